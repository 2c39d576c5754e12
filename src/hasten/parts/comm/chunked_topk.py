"""The k largest numbers of every chunk of 256, as a message of three bytes for each.

Within a chunk a place is one byte, and the value is a bf16; a top-k over a whole tensor with int64
places needs ten. Aji and Heafield (Sparse Communication for Distributed Gradient Descent,
arXiv:1704.05021) send the largest with error feedback; that chunks choose for themselves spreads
what is sent evenly, and lets every rank's message have the same length.

Of equal magnitudes the one at the lowest place is sent. The residual, how what isn't finite is
told, and the order of sums are as in :mod:`hasten.parts.comm.codecs`. The kernel is in C++; where
no compiler is, and on a GPU, torch's operators write the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from hasten.parts.comm.wire_message import (
    check_message,
    check_messages,
    checked,
    message_for,
    padded,
    result_for,
)
from hasten.parts.kernels import codec as compiled
from hasten.parts.kernels import codec_reference
from hasten.parts.kernels.codec_reference import CHUNK

INFINITE_BF16 = 0x7F80


@dataclass(frozen=True)
class ChunkedTopK:
    """A codec that keeps the ``k`` largest magnitudes of each chunk of 256 numbers."""

    k: int

    def __post_init__(self) -> None:
        if not 0 < self.k <= CHUNK:
            raise ValueError(f"of a chunk of {CHUNK}, 1 to {CHUNK} numbers are kept, not {self.k}")

    @classmethod
    def of_share(cls, share: float) -> ChunkedTopK:
        """Keeps that share of the numbers, rounded up to a whole number of each chunk.

        Raises:
            ValueError: a share that isn't above 0 and at most 1.
        """
        if not 0 < share <= 1:
            raise ValueError(f"the share that is kept lies above 0 and up to 1, not at {share}")
        return cls(math.ceil(share * CHUNK))

    @property
    def name(self) -> str:
        return "topk"

    def message_bytes(self, numbers: int) -> int:
        chosen = self._chosen(numbers)
        return padded(chosen) + padded(2 * chosen)

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        flat = checked(flat)
        return self._encoded(flat, None, None, out)

    def encode_with_feedback(
        self,
        flat: Tensor,
        residual: Tensor,
        out: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        flat = checked(flat, residual, kept)
        into = kept if kept is not None else residual
        if kept is None and len(flat):
            fine = _way(flat).finite(flat, residual, codec_reference.TOO_LARGE_FOR_BF16)
            into = residual if fine else None
        message = self._encoded(flat, residual, into, out)
        return message, self.finite(message, len(flat))

    def _encoded(
        self, flat: Tensor, residual: Tensor | None, kept: Tensor | None, out: Tensor | None
    ) -> Tensor:
        message = message_for(out, self.message_bytes(len(flat)), flat)
        chosen = self._chosen(len(flat))
        message[chosen : padded(chosen)].zero_()
        message[padded(chosen) + 2 * chosen :].zero_()
        if chosen:
            places, values = self._parts(message[None], len(flat))
            _way(flat).topk_encode(flat, residual, kept, places[0], values[0], self.k)
        return message

    def decode(
        self, message: Tensor, numbers: int, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        check_message(message, self.message_bytes(numbers))
        return self._decoded(message[None], result_for(out, numbers, message, add), add)

    def decode_mean(self, messages: Tensor, numbers: int, out: Tensor | None = None) -> Tensor:
        check_messages(messages, self.message_bytes(numbers))
        return self._decoded(messages, result_for(out, numbers, messages, False), False)

    def _decoded(self, messages: Tensor, out: Tensor, add: bool) -> Tensor:
        if len(out):
            places, values = self._parts(messages, len(out))
            _way(out).topk_decode(places, values, out, self.k, 1 / len(messages), add)
        return out

    def finite(self, message: Tensor, numbers: int) -> Tensor:
        _, values = self._parts(message[None], numbers)
        return ((values & 0x7FFF) < INFINITE_BF16).all()

    def _parts(self, messages: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
        """Places (ranks, chosen) uint8 and values (ranks, chosen) int16 of messages."""
        chosen = self._chosen(numbers)
        values = messages[:, padded(chosen) : padded(chosen) + 2 * chosen]
        return messages[:, :chosen], values.view(torch.int16)

    def _chosen(self, numbers: int) -> int:
        return -(-numbers // CHUNK) * self.k


def _way(tensor: Tensor) -> ModuleType:
    """The module that has ``finite`` and the two passes for the tensor's device."""
    on_processor = tensor.device.type == "cpu" and compiled.library().library is not None
    return compiled if on_processor else codec_reference
