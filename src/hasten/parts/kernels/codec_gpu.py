"""The codecs of ``codec_triton.py`` as operators of torch, so a simulated GPU can count them."""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.parts.kernels import codec_reference
from hasten.parts.kernels.codec_reference import INFINITE, key_of, rule_of
from hasten.parts.kernels.operators import launch, no_results, operator

finite = codec_reference.finite  # one pass of torch's, which waits for its answer


@operator("hasten_gpu::codec_encode", no_results, mutates=("residual_out", "codes", "scales"))
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
    """Same as :func:`hasten.parts.kernels.codec_reference.encode`, in Triton.

    The reference runs if a block is no power of two. It also runs for signs, because a
    program here can't reproduce the order of their sum.
    """
    if block & (block - 1) or bits == 1:
        codec_reference.encode(flat, residual, residual_out, codes, scales, block, bits, seed)
        return
    rule = rule_of(bits)
    unused = flat.new_empty(0, dtype=torch.float32)
    residuals = [unused if t is None else t for t in (residual, residual_out)]
    key = 0 if seed is None else key_of(seed)
    # Triton uses a number's narrowest format; a signed one is always an int32.
    signed = key - (key >> 31 << 32)
    launch(
        "hasten.parts.kernels.codec_triton",
        "encode_kernel",
        (len(scales),),
        flat,
        *residuals,
        codes.view(torch.int8),
        scales,
        len(flat),
        rule.share,
        rule.low,
        rule.cap,
        rule.most,
        signed,
        BITS=bits,
        HALF=block // 2,
        REST=residual is not None,
        KEEP=residual_out is not None,
        DICE=seed is not None,
        INFINITY=INFINITE,
        num_warps=1,
        enable_fp_fusion=False,
    )


@operator("hasten_gpu::codec_decode", no_results, mutates=("out",))
def decode(
    codes: Tensor, scales: Tensor, out: Tensor, block: int, bits: int, factor: float, add: bool
) -> None:
    """Same as :func:`hasten.parts.kernels.codec_reference.decode`, in Triton."""
    if block & (block - 1) or bits == 1:
        codec_reference.decode(codes, scales, out, block, bits, factor, add)
        return
    launch(
        "hasten.parts.kernels.codec_triton",
        "decode_kernel",
        (scales.shape[1],),
        codes.view(torch.int8),
        scales,
        out,
        len(out),
        len(codes),
        codes.stride(0),
        scales.stride(0),
        factor,
        BITS=bits,
        HALF=block // 2,
        ADD=add,
        num_warps=1,
        enable_fp_fusion=False,
    )
