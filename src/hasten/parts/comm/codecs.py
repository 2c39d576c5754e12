"""Codecs: a flat tensor as a shorter message of bytes, and numbers again from such messages.

    wire = codec("int4")
    message, finite = wire.encode_with_feedback(gradient, residual)   # uint8
    mean = wire.decode_mean(messages_of_all_ranks, len(gradient))     # float32

| name | bytes per number | what is sent |
|---|---|---|
| none | 4 | float32 |
| half, bf16 | 2 | the nearest number of that format |
| int8, int4 | 1.008, 0.508 | codes in blocks of 256 with one bf16 scale each |
| sign | 0.133 | signs in blocks of 256 with their mean magnitude in bf16 |

A message is as long as :meth:`Codec.message_bytes` says, its parts begin at multiples of 16 bytes,
and the same message is decoded to the same bits on every rank and device. Several ranks' messages
are summed in the order of the ranks, so that all end with the same mean.

What a message leaves out can be kept and added to the next one: error feedback (Seide et al.,
1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., arXiv:1901.09847). One
infinity in a residual would never leave it. So numbers that aren't finite, or are too large for
the format, leave the residual as it is; the message says so to every rank that decodes it, since it
holds a NaN or an infinity in their place.

Signs with the mean magnitude are the nearest that one bit can come, and always nearer than nothing
(Karimireddy et al.): for what stays with its owner until it is sent, as in
:mod:`hasten.parts.comm.drift`, not for gradients.

int8, int4 and sign run in C++ on a processor, int8 and int4 in Triton on a GPU, all in torch's
operators elsewhere, and all write the same bits (:mod:`hasten.parts.kernels.codec_reference`
defines them).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hasten.parts.comm.cast_codec import FORMATS, Cast
from hasten.parts.comm.quantised_codec import WIDTHS, Quantised


class Codec(Protocol):
    """What encodes float32 or bf16 numbers, flat and without gaps, into a message of bytes."""

    @property
    def name(self) -> str:
        """As it stands in a recipe."""

    def message_bytes(self, numbers: int) -> int:
        """The exact length of a message of so many numbers."""

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """The message, uint8, in ``out`` where that is given."""

    def encode_with_feedback(
        self,
        flat: Tensor,
        residual: Tensor,
        out: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The message of ``flat + residual``, and a bool tensor: whether all of it was finite.

        What the message leaves out is put into ``kept`` (float32), and ``residual`` stays; without
        ``kept`` it replaces the residual if all was finite: int8, int4 and top-k read the numbers
        once more for that, and wait for a GPU. With ``kept`` neither is needed, and a caller can
        decide when the other ranks have told theirs.
        """

    def decode(
        self, message: Tensor, numbers: int, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """The numbers of a message in float32, put into ``out`` or added to it."""

    def decode_mean(self, messages: Tensor, numbers: int, out: Tensor | None = None) -> Tensor:
        """The mean of messages (ranks, bytes), summed in float32 in the order of the ranks."""

    def finite(self, message: Tensor, numbers: int) -> Tensor:
        """A bool tensor: whether all that was encoded was finite and within the format's range."""


def codec(name: str, block: int = 256) -> Codec:
    """The codec of that name; ``block`` is how many numbers share a scale in int8, int4 and sign.

    Raises:
        ValueError: no codec of that name, or a block that isn't a multiple of 32 up to 4096.
    """
    if name in FORMATS:
        return Cast(name)
    if name in WIDTHS:
        return Quantised(WIDTHS[name], block)
    known = ", ".join([*FORMATS, *WIDTHS])
    raise ValueError(f"there is no codec {name!r}; there are {known}")
