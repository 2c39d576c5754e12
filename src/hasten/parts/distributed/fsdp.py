"""FSDP2: each rank keeps a shard of every weight; also for experts and pipelines.

A decoder block's weights are gathered (all-gather) when its pass begins and released
when it ends. Its gradients are summed and sharded (reduce-scatter) as soon as they are
complete, while earlier blocks still compute. Modules outside the blocks (embedding,
last norm, head) form the outermost group. It stays gathered from the forward to the
backward pass. The method is ZeRO (Rajbhandari et al., arXiv:1910.02054), the engine
``torch.distributed.fsdp.fully_shard``.

    shard(module, mesh)                     # in place; the optimizer comes after it
    send_gradients(module, last)            # before each backward pass of a step
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hasten.machine.lazy_torch import is_fsdp_module
from hasten.parts.comm.methods import BucketPart, Pieces
from hasten.parts.nn.multi_token import prediction_modules
from hasten.parts.nn.recompute import decoder_blocks

HALF = {torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Args:
        reshard: let a block's weights go after its forward pass too, and bring them together again
            for backward: less memory, half as much communication again.
        offload: shards of weights, gradients and moments lie in host memory.
    """

    reshard: bool = True
    offload: bool = False


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    how: Sharding = Sharding(),
    dtype: torch.dtype | None = None,
    ignored: Iterable[nn.Parameter] = (),
    layers: Iterable[nn.Module] | None = None,
) -> None:
    """Shards the module's parameters in place: each block is a group, all other modules another.

    Gradients are reduced in float32 where the module computes in half a format, or learns in it.

    Args:
        dtype: format in which blocks compute, weights staying as they are; None: the same.
        ignored: parameters that stay whole (experts that are shared out over ranks).
        layers: the module is a pipeline stage and its blocks are among these layers. Gathered
            weights of all groups are freed after each pass: after one without gradients they would
            be out of date.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    learns = {p.dtype for p in module.parameters() if p.requires_grad}
    reduce = torch.float32 if dtype or learns & HALF else None
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce),
        "offload_policy": CPUOffloadPolicy() if how.offload else OffloadPolicy(),
        "ignored_params": set(ignored),
    }
    layer_ids = set(map(id, layers or ()))
    blocks = [part for part in module.modules() if id(part) in layer_ids]
    if layers is None:
        with suppress(ValueError):  # nothing repeats: the full module is one group
            blocks = decoder_blocks(module)
    for block in (*blocks, *prediction_modules(module)):
        fully_shard(block, reshard_after_forward=how.reshard, **settings)
    fully_shard(module, reshard_after_forward=layers is not None, **settings)


def send_gradients(module: nn.Module, send: bool) -> None:
    """Selects if the next backward pass reduces gradients or each rank keeps full ones."""
    if is_fsdp_module(module):
        module.set_requires_gradient_sync(send)


def take_new_shards(module: nn.Module) -> None:
    """Makes FSDP2 use the shards that parameters have got since it was called."""
    for _, group in _parameter_groups(module):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()


def reshard_all(module: nn.Module) -> None:
    """Frees gathered weights: after a pass without gradients the outermost group isn't sharded."""
    for submodule in filter(is_fsdp_module, module.modules()):
        submodule.reshard()


# The groups of weights that FSDP2 reduces together, and their layout in its messages.
#
# Each module with its own ``fully_shard`` call is one group. Its message has one row for each rank:
# row r holds the r-th shard of every weight, one after another, the last shards padded with zeros.
# FSDP2 accepts another reduce-scatter (``set_custom_reduce_scatter``) and a hook on its result
# (``set_all_reduce_hook``) but doesn't describe the layout. The layout is read from its
# undocumented parameter groups.


@dataclass(frozen=True)
class ShardGroup:
    """Trained weights of one reduce-scatter over ``ranks``, in the order of its messages.

    Args:
        weights: complete, or one rank's tensor-parallel parts.
    """

    module: Any  # an FSDPModule
    weights: Pieces
    ranks: int

    @property
    def columns(self) -> list[int]:
        """Returns each weight's number of elements in a row, padding included."""
        return [-(-w.shape[0] // self.ranks) * math.prod(w.shape[1:]) for w in self.weights]

    @property
    def row(self) -> int:
        """Returns the number of elements in a row."""
        return sum(self.columns)

    @property
    def name(self) -> str:
        """Returns the name of its first weight, which is in no other group."""
        return self.weights[0].name


def shard_groups(module: nn.Module) -> list[ShardGroup]:
    """Returns the groups with trained weights of a sharded module that hasn't run yet.

    Raises:
        ValueError: nothing that learns is in shards.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    weight_groups = []
    for member, group in _parameter_groups(module):
        learn = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        weights = [BucketPart(names[id(p.sharded_param)], tuple(p._orig_size)) for p in learn]
        if weights:
            ranks = int(group.mesh_info.shard_mesh_size)
            weight_groups.append(ShardGroup(member, tuple(weights), ranks))
    if not weight_groups:
        raise ValueError("no weight that learns is in shards: call fully_shard before")
    return weight_groups


def _parameter_groups(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yields FSDP2's modules and their own parameter groups; in torch 2.11 each has one at most."""
    for member in filter(is_fsdp_module, module.modules()):
        state: Any = member._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                yield member, group


def rows_of(values: Mapping[str, Tensor], group: ShardGroup, device: torch.device) -> Tensor:
    """Returns full float32 values by name as (ranks, row); missing ones are zero."""
    columns = [torch.zeros(group.ranks, width, device=device) for width in group.columns]
    for weight, column in zip(group.weights, columns, strict=True):
        if (numbers := values.get(weight.name)) is not None:
            column.view(-1)[: numbers.numel()] = numbers.flatten().to(device, torch.float32)
    return torch.cat(columns, dim=1)


def values_of(rows: Tensor, group: ShardGroup) -> dict[str, Tensor]:
    """Returns the reverse of ``rows_of``: flat values by name, without padding."""
    pairs = zip(group.weights, rows.split(group.columns, dim=1), strict=True)
    return {w.name: column.flatten()[: w.numbers].clone() for w, column in pairs}
