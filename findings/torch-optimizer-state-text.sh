#!/usr/bin/env bash
# torch: Optimizer.load_state_dict loses a text that an optimizer's state holds.
#
# One would expect the saved value. Every iterable in the state is rebuilt by type(value)(generator),
# so a str becomes the printed form of a generator object.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 || exit 2
"$folder/venv/bin/python" - <<'PY'
import sys

import torch


class Sgd(torch.optim.SGD):
    """Stores in each weight's state how its update was made."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["rule"] = "plain"


weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
optimizer = Sgd([weight], lr=0.1)
optimizer.step()
saved = optimizer.state_dict()
loaded = Sgd([weight], lr=0.1)
loaded.load_state_dict(saved)
text = loaded.state_dict()["state"][0]["rule"]
print("torch", torch.__version__)
print("saved: ", saved["state"][0]["rule"])
print("loaded:", text)
changed = not text.startswith("<generator object")
print("the behaviour has changed" if changed else "the text is lost without an error")
sys.exit(changed)
PY
