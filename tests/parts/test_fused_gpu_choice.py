"""Which code the GPU's fused operations take, and why they can't: no kernel runs here."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.parts.nn import fused_functions, fused_gpu
from hasten.parts.nn.fused_layers import why_not
from hasten.techniques.layers import FusedLayers
from tiny import job_facts, language_job


@pytest.mark.skipif(fused_gpu.liger() is None, reason="Liger isn't installed")
def test_liger_takes_the_arguments_it_is_given() -> None:
    """Of the installed version: names, order, and as many gradients as arguments."""
    found = fused_gpu.liger()
    assert found is not None
    norm, silu_mul = (inspect.signature(inspect.unwrap(f.forward)).parameters for f in found)
    assert [*norm][1:7] == ["X", "W", "eps", "offset", "casting_mode", "in_place"]
    assert [*silu_mul][1:3] == ["a", "b"]
    assert all(p.default is not inspect.Parameter.empty for p in [*silu_mul.values()][3:])


def test_liger_is_called_so_that_no_gradient_is_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Known:
        @staticmethod
        def apply(*arguments: Any) -> Tensor:
            calls.append(arguments[1:] if len(arguments) > 2 else ())
            found: Tensor = arguments[0] * 2
            return found

    monkeypatch.setattr(fused_gpu, "liger", lambda: fused_gpu.Liger(Known, Known))
    monkeypatch.setattr(fused_functions, "backend", lambda x: fused_gpu)
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(fused_functions.rms_norm(x, weight, 1e-6), 2 * x)
    assert calls == [(weight, 1e-6, 0.0, "gemma", False)]
    assert torch.equal(fused_functions.swiglu(x, x), 2 * x)


def test_other_devices_and_a_missing_triton_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "not for mps" in why_not("mps")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not("cuda:0").endswith("pip install triton")


def test_a_job_on_a_gpu_hears_it_as_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = replace(job_facts(language_job()), device="cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (reason,) = FusedLayers().obstacles(on_gpu)
    assert "Triton" in reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert FusedLayers().obstacles(on_gpu) == ()


def test_an_old_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not("cuda:0") == (
        "Triton takes compute capability 8.0 or later, and this GPU has 7.5"
    )
