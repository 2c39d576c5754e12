"""Shards of a model after FSDP2: each rank keeps a piece of every weight, gradient and moment.

A decoder block's weights are brought together (all-gather) when its pass begins and let go when it
is over; its gradients are added up and cut (reduce-scatter) as soon as they are there, while the
blocks before it still compute. What lies outside the blocks (embedding, last norm, head) forms the
outermost group, which stays together from the forward to the backward pass. The idea is ZeRO's
(Rajbhandari et al., arXiv:1910.02054), the engine ``torch.distributed.fsdp.fully_shard``.

    shard(module, mesh)                     # in place; the optimizer comes after it
    send_gradients(module, last)            # before each backward pass of a step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from hasten.parts.nn.recompute import decoder_blocks


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Args:
        reshard: let a block's weights go after its forward pass too, and bring them together again
            for backward: less memory, half as much communication again.
        offload: shards of weights, gradients and moments lie in host memory.
        dtype: format in which blocks compute, weights staying as they are; None: the same.
    """

    reshard: bool = True
    offload: bool = False
    dtype: torch.dtype | None = None


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    how: Sharding | None = None,
    before: Callable[[nn.Module], None] = lambda part: None,
) -> None:
    """Turn the module's parameters into shards, in place: each block a group, the rest another.

    Gradients are reduced in float32 where the module computes in half a format.

    Args:
        before: called with each block, and with the module at last, just before it is cut.
    """
    how = how or Sharding()
    reduce = None if how.dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=how.dtype, reduce_dtype=reduce)
    offload = CPUOffloadPolicy() if how.offload else OffloadPolicy()
    for block in _blocks(module):
        before(block)
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=how.reshard,
            mp_policy=policy,
            offload_policy=offload,
        )
    before(module)
    fully_shard(
        module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload
    )


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def groups(module: nn.Module) -> int:
    """How many pieces are brought together one after the other."""
    return sum(isinstance(m, FSDPModule) for m in module.modules())


def send_gradients(module: nn.Module, send: bool) -> None:
    """Whether the next backward pass reduces its gradients, or each rank keeps whole ones."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(send)


def let_go(module: nn.Module) -> None:
    """Back to shards everywhere: after a pass without gradients the outermost group is whole."""
    for found in module.modules():
        if isinstance(found, FSDPModule):
            found.reshard()


def _blocks(module: nn.Module) -> list[nn.Module]:
    try:
        return decoder_blocks(module)
    except ValueError:  # nothing repeats: the whole module is one group
        return []
