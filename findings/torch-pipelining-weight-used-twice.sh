#!/usr/bin/env bash
# torch: zero-bubble's split backward pass refuses a weight that is used at several depths.
#
# Guess: stage_backward_input and stage_backward_weight, which the zero-bubble schedules of
# torch.distributed.pipelining call, give the gradients of backward() for every stage.
# Seen: if a layer lies between two uses of a weight, the second half fails. The gradient of the
# weight that is used twice passes through that layer and frees its part of the graph, which the
# layer's own gradient needs. Heads and embeddings of stages that predict further tokens are so.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  torch==2.13.0 numpy==2.4.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class Stage(nn.Module):
    def __init__(self, twice):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last = self.first if twice else nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.between(torch.tanh(self.first(x)))))


print("torch", torch.__version__.split("+")[0])
for twice in (False, True):
    stage = Stage(twice)
    weights = list(stage.parameters())
    x = torch.ones(2, 4, requires_grad=True)
    expected = torch.autograd.grad(stage(x).square().sum(), weights)
    loss = stage(x).square().sum()
    _, groups = stage_backward_input([loss], None, [x], iter(weights))
    try:
        stage_backward_weight(iter(weights), groups)
        equal = all(torch.allclose(w.grad, g) for w, g in zip(weights, expected))
        outcome = f"gradients as of backward(): {equal}"
    except RuntimeError as error:
        outcome = str(error).split(" (")[0]
    print("one weight used twice:" if twice else "three weights:        ", outcome)
PY
cat >"$folder/seen.txt" <<'TEXT'
torch 2.13.0
three weights:         gradients as of backward(): True
one weight used twice: Trying to backward through the graph a second time
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
