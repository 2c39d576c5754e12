"""``autocast`` and ``GradScaler`` are torch's, in the format that pays on this device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from hasten import GradScaler, autocast
from hasten.core import context as facts
from hasten.integrations import mixed_precision
from hasten.machine.host import Accelerator


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    mixed_precision.format_of.cache_clear()
    yield
    mixed_precision.format_of.cache_clear()


def processor(monkeypatch: pytest.MonkeyPatch, *sets: str) -> None:
    known = facts.seen_at_start()
    hardware = replace(known.hardware, instruction_sets=sets, system="Linux 6", cpu="Some CPU")
    monkeypatch.setattr(facts, "seen_at_start", lambda: replace(known, hardware=hardware))


def test_products_are_in_bf16_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, "avx512f")
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with autocast() as region:
        assert layer(x).dtype == torch.bfloat16
    assert region is not None
    with autocast(enabled=False):
        assert layer(x).dtype == torch.float32
    assert autocast()(layer.forward)(x).dtype == torch.bfloat16  # as a decorator
    assert not GradScaler().is_enabled()


def test_products_stay_where_they_were_faster_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor(monkeypatch)
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.warns(UserWarning, match="products stay in float32: Some CPU multiplies bf16"):
        region = autocast()
    with region:
        assert layer(x).dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autocast(enabled=False)


def test_what_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch)
    with autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert nn.Linear(4, 4)(torch.randn(2, 4)).dtype == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()


@pytest.mark.parametrize(("capability", "dtype"), [("8.0", torch.bfloat16), ("7.0", torch.float16)])
def test_a_gpu_has_the_format_of_its_units(
    monkeypatch: pytest.MonkeyPatch, capability: str, dtype: torch.dtype
) -> None:
    known = facts.seen_at_start()
    gpu = Accelerator("Some GPU", 2**34, capability)
    hardware = replace(known.hardware, accelerators=(gpu,))
    there = replace(known, hardware=hardware, device="cuda:0")
    monkeypatch.setattr(facts, "seen_at_start", lambda: there)
    assert mixed_precision.format_of("cuda") == (dtype, "")


def test_a_scaler_of_fp16_takes_torch_s_settings_and_skips_an_overflow() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", 8.0, 4.0, 0.25, 1, dtype=torch.float16)
    assert scaler.is_enabled()
    scaler.scale(weight * 2.0).backward()
    assert weight.grad is not None
    assert weight.grad.item() == 16.0
    scaler.step(optimizer)
    scaler.update()
    assert (weight.item(), scaler.get_scale()) == (-1.0, 32.0)
    weight.grad = torch.tensor([float("inf")])
    scaler.step(optimizer)
    scaler.update()
    assert (weight.item(), scaler.get_scale()) == (-1.0, 8.0)
    assert not GradScaler("cpu", enabled=False, dtype=torch.float16).is_enabled()
