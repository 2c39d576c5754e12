"""The calibration: the same bits each time, found again from made figures, no group seen twice."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "planner"))

import held_out
from held_out import Cases, PublishedConstants, fit_memory, fit_seconds, read_records
from published import PublishedMeasurement

from hasten.planner.numbers import Calibration, Constants, MemoryConstants, calibrated

MEASUREMENTS = Path(__file__).parents[2] / "benchmarks" / "planner" / "measurements.json"


@pytest.fixture(scope="module")
def records() -> list[PublishedMeasurement]:
    return read_records(MEASUREMENTS)


def test_every_published_figure_names_its_source() -> None:
    rows = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))
    assert len(rows) == 449
    assert all(row["source"] and row["read"] and row["confidence"] for row in rows)


def test_the_same_measurements_give_the_same_bits(records: list[PublishedMeasurement]) -> None:
    rows = held_out.timed(records)[::6]
    first, second = (fit_seconds(Cases.of(rows)) for _ in range(2))
    assert first == second


def test_the_packages_calibration_is_that_of_the_committed_measurements(
    records: list[PublishedMeasurement],
) -> None:
    import hashlib

    assert (
        calibrated().provenance["sha256"] == hashlib.sha256(MEASUREMENTS.read_bytes()).hexdigest()
    )
    constants, stacks = fit_seconds(Cases.of(held_out.timed(records)))
    for field in fields(Constants):  # a new torch or numpy may round differently, not more
        expected = getattr(calibrated().constants, field.name)
        assert getattr(constants, field.name) == pytest.approx(expected, rel=1e-3)
    assert stacks == pytest.approx(dict(calibrated().stacks), rel=1e-3)


def test_constants_are_found_again_in_figures_made_with_them(
    records: list[PublishedMeasurement],
) -> None:
    rows = held_out.timed(records)[::2]
    cases = Cases.of(rows)
    truth = replace(PublishedConstants(), gemm16=0.8, bubble=1.05, inter=0.5, attention=0.5)
    seconds = cases.seconds(truth)
    made = [
        replace(r, tokens_per_second=float(r.job.global_batch * r.job.sequence / s / d), stack="")
        for r, s, d in zip(rows, seconds, cases.layouts.devices, strict=True)
    ]
    found, stacks = fit_seconds(Cases.of(made))
    errors = held_out.time_errors(made, found, stacks)
    assert np.median(np.abs(errors)) < 0.01
    assert stacks[""] == pytest.approx(1, abs=0.06)
    assert found.gemm16 == pytest.approx(0.8, rel=0.05)


def test_broken_rows_hardly_move_the_fit(records: list[PublishedMeasurement]) -> None:
    rows = held_out.timed(records)
    sound, _ = fit_seconds(Cases.of(rows))
    broken = [
        replace(r, tokens_per_second=(r.tokens_per_second or 0) * (5 if n % 40 == 0 else 1))
        for n, r in enumerate(rows)
    ]
    found, _ = fit_seconds(Cases.of(broken))
    assert found.gemm16 == pytest.approx(sound.gemm16, rel=0.1)


def test_memorys_figures_are_shares_of_what_was_measured(
    records: list[PublishedMeasurement],
) -> None:
    found = held_out.memory(records)
    measured = np.array([r.memory_gb or np.nan for r in found.records])
    predicted = measured / np.exp(found.errors)
    off = np.abs(predicted / measured - 1)
    told = calibrated().provenance["held_out"]
    assert f"{np.median(off):.1%}" == told["memory, median"].replace(" ", "")
    assert f"{np.quantile(off, 0.9):.1%}" == told["memory, p90"].replace(" ", "")


def test_memory_is_fitted_as_well(records: list[PublishedMeasurement]) -> None:
    rows = held_out.weighed(records)
    errors = held_out.memory_errors(rows, fit_memory(Cases.of(rows)))
    before = held_out.memory_errors(rows, MemoryConstants())
    assert np.median(np.abs(errors)) <= np.median(np.abs(before))
    assert np.median(np.abs(errors)) < 0.1


def test_few_folds_already_show_that_unseen_groups_are_met(
    records: list[PublishedMeasurement],
) -> None:
    found = held_out.seconds(records, folds=5)
    dense = found.chosen(held_out.DENSE)
    assert not np.isnan(found.errors).any()
    assert np.median(held_out.off(found.errors[dense])) < 0.06
    assert 0.7 < held_out.coverage(found, dense) < 0.92
    choice = held_out.choice(found, "megatron-deepspeed-bloom")
    assert np.mean(choice.regrets) < 0.03
    assert choice.concordance > 0.75


def test_a_group_is_never_on_both_sides(
    records: list[PublishedMeasurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[set[str], set[str]]] = []

    def noted(
        inside: list[PublishedMeasurement], outside: list[PublishedMeasurement]
    ) -> np.ndarray:
        seen.append(({r.group for r in inside}, {r.group for r in outside}))
        return np.zeros(len(outside))

    monkeypatch.setattr(held_out, "_time_errors", noted)
    held_out.seconds(records)
    assert all(not inside & outside for inside, outside in seen)
    assert set.union(*(outside for _, outside in seen)) == {
        r.group for r in held_out.timed(records)
    }


def test_runs_that_ran_out_of_memory_are_not_called_fitting(
    records: list[PublishedMeasurement],
) -> None:
    rows = [r for r in records if r.scope == "oom"]
    known = calibrated()
    held = Cases.of(rows).memory(known.memory)
    most = held.total * np.exp(known.quantiles("memory")[1] * held.doubt)
    assert len(rows) == 2
    assert all(b > r.cluster.device.memory_bytes for r, b in zip(rows, most, strict=True))


def test_a_quantile_is_a_weighted_ones_where_all_weigh_alike() -> None:
    errors = np.random.default_rng(0).normal(size=1001)
    plain = held_out.quantiles(errors)
    assert plain == held_out.quantiles(errors, np.full(1001, 3.0))
    assert plain[0] == pytest.approx(np.quantile(errors, 0.1), abs=0.02)
    assert plain[1] == pytest.approx(np.quantile(errors, 0.9), abs=0.02)


def test_a_calibration_survives_its_file() -> None:
    again = Calibration.from_dict(json.loads(json.dumps(calibrated().to_dict())))
    assert again == calibrated()
