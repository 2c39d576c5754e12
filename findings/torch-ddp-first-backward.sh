#!/usr/bin/env bash
# torch's DDP on three ranks: the first backward pass of a process gives other bits than the next ones.
#
# The same model, the same batch, no update, three passes. DDP groups gradients into buckets by the
# order of registration, and groups them anew after the first pass by the order in which they arrived.
# A ring over three ranks then adds the numbers of a tensor in another order. With two ranks a sum has
# no order, and all passes are equal. A resumed process makes a first pass where an uninterrupted one
# doesn't, so its weights differ in their last bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.3.4 || exit 2
cat > "$folder/passes.py" <<'END'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PASSES = 3


def rank_of(rank, ranks, store, found):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(rank))
    gradients = []
    for _ in range(PASSES):
        model.zero_grad()
        model(batch).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    if rank == 0:
        other = [int((gradients[0] != g).sum()) for g in gradients[1:]]
        found.extend([*other, int((gradients[1] != gradients[2]).sum()), gradients[0].numel()])
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    results = {}
    for ranks in (2, 3):
        with mp.Manager() as manager:
            found = manager.list()
            store = f"{sys.argv[1]}/store{ranks}"
            mp.spawn(rank_of, (ranks, store, found), nprocs=ranks)
            first_second, first_third, second_third, count = results[ranks] = list(found)
        print(
            f"{ranks} ranks: of {count:,} gradients, pass 1 and 2 differ in {first_second:,}, "
            f"pass 1 and 3 in {first_third:,}, pass 2 and 3 in {second_third:,}"
        )
    as_described = (
        results[2][:3] == [0, 0, 0]
        and results[3][0] > 0
        and results[3][1] > 0
        and results[3][2] == 0
    )
    print("as described" if as_described else "the behaviour has changed")
    sys.exit(0 if as_described else 1)
END
"$folder/venv/bin/python" "$folder/passes.py" "$folder"
