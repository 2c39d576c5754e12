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

from hasten.parts.checkpoint import STATE
from hasten.parts.checkpoint.format import DTYPES, Packing, bytes_of, decode, encode
from saved import save


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": (torch.randn(300, 400, generator=generator) * 0.02).to(dtype)}


def back(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """What is decoded again, and how many times smaller it was."""
    packed = encode(tensors)
    size = sum(t.nbytes for t in {**tensors, **packed}.values())
    whole = sum(t.nbytes for t in tensors.values())
    unpacked = {n: decode(p, tensors[n].dtype, tensors[n].shape) for n, p in packed.items()}
    return {**tensors, **unpacked}, whole / max(size, 1)


@given(
    shape=st.lists(st.integers(0, 40), max_size=3),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 9),
    repeated=st.booleans(),
)
def test_every_tensor_comes_back_bit_for_bit(
    shape: list[int], dtype: torch.dtype, seed: int, repeated: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if repeated or dtype == torch.bool else 256
    raw = torch.randint(0, high, (count,), generator=generator, dtype=torch.uint8)
    one = raw.view(dtype).reshape(shape)
    found = back({"x": one})[0]["x"]
    assert found.dtype == dtype
    assert found.shape == one.shape
    assert bytes(bytes_of(found)) == bytes(bytes_of(one.contiguous()))


def test_weights_get_smaller() -> None:
    assert back(weights())[1] > 1.1
    assert back(weights(dtype=torch.bfloat16))[1] > 1.3


def measured(state: dict[str, Tensor], bytes_per_second: float) -> Packing:
    packing = Packing(True)
    packing.speed = bytes_per_second
    packing.encode(state, in_place=False)
    return packing


def test_packing_pays_for_a_slow_place_and_not_for_a_fast_one() -> None:
    state = {f"w{i}": weights(i)["w"].bfloat16() for i in range(4)}
    slow, fast = measured(state, 1e3), measured(state, 1e12)  # minutes, microseconds
    assert slow.packs
    assert re.search(r"shuffle: 1\.\d+ times smaller", slow.reason)
    assert not fast.packs
    assert fast.reason.startswith("compression off: shuffle is 1.")


def test_nothing_to_pack_is_said() -> None:
    assert measured({"x": torch.ones(3)}, 1.0).reason == (
        "compression off: there is nothing large enough to pack"
    )


@pytest.mark.parametrize("cut", [0, 1, 50])
def test_packed_bytes_that_were_cut_are_an_error(cut: int) -> None:
    with pytest.raises((ValueError, OSError)):
        decode(encode(weights())["w"][:cut], torch.float32, [300, 400])


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_the_library_reads_what_was_written_in_every_format(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 2, (6, 16), generator=draw, dtype=torch.uint8)
    values = raw.view(dtype) if dtype != torch.complex64 else torch.randn(6, 2, dtype=dtype)
    path = save(tmp_path, 1, {"x": values, "odd": torch.ones(3, dtype=torch.uint8)}, {})
    with safetensors.safe_open(path / STATE, "pt") as file:
        read = file.get_tensor("x")
    assert read.dtype == dtype
    assert bytes(bytes_of(read)) == bytes(bytes_of(values))
