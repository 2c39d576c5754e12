"""Which code the GPU's fused operations take, and why they can't: no kernel runs here."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from hasten.parts.comm import codecs
from hasten.parts.kernels import registry
from hasten.parts.nn import attention, fused_functions, fused_gpu
from hasten.parts.nn.fused_layers import why_not


def test_other_devices_and_a_missing_triton_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert why_not("mps") == "the fused layers are for processors and NVIDIA GPUs, not for mps"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert why_not("cuda:0") == (
        "the fused layers are for NVIDIA GPUs: their kernels were never tried on ROCm"
    )
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not("cuda:0").endswith("pip install triton")


@pytest.mark.parametrize(
    ("capability", "hip", "takes"),
    [((8, 0), None, True), ((7, 5), None, False), ((9, 4), "7", False)],
)
def test_other_gpus_run_without_the_kernels_of_codecs_and_attention(
    capability: tuple[int, int], hip: str | None, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    for found in (attention._has_varlen, codecs._takes_triton):
        found.cache_clear()
        assert found(torch.device("cuda:0")) == takes
        found.cache_clear()


def test_norms_of_wider_rows_than_registers_hold_are_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGPU:
        dtype, device = torch.float16, torch.device("cuda:0")

        def __init__(self, *shape: int) -> None:
            self.shape, self.ndim = shape, len(shape)

    row, gate = OnGPU(2, 16_384), OnGPU(2, 28_672)
    assert fused_gpu.fits(row, OnGPU(16_384))  # type: ignore[arg-type]
    assert not fused_gpu.fits(gate, OnGPU(28_672))  # type: ignore[arg-type]
    assert fused_gpu.fits(gate, gate)  # type: ignore[arg-type]


def test_a_refused_kernel_leaves_its_layer_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_functions, "backend", lambda x: fused_gpu)
    monkeypatch.setattr(fused_gpu, "fits", lambda *tensors: True)
    x = torch.randn(2, 8)
    registry.refuse("swiglu", "wrong by 3 %")
    try:
        assert not fused_functions.fits("swiglu", x, x)
        assert fused_functions.fits("rms_norm", x, x)
    finally:
        registry.allow_all()
    assert fused_functions.fits("swiglu", x, x)


def test_an_old_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not("cuda:0") == (
        "Triton takes compute capability 8.0 or later, and this GPU has 7.5"
    )
