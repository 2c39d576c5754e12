"""Peaks of memory are those of the device that is named, not of the current one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.machine import host
from hasten.machine.memory import memory_meter

PEAKS = {"cuda:0": 5, "cuda:1": 7}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that were asked; two GPUs answer."""
    found: list[str] = []

    def answer(device: Any = None) -> int:
        found.append(str(device))
        return PEAKS[str(device)]

    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.accelerator.memory, name, answer)
    monkeypatch.setattr(torch.accelerator.memory, "reset_peak_memory_stats", answer)
    monkeypatch.setattr(
        torch.accelerator.memory, "get_memory_info", lambda device: (answer(device), 80)
    )
    return found


def test_the_peak_is_the_rank_s_own_device_s(asked: list[str]) -> None:
    host.reset_memory_peak("cuda:1")
    assert host.memory_peak("cuda:1") == 7
    assert host.memory_peak("cuda:0") == 5
    assert asked == ["cuda:1", "cuda:1", "cuda:0"]


def test_the_meter_asks_its_own_device(asked: list[str]) -> None:
    assert memory_meter("cuda:1")() == (7.0, 14.0)
    assert set(asked) == {"cuda:1"}
