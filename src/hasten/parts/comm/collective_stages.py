"""The two halves of an all-reduce in one group, dense or by a codec: scatter a sum, gather pieces.

    scatter_sum  each rank gets every rank's version of one piece and adds them up in rank order
    gather       each rank's piece goes to all; with a codec all decode the same bytes, the owner
                 of a piece too, so that results have the same bits on all ranks

A codec's messages are never summed as codes: they are decoded, added in float32 and encoded once
more, two roundings whatever the number of ranks. What isn't finite reaches every rank as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.parts.comm import full_duplex
from hasten.parts.comm.collective_groups import moves_by_nccl

if TYPE_CHECKING:
    from hasten.parts.comm.codecs import Codec

HALVES = (torch.bfloat16, torch.float16)
Group = Any  # torch.distributed.ProcessGroup
# Renamed in torch 2.13, where the old name warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ErrorMemory:
    """What codecs left out, by name, to be added next time (error feedback, arXiv:1901.09847).

    What a step leaves is pending until ``commit``; ``drop`` forgets it, for a step that is skipped
    because some gradient wasn't finite: then nothing of that step has happened. Residuals are
    float32 and in the unit of the true gradient: ``scale`` is what gradients are multiplied by.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._kept: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    def encode(self, codec: Codec, numbers: Tensor, pieces: int, name: str, into: Tensor) -> None:
        """Encode in so many pieces, one row of ``into`` each, with what was left out before."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() != numbers.numel():
            kept = torch.zeros_like(numbers, dtype=torch.float32)
        kept = kept.to(numbers.device)  # a checkpoint is read on the host
        scaled = kept if self.scale == 1.0 else kept * self.scale
        rest = torch.empty_like(kept)
        rows = zip(into, *(t.view(pieces, -1) for t in (numbers, scaled, rest)), strict=True)
        for row, piece, before, after in rows:
            codec.encode_with_feedback(piece, before, row, after)
        self._pending[name] = rest if self.scale == 1.0 else rest.div_(self.scale)

    def commit(self) -> None:
        """The step was taken."""
        self._kept |= self._pending
        self._pending = {}

    def drop(self) -> None:
        """The step wasn't taken."""
        self._pending = {}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: kept.clone() for name, kept in self._kept.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._kept = {name: kept.float().clone() for name, kept in state.items()}
        self._pending = {}


def scatter_sum(
    numbers: Tensor,
    group: Group,
    codec: Codec | None = None,
    memory: ErrorMemory | None = None,
    name: str = "",
    cut: bool = True,
) -> Tensor:
    """This rank's piece of the sum over the group; ``numbers`` are one piece per rank, end to end.

    With a codec, float32. ``memory`` corrects what is sent under ``name``. ``cut``: large messages
    go in pieces, which is for links between hosts.
    """
    size = group.size()
    if size == 1:
        return numbers
    if codec is None:
        return _dense_sum(numbers, group, size, cut)
    sent = _encoded(numbers, size, codec, memory, name)
    got = torch.empty_like(sent)
    full_duplex.all_to_all(got, sent, group, cut).wait()
    return codec.decode_mean(got, numbers.numel() // size).mul_(size)


def gather(
    piece: Tensor,
    group: Group,
    codec: Codec | None = None,
    memory: ErrorMemory | None = None,
    name: str = "",
    cut: bool = True,
) -> Tensor:
    """All ranks' pieces end to end, by rank; with a codec, float32 as decoded."""
    size, count = group.size(), piece.numel()
    if size == 1:
        return piece
    if codec is None:
        whole = piece.new_empty(size * count)
        full_duplex.all_gather(whole, piece, group, cut).wait()
        return whole
    sent = _encoded(piece, 1, codec, memory, name)
    got = sent.new_empty((size, sent.shape[1]))
    full_duplex.all_gather(got, sent, group, cut).wait()
    whole = piece.new_empty(size * count, dtype=torch.float32)
    for row, target in zip(got, whole.view(size, count), strict=True):
        codec.decode(row, count, target)
    return whole


def sum_across(share: Tensor, group: Group) -> Tensor:
    """The sum over the group of the whole share, without a codec: torch's own all-reduce.

    On gloo its ring sends in segments, which took 0.9 s where the two halves one after the other
    took 1.3 s (docs/log.md).
    """
    if group.size() > 1:
        share = share.contiguous()
        dist.all_reduce(share, group=group)
    return share


def sent_bytes(piece: Tensor, group: Group, codec: Codec | None) -> int:
    """What one rank sends in either half for pieces of this size: one message per other rank."""
    message = piece.nbytes if codec is None else codec.message_bytes(piece.numel())
    return message * int(group.size() - 1)


def _dense_sum(numbers: Tensor, group: Group, size: int, cut: bool) -> Tensor:
    if numbers.device.type != "cpu" and moves_by_nccl(group):
        piece = numbers.new_empty(numbers.numel() // size)
        _reduce_scatter(piece, numbers, group=group)
        return piece
    # On gloo all-to-all and a sum in rank order: the same bits whatever the ring's direction, and
    # half formats are added in float32 and rounded once.
    got = torch.empty_like(numbers)
    full_duplex.all_to_all(got, numbers, group, cut).wait()
    half = numbers.dtype in HALVES
    total = got.view(size, -1).sum(0, dtype=torch.float32 if half else numbers.dtype)
    return total.to(numbers.dtype)


def _encoded(
    numbers: Tensor, pieces: int, codec: Codec, memory: ErrorMemory | None, name: str
) -> Tensor:
    """One message per piece, as rows."""
    exact = numbers if numbers.dtype in (torch.float32, torch.bfloat16) else numbers.float()
    count = numbers.numel() // pieces
    rows = numbers.new_empty((pieces, codec.message_bytes(count)), dtype=torch.uint8)
    if memory is not None:
        memory.encode(codec, exact, pieces, name, rows)
        return rows
    for row, piece in zip(rows, exact.view(pieces, count), strict=True):
        codec.encode(piece, row)
    return rows
