#!/usr/bin/env bash
# torch: a number in the state makes HuggingFaceStorageWriter write a file that can't be opened.
#
# Guess: a value that isn't a tensor is stored next to the tensors, as in other checkpoints of
# torch.distributed.checkpoint, or refused.
# Seen: dcp.save with save_distributed=True succeeds without a warning. One of the two files isn't
# a safetensors file, and the weights of that rank are lost.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def rank_job(rank, folder, with_step):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous{with_step}", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    state = {"weight": weight, "step": 7} if with_step else {"weight": weight}
    writer = dcp.HuggingFaceStorageWriter(f"{folder}/saved{with_step}", save_distributed=True)
    with warnings.catch_warnings(record=True) as caught:
        dcp.save(state, storage_writer=writer)
    about_step = [str(w.message) for w in caught if "step" in str(w.message)]
    if rank == 0:
        print("warnings about the number:", about_step, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = sys.path[0]
    print("torch", torch.__version__.split("+")[0], flush=True)
    for with_step in (False, True):
        print("state with a number:" if with_step else "state of tensors alone:", flush=True)
        mp.spawn(rank_job, (folder, with_step), nprocs=2)
        for file in sorted(Path(folder, f"saved{with_step}").glob("*.safetensors")):
            try:
                content = {name: tensor.tolist() for name, tensor in load_file(file).items()}
            except Exception as error:
                content = f"{type(error).__name__}: {error}"
            print(f"  {file.name}: {content}", flush=True)
PY
cat >"$folder/seen.txt" <<'TEXT'
torch 2.13.0
state of tensors alone:
warnings about the number: []
  shard-00001-model-00001-of-00001.safetensors: {'weight': [0.0, 1.0]}
  shard-00002-model-00001-of-00001.safetensors: {'weight': [2.0, 3.0]}
state with a number:
warnings about the number: []
  shard-00001-model-00001-of-00001.safetensors: {'weight': [0.0, 1.0]}
  shard-00002-model-00001-of-00001.safetensors: SafetensorError: Error while deserializing header: header too large
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
