"""Chunks of weights that are encoded and taken in one after the other, small enough for a cache.

On a processor that can compile them, float32 weights and codes of 8 or 4 bits go through loops of
their own, one pass over memory; torch's operators on a chunk at a time do everything else, to the
same bits. A chunk's message is one of its codec's.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hasten.parts.comm.quantised_codec import Quantised
from hasten.parts.kernels import local_sgd as compiled

if TYPE_CHECKING:
    from hasten.parts.comm.codecs import Codec

NUMBERS = 1 << 17  # of a processor's chunk; a device takes a fragment at once
Outer = Callable[[Tensor, int], Tensor]  # a movement, and the place of its first number


class Chunk:
    """Weights ``start:end`` of all, which are parts of one or more parameters.

    ``anchor`` is of all weights.
    """

    def __init__(self, parts: Sequence[Tensor], start: int, end: int, anchor: Tensor) -> None:
        self.start, self.end, self.numbers = start, end, end - start
        self._parts, self._anchor = list(parts), anchor[start:end]
        edges = itertools.accumulate((p.numel() for p in parts), initial=0)
        self._places = list(itertools.pairwise(edges))
        plain = all(p.is_cpu and p.dtype == torch.float32 for p in parts)
        self._stretch = compiled.Stretch(parts) if plain and compiled.library().library else None

    def note(self) -> None:
        """The weights as they are become the anchor."""
        self._read(self._anchor)

    def give(self) -> None:
        """The weights become the anchor."""
        for part, (low, high) in zip(self._parts, self._places, strict=True):
            part.copy_(self._anchor[low:high])

    def moved(self, into: Tensor) -> Tensor:
        """How far the weights are from the anchor, in the first numbers of ``into``."""
        delta = into[: self.numbers]
        self._read(delta)
        return delta.sub_(self._anchor)

    def encode(self, codec: Codec, body: Tensor, room: Tensor) -> bool:
        """How far the weights have moved, as a message; whether all of it is finite.

        ``room`` has as many float32 numbers at least, to be used meanwhile.
        """
        if self._stretch is not None and isinstance(codec, Quantised):
            codes, scales = codec.parts_of(body, self.numbers)
            body[len(codes) + len(scales) :].zero_()
            return self._stretch.encode(self._anchor, codes, scales, codec.block, codec.bits)
        codec.encode(self.moved(room), body)
        return bool(codec.finite(body, self.numbers))  # waits for the device

    def take(
        self,
        messages: Tensor,
        codec: Codec,
        shares: Sequence[float],
        own: int,
        rooms: Sequence[Tensor],
        outer: Outer | None = None,
    ) -> None:
        """Anchor and weights move as the messages (ranks, bytes) of all ranks say, by shares.

        ``own`` is this rank's place. ``outer`` makes another step of the movement. Three ``rooms``
        of as many float32 numbers at least are used meanwhile.
        """
        if self._stretch is not None and isinstance(codec, Quantised) and outer is None:
            codes, scales = codec.parts_of(messages, self.numbers)
            self._stretch.take(self._anchor, codes, scales, shares, own, codec.block, codec.bits)
            return
        common, mine, others = (room[: self.numbers] for room in rooms)
        common.zero_()
        for rank, share in enumerate(shares):
            found = codec.decode(messages[rank], self.numbers, mine if rank == own else others)
            common.add_(torch.mul(found, share, out=others))
        common = common if outer is None else outer(common, self.start)
        self.move(common, mine)

    def move(self, common: Tensor, own: Tensor | None = None) -> None:
        """The anchor moves by ``common``, the weights by ``common - own``, put into ``own``."""
        self._anchor.add_(common)
        change = common if own is None else torch.sub(common, own, out=own)
        for part, (low, high) in zip(self._parts, self._places, strict=True):
            part.add_(change[low:high])

    def _read(self, into: Tensor) -> None:
        for part, (low, high) in zip(self._parts, self._places, strict=True):
            into[low:high].copy_(part)


def chunks_of(parameters: Sequence[Tensor], anchor: Tensor, start: int, end: int) -> list[Chunk]:
    """Weights ``start:end`` of all ``parameters`` in chunks."""
    step = NUMBERS if anchor.is_cpu else max(end - start, 1)
    ends = list(itertools.accumulate(p.numel() for p in parameters))
    found = []
    for low in range(start, end, step):
        high, parts = min(low + step, end), []
        for place in range(bisect.bisect_right(ends, low), len(ends)):
            parameter = parameters[place]
            offset = ends[place] - parameter.numel()
            if offset >= high:
                break
            first, last = max(low, offset) - offset, min(high, ends[place]) - offset
            parts.append(parameter.detach().view(-1)[first:last])
        found.append(Chunk(parts, low, high, anchor))
    return found
