"""Top-k: of each 256 numbers the largest few travel, as a place and a bf16 value.

Three bytes for a number that is kept, so 5 % (13 of 256) is 0.15 bytes per number; one choice over
the whole tensor would need a place of eight bytes. Every rank gets every other's message and adds
them up in the order of the ranks, so that all have the same bits; what a rank sends grows with the
number of ranks. What isn't sent is remembered and added to the next gradient (Stich et al.,
Sparsified SGD with Memory, arXiv:1809.07599).

``momentum`` corrects that for a momentum optimizer (Lin et al., Deep Gradient Compression,
arXiv:1712.01887, section 3.1): the velocity is kept here, before the choice, and what has been sent
is taken out of it; the optimizer must then be plain SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hasten.parts.comm.chunked_topk import ChunkedTopK
from hasten.parts.comm.error_feedback import Memory, Pieces, numbers
from hasten.parts.comm.exchange import FIRST, Ranks, gathered_bytes
from hasten.parts.comm.ways import Finish, Outcome


class TopKMean:
    """The largest ``ratio`` of each chunk, rounded up to whole numbers."""

    feedback = True

    def __init__(self, ratio: float, momentum: float = 0.0) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; it must be at least 0 and below 1")
        self.codec, self.momentum = ChunkedTopK.of_share(ratio), momentum
        self._velocity = Memory()

    def start(self, flat: Tensor, residual: Tensor | None, pieces: Pieces, ranks: Ranks) -> Finish:
        message, left = self._chosen(flat, residual, pieces)
        pending = ranks.all_gather(message, FIRST)
        return lambda: (self._mean(pending.wait(), len(flat)), left)

    def local(self, flat: Tensor, residual: Tensor | None, pieces: Pieces) -> Outcome:
        message, left = self._chosen(flat, residual, pieces)
        return self._mean(message[None], len(flat)), left

    def sent_bytes(self, pieces: Pieces, world: int) -> int:
        return gathered_bytes(self.codec.message_bytes(numbers(pieces)), world)

    def settle(self, counted: bool) -> None:
        self._velocity.settle(counted)

    def state(self) -> dict[str, Any]:
        return {"velocity": self._velocity.state()} if self.momentum else {}

    def load(self, state: Mapping[str, Any]) -> None:
        self._velocity.load(state.get("velocity", {}))

    def _chosen(
        self, flat: Tensor, residual: Tensor | None, pieces: Pieces
    ) -> tuple[Tensor, Tensor]:
        """The message, and what stays behind, rounding included."""
        if residual is None:
            residual = torch.zeros(len(flat), device=flat.device)
        if self.momentum:
            flat = self._velocity.kept(pieces, flat.device) * self.momentum + flat
        left = torch.empty_like(residual)
        message, _ = self.codec.encode_with_feedback(flat, residual, None, left)
        if self.momentum:
            sent = self.codec.decode(message, len(flat)) != 0
            self._velocity.leave(pieces, flat.masked_fill(sent, 0.0))
        return message, left

    def _mean(self, rows: Tensor, count: int) -> Tensor | None:
        """Of all ranks' messages; None where one holds what isn't finite: nothing is larger, so
        it is always among what was chosen."""
        fine = torch.stack([self.codec.finite(row, count) for row in rows]).all()
        return self.codec.decode_mean(rows, count) if bool(fine) else None  # waits for the device
