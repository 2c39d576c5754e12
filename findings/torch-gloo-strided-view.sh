#!/usr/bin/env bash
# torch: on gloo, all_reduce and broadcast of a strided view use the wrong numbers.
#
# Guess: a collective handles a view by its strides, as every other operation of torch does, or
# refuses it.
# Seen: the first numel() numbers of the memory are reduced or sent, not those of the view. Half
# of the view keeps its old numbers, numbers beside the view change, and nothing is raised.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  torch==2.13.0 numpy==2.4.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_job(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    for name in ("all_reduce", "broadcast"):
        table = torch.arange(8.0).reshape(4, 2) + 100 * rank
        strided = table[:, 0]  # 0, 2, 4, 6 on rank 0; 100, 102, 104, 106 on rank 1
        contiguous = strided.contiguous()
        for column in (contiguous, strided):
            dist.all_reduce(column) if name == "all_reduce" else dist.broadcast(column, 0)
        if rank == 1:
            print(name, "of a contiguous copy:", contiguous.tolist())
            print(name, "of the view:         ", strided.tolist())
            print(name, "table of the view:   ", table.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__.split("+")[0], flush=True)
    mp.spawn(rank_job, (sys.path[0],), nprocs=2)
PY
cat >"$folder/seen.txt" <<'TEXT'
torch 2.13.0
all_reduce of a contiguous copy: [100.0, 104.0, 108.0, 112.0]
all_reduce of the view:          [100.0, 104.0, 104.0, 106.0]
all_reduce table of the view:    [[100.0, 102.0], [104.0, 106.0], [104.0, 105.0], [106.0, 107.0]]
broadcast of a contiguous copy: [0.0, 2.0, 4.0, 6.0]
broadcast of the view:          [0.0, 2.0, 104.0, 106.0]
broadcast table of the view:    [[0.0, 1.0], [2.0, 3.0], [104.0, 105.0], [106.0, 107.0]]
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
