"""Local SGD and DiLoCo: ranks train alone for some steps, then average their weights.

    (1) every rank: ``every`` steps of its own optimizer on its own examples

    (2) all ranks: exchange the change of their weights in (1), in few bits

    (3) the outer step: the mean change, or Nesterov momentum over the mean changes

With the mean this is Local SGD (Stich, arXiv:1805.09767). With momentum it is DiLoCo
(Douillard et al., arXiv:2311.08105; rate 0.7, momentum 0.9), which needs many outer steps
to be useful. Sending changes in 4 bits is from Streaming DiLoCo (arXiv:2501.18512). Each
rank has its own optimizer state.

    local = LocalSteps(model.parameters(), every=20, codec=codec("int4"))
    for batch in batches:
        loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
        local.after_step()
    local.synchronize()   # before saving or evaluating: one model
"""

from __future__ import annotations

import bisect
import datetime
import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.parts.comm.codecs import Codec, QuantisedCodec
from hasten.parts.comm.groups import FullDuplexWork, all_gather
from hasten.parts.comm.rank_check import CollectiveError, RankReports
from hasten.parts.kernels import codec as compiled

# Chunks of weights, encoded and applied one after the other, small enough for a processor's cache.
#
# For float32 weights on a processor with a C++ compiler, codecs of 8 or 4 bits run in compiled
# loops, one pass over memory. Otherwise torch's operators process a chunk at a time, with the same
# bits. The message of a chunk is one message of the codec.

NUMBERS = 1 << 17  # weights of a chunk on a processor; on a GPU a fragment is one chunk
# (mean change of weights, index of the first one in all weights) -> change by the outer step
Outer = Callable[[Tensor, int], Tensor]


class WeightChunk:
    """Weights ``start:end`` of the model, views ``parts`` of its parameters, and their anchor."""

    def __init__(self, parts: Sequence[Tensor], start: int, end: int, anchor: Tensor) -> None:
        self.start, self.end, self.numbers = start, end, end - start
        self._parts, self._anchor = list(parts), anchor[start:end]
        edges = itertools.accumulate((p.numel() for p in parts), initial=0)
        self._ranges = list(itertools.pairwise(edges))
        plain = all(p.is_cpu and p.dtype == torch.float32 for p in parts)
        self._flat = compiled.FlatWeights(parts) if plain and compiled.drift().library else None

    def copy_to_anchor(self) -> None:
        """Copies the weights to the anchor."""
        self._read(self._anchor)

    def copy_from_anchor(self) -> None:
        """Copies the anchor to the weights."""
        for part, (low, high) in zip(self._parts, self._ranges, strict=True):
            part.copy_(self._anchor[low:high])

    def moved(self, into: Tensor) -> Tensor:
        """Returns weights minus anchor, written to the first numbers of ``into``."""
        delta = into[: self.numbers]
        self._read(delta)
        return delta.sub_(self._anchor)

    def encode(self, codec: Codec, body: Tensor, work_buffer: Tensor) -> bool:
        """Encodes weights minus anchor into ``body``; returns True if all numbers are finite.

        ``work_buffer`` is a work buffer of at least as many float32 numbers.
        """
        if self._flat is not None and isinstance(codec, QuantisedCodec):
            codes, scales = codec.parts_of(body, self.numbers)
            body[len(codes) + len(scales) :].zero_()
            return self._flat.encode(self._anchor, codes, scales, codec.block, codec.bits)
        codec.encode(self.moved(work_buffer), body)
        return bool(codec.finite(body, self.numbers))  # waits for the device

    def apply_messages(
        self,
        messages: Tensor,
        codec: Codec,
        shares: Sequence[float],
        own_rank: int,
        work_buffers: Sequence[Tensor],
        outer: Outer | None = None,
    ) -> None:
        """Moves anchor and weights by the messages (ranks, bytes), each weighted by its share.

        ``own_rank`` is this rank's index. ``outer`` maps the weighted mean to the outer step.
        Each of the three ``work_buffers`` has at least as many float32 numbers as the chunk.
        """
        if self._flat is not None and isinstance(codec, QuantisedCodec) and outer is None:
            codes, scales = codec.parts_of(messages, self.numbers)
            self._flat.apply_messages(
                self._anchor, codes, scales, shares, own_rank, codec.block, codec.bits
            )
            return
        common, local_change, others = (work_buffer[: self.numbers] for work_buffer in work_buffers)
        common.zero_()
        for rank, share in enumerate(shares):
            decoded = codec.decode(
                messages[rank], self.numbers, local_change if rank == own_rank else others
            )
            common.add_(torch.mul(decoded, share, out=others))
        common = common if outer is None else outer(common, self.start)
        self.move(common, local_change)

    def move(self, common: Tensor, local_change: Tensor | None = None) -> None:
        """Adds ``common`` to the anchor, and ``common - local_change`` to the weights."""
        self._anchor.add_(common)
        change = (
            common if local_change is None else torch.sub(common, local_change, out=local_change)
        )
        for part, (low, high) in zip(self._parts, self._ranges, strict=True):
            part.add_(change[low:high])

    def _read(self, into: Tensor) -> None:
        for part, (low, high) in zip(self._parts, self._ranges, strict=True):
            into[low:high].copy_(part)


def chunks_of(
    parameters: Sequence[Tensor], anchor: Tensor, start: int, end: int
) -> list[WeightChunk]:
    """Returns weights ``start:end`` of all ``parameters`` in chunks."""
    step = NUMBERS if anchor.is_cpu else max(end - start, 1)
    ends = list(itertools.accumulate(p.numel() for p in parameters))
    chunks = []
    for low in range(start, end, step):
        high, parts = min(low + step, end), []
        for index in range(bisect.bisect_right(ends, low), len(ends)):
            parameter = parameters[index]
            offset = ends[index] - parameter.numel()
            if offset >= high:
                break
            first, last = max(low, offset) - offset, min(high, ends[index]) - offset
            parts.append(parameter.detach().view(-1)[first:last])
        chunks.append(WeightChunk(parts, low, high, anchor))
    return chunks


# The drift of a rank's weights from the common anchor, and how ranks average their weights.
#
# Ranks that train alone for some steps send no gradients. Each rank stores ``anchor``, the last
# common weights (float32, the same bits on every rank, 4 bytes per weight). From time to time it
# sends the change of a *fragment* of its weights:
#
#     change   = decode(encode(weights - anchor))        sent in few bits
#     common   = sum over ranks of share * change        the same bits on every rank
#     anchor  += common
#     weights += common - change of this rank
#
# The codec's error stays in the weights and is part of the next change. An error memory would
# count it twice, so there is none. A rank's share is its part of the trained tokens since the
# fragment was last sent. So one round of plain SGD equals the step of replicas with averaged
# gradients (Stich, Local SGD, arXiv:1805.09767, has equal shares). A message begins with ``HEADER``
# bytes (tokens and flags). The codec's message for each chunk follows.

HEADER = 16  # bytes of two float64 numbers: trained tokens, flags
ALIGNED = 256  # fragments begin at multiples of so many weights, the block of a codec
NOT_FINITE, STOP = 1, 2  # bits of the flags
TIMEOUT = datetime.timedelta(minutes=10)  # default for a collective


class DriftError(CollectiveError):
    """Weights can't be averaged: a rank has ended, or its weights aren't finite."""


class Drift:
    """This rank's weights, cut into fragments, and the anchor common to all ranks.

    All ranks construct it together, with equal weights. It opens its own process group, with
    ``timeout`` for each collective. If torch.distributed isn't running, there is one rank
    and nothing is sent.

    Raises:
        ValueError: there is no weight, or one isn't contiguous.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        fragments: int = 1,
        timeout: datetime.timedelta = TIMEOUT,
    ) -> None:
        if not parameters:
            raise ValueError("there is no weight to keep together: give the model's parameters")
        if any(not p.is_contiguous() for p in parameters):
            raise ValueError("a weight doesn't lie in one piece: make it contiguous() first")
        self.group: Any = None
        self.size, self.rank = 1, 0
        self._reports: RankReports | None = None
        if dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(timeout=timeout)
            self.size, self.rank = dist.get_world_size(), dist.get_rank()
            self._reports = RankReports("weights", range(self.size), timeout.total_seconds())
        self.parameters = list(parameters)
        self.anchor = torch.empty(
            sum(p.numel() for p in parameters), dtype=torch.float32, device=parameters[0].device
        )
        self.cut(fragments)
        self.reset()

    def cut(self, fragments: int) -> None:
        """Cuts the weights into fragments of nearly equal size, each with a block at least."""
        numbers = self.anchor.numel()
        count = max(1, min(fragments, numbers // ALIGNED))
        edges = [numbers * k // count // ALIGNED * ALIGNED for k in range(count)] + [numbers]
        self.edges: list[tuple[int, int]] = list(itertools.pairwise(edges))
        self.tokens = [0.0] * count
        self._chunks = [chunks_of(self.parameters, self.anchor, *edge) for edge in self.edges]

    @torch.no_grad()
    def reset(self) -> None:
        """Makes the present weights, equal on all ranks, the common anchor."""
        for chunk in itertools.chain(*self._chunks):
            chunk.copy_to_anchor()
        self.tokens = [0.0] * len(self.edges)

    def count_step(self, tokens: float) -> None:
        """Adds the trained tokens of a step of this rank to each fragment's count."""
        self.tokens = [before + tokens for before in self.tokens]

    def numbers(self, fragment: int) -> int:
        """Returns the number of weights of a fragment."""
        start, end = self.edges[fragment]
        return end - start

    def message_bytes(self, fragment: int, codec: Codec) -> int:
        """Returns the exact size of a fragment's message, a multiple of 16."""
        chunks = Counter(chunk.numbers for chunk in self._chunks[fragment])
        body = sum(count * codec.message_bytes(numbers) for numbers, count in chunks.items())
        return HEADER + -(-body // 16) * 16

    @torch.no_grad()
    def message(self, fragment: int, codec: Codec, stop: bool = False) -> Tensor:
        """Returns the message of a fragment; the fragment's token count restarts at zero."""
        size, device = self.message_bytes(fragment, codec), self.anchor.device
        message = torch.empty(size, dtype=torch.uint8, device=device)
        (work_buffer,) = self._work_buffers(fragment, 1)
        finite, at = True, HEADER
        for chunk in self._chunks[fragment]:
            after = at + codec.message_bytes(chunk.numbers)
            finite &= chunk.encode(codec, message[at:after], work_buffer)
            at = after
        message[at:].zero_()
        flags = (0 if finite else NOT_FINITE) | (STOP if stop else 0)
        header = torch.tensor([self.tokens[fragment], float(flags)], dtype=torch.float64)
        message[:HEADER].copy_(header.view(torch.uint8))
        self.tokens[fragment] = 0.0
        return message

    @torch.no_grad()
    def apply_messages(
        self, rows: Tensor, fragment: int, codec: Codec, outer: Outer | None = None
    ) -> bool:
        """Moves anchor and weights by the messages ``rows`` (ranks, bytes) of all ranks.

        Every rank adds them in the same order. ``outer`` maps the weighted mean of a chunk to
        the outer step. Returns True if any rank requests a stop.
        """
        headers = rows[:, :HEADER].contiguous().view(torch.float64)
        shares, stop = rank_answers(headers.tolist())  # waits for the device
        work_buffers, at = self._work_buffers(fragment, 3), HEADER
        for chunk in self._chunks[fragment]:
            after = at + codec.message_bytes(chunk.numbers)
            chunk.apply_messages(rows[:, at:after], codec, shares, self.rank, work_buffers, outer)
            at = after
        return stop

    @torch.no_grad()
    def move(self, common: Tensor) -> None:
        """Moves all weights and the anchor by ``common``, which is equal on all ranks."""
        for chunk in itertools.chain(*self._chunks):
            chunk.move(common[chunk.start : chunk.end])

    def _work_buffers(self, fragment: int, count: int) -> tuple[Tensor, ...]:
        """Returns ``count`` work buffers for the numbers of a chunk."""
        longest = max((chunk.numbers for chunk in self._chunks[fragment]), default=0)
        return tuple(torch.empty(count, longest, device=self.anchor.device))

    @torch.no_grad()
    def average(self, stop: bool = False) -> bool:
        """Replaces all weights by their weighted float32 mean, the same bits on every rank.

        Returns True if any rank requests a stop.
        """
        if self.size == 1:
            self.reset()
            return stop
        moved = torch.empty_like(self.anchor)
        for chunk in itertools.chain(*self._chunks):
            chunk.moved(moved[chunk.start : chunk.end])
        finite = bool(moved.isfinite().all())  # waits for the device; the flags need it
        flags = (0 if finite else NOT_FINITE) | (STOP if stop else 0)
        report = torch.tensor([*self.tokens, float(flags)], dtype=torch.float64)
        gathered = torch.empty(self.size * report.numel(), dtype=torch.float64)
        device = self.anchor.device
        gathered, report = gathered.to(device), report.to(device)
        self.travel(all_gather, gathered, report)
        table = gathered.view(self.size, -1).tolist()
        for k, (start, end) in enumerate(self.edges):
            shares, _ = rank_answers([[row[k], row[-1]] for row in table])
            moved[start:end].mul_(shares[self.rank])
        self.travel(dist.all_reduce, moved)
        self.anchor.add_(moved)
        for chunk in itertools.chain(*self._chunks):
            chunk.copy_from_anchor()
        self.tokens = [0.0] * len(self.edges)
        return any(int(row[-1]) & STOP for row in table)

    def travel(self, collective: Any, *arguments: Any) -> None:
        """Runs a collective in the group; a failure becomes a DriftError."""
        try:
            work = collective(*arguments, group=self.group)
            if isinstance(work, FullDuplexWork):
                work.wait()
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: Exception) -> DriftError:
        """Returns the error of a failed exchange, with the rank that caused it."""
        assert self._reports is not None  # a single rank can't fail
        failure = self._reports.failed("bringing weights together", error)
        return DriftError(
            f"{failure}; this rank's own weights are complete: resume from the last checkpoint",
            failure.missing,
        )


def rank_answers(headers: Sequence[Sequence[float]]) -> tuple[list[float], bool]:
    """Returns the ranks' shares from their (tokens, flags), and True if any requests a stop.

    The shares are equal if no rank has trained a token.

    Raises:
        DriftError: a rank's weights aren't finite; every rank raises it at the same exchange.
    """
    invalid_ranks = [rank for rank, (_, flags) in enumerate(headers) if int(flags) & NOT_FINITE]
    if invalid_ranks:
        raise DriftError(
            f"the weights of rank {invalid_ranks[0]} are not finite, and no rank has used them: "
            "lower the learning rate and resume from the last checkpoint"
        )
    total = sum(tokens for tokens, _ in headers)
    shares = [tokens / total if total else 1 / len(headers) for tokens, _ in headers]
    return shares, any(int(flags) & STOP for _, flags in headers)


OUTER = ("mean", "nesterov")  # outer steps
RATE, MOMENTUM = 0.7, 0.9  # learning rate and momentum of the outer step, as in DiLoCo


class LocalTraining(ABC):
    """Training with local steps between exchanges of weights; counts the exchanges.

    ``stop`` is set on all ranks after the same step, once a rank has requested it.
    """

    codec: Codec | None

    def __init__(self, drift: Drift) -> None:
        self.drift = drift
        self.steps = self.exchanges = self.message_bytes = 0
        self.stop = self._dirty = False
        self.waited_seconds = 0.0  # communication during which nothing was computed
        self.hidden_seconds: float | None = 0.0  # communication in parallel with computation
        self.sent_bytes = 0

    def after_step(self, tokens: float = 1.0, stop: bool = False) -> bool:
        """Counts a step with ``tokens`` trained tokens; returns True if an exchange moved weights.

        Every rank calls it after each step; after a skipped step with 0 tokens.

        Raises:
            DriftError: a rank has left, or its weights aren't finite.
        """
        self.steps += 1
        self._dirty = True
        self.drift.count_step(tokens)
        if not self._due():
            return False
        if self.drift.size == 1:
            self.stop = self.stop or stop
            return False
        return self._exchange(stop)

    def synchronize(self) -> bool:
        """Replaces all ranks' weights by their float32 mean; returns True if they differed."""
        if not self._dirty:
            return False
        self._receive()
        self.drift.average()
        self._dirty = False
        return self.drift.size > 1

    @property
    def acts(self) -> bool:
        """Returns True if there has been an exchange."""
        return self.exchanges > 0

    def summary(self) -> str:
        """Returns a summary of the exchanges so far."""
        each = f"{self.message_bytes:,} bytes each"
        return f"{self.exchanges} exchanges in {self.steps} steps, {each}"

    def _due(self) -> bool:
        return True

    @abstractmethod
    def _exchange(self, stop: bool) -> bool:
        """Sends or receives changes; returns True if weights moved."""

    def _receive(self) -> bool:
        """Waits for a message and applies it; returns True if there was one."""
        return False

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state for resuming, the same on every rank; call ``synchronize`` first."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from weights that were saved with this state and are loaded already.

        Raises:
            ValueError: the state was saved with other settings or other weights.
        """


class LocalSteps(LocalTraining):
    """Averages weights over ranks every ``every`` steps; ``codec`` None sends float32.

    Raises:
        ValueError: a setting is impossible, or a weight doesn't lie in one piece.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        every: int = 20,
        outer: str = "mean",
        codec: Codec | None = None,
        timeout: datetime.timedelta = TIMEOUT,
    ) -> None:
        check(every, outer)
        self.every, self.outer = every, outer
        self.codec = None if codec is None or codec.name == "none" else codec
        super().__init__(Drift(list(parameters), 1, timeout))
        self.velocity = torch.zeros_like(self.drift.anchor) if outer == "nesterov" else None

    def _due(self) -> bool:
        return self.steps % self.every == 0

    def _exchange(self, stop: bool) -> bool:
        self.exchanges += 1
        self.sent_bytes += self.predicted_bytes
        if self.codec is None:
            self._exact(stop)
        else:
            self._encoded(self.codec, stop)
        return True

    @property
    def predicted_bytes(self) -> int:
        """Returns the bytes that this rank sends to others in one exchange."""
        others = self.drift.size - 1
        if self.codec is not None:
            return others * self.drift.message_bytes(0, self.codec)
        return 2 * others * 4 * self.drift.numbers(0) // self.drift.size + others * 16

    @torch.no_grad()
    def _encoded(self, codec: Codec, stop: bool) -> None:
        drift = self.drift
        message = drift.message(0, codec, stop)
        rows = message.new_empty(drift.size * message.numel())
        began = time.perf_counter()
        drift.travel(all_gather, rows, message)
        self.waited_seconds += time.perf_counter() - began
        self.message_bytes = message.numel()
        wanted = drift.apply_messages(rows.view(drift.size, -1), 0, codec, self._outer)
        self.stop = self.stop or wanted

    @torch.no_grad()
    def _exact(self, stop: bool) -> None:
        """Averages in float32 without a codec; weights are equal on all ranks afterwards."""
        before = self.drift.anchor.clone() if self.velocity is not None else None
        began = time.perf_counter()
        self.stop = self.drift.average(stop) or self.stop
        self.waited_seconds += time.perf_counter() - began
        self.message_bytes = 4 * self.drift.numbers(0)
        if before is not None:  # the outer step starts at the mean
            moved = self.drift.anchor - before
            self.drift.move(self._outer(moved) - moved)

    def _outer(self, mean: Tensor, start: int = 0) -> Tensor:
        """Returns the outer step: torch.optim.SGD(nesterov=True) with mean changes as gradients.

        ``mean`` has the changes of the weights from index ``start`` on.
        """
        if self.velocity is None:
            return mean
        velocity = self.velocity[start : start + len(mean)]
        velocity.mul_(MOMENTUM).add_(mean)
        return mean.add(velocity, alpha=MOMENTUM).mul_(RATE)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps, "exchanges": self.exchanges}
        return state if self.velocity is None else {**state, "velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        velocity = state.get("velocity")
        if (velocity is None) != (self.velocity is None):
            raise ValueError(f"the state is of another outer step than {self.outer!r}")
        if self.velocity is not None and velocity is not None:
            if velocity.numel() != self.velocity.numel():
                raise ValueError("the state is of other weights than these")
            self.velocity.copy_(velocity)
        self.steps, self.exchanges = state["steps"], state["exchanges"]
        self.drift.reset()
        self._dirty = False


def check(every: int, outer: str) -> None:
    """Raises ValueError for impossible settings."""
    if every < 1:
        raise ValueError(f"every is {every}; ranks average after at least 1 step")
    if outer not in OUTER:
        raise ValueError(f"outer is {outer!r}; it is one of {', '.join(OUTER)}")


class Buffers:
    """Averages buffers that forward passes change (running sums, routers' biases).

    ``average`` replaces those that have changed on any rank by their mean. The mean is
    computed in float64, so equal values keep their bits.
    """

    def __init__(self, module: nn.Module, drift: Drift) -> None:
        self._module, self._drift = module, drift
        self._last_sums = self._sums()

    @torch.no_grad()
    def average(self) -> None:
        """Averages the buffers; every rank calls it between the same two steps."""
        drift, named, now = self._drift, dict(self._module.named_buffers()), self._sums()
        if drift.size == 1 or not named:
            return
        changed = torch.tensor([float(now[n] != self._last_sums.get(n)) for n in named])
        changed = changed.to(drift.anchor.device)
        drift.travel(dist.all_reduce, changed)
        for buffer, has_changed in zip(named.values(), changed.tolist(), strict=True):
            if has_changed:
                mean = buffer.double()
                drift.travel(dist.all_reduce, mean)
                mean /= drift.size
                buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        self._last_sums = self._sums()

    def _sums(self) -> dict[str, float]:
        """Returns a checksum per buffer; batch_norm's writes don't raise a tensor's version."""
        return {n: b.sum(dtype=torch.float64).item() for n, b in self._module.named_buffers()}


@torch.no_grad()
def same_start(module: nn.Module) -> None:
    """Sets weights and buffers to those of rank 0, as DistributedDataParallel does at its start."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), 0)
