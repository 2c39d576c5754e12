"""Marks of tests that run Triton's kernels: on a GPU, or in the interpreter where none is."""

from __future__ import annotations

import importlib.util

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _why_no_triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton isn't installed"
    import triton.language as tl

    fits = DEVICE == "cuda" or type(tl.sum).__name__ == "InterpretedFunction"
    return "" if fits else "Triton is here to compile: give TRITON_INTERPRET=1"


needs_triton = pytest.mark.skipif(bool(_why_no_triton()), reason=_why_no_triton())
on_gpu = [pytest.mark.gpu] if DEVICE == "cuda" else []
