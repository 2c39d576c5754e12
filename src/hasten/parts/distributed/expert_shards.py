"""Shards of what isn't an expert, beside experts that are shared out over ranks (FSDP2).

Experts lie on their ranks whole and take no part in the all-gathers of a block; whatever else a
block holds does, as in :mod:`hasten.parts.distributed.sharding`.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hasten.parts.distributed.expert_parallel import SharedExperts
from hasten.parts.nn.recompute import decoder_blocks


def shard_rest(
    module: nn.Module, shared: SharedExperts, mesh: DeviceMesh, reshard: bool = True
) -> None:
    """Turn all but the experts into shards, in place: each block a group, the rest another."""
    experts = set(shared.parameters())
    for block in decoder_blocks(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, ignored_params=experts)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=experts)
