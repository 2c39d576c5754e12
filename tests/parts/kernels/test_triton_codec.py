"""The codecs' Triton kernels have the bits of torch's; in the interpreter where no GPU is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec_cases import cases, same_bits
from hasten.parts.kernels import codec_gpu, codec_reference
from triton_marks import DEVICE, needs_triton, on_gpu

pytestmark = [needs_triton, *on_gpu]


@settings(max_examples=25)
@given(
    flat=cases(),
    block=st.sampled_from([256, 32, 96]),
    bits=st.sampled_from([8, 4]),
    seed=st.none() | st.integers(0, 2**40),
    on_bf16=st.booleans(),
    with_rest=st.booleans(),
)
def test_triton_codes_have_the_bits_of_torchs(
    flat: Tensor, block: int, bits: int, seed: int | None, on_bf16: bool, with_rest: bool
) -> None:
    flat = (flat.bfloat16() if on_bf16 else flat).to(DEVICE)
    rest = torch.full((len(flat),), 0.01, device=DEVICE) if with_rest else None
    found = []
    for way in (codec_gpu, codec_reference):
        blocks, n = -(-len(flat) // block), len(flat)
        codes = torch.zeros(blocks * block * bits // 8, dtype=torch.uint8, device=DEVICE)
        scales = torch.zeros(blocks, dtype=torch.int16, device=DEVICE)
        kept = None if rest is None else torch.zeros(n, device=DEVICE)
        way.encode(flat, rest, kept, codes, scales, block, bits, seed)
        mean, added = torch.zeros(n, device=DEVICE), torch.ones(n, device=DEVICE)
        way.decode(codes[None], scales[None], added, block, bits, 1.0, True)
        way.decode(codes.repeat(3, 1), scales.repeat(3, 1), mean, block, bits, 1 / 3, False)
        found.append([codes, scales, mean, added, *([] if kept is None else [kept])])
    for a, b in zip(*found, strict=True):
        assert same_bits(a.cpu(), b.cpu())
