#!/usr/bin/env bash
# DeepSpeed: a weight that was set reads back as set, and the model goes on with the old one.
#
# Guess: after safe_set_full_fp32_param(weight, values) the model computes with these values, above
# all where it trains in float32 and has no copy in another format; safe_get_full_fp32_param returns
# them, so the call has worked.
# Seen: under ZeRO 1, 2 and 3 the setter changes the optimizer's copy alone, also in float32. The
# output is the old one until the next update, which brings the weight to the model, here with a
# learning rate of 0. An evaluation or export in between is of the old model.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet torch==2.13.0 numpy==2.4.6 ninja==1.13.0 || exit 2
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --quiet deepspeed==0.19.8 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

torch.distributed.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=0, world_size=1
)
print("deepspeed", deepspeed.__version__.split("+")[0])
inputs = torch.ones(1, 4)
for stage in (1, 2, 3):
    layer = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 1.0)
    engine = deepspeed.initialize(
        model=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.0),
        config={
            "train_batch_size": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )[0]
    safe_set_full_fp32_param(layer.weight, torch.full((1, 4), 2.0))
    read_back = safe_get_full_fp32_param(layer.weight).flatten().tolist()
    output = engine(inputs)
    engine.backward(output.sum())
    engine.step()
    after = engine(inputs)
    print(f"stage {stage}: all 1.0, set to 2.0, reads back as {read_back};", end=" ")
    print(f"sum of the weights by the model: {output.item()}, after an update: {after.item()}")
torch.distributed.destroy_process_group()
PY
cat >"$folder/seen.txt" <<'TEXT'
deepspeed 0.19.8
stage 1: all 1.0, set to 2.0, reads back as [2.0, 2.0, 2.0, 2.0]; sum of the weights by the model: 4.0, after an update: 8.0
stage 2: all 1.0, set to 2.0, reads back as [2.0, 2.0, 2.0, 2.0]; sum of the weights by the model: 4.0, after an update: 8.0
stage 3: all 1.0, set to 2.0, reads back as [2.0, 2.0, 2.0, 2.0]; sum of the weights by the model: 4.0, after an update: 8.0
TEXT

# Its operator for messages on a processor is compiled into the temporary folder.
PATH="$folder/venv/bin:$PATH" DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$folder/operators" \
  RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 \
  "$folder/venv/bin/python" "$folder/behaviour.py" "$folder" 2>"$folder/errors.txt" |
  grep -E "^(deepspeed|stage) [0-9]" | tee "$folder/output.txt" || tail -5 "$folder/errors.txt"
diff "$folder/seen.txt" "$folder/output.txt"
