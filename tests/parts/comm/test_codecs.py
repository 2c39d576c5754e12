"""Codecs and top-k by chunks: messages, errors, what is kept, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from codec_cases import BROKEN, LARGEST, cases, read_by_hand, same_bits
from hasten.parts.comm.codecs import ChunkedTopK, Codec, QuantisedCodec, codec
from hasten.parts.kernels import codec_reference

NAMES = ("none", "half", "bf16", "int8", "int4", "sign")
names = pytest.mark.parametrize("name", NAMES)
every = pytest.mark.parametrize(
    "communication", [*map(codec, NAMES), codec("int8", 32), ChunkedTopK(13)], ids=str
)


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("none", 4016),
        ("half", 2016),
        ("bf16", 2016),
        ("int8", 1024 + 16),
        ("int4", 512 + 16),
        ("sign", 128 + 16),
    ],
)
def test_a_message_has_the_stated_length(name: str, size: int) -> None:
    communication = codec(name)
    assert communication.name == name
    assert communication.message_bytes(1001) == size == communication.encode(numbers(1001)).nbytes
    assert communication.message_bytes(0) == 0 == communication.encode(numbers(0)).nbytes


@pytest.mark.parametrize("bits", [8, 4, 1])
@given(flat=cases(), block=st.sampled_from([32, 96, 256, 1024]))
def test_a_message_reads_as_the_documented_layout_says(bits: int, flat: Tensor, block: int) -> None:
    communication = QuantisedCodec(bits, block)
    message = communication.encode(flat)
    by_hand = torch.tensor(read_by_hand(message, len(flat), bits, block), dtype=torch.float64)
    assert same_bits(communication.decode(message, len(flat)), by_hand.float())


@pytest.mark.parametrize("bits", [8, 4])
@given(flat=cases(broken=False))
def test_a_number_is_off_by_half_a_code_at_most(bits: int, flat: Tensor) -> None:
    communication, most = QuantisedCodec(bits), 2 ** (bits - 1) - 1
    found = communication.decode(communication.encode(flat), len(flat))
    assert bool(found.isfinite().all())
    for a, b in zip(flat.double().split(256), found.double().split(256), strict=True):
        # a scale rounded up to bf16 is at most 1/128 above, and numbers below 2^-90 may be left
        half = max(float(a.abs().max()) / most / 2 * (1 + 2**-7), most * 2.0**-100)
        assert float((a - b).abs().max()) <= half * (1 + 1e-6)


@pytest.mark.parametrize("bits", [8, 4])
@given(flat=cases(broken=False).filter(lambda flat: float(flat[:256].abs().max()) > 1e-20))
def test_a_scale_is_the_next_bf16_above_its_share_of_the_largest(bits: int, flat: Tensor) -> None:
    most, flat = 2 ** (bits - 1) - 1, flat[:256].clamp(-1e38, 1e38)
    communication = QuantisedCodec(bits)
    message = communication.encode(flat)
    (scale,) = message[32 * bits :][:2].view(torch.bfloat16).tolist()
    share = float(flat.abs().max()) / most
    assert share * (1 - 1e-6) <= scale <= share * (1 + 2**-7)
    codes = communication.decode(message, len(flat)) / scale
    assert float(codes.abs().max()) <= most


@given(flat=cases(broken=False), block=st.sampled_from([32, 256]))
def test_signs_are_sent_with_the_mean_magnitude_of_their_block(flat: Tensor, block: int) -> None:
    flat, communication = flat.clamp(-1e30, 1e30), QuantisedCodec(1, block)
    found = communication.decode(communication.encode(flat), len(flat)).double()
    for a, b in zip(flat.double().split(block), found.split(block), strict=True):
        mean = float(a.abs().mean())
        assert torch.equal(b < 0, (a < 0) & (b != 0))
        assert b.abs().tolist() == pytest.approx([mean] * len(b), rel=2**-8, abs=1e-40)
        # no other size comes nearer: what is left is less than there was (contraction)
        assert float((a - b).square().sum()) <= float(a.square().sum()) * (1 + 1e-6)


def test_signs_end_where_a_sum_might_be_infinite() -> None:
    flat, residual = numbers(300), numbers(300, 1)
    flat[3], before = 2.0**115, residual.clone()
    message, finite = QuantisedCodec(1).encode_with_feedback(flat, residual)
    assert not bool(finite)
    assert torch.equal(residual, before)
    assert not bool(QuantisedCodec(1).finite(message, 300))
    flat[3] = 2.0**114
    assert bool(QuantisedCodec(1).encode_with_feedback(flat, residual)[1])


@every
@given(flat=cases(broken=False), seed=st.integers(0, 99), on_bf16=st.booleans())
def test_what_is_sent_and_what_is_kept_are_what_was_there(
    communication: Codec, flat: Tensor, seed: int, on_bf16: bool
) -> None:
    flat = flat.clamp(-60000, 60000)
    flat = flat.bfloat16() if on_bf16 else flat
    residual, kept = numbers(len(flat), seed) * 1e-3, torch.empty(len(flat))
    before = residual.clone()
    message, finite = communication.encode_with_feedback(flat, residual, residual_out=kept)
    assert bool(finite)
    assert torch.equal(residual, before)
    sent = communication.decode(message, len(flat)).double()
    exact = flat.double() + residual.double()
    # What is kept beside a sign is as large as what was sent, and rounded as that is.
    least = 2.0**-23 * float(sent.abs().max()) if communication.name == "sign" else 1e-30
    assert torch.allclose(sent + kept.double(), exact, rtol=1e-6, atol=least)
    again, _ = communication.encode_with_feedback(flat, residual)
    assert torch.equal(again, message)
    assert same_bits(residual, kept)


@every
def test_what_was_left_out_comes_later(communication: Codec) -> None:
    gradient, residual, sent = numbers(1000) * 1e-3, torch.zeros(1000), torch.zeros(1000)
    # the largest wait until the mean is large enough
    rounds = 2000 if communication.name == "sign" else 200
    for _ in range(rounds):
        message, _ = communication.encode_with_feedback(gradient, residual)
        communication.decode(message, 1000, sent, add=True)
    wanted = rounds * gradient.double()
    assert float((sent + residual - wanted).abs().max()) < 5e-7 * rounds
    assert float(residual.abs().max()) < (0.5 if communication.name == "sign" else 0.1)


@every
@pytest.mark.parametrize("value", BROKEN, ids=str)
@pytest.mark.parametrize("place", [0, 299, 999])
def test_a_broken_number_leaves_the_residual_and_reaches_every_rank(
    communication: Codec, value: float, place: int
) -> None:
    flat, residual = numbers(1000), numbers(1000, 1)
    flat[place] = value
    before = residual.clone()
    message, finite = communication.encode_with_feedback(flat, residual)
    assert not bool(finite)
    assert torch.equal(residual, before)
    assert not bool(communication.finite(message, 1000))
    assert not bool(communication.decode(message, 1000)[place].isfinite())
    fine = communication.encode(numbers(1000, 2))
    assert bool(communication.finite(fine, 1000))
    assert not bool(communication.decode_mean(torch.stack([fine, message]), 1000)[place].isfinite())


@pytest.mark.parametrize(("name", "beyond"), [("half", 70000.0), ("bf16", LARGEST)])
def test_a_number_beyond_the_format_counts_as_not_finite(name: str, beyond: float) -> None:
    residual = torch.zeros(4)
    _, finite = codec(name).encode_with_feedback(torch.tensor([1.0, beyond, 0, 0]), residual)
    assert not bool(finite)
    assert torch.equal(residual, torch.zeros(4))


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_a_sum_that_overflows_counts_as_not_finite(bits: int) -> None:
    flat, residual = torch.full((300,), LARGEST), torch.full((300,), 3e38)
    before = residual.clone()
    message, finite = QuantisedCodec(bits).encode_with_feedback(flat, residual)
    assert not bool(finite)
    assert torch.equal(residual, before)
    assert bool(QuantisedCodec(bits).decode(message, 300).isnan().all())


@every
def test_a_mean_is_summed_in_the_order_of_the_ranks(communication: Codec) -> None:
    messages = torch.stack(
        [communication.encode(numbers(700, seed) * 10.0**seed) for seed in range(5)]
    )
    total = communication.decode(messages[0], 700)
    for message in messages[1:]:
        total += communication.decode(message, 700)
    assert same_bits(communication.decode_mean(messages, 700), total * torch.tensor(1 / 5))
    added = communication.decode(
        messages[1], 700, out=communication.decode(messages[0], 700), add=True
    )
    assert same_bits(
        added, communication.decode(messages[0], 700) + communication.decode(messages[1], 700)
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_by_chance_is_right_in_the_mean_and_the_seed_decides_it(bits: int) -> None:
    communication, flat = QuantisedCodec(bits), numbers(2048)

    def encoded(seed: int, flat: Tensor = flat) -> Tensor:
        message = torch.zeros(communication.message_bytes(len(flat)), dtype=torch.uint8)
        codes, scales = communication.parts_of(message, len(flat))
        parts = codes, scales.view(torch.int16)
        codec_reference.encode(flat, None, None, *parts, 256, bits, seed)
        return message

    drawn = torch.stack([communication.decode(encoded(seed), 2048) for seed in range(400)])
    step = flat.view(-1, 256).abs().amax(1).repeat_interleave(256) / (2 ** (bits - 1) - 1)
    off = (drawn.double().mean(0) - flat) / step
    assert float(off.abs().max()) < 5 * 0.5 / math.sqrt(400)  # of 2048, beyond five sigmas: none
    assert abs(float(off.mean())) < 5 * 0.5 / math.sqrt(400 * 2048)
    assert torch.equal(encoded(3), encoded(3))
    assert not torch.equal(encoded(3), encoded(3 + 2**33))
    assert not torch.equal(encoded(-3), encoded(3))
    zero = encoded(1, torch.zeros(300))
    assert torch.equal(zero, torch.zeros_like(zero))


@names
def test_all_messages_are_whole_without_what_was_in_their_memory(name: str) -> None:
    communication = codec(name)
    for count in (1, 7, 255, 257):
        size = communication.message_bytes(count)
        memory = torch.full((2, size), 171, dtype=torch.uint8)
        message = communication.encode(numbers(count), memory[1])
        assert message.data_ptr() == memory[1].data_ptr()
        assert torch.equal(message, communication.encode(numbers(count)))
        assert torch.equal(memory[0], torch.full_like(memory[0], 171))
        out = torch.full((count + 2,), 5.0)
        communication.decode(message, count, out[1:-1])
        assert torch.equal(out[1:-1], communication.decode(message, count))
        assert float(out[0]) == float(out[-1]) == 5.0


@every
def test_nothing_of_a_message_needs_a_gradient(communication: Codec) -> None:
    weight, residual = torch.nn.Parameter(numbers(300)), torch.zeros(300)
    message, _ = communication.encode_with_feedback(weight, residual)
    assert torch.equal(message, communication.encode(weight))
    assert not communication.decode(message, 300).requires_grad
    assert not residual.requires_grad


@every
def test_what_does_not_fit_is_refused_with_a_sentence(communication: Codec) -> None:
    flat, message = numbers(300), communication.encode(numbers(300))
    size = len(message)
    with pytest.raises(ValueError, match="float32 and bf16"):
        communication.encode(flat.double())
    with pytest.raises(ValueError, match="flat and without gaps"):
        communication.encode(flat.view(3, 100))
    with pytest.raises(ValueError, match="flat and without gaps"):
        communication.encode(flat[::2])
    with pytest.raises(ValueError, match=f"is {size} of torch.uint8, not {size - 1}"):
        communication.decode(message[:-1], 300)
    with pytest.raises(ValueError, match=r"of torch\.uint8, not"):
        communication.encode(flat, torch.zeros(size))
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        communication.encode(flat, torch.zeros(size + 2, dtype=torch.uint8)[2:])
    with pytest.raises(ValueError, match="nothing to add to"):
        communication.decode(message, 300, add=True)
    with pytest.raises(ValueError, match="out must be 300 numbers"):
        communication.decode(message, 300, torch.zeros(299))
    with pytest.raises(ValueError, match="residual must be float32"):
        communication.encode_with_feedback(flat.bfloat16(), flat.bfloat16())
    with pytest.raises(ValueError, match="what is kept must be 300 numbers"):
        communication.encode_with_feedback(flat, flat, residual_out=torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(ranks, \d+ bytes\)"):
        communication.decode_mean(message, 300)
    with pytest.raises(ValueError, match=r"\(ranks, \d+ bytes\)"):
        communication.decode_mean(message.new_zeros(0, size), 300)


def test_settings_that_mean_nothing_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="no codec 'int5'; there are none, half, bf16, int8, int4"):
        codec("int5")
    for block in (0, 31, 48, -32, 8192):
        with pytest.raises(ValueError, match=f"multiple of 32 .* not {block}"):
            codec("int8", block)
    with pytest.raises(ValueError, match="8, 4 or 1 bits, not 3"):
        QuantisedCodec(3)


def by_hand(flat: Tensor, k: int) -> list[tuple[int, float]]:
    """Sorted by magnitude, then by place; the k first of each chunk, as bf16."""
    found = []
    numbers = flat.tolist()
    for first in range(0, len(numbers), 256):
        places = range(first, min(first + 256, len(numbers)))
        best = sorted(places, key=lambda i: (-abs(numbers[i]), i))[:k]
        found += [(i, float(flat[i].bfloat16())) for i in best]
    return found


@given(flat=cases(broken=False), k=st.sampled_from([1, 2, 13, 100, 256]), ties=st.booleans())
def test_the_largest_travel_and_the_others_are_zero(flat: Tensor, k: int, ties: bool) -> None:
    flat = flat.clamp(-3e38, 3e38)
    if ties:
        flat = flat.sign()
    wanted = torch.zeros(len(flat))
    for place, value in by_hand(flat, k):
        wanted[place] = value
    communication = ChunkedTopK(k)
    assert torch.equal(communication.decode(communication.encode(flat), len(flat)), wanted)


def test_three_bytes_for_each_number_that_is_kept() -> None:
    assert ChunkedTopK(13).message_bytes(256 * 1600) == 3 * 13 * 1600
    assert ChunkedTopK(1).message_bytes(1) == 32  # one place and one value, each filled up to 16
    assert ChunkedTopK(13).message_bytes(257) == ChunkedTopK(13).message_bytes(512)


def test_a_share_keeps_at_least_that_many() -> None:
    assert ChunkedTopK.of_share(0.05).k == 13
    assert ChunkedTopK.of_share(1e-9).k == 1
    assert ChunkedTopK.of_share(1.0).k == 256


def test_places_are_sent_in_their_order() -> None:
    flat = torch.zeros(256)
    flat[[200, 7, 90]] = torch.tensor([1.0, -2.0, 3.0])
    assert ChunkedTopK(3).encode(flat)[:3].tolist() == [7, 90, 200]


@pytest.mark.parametrize("k", [0, 257, -1])
def test_a_number_of_kept_ones_beyond_a_chunk_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 256 numbers are kept, not {k}"):
        ChunkedTopK(k)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_beyond_all_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="more than 0 and at most 1"):
        ChunkedTopK.of_share(share)
