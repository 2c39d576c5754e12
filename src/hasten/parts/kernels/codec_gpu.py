"""The codecs of ``codec_triton.py`` as operators of torch, which a simulated GPU can count.

Triton is imported when an operator runs, so that it may be missing where none does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.library import custom_op

from hasten.parts.kernels import codec_reference

finite = codec_reference.finite  # one pass of torch's, which waits for its answer


@custom_op("hasten_gpu::codec_encode", mutates_args=("residual_out", "codes", "scales"))
def encode(
    flat: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    block: int,
    bits: int,
    seed: int | None,
) -> None:
    """Same as :func:`hasten.parts.kernels.codec_reference.encode`, on a GPU."""
    from hasten.parts.kernels import codec_triton

    codec_triton.encode(flat, residual, residual_out, codes, scales, block, bits, seed)


@custom_op("hasten_gpu::codec_decode", mutates_args=("out",))
def decode(
    codes: Tensor, scales: Tensor, out: Tensor, block: int, bits: int, factor: float, add: bool
) -> None:
    """Same as :func:`hasten.parts.kernels.codec_reference.decode`, on a GPU."""
    from hasten.parts.kernels import codec_triton

    codec_triton.decode(codes, scales, out, block, bits, factor, add)


def _nothing(*args: Any) -> None:
    """Does nothing: the operators' implementation for tensors without memory."""


encode.register_fake(_nothing)
decode.register_fake(_nothing)
