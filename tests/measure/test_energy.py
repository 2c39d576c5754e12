"""Energy counters: added, and never guessed."""

from __future__ import annotations

import pytest

from hasten.measure.energy import EnergyMeter, open_meter


def test_counters_are_added() -> None:
    meter = EnergyMeter("NVML", [lambda: 3.0, lambda: 0.5])
    assert meter.read() == pytest.approx(3.5)
    assert meter.totals() == {"kwh": pytest.approx(3.5 / 3.6e6), "source": "NVML"}


def test_a_processor_has_no_counter_and_the_reason_is_given() -> None:
    meter = open_meter("cpu")
    assert meter.totals() == {"kwh": None, "source": meter.source}
    assert meter.source == "not measured: only GPUs have a counter that is read"


def test_a_counter_that_breaks_gives_no_number() -> None:
    readings = iter([1.0])

    def counter() -> float:
        for joules in readings:
            return joules
        raise OSError("gone")

    meter = EnergyMeter("NVML", [counter])
    assert meter.read() == 1.0
    assert meter.read() is None
    assert meter.read() is None
    assert meter.source == "not measured: the counter failed (gone)"
