"""A rank's weights while they drift from the others': what all have in common, and the way back.

Ranks that train alone for a while need not send gradients. Each keeps ``anchor``, the weights as
all last agreed on them (float32, the same bits on every rank, 4 bytes per weight), and from time to
time says how far a stretch of its own weights, a *fragment*, has moved from there:

    own      = decode(encode(weights - anchor))           travels in few bits
    common   = sum over ranks of share * own of that rank  the same bits on every rank
    anchor  += common
    weights += common - own

What the codec left out stays in the weights and is part of the next difference, so no further
memory of errors is kept: one beside it would count what was left out twice. A rank's share is its
part of the trained tokens since the fragment was last sent, so that one round of plain SGD is the
step that replicas with averaged gradients take (Stich, Local SGD, arXiv:1805.09767, has equal
shares). A message begins with ``HEADER`` bytes, tokens and flags; behind them lies a message of the
codec for each chunk of weights.
"""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.parts.comm.drift_chunks import Outer, chunks_of
from hasten.parts.comm.full_duplex import Travel, all_gather
from hasten.parts.comm.roll_call import CollectiveError, RollCall

if TYPE_CHECKING:
    from hasten.parts.comm.codecs import Codec

HEADER = 16  # two float64 numbers: trained tokens, flags
ALIGNED = 256  # fragments begin at multiples of a codec's block
NOT_FINITE, STOP = 1, 2  # flags
TIMEOUT = datetime.timedelta(minutes=10)


class DriftError(CollectiveError):
    """Ranks can't be brought together: one has left, or its weights aren't numbers any more."""


@dataclass(frozen=True)
class Answer:
    """What the ranks said: each one's share, and whether one of them wants to stop."""

    shares: list[float]
    stop: bool


class Drift:
    """The weights of this rank, cut into fragments, and what all ranks have in common of them.

    Every rank builds one at the same moment, over weights that are equal on all of them. ``group``
    is used by nothing else; without one a new group is made, whose collectives end after
    ``timeout``. Where torch.distributed isn't running there is one rank and nothing travels.

    Raises:
        ValueError: there is no weight, or one doesn't lie in one piece.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        fragments: int = 1,
        group: Any = None,
        timeout: datetime.timedelta = TIMEOUT,
    ) -> None:
        if not parameters:
            raise ValueError("there is no weight to keep together: give the model's parameters")
        if any(not p.is_contiguous() for p in parameters):
            raise ValueError("a weight doesn't lie in one piece: make it contiguous() first")
        running = dist.is_available() and dist.is_initialized()
        if running and group is None:
            group = dist.new_group(timeout=timeout)
        self.group = group
        self.size = dist.get_world_size(group) if running else 1
        self.rank = dist.get_rank(group) if running else 0
        self._roll: RollCall | None = None
        if running:
            members = dist.get_process_group_ranks(group)
            self._roll = RollCall("weights", members, timeout.total_seconds())
        self.parameters = list(parameters)
        self.anchor = torch.empty(
            sum(p.numel() for p in parameters), dtype=torch.float32, device=parameters[0].device
        )
        self.cut(fragments)
        self.reset()

    def cut(self, fragments: int) -> None:
        """Into so many fragments of nearly equal size; fewer where weights don't suffice."""
        numbers = self.anchor.numel()
        count = max(1, min(fragments, numbers // ALIGNED))
        edges = [numbers * k // count // ALIGNED * ALIGNED for k in range(count)] + [numbers]
        self.edges: list[tuple[int, int]] = list(itertools.pairwise(edges))
        self.tokens = [0.0] * count
        self._chunks = [chunks_of(self.parameters, self.anchor, *edge) for edge in self.edges]

    @torch.no_grad()
    def reset(self) -> None:
        """The weights as they are now, equal on all ranks, are what all have in common."""
        for chunk in itertools.chain(*self._chunks):
            chunk.note()
        self.tokens = [0.0] * len(self.edges)

    def note(self, tokens: float) -> None:
        """A step was done with so many trained tokens of this rank's own."""
        self.tokens = [before + tokens for before in self.tokens]

    def numbers(self, fragment: int) -> int:
        """Weights of a fragment."""
        start, end = self.edges[fragment]
        return end - start

    def message_bytes(self, fragment: int, codec: Codec) -> int:
        """Exact size of a fragment's message, a multiple of 16."""
        chunks = Counter(chunk.numbers for chunk in self._chunks[fragment])
        body = sum(count * codec.message_bytes(numbers) for numbers, count in chunks.items())
        return HEADER + -(-body // 16) * 16

    @torch.no_grad()
    def message(self, fragment: int, codec: Codec, stop: bool = False) -> Tensor:
        """How far the fragment has moved, encoded; its tokens start from zero again."""
        size, device = self.message_bytes(fragment, codec), self.anchor.device
        found = torch.empty(size, dtype=torch.uint8, device=device)
        (room,) = self._rooms(fragment, 1)
        finite, at = True, HEADER
        for chunk in self._chunks[fragment]:
            after = at + codec.message_bytes(chunk.numbers)
            finite &= chunk.encode(codec, found[at:after], room)
            at = after
        found[at:].zero_()
        flags = (0 if finite else NOT_FINITE) | (STOP if stop else 0)
        header = torch.tensor([self.tokens[fragment], float(flags)], dtype=torch.float64)
        found[:HEADER].copy_(header.view(torch.uint8))
        self.tokens[fragment] = 0.0
        return found

    @torch.no_grad()
    def take(self, rows: Tensor, fragment: int, codec: Codec, outer: Outer | None = None) -> bool:
        """Anchor and weights move as all ranks together say; whether one of them wants to stop.

        ``rows`` (ranks, bytes) are the messages of all ranks; every rank adds in the same order.
        ``outer`` makes a step of its own of the movement by shares, chunk by chunk.
        """
        answer = answered(rows[:, :HEADER].contiguous().view(torch.float64).tolist())  # waits
        rooms, at = self._rooms(fragment, 3), HEADER
        for chunk in self._chunks[fragment]:
            after = at + codec.message_bytes(chunk.numbers)
            chunk.take(rows[:, at:after], codec, answer.shares, self.rank, rooms, outer)
            at = after
        return answer.stop

    @torch.no_grad()
    def move(self, common: Tensor) -> None:
        """All weights and the anchor move by ``common``, which is equal on all ranks."""
        for chunk in itertools.chain(*self._chunks):
            chunk.move(common[chunk.start : chunk.end])

    def _rooms(self, fragment: int, count: int) -> tuple[Tensor, ...]:
        """Room for the numbers of a chunk, so many times."""
        longest = max((chunk.numbers for chunk in self._chunks[fragment]), default=0)
        return tuple(torch.empty(count, longest, device=self.anchor.device))

    @torch.no_grad()
    def average(self, stop: bool = False) -> bool:
        """All weights become their float32 mean by shares, on every rank the same bits.

        Whether any rank wants to stop.
        """
        if self.size == 1:
            self.reset()
            return stop
        moved = self._moved()
        flags = (0 if _finite(moved) else NOT_FINITE) | (STOP if stop else 0)
        said = torch.tensor([*self.tokens, float(flags)], dtype=torch.float64)
        everyone = torch.empty(self.size * said.numel(), dtype=torch.float64)
        device = self.anchor.device
        everyone, said = everyone.to(device), said.to(device)
        self.travel(all_gather, everyone, said)
        table = everyone.view(self.size, -1).tolist()
        for k, (start, end) in enumerate(self.edges):
            moved[start:end].mul_(answered([[row[k], row[-1]] for row in table]).shares[self.rank])
        self.travel(dist.all_reduce, moved)
        self.anchor.add_(moved)
        for chunk in itertools.chain(*self._chunks):
            chunk.give()
        self.tokens = [0.0] * len(self.edges)
        return any(int(row[-1]) & STOP for row in table)

    def travel(self, collective: Any, *arguments: Any) -> None:
        """Run a collective in the group; a failure becomes a DriftError."""
        try:
            found = collective(*arguments, group=self.group)
            if isinstance(found, Travel):
                found.wait()
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: Exception) -> DriftError:
        """A failed exchange in words, with the rank that it failed for."""
        assert self._roll is not None  # where nothing travels nothing is lost
        found = self._roll.failed("bringing weights together", error)
        return DriftError(
            f"{found}; this rank's own weights are whole: go on from the last checkpoint",
            found.missing,
        )

    def _moved(self) -> Tensor:
        """How far all weights have moved from the anchor."""
        found = torch.empty_like(self.anchor)
        for chunk in itertools.chain(*self._chunks):
            chunk.moved(found[chunk.start : chunk.end])
        return found


def answered(headers: Sequence[Sequence[float]]) -> Answer:
    """Shares from (tokens, flags) of each rank; equal ones where no rank has trained a token.

    Raises:
        DriftError: a rank's weights aren't finite; every rank raises it at the same exchange.
    """
    wrong = [rank for rank, (_, flags) in enumerate(headers) if int(flags) & NOT_FINITE]
    if wrong:
        raise DriftError(
            f"the weights of rank {wrong[0]} are not finite; nothing of them was taken over: lower "
            "the learning rate and go on from the last checkpoint"
        )
    total = sum(tokens for tokens, _ in headers)
    shares = [tokens / total if total else 1 / len(headers) for tokens, _ in headers]
    return Answer(shares, any(int(flags) & STOP for _, flags in headers))


def _finite(values: Tensor) -> bool:
    # Waits for the device: a message must say whether its numbers are any.
    return not values.numel() or bool(torch.isfinite(values.abs().amax()))
