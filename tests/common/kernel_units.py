"""The ways to multiply of the processor's kernels, each of which a test can take; its numbers."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hasten.machine.host import processor_flags
from hasten.parts.kernels import products
from hasten.parts.kernels.build import SOURCES, LoadedLibrary, build_library

FORMATS = {"float32": torch.float32, "floats": torch.bfloat16, "pairs": torch.bfloat16}
if products.tile_library().library:
    FORMATS["tiles"] = torch.bfloat16


@functools.cache
def library_with_pairs() -> LoadedLibrary:
    """The kernels with pairs of bf16, which ordinary instructions multiply where none are made."""
    if "avx512_bf16" in processor_flags():
        return products.library()
    with tempfile.TemporaryDirectory(prefix="hasten-pairs-") as place:
        sources = Path(place) / "sources"
        shutil.copytree(SOURCES, sources)
        header = sources / "unit.h"
        header.write_text("#define HASTEN_PROVE_PAIRS\n" + header.read_text())
        # Stored with the others: compiling it takes each process a quarter of a minute.
        return build_library("product", "document_attention", sources=sources)


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Lets a test multiply in one of these ways; the format of its numbers."""
    monkeypatch.setattr(products, "forced_unit", "" if way == "float32" else way)
    if way == "pairs":
        library = library_with_pairs()
        assert library.library, library.reason
        monkeypatch.setattr(products, "library", lambda: library)
    return FORMATS[way]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=draw).to(dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairs_in: bool, pairs_out: bool) -> Tensor:
    """Rotary embedding of the last columns by complex numbers, in whatever layout."""
    m = cos.shape[-1]
    plain, moving = x.split([x.shape[-1] - 2 * m, 2 * m], dim=-1)
    pairs = moving.unflatten(-1, (m, 2) if pairs_in else (2, m))
    a, b = pairs.unbind(-1 if pairs_in else -2)
    z = torch.complex(a, b) * torch.complex(cos, sin).unsqueeze(1)
    both = torch.stack((z.real, z.imag), dim=-1 if pairs_out else -2)
    return torch.cat((plain, both.flatten(-2)), dim=-1)
