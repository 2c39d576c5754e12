"""Energy counters: read as the kernel shows them, across turnovers, and never guessed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.measure.energy import EnergyMeter, RaplCounter, open_meter


def zone(folder: Path, place: str, name: str, micro_joules: int, most: int = 10**12) -> Path:
    path = folder / place
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{most}\n")
    (path / "energy_uj").write_text(f"{micro_joules}\n")
    return path


def test_packages_and_memory_are_added_and_the_platform_is_not_counted_twice(
    tmp_path: Path,
) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    memory = zone(tmp_path, "intel-rapl:0:0", "dram", 1_000_000)
    core = zone(tmp_path, "intel-rapl:0:1", "core", 7)
    platform = zone(tmp_path, "intel-rapl:1", "psys", 9)
    meter = open_meter("cpu", powercap=tmp_path)
    assert meter.read() == 0
    for path, value in (
        (package, 8_000_000),
        (memory, 1_500_000),
        (core, 10**9),
        (platform, 10**9),
    ):
        (path / "energy_uj").write_text(str(value))
    assert meter.read() == pytest.approx(3.5)
    assert meter.totals()["kwh"] == pytest.approx(3.5 / 3.6e6)
    assert "package-0, dram" in meter.source


@given(st.lists(st.integers(0, 999_999), min_size=1, max_size=30))
def test_a_counter_that_turns_over_loses_nothing(steps: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = zone(Path(folder), "z", "package-0", 123_456, most=1_000_000)
        ticks = itertools.count(0.0, 1e-4)  # read often enough
        counter = RaplCounter(path, clock=lambda: next(ticks))
        total = 0
        for step in steps:
            total += step
            (path / "energy_uj").write_text(str((123_456 + total) % 1_000_000))
            assert counter() == pytest.approx(total / 1e6)


def test_a_counter_read_too_seldom_says_so_and_gives_no_number(tmp_path: Path) -> None:
    path = zone(tmp_path, "z", "package-0", 0, most=262_143_328_850)
    times = iter([0.0, 100.0, 500.0])
    meter = EnergyMeter("RAPL", [RaplCounter(path, clock=lambda: next(times))])
    assert meter.read() == 0
    assert meter.read() is None
    assert meter.source == "not measured: the counter was read too seldom"
    assert meter.totals() == {"kwh": None, "source": meter.source}


def test_after_a_gap_differences_are_known_again(tmp_path: Path) -> None:
    path = zone(tmp_path, "z", "package-0", 0, most=262_143_328_850)
    times = iter([0.0, 500.0, 510.0, 520.0])
    meter = EnergyMeter("RAPL", [RaplCounter(path, clock=lambda: next(times))])
    assert meter.reading() is None  # ten minutes: nobody knows how often it turned over
    first = meter.reading()
    (path / "energy_uj").write_text("7000000\n")
    second = meter.reading()
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(7.0)
    assert meter.source == "RAPL"


def test_without_counters_the_reason_is_given(tmp_path: Path) -> None:
    assert open_meter("cpu", powercap=tmp_path / "none").read() is None
    assert "no RAPL counter" in open_meter("cpu", powercap=tmp_path / "none").source


def test_a_counter_that_breaks_or_lies_gives_no_number(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (path / "energy_uj").write_text("many\n")
    assert "not a count" in open_meter("cpu", powercap=tmp_path).source
    (path / "energy_uj").write_text("1\n")
    meter = open_meter("cpu", powercap=tmp_path)
    (path / "energy_uj").unlink()
    assert meter.read() is None
    assert meter.read() is None
    assert meter.source.startswith("not measured: the counter failed")


def test_a_counter_that_only_root_may_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    usual = Path.read_text

    def refused(path: Path, *arguments: object, **named: object) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return usual(path)

    monkeypatch.setattr(Path, "read_text", refused)
    assert "its owner is root" in open_meter("cpu", powercap=tmp_path).source
