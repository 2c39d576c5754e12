"""Stages of a pipeline whose weights are sharded (FSDP2): each block a group, the rest another.

A stage is a root of its own, whose groups come together for each pass over a micro-batch and let go
after it. Gradients are cut and added up (reduce-scatter) in every backward pass, since a rank's
passes of the next micro-batches stand between. See :mod:`hasten.parts.distributed.sharding` for a
model that isn't cut into stages.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def shard_stage(stage: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Turn a stage's parameters into shards, in place; ``layers`` are those of all stages here."""
    own = {id(layer) for layer in layers}
    for module in list(stage.modules()):
        if id(module) in own:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    # Let go as well: after a pass without gradients it would be stale once the pieces move.
    fully_shard(stage, mesh=mesh, reshard_after_forward=True)
