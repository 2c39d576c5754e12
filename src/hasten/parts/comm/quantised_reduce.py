"""The mean of quantised gradients: codes to the owner of a shard, its mean as codes to everybody.

    (1) each rank cuts its bucket into as many shards as there are ranks and encodes each
    (2) all_to_all: shard r of every rank goes to rank r
    (3) rank r decodes them one after the other and takes the mean in float32
    (4) it encodes the mean once; all_gather: every rank gets every mean
    (5) everybody decodes the same bytes, so replicas keep the same bits

A number is rounded twice whatever the number of ranks; a ring that adds codes would round it once
per rank. What (1) leaves out is this rank's residual. What (4) leaves out is owed to all ranks: its
owner adds it to its own residual, times the number of ranks, since its share in the next mean is
one of so many. So given = applied + mean of residuals holds from the first step to the last, with
no second memory (after DoubleSqueeze, Tang et al., arXiv:1905.05957, which has two).

A codec writes a NaN where a number wasn't finite. It is in the codes of (4) as well, so that all
ranks see it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hasten.parts.comm.error_feedback import Pieces, numbers
from hasten.parts.comm.exchange import SECOND, Ranks, gathered_bytes
from hasten.parts.comm.ways import Finish, Forgetful, Outcome

if TYPE_CHECKING:
    from hasten.parts.comm.codecs import Codec

ALIGNED = 256  # a shard begins where a codec's block does


class QuantisedMean(Forgetful):
    """Gradients through a codec; ``feedback``: what it leaves out returns with the next ones."""

    def __init__(self, codec: Codec, feedback: bool = True, aligned: int = ALIGNED) -> None:
        self.codec, self.feedback, self._aligned = codec, feedback, aligned

    def start(self, flat: Tensor, residual: Tensor | None, pieces: Pieces, ranks: Ranks) -> Finish:
        flat, back = self._in_range(flat, ranks.world)
        shards = self._shards(len(flat), ranks.world)
        rows = torch.zeros(ranks.world, self._row(shards), dtype=torch.uint8, device=flat.device)
        left = None if residual is None else torch.empty_like(residual)
        for row, (low, high) in zip(rows, shards, strict=True):
            message = row[: self.codec.message_bytes(high - low)]
            if residual is None or left is None:
                self.codec.encode(flat[low:high], message)
            else:
                self.codec.encode_with_feedback(
                    flat[low:high], residual[low:high], message, left[low:high]
                )
        pending = ranks.all_to_all(rows)

        def finish() -> Outcome:
            low, high = shards[ranks.rank]
            count = high - low
            size = self.codec.message_bytes(count)
            mean = self.codec.decode_mean(pending.wait()[:, :size].contiguous(), count)
            answer = torch.zeros_like(rows[0])
            self.codec.encode(mean, answer[:size])
            means = ranks.all_gather(answer, SECOND).wait()
            result = self._decoded(means, shards)
            if result is not None and left is not None:
                left[low:high].add_(mean - result[low:high], alpha=ranks.world)
            return (None if result is None else result.mul_(back)), left

        return finish

    def local(self, flat: Tensor, residual: Tensor | None, pieces: Pieces) -> Outcome:
        if residual is None:
            left, message = None, self.codec.encode(flat)
        else:
            left = torch.empty_like(residual)
            message, _ = self.codec.encode_with_feedback(flat, residual, None, left)
        return self._decoded(message[None], [(0, len(flat))]), left

    def sent_bytes(self, pieces: Pieces, world: int) -> int:
        return 2 * gathered_bytes(self._row(self._shards(numbers(pieces), world)), world)

    def _in_range(self, flat: Tensor, world: int) -> tuple[Tensor, float]:
        """fp16 ends at 65504: no sum of ranks may reach beyond it, nor one rank's share."""
        return (flat / world, float(world)) if self.codec.name == "half" else (flat, 1.0)

    def _shards(self, count: int, world: int) -> list[tuple[int, int]]:
        """Where each rank's shard begins and ends; the last ones may be short or empty."""
        each = -(-count // (world * self._aligned)) * self._aligned
        return [(min(r * each, count), min((r + 1) * each, count)) for r in range(world)]

    def _row(self, shards: list[tuple[int, int]]) -> int:
        low, high = shards[0]
        return self.codec.message_bytes(high - low)

    def _decoded(self, rows: Tensor, shards: list[tuple[int, int]]) -> Tensor | None:
        """All shards end to end; None where one holds what isn't finite."""
        result = torch.empty(shards[-1][1], dtype=torch.float32, device=rows.device)
        fine = []
        for row, (low, high) in zip(rows, shards, strict=True):
            message = row[: self.codec.message_bytes(high - low)]
            self.codec.decode(message, high - low, result[low:high])
            fine.append(self.codec.finite(message, high - low))
        return result if bool(torch.stack(fine).all()) else None  # waits for the device
