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
shares). A message begins with ``HEADER`` bytes: tokens, and flags.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.parts.roll_call import CollectiveError, RollCall

if TYPE_CHECKING:
    from hasten.parts.codecs import Codec

HEADER = 16  # two float64 numbers: trained tokens, flags
ALIGNED = 256  # fragments begin at multiples of a codec's block
NOT_FINITE, STOP = 1, 2  # flags
TIMEOUT = datetime.timedelta(minutes=10)
# torch 2.13 has a new name for it and warns at the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
        self._pieces = [_pieces(self.parameters, start, end) for start, end in self.edges]

    @torch.no_grad()
    def reset(self) -> None:
        """The weights as they are now, equal on all ranks, are what all have in common."""
        for (start, _), pieces in zip(self.edges, self._pieces, strict=True):
            for view, low, high in pieces:
                self.anchor[start + low : start + high].copy_(view)
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
        return HEADER + -(-codec.message_bytes(self.numbers(fragment)) // 16) * 16

    @torch.no_grad()
    def message(self, fragment: int, codec: Codec, stop: bool = False) -> Tensor:
        """How far the fragment has moved, encoded; its tokens start from zero again."""
        delta = self._delta(fragment)
        size = self.message_bytes(fragment, codec)
        found = torch.zeros(size, dtype=torch.uint8, device=delta.device)
        body = found[HEADER : HEADER + codec.message_bytes(delta.numel())]
        codec.encode(delta, body)
        finite = bool(codec.finite(body, delta.numel()))  # waits for the device
        flags = (0 if finite else NOT_FINITE) | (STOP if stop else 0)
        header = torch.tensor([self.tokens[fragment], float(flags)], dtype=torch.float64)
        found[:HEADER].copy_(header.view(torch.uint8))
        self.tokens[fragment] = 0.0
        return found

    @torch.no_grad()
    def common(self, rows: Tensor, fragment: int, codec: Codec) -> tuple[Tensor, Tensor, bool]:
        """All ranks' movement by their shares, this rank's own, and whether one wants to stop.

        ``rows`` (ranks, bytes) are the messages of all ranks; every rank adds in the same order.
        """
        numbers = self.numbers(fragment)
        answer = answered(rows[:, :HEADER].contiguous().view(torch.float64).tolist())  # waits
        total = torch.zeros(numbers, dtype=torch.float32, device=rows.device)
        own = other = torch.empty_like(total)
        for rank, share in enumerate(answer.shares):
            message = rows[rank, HEADER : HEADER + codec.message_bytes(numbers)]
            if rank == self.rank:
                own = codec.decode(message, numbers)
                total.add_(own, alpha=share)
            else:
                total.add_(codec.decode(message, numbers, other), alpha=share)
        return total, own, answer.stop

    @torch.no_grad()
    def move(self, fragment: int, common: Tensor, own: Tensor) -> None:
        """The anchor moves by ``common``, the weights by ``common - own``."""
        start, end = self.edges[fragment]
        self.anchor[start:end].add_(common)
        change = common - own
        for view, low, high in self._pieces[fragment]:
            view.add_(change[low:high])

    @torch.no_grad()
    def average(self, stop: bool = False) -> bool:
        """All weights become their float32 mean by shares, on every rank the same bits.

        Whether any rank wants to stop.
        """
        if self.size == 1:
            self.reset()
            return stop
        deltas = [self._delta(k) for k in range(len(self.edges))]
        flags = (0 if all(map(_finite, deltas)) else NOT_FINITE) | (STOP if stop else 0)
        said = torch.tensor([*self.tokens, float(flags)], dtype=torch.float64)
        everyone = torch.empty(self.size * said.numel(), dtype=torch.float64)
        device = self.anchor.device
        everyone, said = everyone.to(device), said.to(device)
        self.travel(all_gather, everyone, said)
        table = everyone.view(self.size, -1).tolist()
        for k, delta in enumerate(deltas):
            delta.mul_(answered([[row[k], row[-1]] for row in table]).shares[self.rank])
        flat = torch.cat(deltas)
        self.travel(dist.all_reduce, flat)
        self.anchor.add_(flat)
        for (start, _), pieces in zip(self.edges, self._pieces, strict=True):
            for view, low, high in pieces:
                view.copy_(self.anchor[start + low : start + high])
        self.tokens = [0.0] * len(self.edges)
        return any(int(row[-1]) & STOP for row in table)

    def travel(self, collective: Any, *arguments: Any) -> None:
        """Run a collective in the group; a failure becomes a DriftError."""
        try:
            collective(*arguments, group=self.group)
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

    def _delta(self, fragment: int) -> Tensor:
        start, end = self.edges[fragment]
        found = torch.empty(end - start, dtype=torch.float32, device=self.anchor.device)
        for view, low, high in self._pieces[fragment]:
            found[low:high].copy_(view)
        return found.sub_(self.anchor[start:end])


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


def _pieces(parameters: Sequence[Tensor], start: int, end: int) -> list[tuple[Tensor, int, int]]:
    """The parts of the weights in a stretch of all of them, with their places within it."""
    found, offset = [], 0
    for parameter in parameters:
        low, high = max(start, offset), min(end, offset + parameter.numel())
        if low < high:
            view = parameter.detach().view(-1)[low - offset : high - offset]
            found.append((view, low - start, high - start))
        offset += parameter.numel()
    return found


def _finite(values: Tensor) -> bool:
    # Waits for the device: a message must say whether its numbers are any.
    return not values.numel() or bool(torch.isfinite(values.abs().amax()))


class Buffers:
    """What a module's passes change beside its weights (running sums, routers' biases).

    ``average`` makes those that have changed on some rank their mean, taken in float64, so that
    equal ones keep their bits.
    """

    def __init__(self, module: nn.Module, drift: Drift) -> None:
        self._module, self._drift = module, drift
        self._seen = self._sums()

    @torch.no_grad()
    def average(self) -> None:
        """Every rank calls it between the same two steps."""
        drift, named, now = self._drift, dict(self._module.named_buffers()), self._sums()
        if drift.size == 1 or not named:
            return
        changed = torch.tensor([float(now[n] != self._seen.get(n)) for n in named])
        changed = changed.to(drift.anchor.device)
        drift.travel(dist.all_reduce, changed)
        for buffer, anywhere in zip(named.values(), changed.tolist(), strict=True):
            if anywhere:
                mean = buffer.double()
                drift.travel(dist.all_reduce, mean)
                mean /= drift.size
                buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        self._seen = self._sums()

    def _sums(self) -> dict[str, float]:
        """What shows a change; batch_norm doesn't count its writes in the tensors' versions."""
        return {n: b.sum(dtype=torch.float64).item() for n, b in self._module.named_buffers()}


@torch.no_grad()
def same_start(module: nn.Module) -> None:
    """Weights and buffers become those of rank 0, as DistributedDataParallel does at its start."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), 0)
