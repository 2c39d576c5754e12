"""The codecs' kernels in C++ and in torch's operators: the same bits, whatever they are given."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from codec_cases import cases, same_bits
from hasten.parts.comm import codecs
from hasten.parts.comm.codecs import ChunkedTopK, codec
from hasten.parts.kernels import codec as compiled
from hasten.parts.kernels import codec_reference
from hasten.parts.kernels.build import LoadedLibrary

pytestmark = pytest.mark.skipif(not compiled.library().library, reason=compiled.library().reason)
WAYS = (compiled, codec_reference)


def coded(
    way: ModuleType, flat: Tensor, rest: Tensor | None, block: int, bits: int, seed: int | None
) -> list[Tensor]:
    """All that the passes of one way leave behind, alone and over three ranks."""
    blocks, n = -(-len(flat) // block), len(flat)
    codes = torch.full((blocks * block * bits // 8,), 99, dtype=torch.uint8)
    scales = torch.full((blocks,), 99, dtype=torch.int16)
    kept = None if rest is None else torch.full((n,), 9.0)
    way.encode(flat, rest, kept, codes, scales, block, bits, seed)
    put, mean, added = torch.empty(n), torch.empty(n), torch.ones(n)
    three = codes.repeat(3, 1), torch.stack([scales, scales.flip(0), scales])
    way.decode(codes[None], scales[None], put, block, bits, 1.0, False)
    way.decode(codes[None], scales[None], added, block, bits, 1.0, True)
    way.decode(*three, mean, block, bits, 1 / 3, False)
    return [codes, scales, put, mean, added, *([] if kept is None else [kept])]


@given(
    flat=cases(),
    block=st.sampled_from([256, 32, 96, 1024]),
    bits=st.sampled_from([8, 4, 1]),
    seed=st.none() | st.integers(-(2**40), 2**40),
    on_bf16=st.booleans(),
    with_rest=st.booleans(),
)
def test_compiled_codes_have_the_bits_of_torchs(
    flat: Tensor, block: int, bits: int, seed: int | None, on_bf16: bool, with_rest: bool
) -> None:
    rest = torch.randn(len(flat), generator=torch.Generator().manual_seed(1)) * flat.abs().mean()
    rest = rest.nan_to_num(0.0, 0.0, 0.0) if with_rest else None
    flat = flat.bfloat16() if on_bf16 else flat
    seed = None if bits == 1 else seed
    both = [coded(way, flat, rest, block, bits, seed) for way in WAYS]
    for a, b in zip(*both, strict=True):
        assert same_bits(a, b)
    limits = (codec_reference.INFINITE, codec_reference.TOO_LARGE_FOR_BF16, codec_reference.SUMMED)
    for limit in limits:
        assert compiled.finite(flat, rest, limit) == codec_reference.finite(flat, rest, limit)


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_halfway_between_two_codes_are_rounded_alike(bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    halves = torch.arange(-2 * most, 2 * most + 1) / 2
    flat = torch.cat([halves, halves.nextafter(torch.tensor(9e9)), torch.tensor([float(most)])])
    for scale in (1.0, 2.0**-30, 3.0, 1 / 3):
        both = [coded(way, flat * scale, None, 1024, bits, None) for way in WAYS]
        for a, b in zip(*both, strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("way", WAYS)
def test_magnitudes_are_summed_in_the_order_that_is_given(way: ModuleType) -> None:
    # A 32nd of the first number lies between two bf16 numbers, of which the even one is below.
    border = 2.0**24 * (1 + 2**-8)
    flat = torch.tensor([border, *15 * [1.0], *16 * [0.0]])  # one after the other all ones are lost
    put = coded(way, flat, None, 32, 1, None)[2]
    assert put.tolist() == 32 * [2.0**19 * (1 + 2**-7)]


def chosen(way: ModuleType, flat: Tensor, rest: Tensor | None, k: int) -> list[Tensor]:
    chunks, n = -(-len(flat) // 256), len(flat)
    places = torch.full((chunks * k,), 99, dtype=torch.uint8)
    sent = torch.full((chunks * k,), 99, dtype=torch.int16)
    kept = None if rest is None else torch.full((n,), 9.0)
    way.topk_encode(flat, rest, kept, places, sent, k)
    put, mean, added = torch.empty(n), torch.empty(n), torch.ones(n)
    three = places.repeat(3, 1), torch.stack([sent, sent * 3, sent])
    way.topk_decode(places[None], sent[None], put, k, 1.0, False)
    way.topk_decode(places[None], sent[None], added, k, 1.0, True)
    way.topk_decode(*three, mean, k, 1 / 3, False)
    return [places, sent, put, mean, added, *([] if kept is None else [kept])]


@given(
    flat=cases(),
    k=st.sampled_from([1, 3, 13, 128, 255, 256]),
    few_values=st.booleans(),
    on_bf16=st.booleans(),
    with_rest=st.booleans(),
)
def test_compiled_choices_have_the_bits_of_torchs(
    flat: Tensor, k: int, few_values: bool, on_bf16: bool, with_rest: bool
) -> None:
    if few_values:  # many ties
        flat = flat.sign() * 2
    rest = torch.full_like(flat, 0.25) if with_rest else None
    flat = flat.bfloat16() if on_bf16 else flat
    both = [chosen(way, flat, rest, k) for way in WAYS]
    for a, b in zip(*both, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("count", [32_768, 100_001])
def test_bits_do_not_depend_on_the_number_of_threads(count: int) -> None:
    flat = torch.randn(count, generator=torch.Generator().manual_seed(0))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rest = flat.flip(0)
            ways = [coded(compiled, flat, rest, 256, *way) for way in ((4, 5), (1, None))]
            found.append([*ways[0], *ways[1], *chosen(compiled, flat, rest, 13)])
            assert compiled.finite(flat, rest, codec_reference.INFINITE)
            assert not compiled.finite(flat, rest, 0x3F800000)  # some are above 1
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], others, strict=True))


def test_without_a_compiler_messages_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    communications = [codec("int8"), codec("int4"), ChunkedTopK(13)]
    fast = [communication.encode(flat) for communication in communications]
    monkeypatch.setattr(
        compiled, "library", lambda: LoadedLibrary(None, "no C++ compiler was found")
    )
    assert codecs._way(flat) is codec_reference
    for communication, message in zip(communications, fast, strict=True):
        assert torch.equal(communication.encode(flat), message)
        communication.decode_mean(torch.stack([message, message]), 3000)
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        compiled.finite(flat, None, 0)


@pytest.mark.parametrize("communication", [codec("int8"), codec("int4"), ChunkedTopK(13)], ids=str)
def test_any_bytes_can_be_decoded(communication: ChunkedTopK) -> None:
    """A message that was damaged on its way gives wrong numbers, and reads no foreign memory."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 256, 777):
        size = communication.message_bytes(count)
        noise = torch.randint(0, 256, (2, size), generator=generator, dtype=torch.uint8)
        assert communication.decode_mean(noise, count).shape == (count,)
