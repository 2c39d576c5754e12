"""The writer of safetensors files against the library that everybody reads them with."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import torch

from hasten.parts import checkpoint
from hasten.parts.checkpoint import STATE
from hasten.parts.checkpoint.format import DTYPES, bytes_of


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
