"""Codecs: encode a flat tensor as a shorter message of bytes and decode messages.

    communication = codec("int4")
    message, finite = communication.encode_with_feedback(gradient, residual)   # uint8
    mean = communication.decode_mean(messages_of_all_ranks, len(gradient))     # float32

| name | bytes per number | contents of the message |
|---|---|---|
| none | 4 | float32 |
| half, bf16 | 2 | the nearest number of that format |
| int8, int4 | 1.008, 0.508 | codes in blocks of 256 with one bf16 scale each |
| sign | 0.133 | signs in blocks of 256 with their mean magnitude in bf16 |

:meth:`Codec.message_bytes` returns the length of a message. Its parts begin at
multiples of 16 bytes. The same message is decoded to the same bits on every rank and
device. Several ranks' messages are summed in the order of the ranks, so all get the
same mean.

The rounding error of a message can be stored and added to the next one. This is error
feedback (Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy
et al., arXiv:1901.09847). An infinity in a residual would never leave it. So numbers
that aren't finite, or are too large for the format, leave the residual unchanged. The
message holds a NaN or an infinity at their positions, so every rank that decodes it
detects them.

Signs with the mean magnitude are the best approximation with one bit per number, and
always better than sending nothing (Karimireddy et al.). Use them for changes of weights,
as in :mod:`hasten.parts.comm.local_sgd`, where the error stays in the weights; not for
gradients.

int8, int4 and sign run in C++ on a processor. int8 and int4 run in Triton on a GPU. All
others use torch's operators. All write the same bits
(:mod:`hasten.parts.kernels.codec_reference` defines them).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from hasten.parts.kernels import codec as compiled
from hasten.parts.kernels import codec_gpu, codec_reference
from hasten.parts.kernels.codec_reference import CHUNK
from hasten.parts.kernels.operators import why_no_triton
from hasten.parts.kernels.registry import is_refused

ALIGNED = 16  # bytes; parts of a message begin at multiples, so views in any format are possible


class Codec(ABC):
    """Encodes float32 or bf16 numbers, flat and without gaps, into a message of bytes.

    All methods raise ``ValueError`` if a tensor has another shape, format, size or device.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Returns the name as written in a recipe."""

    @abstractmethod
    def message_bytes(self, numbers: int) -> int:
        """Returns the exact length of a message of so many numbers."""

    @abstractmethod
    def finite(self, message: Tensor, numbers: int) -> Tensor:
        """Returns a bool tensor: True if all was finite and within the format's range."""

    @abstractmethod
    def _encoded(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, message: Tensor
    ) -> None:
        """Fills the message; ``residual_out`` may be the residual if ``_may_replace`` is true."""

    @abstractmethod
    def _may_replace(self, flat: Tensor, residual: Tensor) -> bool:
        """Returns True if the error of the message may be written over the residual."""

    @abstractmethod
    def _decoded(self, messages: Tensor, out: Tensor, add: bool) -> None:
        """Writes the mean of the messages (ranks, bytes) to ``out``, or adds it."""

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the message, uint8, in ``out`` if that is given."""
        message = self._message_for(flat, out)
        self._encoded(flat.detach(), None, None, message)
        return message

    def encode_with_feedback(
        self,
        flat: Tensor,
        residual: Tensor,
        out: Tensor | None = None,
        residual_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the message of ``flat + residual``, and a bool tensor: True if all was finite.

        If ``residual_out`` (float32) is given, the error of the message is stored there, and
        ``residual`` is unchanged. So the caller can choose between the two once the flags of
        the other ranks have arrived.

        Without ``residual_out`` the error replaces the residual if all numbers were finite. For
        this check, int8, int4 and top-k read the numbers a second time and wait for a GPU.
        """
        message, flat = self._message_for(flat, out), flat.detach()
        for name, tensor in (("the residual", residual), ("what is kept", residual_out)):
            if tensor is not None:
                _check_numbers(tensor, len(flat), flat.device, name)
        if residual_out is None and len(flat) and self._may_replace(flat, residual):
            residual_out = residual
        self._encoded(flat, residual, residual_out, message)
        return message, self.finite(message, len(flat))

    def decode(
        self, message: Tensor, numbers: int, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """Returns the numbers of a message in float32, written or added to ``out``."""
        if add and out is None:
            raise ValueError("there is nothing to add to: give out, or leave add away")
        _check_plain(message, "a message")
        return self._result(message[None], numbers, out, add)

    def decode_mean(self, messages: Tensor, numbers: int, out: Tensor | None = None) -> Tensor:
        """Returns the mean of messages (ranks, bytes), summed in float32 in rank order."""
        if messages.dim() != 2 or not len(messages) or not messages.is_contiguous():
            size, shape = self.message_bytes(numbers), tuple(messages.shape)
            raise ValueError(f"messages are rows without gaps, (ranks, {size} bytes), not {shape}")
        return self._result(messages, numbers, out, False)

    def _message_for(self, flat: Tensor, out: Tensor | None) -> Tensor:
        """Returns ``out`` if it fits, or new memory for the message of these numbers."""
        if flat.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"codecs encode float32 and bf16, not {flat.dtype}: convert it before")
        _check_plain(flat, "what is encoded")
        size = self.message_bytes(len(flat))
        if out is None:
            return torch.empty(size, dtype=torch.uint8, device=flat.device)
        if out.device != flat.device:
            raise ValueError(f"the message is on {out.device} and the numbers on {flat.device}")
        _check_plain(out, "a message")
        _check_bytes(out, size)
        return out

    def _result(self, messages: Tensor, numbers: int, out: Tensor | None, add: bool) -> Tensor:
        _check_bytes(messages, self.message_bytes(numbers))
        if out is None:
            out = torch.empty(numbers, dtype=torch.float32, device=messages.device)
        else:
            _check_numbers(out, numbers, messages.device, "out")
        self._decoded(messages, out, add)
        return out


def padded(size: int) -> int:
    """Returns the bytes of a message's part, padded to the start of the next."""
    return -(-size // ALIGNED) * ALIGNED


def _check_bytes(message: Tensor, size: int) -> None:
    if message.dtype != torch.uint8 or message.shape[-1] != size:
        actual = f"{message.shape[-1]} of {message.dtype}"
        raise ValueError(f"a message of these numbers is {size} of torch.uint8, not {actual}")
    if message.storage_offset() % ALIGNED:
        raise ValueError(
            f"a message begins at a multiple of {ALIGNED} bytes of its memory, "
            f"not at {message.storage_offset()}"
        )


def _check_numbers(tensor: Tensor, numbers: int, device: torch.device, name: str) -> None:
    if tensor.dtype != torch.float32:
        raise ValueError(f"{name} must be float32, not {tensor.dtype}")
    _check_plain(tensor, name)
    if len(tensor) != numbers or tensor.device != device:
        actual = f"{len(tensor)} on {tensor.device}"
        raise ValueError(f"{name} must be {numbers} numbers on {device}, not {actual}")


def _check_plain(tensor: Tensor, name: str) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be flat and without gaps, not of shape {tuple(tensor.shape)} "
            f"and strides {tensor.stride()}"
        )


FORMATS = {"none": torch.float32, "half": torch.float16, "bf16": torch.bfloat16}
# Bits of infinity. Without the sign, bits are ordered as magnitudes; those of NaN are larger.
INFINITIES = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}
PIECE = 65_536  # numbers that a processor casts at a time


@dataclass(frozen=True)
class CastCodec(Codec):
    """Writes each number in float32, float16 or bf16.

    float16 ends at 65504. A number beyond its format is infinite in the message and counts as not
    finite: scale before encoding.
    """

    format: str

    @property
    def name(self) -> str:
        return self.format

    def message_bytes(self, numbers: int) -> int:
        return padded(numbers * FORMATS[self.format].itemsize)

    def finite(self, message: Tensor, numbers: int) -> Tensor:
        values = self._values(message, numbers)
        int_dtype, infinity = INFINITIES[values.dtype]
        bits = values.view(int_dtype)
        sizes = [(bits[p] & torch.iinfo(int_dtype).max).amax() for p in _pieces(bits)]
        if not sizes:
            return torch.ones((), dtype=torch.bool, device=message.device)
        return torch.stack(sizes).amax() < infinity

    def _may_replace(self, flat: Tensor, residual: Tensor) -> bool:
        return True  # ``_encoded`` reads the message before it writes

    def _encoded(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, message: Tensor
    ) -> None:
        values, pieces = self._values(message, len(flat)), _pieces(flat)
        message[values.nbytes :].zero_()
        if residual is None:
            values.copy_(flat)
            return
        for p in pieces:
            values[p].copy_(residual[p] + flat[p])
        if residual_out is None:
            return
        all_finite = self.finite(message, len(flat))
        on_cpu = flat.device.type == "cpu"  # no wait on a processor, where where() is slow
        if on_cpu and not bool(all_finite):
            residual_out.copy_(residual)
            return
        for p in pieces:
            remainder = (residual[p] + flat[p]).sub_(values[p].to(torch.float32))
            residual_out[p].copy_(remainder if on_cpu else remainder.where(all_finite, residual[p]))

    def _decoded(self, messages: Tensor, out: Tensor, add: bool) -> None:
        for message in messages:
            values = self._values(message, len(out))
            if add:
                for p in _pieces(values):  # a sum of two formats is ten times slower
                    out[p].add_(values[p].to(torch.float32))
            else:
                out.copy_(values)
            add = True
        if len(messages) > 1:
            out.mul_(1 / len(messages))

    def _values(self, message: Tensor, numbers: int) -> Tensor:
        dtype = FORMATS[self.format]
        return message[: numbers * dtype.itemsize].view(dtype)


def _pieces(flat: Tensor) -> list[slice]:
    """Returns slices that cover the tensor; on a processor small enough for its cache."""
    each = PIECE if flat.device.type == "cpu" else max(1, len(flat))
    return [slice(at, at + each) for at in range(0, len(flat), each)]


WIDTHS = {"int8": 8, "int4": 4, "sign": 1}
LARGEST_BLOCK = 4096
TRITON = "codec"  # name of the Triton kernels in the registry


@dataclass(frozen=True)
class QuantisedCodec(Codec):
    """Blocks of numbers as codes of 8 or 4 bits, or as signs, with a bf16 scale for each block.

    A message has the codes of all blocks, then their scales. In int4 the lower halves of a block's
    bytes have the block's first half. In sign, bit k of the bytes has the block's eighth k.
    """

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

    def _may_replace(self, flat: Tensor, residual: Tensor) -> bool:
        return bool(_way(flat).finite(flat, residual, codec_reference.limit_of(self.bits)))

    def _encoded(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, message: Tensor
    ) -> None:
        codes, scales = self.parts_of(message, len(flat))
        message[len(codes) + len(scales) :].zero_()
        if len(flat):
            parts = codes, scales.view(torch.int16)
            _way(flat).encode(flat, residual, residual_out, *parts, self.block, self.bits, None)

    def _decoded(self, messages: Tensor, out: Tensor, add: bool) -> None:
        codes, scales = self.parts_of(messages, len(out))
        if len(out):
            settings = self.block, self.bits, 1 / len(messages), add
            _way(out).decode(codes, scales.view(torch.int16), out, *settings)

    def parts_of(self, messages: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
        """Returns the codes and the scales of one message, or of several as rows."""
        blocks, size = self._sizes(numbers)
        return messages[..., :size], messages[..., size : size + 2 * blocks]

    def finite(self, message: Tensor, numbers: int) -> Tensor:
        _, scales = self.parts_of(message, numbers)
        return (scales.view(torch.int16) < codec_reference.INFINITE >> 16).all()

    def _sizes(self, numbers: int) -> tuple[int, int]:
        """Returns the number of blocks, the last one padded, and the bytes of codes."""
        blocks = -(-numbers // self.block)
        return blocks, blocks * self.block * self.bits // 8


def _way(tensor: Tensor, in_triton: bool = True) -> ModuleType:
    """Returns the module with the kernels for the tensor's device."""
    if tensor.device.type == "cpu":
        return compiled if compiled.library().library is not None else codec_reference
    if in_triton and tensor.is_cuda and _takes_triton(tensor.device) and not is_refused(TRITON):
        return codec_gpu
    return codec_reference


@functools.cache
def _takes_triton(device: torch.device) -> bool:
    return not why_no_triton(device, "these codecs are")


def codec(name: str, block: int = 256) -> Codec:
    """Returns the codec of that name; ``block`` numbers share a scale in int8, int4 and sign.

    Raises:
        ValueError: no codec of that name, or a block that isn't a multiple of 32 up to 4096.
    """
    if name in FORMATS:
        return CastCodec(name)
    if name in WIDTHS:
        return QuantisedCodec(WIDTHS[name], block)
    names = ", ".join([*FORMATS, *WIDTHS])
    raise ValueError(f"there is no codec {name!r}; there are {names}")


INFINITE_BF16 = 0x7F80


@dataclass(frozen=True)
class ChunkedTopK(Codec):
    """Keeps the ``k`` largest magnitudes of each chunk of 256 numbers.

    Each kept number takes three bytes: an index within the chunk and a bf16 value. Top-k over the
    full tensor, with int64 indices, would take ten. A separate choice in each chunk spreads the
    kept numbers evenly, and all ranks' messages have the same length. Of equal magnitudes the one
    with the lowest index is kept (Aji and Heafield, arXiv:1704.05021).
    """

    k: int

    def __post_init__(self) -> None:
        if not 0 < self.k <= CHUNK:
            raise ValueError(f"of a chunk of {CHUNK}, 1 to {CHUNK} numbers are kept, not {self.k}")

    @classmethod
    def of_share(cls, share: float) -> ChunkedTopK:
        """Returns the codec for a share of the numbers, rounded up to whole numbers of each chunk.

        Raises:
            ValueError: a share that isn't above 0 and at most 1.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share of kept numbers is {share}; give more than 0 and at most 1")
        return cls(math.ceil(share * CHUNK))

    @property
    def name(self) -> str:
        return "topk"

    def message_bytes(self, numbers: int) -> int:
        chosen = self._chosen(numbers)
        return padded(chosen) + padded(2 * chosen)

    def _may_replace(self, flat: Tensor, residual: Tensor) -> bool:
        limit = codec_reference.TOO_LARGE_FOR_BF16
        return bool(_way(flat, in_triton=False).finite(flat, residual, limit))

    def _encoded(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, message: Tensor
    ) -> None:
        chosen = self._chosen(len(flat))
        message[chosen : padded(chosen)].zero_()
        message[padded(chosen) + 2 * chosen :].zero_()
        if chosen:
            (indices,), (values,) = self._parts(message[None], len(flat))
            way = _way(flat, in_triton=False)
            way.topk_encode(flat, residual, residual_out, indices, values, self.k)

    def _decoded(self, messages: Tensor, out: Tensor, add: bool) -> None:
        if len(out):
            indices, values = self._parts(messages, len(out))
            way = _way(out, in_triton=False)
            way.topk_decode(indices, values, out, self.k, 1 / len(messages), add)

    def finite(self, message: Tensor, numbers: int) -> Tensor:
        _, values = self._parts(message[None], numbers)
        return ((values & 0x7FFF) < INFINITE_BF16).all()

    def _parts(self, messages: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
        """Returns indices (ranks, chosen) uint8 and values (ranks, chosen) int16 of messages."""
        chosen = self._chosen(numbers)
        values = messages[:, padded(chosen) : padded(chosen) + 2 * chosen]
        return messages[:, :chosen], values.view(torch.int16)

    def _chosen(self, numbers: int) -> int:
        return -(-numbers // CHUNK) * self.k
