"""A codec that sends blocks of numbers as codes of 8, 4 or 1 bits with one scale for each block.

A message is the codes of all blocks, then their scales; in int4 the first half of a block lies in
the lower halves of its bytes, of signs each eighth in a bit of its own.
:mod:`hasten.parts.kernels.codec_reference` says how a scale and a code are made.
"""

from __future__ import annotations

import functools
import importlib.util
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

WIDTHS = {"int8": 8, "int4": 4, "sign": 1}
LARGEST_BLOCK = 4096
LEAST_CAPABILITY = (8, 0)  # what Triton supports of NVIDIA's


@dataclass(frozen=True)
class Quantised:
    """Blocks of numbers as whole codes of 8 or 4 bits, or as signs, with a bf16 scale for each."""

    bits: int
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS.values():
            raise ValueError(f"codes have 8, 4 or 1 bits, not {self.bits}")
        if self.block % 32 or not 0 < self.block <= LARGEST_BLOCK:
            raise ValueError(
                f"a block has a multiple of 32 numbers, {LARGEST_BLOCK} at most, not {self.block}"
            )

    @property
    def name(self) -> str:
        return next(name for name, bits in WIDTHS.items() if bits == self.bits)

    def message_bytes(self, numbers: int) -> int:
        blocks, codes = self._sizes(numbers)
        return codes + padded(2 * blocks)

    def encode(self, flat: Tensor, out: Tensor | None = None, seed: int | None = None) -> Tensor:
        """The message. A ``seed`` rounds codes, not signs, by chance, so that the mean is right."""
        flat = checked(flat)
        return self._encoded(flat, None, None, out, seed)

    def encode_with_feedback(
        self,
        flat: Tensor,
        residual: Tensor,
        out: Tensor | None = None,
        kept: Tensor | None = None,
        seed: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        flat = checked(flat, residual, kept)
        into = kept if kept is not None else residual
        if kept is None and len(flat):
            fine = _way(flat).finite(flat, residual, codec_reference.limit_of(self.bits))
            into = residual if fine else None
        message = self._encoded(flat, residual, into, out, seed)
        return message, self.finite(message, len(flat))

    def _encoded(
        self,
        flat: Tensor,
        residual: Tensor | None,
        kept: Tensor | None,
        out: Tensor | None,
        seed: int | None,
    ) -> Tensor:
        if seed is not None and self.bits == 1:
            raise ValueError("signs aren't rounded by chance: leave the seed out")
        message = message_for(out, self.message_bytes(len(flat)), flat)
        blocks, size = self._sizes(len(flat))
        message[size + 2 * blocks :].zero_()
        if len(flat):
            codes, scales = message[:size], message[size : size + 2 * blocks].view(torch.int16)
            _way(flat).encode(flat, residual, kept, codes, scales, self.block, self.bits, seed)
        return message

    def decode(
        self, message: Tensor, numbers: int, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        check_message(message, self.message_bytes(numbers))
        return self._decoded(message[None], numbers, result_for(out, numbers, message, add), add)

    def decode_mean(self, messages: Tensor, numbers: int, out: Tensor | None = None) -> Tensor:
        check_messages(messages, self.message_bytes(numbers))
        return self._decoded(messages, numbers, result_for(out, numbers, messages, False), False)

    def _decoded(self, messages: Tensor, numbers: int, out: Tensor, add: bool) -> Tensor:
        blocks, size = self._sizes(numbers)
        if numbers:
            codes = messages[:, :size]
            scales = messages[:, size : size + 2 * blocks].view(torch.int16)
            factor = 1 / len(messages)
            _way(out).decode(codes, scales, out, self.block, self.bits, factor, add)
        return out

    def parts_of(self, messages: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
        """The bytes of codes and of scales of one message or of several as rows."""
        blocks, size = self._sizes(numbers)
        return messages[..., :size], messages[..., size : size + 2 * blocks]

    def finite(self, message: Tensor, numbers: int) -> Tensor:
        blocks, size = self._sizes(numbers)
        scales = message[size : size + 2 * blocks].view(torch.int16)
        return (scales < codec_reference.INFINITE >> 16).all()

    def _sizes(self, numbers: int) -> tuple[int, int]:
        """How many blocks, and how many bytes of codes; the last block is filled up with zeros."""
        blocks = -(-numbers // self.block)
        return blocks, blocks * self.block * self.bits // 8


def _way(tensor: Tensor) -> ModuleType:
    """The module that has ``finite``, ``encode`` and ``decode`` for the tensor's device."""
    if tensor.device.type == "cpu":
        return compiled if compiled.library().library is not None else codec_reference
    if tensor.device.type == "cuda" and (kernels := _triton()) is not None:
        return kernels
    return codec_reference


@functools.cache
def _triton() -> ModuleType | None:
    """The Triton kernels, where Triton and a GPU that it supports are there."""
    if torch.version.hip is None and torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return None
    if importlib.util.find_spec("triton") is None:
        return None
    from hasten.parts.kernels import codec_triton

    return codec_triton
