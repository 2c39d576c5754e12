"""The gradients of a model in buckets, as names and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.parts.comm.error_feedback import Piece, Pieces, parts_of

Named = tuple[str, Tensor]
BUCKET_BYTES = 25 * 2**20  # as DDP's own; its first bucket ends at 1 MiB
FIRST_BUCKET_BYTES = 2**20


def named(model: nn.Module | Iterable[Any]) -> list[Named]:
    """A model's trainable parameters by name; parameters given alone are named by their place.

    Raises:
        ValueError: something else was given, or a parameter that is sharded over ranks.
    """
    if isinstance(model, nn.Module):
        found: list[Named] = list(model.named_parameters())
    else:
        entries = list(model)
        found = [e if isinstance(e, tuple) else (str(i), e) for i, e in enumerate(entries)]
    for name, parameter in found:
        if not isinstance(parameter, Tensor):
            raise ValueError(
                f"gradients belong to a model or to parameters; {name} is a "
                f"{type(parameter).__name__}"
            )
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is sharded over ranks (DTensor): its gradient isn't averaged like a "
                "replica's, leave it out"
            )
    return [(name, p) for name, p in found if p.requires_grad]


def piece_of(name: str, parameter: Tensor) -> Piece:
    return Piece(name, tuple(parameter.shape), parameter.element_size())


def buckets_of(parameters: Sequence[Named], alone: bool) -> list[list[Named]]:
    """Parameters to be sent together, alike in format; each alone if asked. Missing gradients are
    made of zeros, so that every rank sends the same.

    Raises:
        ValueError: a gradient is sparse.
    """
    buckets: list[list[Named]] = []
    size = BUCKET_BYTES
    for name, parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {name} is sparse: build its embedding with sparse=False"
            )
        last = buckets[-1][-1][1] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (grad.dtype, grad.device)
        if alone or not alike or size + grad.nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append((name, parameter))
        size += grad.nbytes
    return buckets


def predicted_buckets(parameters: Sequence[Named], cap_mb: float) -> list[Pieces]:
    """As DDP lays them out: from the last parameter on, until each is full."""
    buckets: list[list[Piece]] = [[]]
    size, limit = 0, float(FIRST_BUCKET_BYTES)
    for name, parameter in reversed(parameters):
        if size >= limit:
            buckets.append([])
            size, limit = 0, cap_mb * 2**20
        buckets[-1].append(piece_of(name, parameter))
        size += parameter.nbytes
    return [tuple(bucket) for bucket in buckets]


def offered(kept: Tensor, flat: Tensor, pieces: Pieces) -> tuple[Tensor, dict[int, Tensor]]:
    """The memory that goes along with a gradient, and what is held back of it, by piece.

    A parameter whose gradient is all zeros may be one that no rank has used; DDP then leaves its
    gradient alone, and what was sent for it would be lost. So its memory waits.
    """
    parts = parts_of(flat, pieces)
    filled = [i for i, part in enumerate(parts) if part.numel()]
    largest = torch._foreach_norm([parts[i] for i in filled], torch.inf)
    sizes = torch.stack([n.float() for n in largest]).tolist() if filled else []  # waits
    resting = [i for i, size in zip(filled, sizes, strict=True) if size == 0.0]
    if not resting:
        return kept, {}
    going = kept.clone()
    for i in resting:
        parts_of(going, pieces)[i].zero_()
    return going, {i: parts_of(kept, pieces)[i] for i in resting}


def give_back(left: Tensor, held: dict[int, Tensor], pieces: Pieces) -> None:
    """What was held back stays in memory, beside what the message left out."""
    parts = parts_of(left, pieces)
    for i, kept in held.items():
        parts[i].add_(kept)
