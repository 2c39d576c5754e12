"""Fused code on a model that is cut over ranks: kernels see plain tensors, this rank's part.

Under tensor parallelism a norm's weight is whole on every rank, and its input is a piece: of the
sequence, or of the heads. What a row's norm is doesn't depend on other rows, so each rank computes
its own; the weight's gradient is a sum over ranks, which ``Partial`` says and the engine adds up.
Linear layers that are cut are left to torch, whose hooks know what travels.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

Norm = Callable[[Tensor, Tensor, float], Tensor]


def is_cut(*layers: nn.Module) -> bool:
    """Whether the weight of one of them is dealt out over ranks."""
    return any(isinstance(layer.weight, DTensor) for layer in layers)


def own_weight(weight: Tensor) -> Tensor:
    """A norm's weight as a plain tensor, to be multiplied with this rank's rows."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.to_local(grad_placements=[Partial() for _ in weight.placements])


def norm_of_piece(
    norm: Norm, fits: Callable[..., bool], x: DTensor, weight: Tensor, eps: float
) -> DTensor | None:
    """The norm of a piece, laid out as ``x`` is; None where the kernel doesn't take it."""
    whole = isinstance(weight, DTensor) and all(p.is_replicate() for p in weight.placements)
    if not whole or x.placements == (Replicate(),):
        return None
    rows, own = x.to_local(), own_weight(weight)
    if not fits(rows, own):
        return None
    return DTensor.from_local(norm(rows, own, eps), x.device_mesh, x.placements, run_check=False)
