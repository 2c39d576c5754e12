"""Measured rates of machine and disk: what is measured, left out and stored."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.machine import benchmark
from hasten.machine.accelerators import RECALLED, datasheet
from hasten.machine.benchmark import (
    PIECE,
    MachineRates,
    Rate,
    measure,
    measure_disk,
)


@pytest.fixture(scope="module")
def rates() -> MachineRates:
    """In a second; in more where a busy machine had no time for a single product in that."""
    for seconds in (0.8, 8.0, 80.0):
        found = measure("cpu", "a processor", seconds=seconds, memory_bytes=1 << 28)
        if found.products:
            break
    return found


def test_a_short_measurement_has_products_and_copies_in_time(rates: MachineRates) -> None:
    assert {p.dtype for p in rates.products} <= {"fp32", "bf16"}
    assert rates.best() is not None
    assert [c.what for c in rates.copies] == ["read", "write", "copy"]
    for rate in (*rates.products, *rates.copies):
        assert rate.best >= rate.median > 0
        assert rate.repeats >= 1
    assert rates.threads == torch.get_num_threads()


def test_what_takes_too_much_memory_is_left_out(rates: MachineRates) -> None:
    assert not [p for p in rates.products if "8192" in p.what]


def test_progress_reaches_its_end_and_never_goes_back() -> None:
    shares: list[float] = []
    options: dict[str, Any] = {"dtypes": ["fp32"], "seconds": 0.1, "memory_bytes": 1 << 26}
    measure(**options, on_progress=lambda what, share: shares.append(share))
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_a_rate_is_an_amount_over_the_time_of_one_act() -> None:
    rate = benchmark._rate("nap", "", 100, lambda: time.sleep(0.01), "cpu", 0.1)
    assert rate.median <= rate.best <= 100 / 0.01
    assert rate.best > 100 / 0.03  # on a busy machine too


def test_the_precision_of_products_is_as_before_afterwards() -> None:
    before = torch.get_float32_matmul_precision()
    measure(dtypes=["tf32"], seconds=0.1, memory_bytes=1 << 22)
    assert torch.get_float32_matmul_precision() == before


def test_a_format_the_chip_lacks_has_no_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*arguments: Any) -> Any:
        raise RuntimeError("no such kernel\nstack")

    monkeypatch.setattr(benchmark, "_product", refuses)
    found = measure(dtypes=["bf16"], seconds=0.1, memory_bytes=1 << 26)
    assert found.products == ()
    assert found.best() is None


positive = st.floats(1e3, 1e16)
rates_drawn = st.builds(
    Rate,
    what=st.text(max_size=20),
    dtype=st.sampled_from(sorted(benchmark.DTYPES)),
    best=positive,
    median=positive,
    repeats=st.integers(1, 50),
)


@given(st.lists(rates_drawn), st.lists(rates_drawn), st.text())
def test_rates_come_back_from_json_as_they_were(
    some: list[Rate], copies: list[Rate], name: str
) -> None:
    rates = MachineRates(
        *("cpu", name, 2, "2.13", "2026-11-21T00:00:00+00:00", 1.5),
        products=tuple(some),
        copies=tuple(copies),
    )
    assert MachineRates.from_dict(json.loads(json.dumps(rates.to_dict()))) == rates
    usual = [p.best for p in some if p.dtype != "fp8"]
    best = rates.best()
    assert (best.best if best else None) == max(usual, default=None)


@pytest.mark.parametrize("broken", [None, [], {}, {"products": 3}, "text", {"kind": "else"}])
def test_something_else_is_no_measurement(broken: Any) -> None:
    with pytest.raises(ValueError, match="hasten env --bench -o"):
        MachineRates.from_dict(broken)


@pytest.mark.data
def test_the_table_is_that_of_the_figures_it_was_made_from() -> None:
    """Each row's bf16 and memory rates, and its mark where a figure was only recalled."""
    figures = json.loads(
        (Path(os.environ["HASTEN_TEST_DATA"]) / "hardware_figures.json").read_text()
    )
    for key, driver in {
        "h100_sxm": "NVIDIA H100 80GB HBM3",
        "h200": "NVIDIA H200",
        "h20": "NVIDIA H20",
        "a100_40gb": "NVIDIA A100-SXM4-40GB",
        "a100_pcie": "NVIDIA A100 80GB PCIe",
        "b300": "NVIDIA B300",
        "gb200": "NVIDIA GB200",
        "a6000": "NVIDIA RTX A6000",
        "rtx4090": "NVIDIA GeForce RTX 4090",
        "mi300x": "AMD Instinct MI300X",
    }.items():
        row, figure = datasheet(driver), figures[key]
        assert row is not None
        assert row.peak16 == figure["bf16"] * 1e12
        assert row.memory_rate == figure["hbm_TBps"] * 1e12
        assert row.peak8 == (figure.get("fp8") or 0) * 1e12
        assert row.reached16 == (figure.get("mamf_bf16") or 0) * 1e12
        assert (RECALLED in row.source) == ("recalled" in figure.get("src", ""))


def test_rates_are_positive_and_nothing_is_left(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, 4 * PIECE)
    assert found.bytes == 4 * PIECE
    assert found.write > 0
    assert found.read is None or found.read > 0
    assert found.flush_seconds >= 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="needs Linux")
def test_a_file_that_can_only_be_read_through_memory_has_no_rate_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.open

    def refuses(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return usual(path, flags, *mode)

    monkeypatch.setattr(benchmark.os, "open", refuses)
    assert measure_disk(tmp_path, PIECE).read is None


def test_a_folder_that_takes_no_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its disk can't be measured") as error:
        measure_disk(tmp_path / "missing")
    assert "\n" not in str(error.value)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(benchmark.os, "fsync", full)
    with pytest.raises(ValueError, match="No space left"):
        measure_disk(tmp_path, PIECE)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
