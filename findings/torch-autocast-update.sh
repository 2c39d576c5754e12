#!/usr/bin/env bash
# torch: inside one autocast region, a weight that is updated in place keeps its old numbers.
#
# Guess: a matrix product uses the numbers that the weight has at that moment.
# Seen: autocast caches the bf16 copy of a weight that requires gradients, and an update in place
# doesn't invalidate it. Products use the old numbers until the region ends.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  torch==2.13.0 numpy==2.4.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import torch

print("torch", torch.__version__.split("+")[0])
layer = torch.nn.Linear(1, 1, bias=False)
one = torch.ones(1, 1)
with torch.no_grad():
    layer.weight.fill_(1.0)
with torch.autocast("cpu", dtype=torch.bfloat16):
    print("weight 1:", layer(one).item())
    with torch.no_grad():
        layer.weight.fill_(2.0)
    print("weight 2, same region:", layer(one).item())
with torch.autocast("cpu", dtype=torch.bfloat16):
    print("weight 2, next region:", layer(one).item())
PY
cat >"$folder/seen.txt" <<'TEXT'
torch 2.13.0
weight 1: 1.0
weight 2, same region: 1.0
weight 2, next region: 2.0
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
