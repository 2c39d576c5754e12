#!/usr/bin/env bash
# torch: Optimizer.load_state_dict rounds whole numbers in the state of bf16 weights.
#
# One would expect an int64 tensor to come back as it was saved. All tensors of the state but "step"
# are cast to the weight's format: 2570 becomes 2576, a float32 master weight loses 16 bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PY'
import sys

import torch


class Counting(torch.optim.SGD):
    """Counts the tokens that each weight has seen."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight].setdefault("tokens", torch.tensor(0)).add_(257)


weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
weight.grad = torch.ones(2, dtype=torch.bfloat16)
optimizer = Counting([weight], lr=0.1)
for _ in range(10):
    optimizer.step()
loaded = Counting([weight], lr=0.1)
loaded.load_state_dict(optimizer.state_dict())
before, after = (o.state_dict()["state"][0]["tokens"] for o in (optimizer, loaded))
print("torch", torch.__version__)
print("saved: ", before.dtype, before.item())
print("loaded:", after.dtype, after.item())
changed = after.dtype == before.dtype
print("the behaviour has changed" if changed else "the count was cast and rounded without an error")
sys.exit(changed)
PY
