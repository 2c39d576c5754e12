"""Compressed averaging of gradients: top-k, quantised, PowerSGD; and the error memory.

The errors of messages are stored by parameter, in float32, and added to the next
gradient (error feedback, see :mod:`hasten.parts.comm.codecs`).

DDP groups parameters in buckets and regroups them after the first step. So errors are
stored by a parameter's name. While the buckets stay the same, the stored errors have the
buckets' layout and need no copy. A step's errors replace the earlier ones only if the
step counts. A step with a non-finite gradient is skipped on all ranks, and its messages
have no effect. During a step both the earlier and the new errors take memory.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hasten.parts.comm.codecs import ChunkedTopK, Codec
from hasten.parts.comm.exchange import (
    FIRST,
    SECOND,
    Pending,
    Ranks,
    gathered_bytes,
    reduced_bytes,
)


class BucketPart(NamedTuple):
    """A parameter in a bucket."""

    name: str
    shape: tuple[int, ...]
    width: int = 4  # bytes of a number of its gradient

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


Pieces = tuple[BucketPart, ...]  # the parameters of a bucket, in their order in it


def total_numbers(pieces: Pieces) -> int:
    """Returns the count of numbers in all pieces."""
    return sum(part.numbers for part in pieces)


def parts_of(flat: Tensor, pieces: Pieces) -> list[Tensor]:
    """Returns the bucket's parameters as flat views, in their order."""
    return list(flat[: total_numbers(pieces)].split([part.numbers for part in pieces]))


class ErrorMemory:
    """Float32 tensors by name that persist between steps: the errors of messages.

    A step's errors are pending until ``commit``. Reading prefers pending tensors.
    ``scale`` is the factor of the gradients given to ``encode`` (loss scaling). Errors are
    stored without it.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._stored: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """Returns the error to add to the next message; read-only."""
        return self._pending.get(name, self._stored.get(name))

    def is_pending(self, name: str) -> bool:
        return name in self._pending

    def leave(self, name: str, values: Tensor) -> None:
        """Stores the error of the current step as pending; ``values`` isn't copied."""
        self._pending[name] = values

    def commit(self, counted: bool) -> None:
        """Ends a step; if it didn't count, memory is unchanged."""
        if counted:
            self._stored |= self._pending
        self._pending = {}

    def state(self) -> dict[str, Tensor]:
        """Returns copies on the host."""
        return {name: v.detach().to("cpu", copy=True) for name, v in self._stored.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replaces all memory by a saved ``state``."""
        self._stored = {name: v.detach().float().clone() for name, v in state.items()}
        self._pending = {}

    def encode(self, codec: Codec, numbers: Tensor, pieces: int, name: str, into: Tensor) -> None:
        """Encodes numbers plus the stored error in equal ``pieces``, one per row of ``into``."""
        residual = self.get(name)
        if residual is None or residual.numel() != numbers.numel():
            residual = torch.zeros_like(numbers, dtype=torch.float32)
        residual = residual.to(numbers.device)  # a checkpoint is loaded on the host
        scaled = residual if self.scale == 1.0 else residual * self.scale
        new_residual = torch.empty_like(residual)
        rows = zip(
            into, *(t.view(pieces, -1) for t in (numbers, scaled, new_residual)), strict=True
        )
        for row, chunk, before, after in rows:
            codec.encode_with_feedback(chunk, before, row, after)
        self.leave(name, new_residual if self.scale == 1.0 else new_residual.div_(self.scale))

    def bucket(self, pieces: Pieces, device: torch.device) -> Tensor:
        """Returns the memory of a bucket's parameters end to end, zeros at first; read-only.

        Raises:
            ValueError: the stored error of a parameter has another size.
        """
        parts = []
        for bucket_part in pieces:
            residual = self.get(bucket_part.name)
            if residual is None:
                residual = torch.zeros(bucket_part.numbers, device=device)
            elif residual.numel() != bucket_part.numbers:
                raise ValueError(
                    f"error feedback remembers {residual.numel()} numbers of {bucket_part.name} "
                    f"and it has {bucket_part.numbers}: the memory is of another model"
                )
            parts.append(residual.to(device))
        if not parts:
            return torch.zeros(0, device=device)
        # An unchanged bucket stored its parts end to end in one tensor, so no copy is needed.
        start = parts[0].storage_offset()
        for part in parts:
            same = part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
            if not same or part.storage_offset() != start:
                return torch.cat(parts)
            start += part.numel()
        return parts[0].as_strided((total_numbers(pieces),), (1,))

    def leave_bucket(self, pieces: Pieces, values: Tensor) -> None:
        for bucket_part, part in zip(pieces, parts_of(values, pieces), strict=True):
            self.leave(bucket_part.name, part)


# The interface of all averaging methods, and the plain one: an uncompressed sum.

# (mean over ranks, errors of this rank's messages). The mean is None on all ranks if a number of
# any rank wasn't finite. On a GPU, where reading that flag would wait, the mean is all NaN instead.
# The errors are None for a method without error feedback.
Outcome = tuple[Tensor | None, Tensor | None]
Finish = Callable[[], Outcome]


def may_read(tensor: Tensor) -> bool:
    """Returns True if the host may read numbers of this tensor; on a GPU it would wait."""
    on_host: bool = tensor.is_cpu
    return on_host


def judged(mean: Tensor, fine: Tensor) -> Tensor | None:
    """Returns the mean if ``fine``; else None, or NaN on a GPU, where reading would wait."""
    if may_read(mean):
        return mean if bool(fine) else None
    return mean.masked_fill_(~fine, torch.nan)


class OneRank:
    """Replaces ``Ranks`` if there is one rank: returns what it sends."""

    rank, world = 0, 1

    def all_reduce(self, values: Tensor, stage: int) -> Pending:
        return Pending(None, values)

    def all_gather(self, row: Tensor, stage: int) -> Pending:
        return Pending(None, row[None])

    def all_to_all(self, rows: Tensor) -> Pending:
        return Pending(None, rows)


class AveragingMethod(ABC):
    """Averages a bucket: ``start`` sends and returns a function that waits and decodes.

    Attributes:
        feedback: True if the errors of messages must be stored.
        memory: other tensors by parameter that persist; ``memory_name`` is "" if there are none.
    """

    feedback: bool
    memory_name = ""

    def __init__(self) -> None:
        self.memory = ErrorMemory()

    @abstractmethod
    def start(
        self, flat: Tensor, residual: Tensor | None, pieces: Pieces, ranks: Ranks | OneRank
    ) -> Finish:
        """Starts to send ``flat + residual``; neither is changed, or read after the return."""

    @abstractmethod
    def sent_bytes(self, pieces: Pieces, world: int) -> int:
        """Returns the exact bytes that a rank sends for this bucket, in ring collectives."""

    def local(self, flat: Tensor, residual: Tensor | None, pieces: Pieces) -> Outcome:
        """Returns this rank's message as other ranks decode it, and its error; waits for a GPU."""
        if not bool(flat.isfinite().all()):
            return None, None
        mean, new_residual = self.start(flat, residual, pieces, OneRank())()
        if mean is None or not bool(mean.isfinite().all()):
            return None, None
        return mean, new_residual

    def commit(self, counted: bool) -> None:
        """Ends a step; memory changes only if it counted."""
        self.memory.commit(counted)

    def state(self) -> dict[str, Any]:
        """Returns the memory by its name."""
        return {self.memory_name: self.memory.state()} if self.memory_name else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a saved ``state``."""
        self.memory.load(state.get(self.memory_name, {}))


class Dense(AveragingMethod):
    """Sums gradients in their own format in a ring, as DDP does without a hook."""

    feedback = False

    def start(
        self, flat: Tensor, residual: Tensor | None, pieces: Pieces, ranks: Ranks | OneRank
    ) -> Finish:
        pending = ranks.all_reduce(flat / ranks.world, FIRST)

        def finish() -> Outcome:
            mean = pending.wait()
            bad = may_read(mean) and not bool(mean.isfinite().all())
            return (None if bad else mean), None

        return finish

    def sent_bytes(self, pieces: Pieces, world: int) -> int:
        return reduced_bytes(sum(p.numbers * p.width for p in pieces), world)


# Top-k: of each 256 numbers the largest few are sent, as an index and a bf16 value.
#
# A sent number takes three bytes, so 5 % (13 of 256) is 0.15 bytes per number. Top-k over the full
# tensor would need an index of eight bytes. Every rank receives all messages and adds them in the
# order of the ranks, so all have the same bits. Sent bytes grow with the number of ranks. Unsent
# numbers are stored and added to the next gradient (Stich et al., Sparsified SGD with Memory,
# arXiv:1809.07599).
#
# ``momentum`` corrects this for a momentum optimizer (Lin et al., Deep Gradient Compression,
# arXiv:1712.01887, section 3.1). The velocity is computed here, before top-k, and set to zero at
# sent numbers. The optimizer must then be plain SGD.


class TopKMean(AveragingMethod):
    """Sends the largest ``ratio`` of each chunk, rounded up to whole numbers."""

    feedback = True

    def __init__(self, ratio: float, momentum: float = 0.0) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; it must be at least 0 and below 1")
        super().__init__()
        self.codec, self.momentum = ChunkedTopK.of_share(ratio), momentum
        self.memory_name = "velocity" if momentum else ""

    def start(
        self, flat: Tensor, residual: Tensor | None, pieces: Pieces, ranks: Ranks | OneRank
    ) -> Finish:
        count = len(flat)
        if residual is None:
            residual = torch.zeros(count, device=flat.device)
        if self.momentum:
            flat = self.memory.bucket(pieces, flat.device) * self.momentum + flat
        new_residual = torch.empty_like(residual)
        message, _ = self.codec.encode_with_feedback(flat, residual, None, new_residual)
        if self.momentum:
            sent = self.codec.decode(message, count) != 0
            self.memory.leave_bucket(pieces, flat.masked_fill(sent, 0.0))
        pending = ranks.all_gather(message, FIRST)

        def finish() -> Outcome:
            rows = pending.wait()
            # A non-finite number is the largest, so it is always chosen.
            fine = torch.stack([self.codec.finite(row, count) for row in rows]).all()
            return judged(self.codec.decode_mean(rows, count), fine), new_residual

        return finish

    def sent_bytes(self, pieces: Pieces, world: int) -> int:
        return gathered_bytes(self.codec.message_bytes(total_numbers(pieces)), world)


# The mean of quantised gradients.
#
# 1. Each rank cuts its bucket into as many shards as there are ranks and encodes each.
# 2. all_to_all sends shard r of every rank to rank r.
# 3. Rank r decodes them one after the other and takes the mean in float32.
# 4. It encodes the mean once; all_gather sends every mean to every rank.
# 5. All ranks decode the same bytes, so replicas keep the same bits.
#
# Each number is rounded twice, for any number of ranks; a ring that adds codes would round it once
# per rank. The error of (1) is this rank's residual. The error of (4) is in the mean itself. Rank r
# adds it, times the number of ranks, to its own residual, because the next mean divides residuals
# by that number. So mean of gradients = applied + mean of residuals over all steps, without a
# second memory (after DoubleSqueeze, Tang et al., arXiv:1905.05957, which has two).
#
# A codec writes a NaN for a number that isn't finite. The message of (4) then contains it too, so
# all ranks detect it there.

ALIGNED = 256  # shards begin at multiples of so many numbers, the block of a codec


class QuantisedMean(AveragingMethod):
    """Averages gradients encoded by a codec; ``feedback``: errors are added to the next message."""

    def __init__(self, codec: Codec, feedback: bool = True) -> None:
        super().__init__()
        self.codec, self.feedback = codec, feedback

    def start(
        self, flat: Tensor, residual: Tensor | None, pieces: Pieces, ranks: Ranks | OneRank
    ) -> Finish:
        back = 1.0
        if self.codec.name == "half":  # divides before, because fp16 ends at 65504
            flat, back = flat / ranks.world, float(ranks.world)
        shards = self._shards(len(flat), ranks.world)
        rows = torch.zeros(ranks.world, self._row(shards), dtype=torch.uint8, device=flat.device)
        new_residual = None if residual is None else torch.empty_like(residual)
        for row, (low, high) in zip(rows, shards, strict=True):
            message = row[: self.codec.message_bytes(high - low)]
            if residual is None or new_residual is None:
                self.codec.encode(flat[low:high], message)
            else:
                self.codec.encode_with_feedback(
                    flat[low:high], residual[low:high], message, new_residual[low:high]
                )
        pending = ranks.all_to_all(rows)

        def finish() -> Outcome:
            if ranks.world == 1:
                return judged(*self._decoded(pending.wait(), shards)), new_residual
            low, high = shards[ranks.rank]
            count = high - low
            size = self.codec.message_bytes(count)
            mean = self.codec.decode_mean(pending.wait()[:, :size].contiguous(), count)
            answer = torch.zeros_like(rows[0])
            self.codec.encode(mean, answer[:size])
            means = ranks.all_gather(answer, SECOND).wait()
            result = judged(*self._decoded(means, shards))
            if result is not None and new_residual is not None:
                new_residual[low:high].add_(mean - result[low:high], alpha=ranks.world)
            return (None if result is None else result.mul_(back)), new_residual

        return finish

    def sent_bytes(self, pieces: Pieces, world: int) -> int:
        return 2 * gathered_bytes(self._row(self._shards(total_numbers(pieces), world)), world)

    def _shards(self, count: int, world: int) -> list[tuple[int, int]]:
        """Returns the bounds of each rank's shard; the last ones may be short or empty."""
        each = -(-count // (world * ALIGNED)) * ALIGNED
        return [(min(r * each, count), min((r + 1) * each, count)) for r in range(world)]

    def _row(self, shards: list[tuple[int, int]]) -> int:
        low, high = shards[0]
        return self.codec.message_bytes(high - low)

    def _decoded(self, rows: Tensor, shards: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Returns all shards end to end, and True if all are finite."""
        result = torch.empty(shards[-1][1], dtype=torch.float32, device=rows.device)
        fine = []
        for row, (low, high) in zip(rows, shards, strict=True):
            message = row[: self.codec.message_bytes(high - low)]
            self.codec.decode(message, high - low, result[low:high])
            fine.append(self.codec.finite(message, high - low))
        return result, torch.stack(fine).all()


# PowerSGD: sends a matrix of gradients as two thin factors, one power iteration per step.
#
#     stage 1   P = M Q of every matrix in the bucket, end to end, in one all-reduce
#               all ranks: P made orthonormal, the same bits everywhere
#     stage 2   Q = M' P, end to end, in one all-reduce; the mean is P Q'
#
# (Vogels et al., arXiv:1905.13727, algorithm 1.) Q is the start of the next step. Factors are bf16.
# Vectors, and matrices with factors of more than half their size, are sent in float32 with P. A
# rank's error is its own matrix minus P times *its own* Q, as in the paper. Some implementations
# subtract the mean there. Then the errors contain the difference of a rank's gradient from the
# mean, and grow as a random walk.
#
# The mean is decoded by a matrix product. On different processors its last bits may differ, and
# ranks drift apart; `GradientCompressor.check` detects this.

FACTOR_DTYPE = torch.bfloat16


class PowerSGDMean(AveragingMethod):
    """Averages matrices of gradients as products of factors with at most ``rank`` columns."""

    feedback = True
    memory_name = "right"  # Q of each matrix, the start of the next step

    def __init__(self, rank: int = 16) -> None:
        if rank < 1:
            raise ValueError(f"rank is {rank}; a factor has at least 1 column")
        super().__init__()
        self.rank = rank

    def start(
        self, flat: Tensor, residual: Tensor | None, pieces: Pieces, ranks: Ranks | OneRank
    ) -> Finish:
        exact = flat.float() if residual is None else flat.float() + residual
        matrices, dense_parts = [], []
        for part, values in zip(pieces, parts_of(exact, pieces), strict=True):
            if self._pays(part.shape):
                matrices.append((part, values.view(_sides(part.shape))))
            else:
                dense_parts.append(values)
        left_factors = [m @ self._start_of(p, m) for p, m in matrices]
        dense = _concatenated(dense_parts, flat).div_(ranks.world)
        factors = _concatenated([f / ranks.world for f in left_factors], flat).to(FACTOR_DTYPE)
        waiting = [ranks.all_reduce(t, FIRST) for t in (factors, dense) if len(t)]

        def finish() -> Outcome:
            for pending in waiting:
                pending.wait()
            fine = factors.isfinite().all() & dense.isfinite().all()
            # These tensors are equal on all ranks, so all ranks take the same branch.
            if may_read(fine) and not bool(fine):
                return None, None
            bases = [torch.linalg.qr(f).Q for f in _split_like(factors.float(), left_factors)]
            local_factors = [
                (m.mT @ b / ranks.world).to(FACTOR_DTYPE)
                for (_, m), b in zip(matrices, bases, strict=True)
            ]
            means = _concatenated(local_factors, flat).to(FACTOR_DTYPE)
            if len(means):
                ranks.all_reduce(means, SECOND).wait()
            rights = iter(_split_like(means.float(), local_factors))
            factored = iter(zip(matrices, bases, local_factors, strict=True))
            mean = torch.empty(total_numbers(pieces), dtype=torch.float32, device=dense.device)
            new_residual, offset = torch.zeros_like(mean), 0
            for part, into, over in zip(
                pieces, parts_of(mean, pieces), parts_of(new_residual, pieces), strict=True
            ):
                if not self._pays(part.shape):
                    into.copy_(dense[offset : offset + part.numbers])
                    offset += part.numbers
                    continue
                (_, matrix), basis, local_factor = next(factored)
                right, world = next(rights), ranks.world
                into.copy_((basis @ right.mT).flatten())
                over.copy_((matrix - basis @ local_factor.float().mT * world).flatten())
                self.memory.leave(part.name, right)
            return judged(mean, fine), new_residual

        return finish

    def sent_bytes(self, pieces: Pieces, world: int) -> int:
        sides = [_sides(p.shape) for p in pieces if self._pays(p.shape)]
        dense = sum(p.numbers for p in pieces if not self._pays(p.shape))
        columns = [count * min(self.rank, *side) for count, *side in sides]
        sizes = (
            sum(2 * rows * k for (_, rows, _), k in zip(sides, columns, strict=True)),
            sum(2 * width * k for (*_, width), k in zip(sides, columns, strict=True)),
            4 * dense,
        )
        return sum(reduced_bytes(size, world) for size in sizes)

    def _pays(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2:
            return False
        _, rows, width = _sides(shape)
        columns = min(self.rank, rows, width)
        return 0 < 2 * 2 * columns * (rows + width) <= 4 * rows * width

    def _start_of(self, part: BucketPart, matrix: Tensor) -> Tensor:
        """Returns the last step's Q; in the first step a random one, equal on every rank."""
        count, rows, width = matrix.shape
        shape = count, width, min(self.rank, rows, width)
        factor = self.memory.get(part.name)
        if factor is None or factor.shape != shape:
            dice = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
            factor = torch.randn(shape, generator=dice)
        return factor.to(matrix.device)


def _sides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns (count, rows, columns): a matrix per expert; a convolution has a row per filter."""
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], torch.Size(shape[1:]).numel()


def _concatenated(tensors: list[Tensor], like: Tensor) -> Tensor:
    flats = [t.flatten() for t in tensors]
    return torch.cat(flats) if flats else torch.zeros(0, device=like.device)


def _split_like(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([t.numel() for t in like]) if like else ()
    return [chunk.view(t.shape) for chunk, t in zip(pieces, like, strict=True)]
