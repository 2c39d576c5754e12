"""Marks and numbers of tests that run Triton's kernels: on a GPU, or in the interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from interpreted_triton import describe_types_once, replace_once_a_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _why_no_triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton isn't installed"
    import triton.language as tl

    fits = DEVICE == "cuda" or type(tl.sum).__name__ == "InterpretedFunction"
    return "" if fits else "Triton is here to compile: give TRITON_INTERPRET=1"


NO_TRITON = _why_no_triton()
if DEVICE == "cpu" and not NO_TRITON:
    replace_once_a_launch()
    describe_types_once()
needs_triton = pytest.mark.skipif(bool(NO_TRITON), reason=NO_TRITON)
on_gpu = [pytest.mark.gpu] if DEVICE == "cuda" else []


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def far(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest number.

    A sum that comes out near 0 is judged by its terms, which are of the order of 1.
    """
    assert found.shape == expected.shape
    largest = expected.abs().max().clamp_min(0.5)
    return ((found.double() - expected).abs().max() / largest).item()
