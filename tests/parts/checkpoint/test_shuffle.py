"""Packed tensors come back bit for bit; other libraries read the written files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hasten.parts import checkpoint
from hasten.parts.checkpoint import STATE
from hasten.parts.checkpoint.delta import (
    DIFFERENCE,
    PLAIN,
    SHUFFLE,
    choose,
    decode,
    decoded_limit,
    encode,
)
from hasten.parts.checkpoint.format import DTYPES, bytes_of


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": (torch.randn(300, 400, generator=generator) * 0.02).to(dtype)}


def back(
    tensors: dict[str, Tensor], base: dict[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], float]:
    """What is decoded again, and how many times smaller it was."""
    stored, coded = encode(tensors, base)
    size = sum(t.nbytes for t in stored.values())
    whole = sum(t.nbytes for t in tensors.values())
    for name, how in coded.items():
        stored[name] = decode(stored[name], how, (base or {}).get(name))
    return stored, whole / max(size, 1)


@given(
    shape=st.lists(st.integers(0, 40), max_size=3),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 9),
    repeated=st.booleans(),
    with_base=st.booleans(),
)
def test_every_tensor_comes_back_bit_for_bit(
    shape: list[int], dtype: torch.dtype, seed: int, repeated: bool, with_base: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if repeated or dtype == torch.bool else 256

    def drawn() -> Tensor:
        raw = torch.randint(0, high, (count,), generator=generator, dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)

    one, other = drawn(), drawn()
    found = back({"x": one}, {"x": other} if with_base else None)[0]["x"]
    assert found.dtype == dtype
    assert found.shape == one.shape
    assert bytes(bytes_of(found)) == bytes(bytes_of(one.contiguous()))


def test_weights_get_smaller_and_differences_smaller_still() -> None:
    old, draw = weights(dtype=torch.bfloat16), torch.Generator().manual_seed(1)
    new = {"w": old["w"] * (1 + 2**-8 * (torch.rand(300, 400, generator=draw) < 0.2)).bfloat16()}
    assert back(weights())[1] > 1.1
    shuffled, differing = back(new)[1], back(new, old)[1]
    assert shuffled > 1.3
    assert differing > 1.3 * shuffled
    assert torch.equal(back(new, old)[0]["w"], new["w"])


def test_a_base_of_another_form_is_not_differed_from() -> None:
    _, coded = encode(weights(), {"w": torch.zeros(3)})
    assert coded["w"]["difference"] is False


def test_zeros_without_end_are_not_packed_beyond_what_a_reader_accepts() -> None:
    zeros = {"w": torch.zeros(20_000_000)}
    stored, coded = encode(zeros)
    assert coded == {}
    assert stored["w"] is zeros["w"]
    assert decoded_limit(100) < zeros["w"].nbytes


def test_packing_pays_for_a_slow_place_and_not_for_a_fast_one() -> None:
    state = {f"w{i}": weights(i)["w"].bfloat16() for i in range(4)}
    slow, fast = choose(state, None, 1e3), choose(state, None, 1e12)  # minutes, microseconds
    assert slow.kind == SHUFFLE
    assert "times smaller" in slow.reason
    assert fast.kind == PLAIN
    assert fast.reason.startswith("compression off: shuffle is 1.")
    same = choose(state, state, 1e3)
    assert same.kind == DIFFERENCE
    assert re.search(r"difference: [\d,]{3,} times smaller", same.reason)  # no digits of noise


def test_nothing_to_pack_is_said() -> None:
    assert choose({"x": torch.ones(3)}, None, 1.0).reason == (
        "compression off: there is nothing large enough to pack"
    )


@pytest.mark.parametrize("cut", [0, 1, 50])
def test_packed_bytes_that_were_cut_are_an_error(cut: int) -> None:
    stored, coded = encode(weights())
    with pytest.raises((ValueError, OSError)):
        decode(stored["w"][:cut], coded["w"], None)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_the_library_reads_what_was_written_in_every_format(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 2, (6, 16), generator=draw, dtype=torch.uint8)
    values = raw.view(dtype) if dtype != torch.complex64 else torch.randn(6, 2, dtype=dtype)
    path = checkpoint.save(tmp_path, 1, {"x": values, "odd": torch.ones(3, dtype=torch.uint8)}, {})
    with safetensors.safe_open(path / STATE, "pt") as file:
        read = file.get_tensor("x")
    assert read.dtype == dtype
    assert bytes(bytes_of(read)) == bytes(bytes_of(values))
