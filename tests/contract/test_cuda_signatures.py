"""What runs on CUDA alone is called as the oldest and the newest release want it.

Stand-ins with the releases' own signatures take the calls of hasten's own code.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import Tensor, nn

from contract.cuda_signatures import FILE, of_installed, stand_in
from hasten.parts.kernels import products
from hasten.parts.nn import attention, experts_gpu, quantised

WRITTEN: dict[str, dict[str, str]] = json.loads(FILE.read_text())
TORCH = [name for name in WRITTEN if name.startswith("torch ")]


def test_both_ends_of_the_range_are_there() -> None:
    """A wider range in pyproject.toml needs its releases here."""
    import tomllib

    file = FILE.parents[2] / "pyproject.toml"
    wanted = [Requirement(r) for r in tomllib.loads(file.read_text())["project"]["dependencies"]]
    (torch_range,) = (r.specifier for r in wanted if r.name == "torch")
    known = sorted(Version(name.split()[1]) for name in TORCH)
    bounds = sorted((Version(s.version), s.operator) for s in torch_range)
    assert all(version in torch_range for version in known)
    assert known[0].release[:2] == bounds[0][0].release[:2]
    above = bounds[-1][0].release
    assert known[-1].release[:2] == (above[0], above[1] - 1), "the newest minor release below"


def test_the_release_that_is_here_is_as_its_wheel_says() -> None:
    from torch.nn.attention.varlen import varlen_attn

    known = WRITTEN.get(f"torch {torch.__version__.partition('+')[0]}")
    if known is None:
        pytest.skip(f"the file has no torch {torch.__version__}")
    assert of_installed(varlen_attn) == known["varlen_attn"]
    assert of_installed(torch.nn.functional.grouped_mm) == known["grouped_mm"]


@pytest.mark.parametrize("release", TORCH)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_of_documents_calls_the_kernel_as_it_is(
    release: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def heard(given: dict[str, Any]) -> Tensor:
        calls.append(given)
        out: Tensor = given["query"]
        return out

    function = stand_in(WRITTEN[release]["varlen_attn"], heard)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
    monkeypatch.setattr(attention, "_fits_varlen", lambda *given: True)
    monkeypatch.setattr(products, "fits_attention", lambda *given: False)  # as on a GPU
    attention._varlen.cache_clear()
    try:
        tensors = [torch.ones(1, n, 9, 8) for n in (4, kv_heads, kv_heads)]
        where = torch.tensor([0, 4, 9], dtype=torch.int32)
        attention.attend(nn.Identity(), *tensors, None, document_lengths=(4, 5), boundaries=where)
    finally:
        attention._varlen.cache_clear()
    (call,) = calls
    assert call["max_q"] == call["max_k"] == 5
    assert call["window_size"] == (-1, 0), "causal"
    grouped = bool(call.get("enable_gqa"))
    assert call["key"].shape[1] == (kv_heads if grouped else 4)
    assert grouped == (kv_heads < 4 and "enable_gqa" in WRITTEN[release]["varlen_attn"])


@pytest.mark.parametrize("release", TORCH)
def test_float8_products_are_called_as_they_are(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heard(given: dict[str, Any]) -> Tensor:
        a, b = given.get("input", given.get("self")), given["mat2"]
        assert given["scale_a"].shape == (len(a), 1)
        assert given["scale_b"].shape == (1, b.shape[1])
        return torch.ones(len(a), b.shape[1])

    monkeypatch.setattr(torch, "_scaled_mm", stand_in(WRITTEN[release]["_scaled_mm"], heard))
    a, b = (quantised.quantise(torch.randn(rows, 32), (1, 32)) for rows in (5, 16))
    out = quantised.Rounding("rowwise", emulate=False).product(a, b, torch.float32)
    assert out.shape == (5, 16)


@pytest.mark.parametrize("release", TORCH)
def test_grouped_products_are_called_as_transformers_does(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are the calls of a model whose experts are ``grouped_mm``, and hasten's own."""
    from transformers.integrations import moe

    called: list[int] = []

    def heard(given: dict[str, Any]) -> Tensor:
        called.append(len(given["mat_a"]))
        return torch.ones(len(given["mat_a"]), given["mat_b"].shape[-1])

    function = stand_in(WRITTEN[release]["grouped_mm"], heard)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", function)
    offsets = torch.tensor([2, 5], dtype=torch.int32)
    moe._grouped_mm(torch.ones(5, 8), torch.ones(2, 8, 4), offsets)
    experts_gpu._product(torch.ones(5, 8), torch.ones(2, 8, 4), offsets)
    assert called == [5, 5]
