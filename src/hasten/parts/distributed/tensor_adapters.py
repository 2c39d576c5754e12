"""Low-rank adapters beside layers that are cut over ranks: cut along with them, their rank whole.

    column   y_i = W_i x + B_i (A x)                  A is whole, B cut by output as W is
    row      y = sum_i W_i x_i + B sum_i A_i x_i      A is cut by input as W is, B whole

So what travels for an adapter is as wide as its rank: the sum over A_i, or in the other direction
the gradient of A x. A layer that isn't cut keeps its adapter whole.

An adapter is PEFT's ``lora.Linear`` (Hu et al., arXiv:2106.09685): ``base_layer``, and linear
layers ``lora_A`` and ``lora_B`` by the adapter's name. Their forwards are bound to code for pieces,
which does the usual where weights are whole again (while a model is saved). Dropout before the
adapter falls on the places where one process would drop, since every rank draws for the whole input
and takes its own columns; that needs the ranks of a mesh to have drawn alike before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute


def base_of(layer: nn.Module) -> nn.Module:
    """The layer inside an adapter, or the layer itself."""
    inner = layer._modules.get("base_layer")
    return layer if inner is None else inner


def why_not(layer: nn.Module) -> str:
    """Why an adapter can't be cut with its layer, as the end of a sentence; empty: it can."""
    if base_of(layer) is layer:
        return ""
    if not all(_linears(layer, name) for name in ("lora_A", "lora_B")):
        return "has an adapter that isn't made of linear layers"
    if any(layer._modules.get("lora_magnitude_vector") or ()):
        return "has a DoRA adapter, which measures whole rows of the weight"
    if getattr(layer, "parameter_name", None) is not None:
        return "has an adapter on its bare tensor, which is added up before it is cut"
    both = _linears(layer, "lora_A") + _linears(layer, "lora_B")
    if any(linear.bias is not None for linear in both):
        return "has an adapter with a bias"
    return ""


def cut_beside_column(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the adapters of a layer that is cut by output."""
    for first, second, drops in _adapters(layer):
        _place(first, mesh, Replicate())
        _place(second, mesh, Shard(0))
        first.forward = partial(_whole_input, first, drops)
        second.forward = partial(_piece, second)


def cut_beside_row(layer: nn.Module, mesh: DeviceMesh, between: Placement) -> None:
    """Cut the adapters of a layer that is cut by input; ``between``: how its output is laid out."""
    for first, second, drops in _adapters(layer):
        first.forward = partial(_own_columns, first, drops, between, first.in_features)
        _place(first, mesh, Shard(1))
        _place(second, mesh, Replicate())
        second.forward = partial(_whole_rank, second, between)


def _adapters(layer: nn.Module) -> list[tuple[Any, Any, Any]]:
    """(A, B, dropout) of each; none where the layer has no adapter. The dropout now lets all
    through: A's own code drops, since it knows which columns it has."""
    if base_of(layer) is layer:
        return []
    found: list[tuple[Any, Any, Any]] = []
    firsts, seconds, dropouts = (
        layer._modules[name] for name in ("lora_A", "lora_B", "lora_dropout")
    )
    for name, first in firsts.named_children():
        dropout: Any = dropouts.get_submodule(name)
        if isinstance(dropout, nn.Dropout):
            dropout.forward = _through
        found.append((first, seconds.get_submodule(name), dropout))
    return found


def _linears(layer: nn.Module, name: str) -> list[nn.Linear]:
    held = layer._modules.get(name)
    found = [] if held is None else list(held.children())
    return [m for m in found if type(m) is nn.Linear]


def _place(linear: nn.Linear, mesh: DeviceMesh, placement: Placement) -> None:
    weight = linear.weight
    dealt = distribute(weight.detach(), mesh, [placement])
    linear.weight = nn.Parameter(dealt, requires_grad=weight.requires_grad)


def _through(x: Tensor) -> Tensor:
    return x


def _whole_input(self: Any, dropout: Any, x: Tensor) -> Tensor:
    """A beside a column cut."""
    weight = self.weight
    if not isinstance(weight, DTensor):
        return F.linear(_dropped(x, dropout), weight)
    if isinstance(x, DTensor):  # gradients of all who read it are added up over ranks together
        here = _dropped(x.to_local(grad_placements=[Partial()]), dropout)
        return F.linear(here, weight.to_local(grad_placements=[Partial()]))
    found = F.linear(_dropped(x, dropout), weight.to_local())
    shared = DTensor.from_local(found, weight.device_mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


def _piece(self: Any, x: Tensor) -> Tensor:
    """B beside a column cut."""
    weight = self.weight
    return F.linear(x, weight.to_local() if isinstance(weight, DTensor) else weight)


def _own_columns(self: Any, dropout: Any, between: Placement, width: int, x: Tensor) -> Tensor:
    """A beside a row cut: its columns times this rank's part of the input, added up over ranks."""
    weight = self.weight
    if not isinstance(weight, DTensor):
        return F.linear(_dropped(x, dropout), weight)
    mesh, here = weight.device_mesh, x.to_local() if isinstance(x, DTensor) else x
    start = -(-width // mesh.size()) * mesh.get_local_rank()  # as Shard cuts: the last is smaller
    found = F.linear(_dropped(here, dropout, start, width), weight.to_local())
    part = DTensor.from_local(found, mesh, [Partial()], run_check=False)
    return part.redistribute(placements=[between]).to_local()


def _whole_rank(self: Any, between: Placement, x: Tensor) -> Tensor:
    """B beside a row cut, on a piece of the sequence or on all of it."""
    weight = self.weight
    if not isinstance(weight, DTensor):
        return F.linear(x, weight)
    added_up = Replicate() if between.is_replicate() else Partial()
    return F.linear(x, weight.to_local(grad_placements=[added_up]))


def _dropped(x: Tensor, dropout: Any, start: int = 0, width: int | None = None) -> Tensor:
    """``x``, columns from ``start`` on of ``width``, with places dropped as in one process."""
    share = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    if not share:
        return x
    drawn = F.dropout(x.new_ones(*x.shape[:-1], width or x.shape[-1]), share)
    return x * drawn[..., start : start + x.shape[-1]]
