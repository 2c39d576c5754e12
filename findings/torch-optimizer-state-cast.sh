#!/usr/bin/env bash
# torch: an optimizer's load_state_dict casts whole numbers and float32 state to bf16.
#
# Guess: state returns with the types and the numbers that were saved.
# Seen: if a weight is bf16, every tensor of its state except "step" becomes bf16. A counter of
# 257 becomes 256, and an average kept in float32 loses its lower 16 bits.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  torch==2.13.0 numpy==2.4.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import torch


class CountingAverage(torch.optim.Optimizer):
    """Counts examples, and keeps a float32 average of each weight's gradients."""

    def __init__(self, weights):
        super().__init__(weights, {})

    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state["step"] = torch.tensor(257)
            state["examples"] = torch.tensor(257)
            state["average"] = weight.grad.float() / 3


weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
weight.grad = torch.ones_like(weight)
saved = CountingAverage([weight])
saved.step()
restored = CountingAverage([weight])
restored.load_state_dict(saved.state_dict())
print("torch", torch.__version__.split("+")[0])
for name in ("step", "examples", "average"):
    for title, optimizer in (("saved", saved), ("restored", restored)):
        tensor = optimizer.state[weight][name]
        print(name, title, tensor.dtype, tensor.item())
PY
cat >"$folder/seen.txt" <<'TEXT'
torch 2.13.0
step saved torch.int64 257
step restored torch.int64 257
examples saved torch.int64 257
examples restored torch.bfloat16 256.0
average saved torch.float32 0.3333333432674408
average restored torch.bfloat16 0.333984375
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
