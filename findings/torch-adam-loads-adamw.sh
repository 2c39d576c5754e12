#!/usr/bin/env bash
# torch: Adam that loads AdamW's state decouples its weight decay from then on.
#
# Guess: the state has moments and a step counter, and the class decides how decay is applied.
# Seen: load_state_dict also replaces the options of the parameter groups. AdamW stores
# decoupled_weight_decay=True there, so the Adam object trains as AdamW, without a warning.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  torch==2.13.0 numpy==2.4.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import torch


def one_step(kind, state=None):
    """Returns the optimizer and its weight, 1.0 before a step whose gradient is 0."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = kind([weight], lr=0.1, weight_decay=0.5)
    if state is not None:
        optimizer.load_state_dict(state)
    weight.grad = torch.zeros(1)
    optimizer.step()
    return optimizer, weight.item()


adam, adam_weight = one_step(torch.optim.Adam)
adamw, adamw_weight = one_step(torch.optim.AdamW)
_, own_state = one_step(torch.optim.Adam, adam.state_dict())
loaded, loaded_weight = one_step(torch.optim.Adam, adamw.state_dict())
print("torch", torch.__version__.split("+")[0])
print(f"Adam: {adam_weight:.2f}")
print(f"AdamW: {adamw_weight:.2f}")
print(f"Adam with Adam's state: {own_state:.2f}")
print(f"{type(loaded).__name__} with AdamW's state: {loaded_weight:.2f}")
PY
cat >"$folder/seen.txt" <<'TEXT'
torch 2.13.0
Adam: 0.90
AdamW: 0.95
Adam with Adam's state: 0.90
Adam with AdamW's state: 0.95
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
