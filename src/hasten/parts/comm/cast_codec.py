"""A codec that sends each number in a format of its own: float32, float16 or bf16.

float16 ends at 65504. What lies beyond, or is too large for bf16, is infinite in the message and
counts as not finite: scale before encoding, rather than have it cut off unseen.
"""

from __future__ import annotations

from dataclasses import dataclass

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

FORMATS = {"none": torch.float32, "half": torch.float16, "bf16": torch.bfloat16}
# Bits without the sign are ordered as magnitudes are. These are infinity's; a NaN's lie above.
INFINITIES = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}
PIECE = 65_536  # numbers


@dataclass(frozen=True)
class Cast:
    """Each number in a format of its own: float32, float16 or bf16."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise ValueError(f"there is no format {self.name!r}; there are {', '.join(FORMATS)}")

    def message_bytes(self, numbers: int) -> int:
        return padded(numbers * FORMATS[self.name].itemsize)

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        flat = checked(flat)
        message = message_for(out, self.message_bytes(len(flat)), flat)
        values = self._values(message, len(flat))
        values.copy_(flat)
        message[values.nbytes :].zero_()
        return message

    def encode_with_feedback(
        self,
        flat: Tensor,
        residual: Tensor,
        out: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        flat = checked(flat, residual, kept)
        message = message_for(out, self.message_bytes(len(flat)), flat)
        values = self._values(message, len(flat))
        message[values.nbytes :].zero_()
        pieces = _pieces(flat)
        for p in pieces:
            values[p].copy_(residual[p] + flat[p])
        fine, into = self.finite(message, len(flat)), residual if kept is None else kept
        here = flat.device.type == "cpu"  # where looking costs no waiting, and where() is slow
        if here and not bool(fine):
            into.copy_(residual)
            return message, fine
        for p in pieces:
            rest = (residual[p] + flat[p]).sub_(values[p].to(torch.float32))
            into[p].copy_(rest if here else rest.where(fine, residual[p]))
        return message, fine

    def decode(
        self, message: Tensor, numbers: int, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        check_message(message, self.message_bytes(numbers))
        result = result_for(out, numbers, message, add)
        values = self._values(message, numbers)
        return _added(result, values) if add else result.copy_(values)

    def decode_mean(self, messages: Tensor, numbers: int, out: Tensor | None = None) -> Tensor:
        check_messages(messages, self.message_bytes(numbers))
        result = self.decode(messages[0], numbers, out)
        for message in messages[1:]:
            _added(result, self._values(message, numbers))
        return result.mul_(1 / len(messages))

    def finite(self, message: Tensor, numbers: int) -> Tensor:
        values = self._values(message, numbers)
        whole, infinity = INFINITIES[values.dtype]
        bits = values.view(whole)
        sizes = [(bits[p] & torch.iinfo(whole).max).amax() for p in _pieces(bits)]
        if not sizes:
            return torch.ones((), dtype=torch.bool, device=message.device)
        return torch.stack(sizes).amax() < infinity

    def _values(self, message: Tensor, numbers: int) -> Tensor:
        kind = FORMATS[self.name]
        return message[: numbers * kind.itemsize].view(kind)


def _pieces(flat: Tensor) -> list[slice]:
    """All of it; on a processor in pieces whose intermediate results stay in its cache."""
    each = PIECE if flat.device.type == "cpu" else max(1, len(flat))
    return [slice(at, at + each) for at in range(0, len(flat), each)]


def _added(result: Tensor, values: Tensor) -> Tensor:
    for p in _pieces(values):
        result[p].add_(values[p].to(torch.float32))  # a sum of two formats is ten times slower
    return result
