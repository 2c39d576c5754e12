"""Calibration on a machine of one's own: a few runs of twenty steps tell what others will take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.machine.accelerators import Device
from hasten.models.architecture import Architecture
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Layouts, PlannedJob, PlannedLayout
from hasten.planner.numbers import Calibration, Constants
from hasten.planner.own_runs import (
    MachineFactors,
    OwnRun,
    calibrate_machine,
    table,
    terms_of_run,
)
from hasten.planner.planning import plan
from hasten.planner.predict import predict
from planner.usual import JOB, PLAIN, TWO
from planner.usual import MODEL as SEVEN

MODEL = Architecture.from_config("deepseek-llm-tiny")
CHIP = Device("a processor", 1.5e12, 64e9, 2e10, 1.25e8, per_node=2, units=2, reached16=1.5e12)
CLUSTER = Cluster(CHIP, 1, 2, 1.25e8, 1.25e8, intra_latency=1e-4)
CASES = [
    (PlannedLayout(dp=dp, zero=0, micro_batch=m), PlannedJob(length, 8), rate)
    for dp in (1, 2)
    for m in (1, 4)
    for length in (64, 256)
    for rate in (1.25e7, 1.25e8)
]


def seconds(layout: PlannedLayout, job: PlannedJob, rate: float, calibration: Calibration) -> float:
    cluster = replace(CLUSTER, intra=rate, inter=rate)
    rows = Layouts.of([layout])
    return float(predict(MODEL, cluster, job, rows, calibration).step_seconds[0])


def run(place: int, truth: Calibration, noise: float = 1.0) -> OwnRun:
    layout, job, rate = CASES[place]
    cluster = replace(CLUSTER, intra=rate, inter=rate)
    return OwnRun(MODEL, cluster, job, layout, seconds(layout, job, rate, truth) * noise)


@settings(max_examples=6)
@given(st.floats(0.3, 3), st.floats(0.3, 3), st.floats(0.4, 2))
def test_six_runs_foretell_other_batches_layouts_and_rates(
    compute: float, standing: float, links: float
) -> None:
    factors = MachineFactors(compute, 1.0, standing, links)
    truth = Calibration(factors.applied(Constants()))
    noise = np.random.default_rng(0).normal(1, 0.01, len(CASES))
    learned = calibrate_machine([run(n, truth, noise[n]) for n in range(0, 16, 3)], Calibration())
    errors = [
        abs(seconds(*CASES[n], learned) / seconds(*CASES[n], truth) - 1) for n in range(16) if n % 3
    ]
    assert np.median(errors) < 0.05
    assert max(errors) < 0.25


def test_one_run_is_met_and_says_so_with_a_wider_interval() -> None:
    truth = Calibration(MachineFactors(0.5).applied(Constants()))
    one = calibrate_machine([run(3, truth)], Calibration())
    assert seconds(*CASES[3], one) == pytest.approx(run(3, truth).step_seconds, rel=0.03)
    many = calibrate_machine([run(n, truth) for n in range(8)], Calibration())
    assert many.quantiles("dense")[1] < one.quantiles("dense")[1]
    assert one.provenance["own_runs"] == 1


def test_a_link_that_was_measured_is_not_fitted() -> None:
    truth = Calibration(MachineFactors(0.5, links=1.0).applied(Constants()))
    known = calibrate_machine([run(1, truth)], Calibration(), link_measured=True)
    assert known.constants.inter == known.constants.intra == 1.0
    assert known.provenance["own_factors"]["links"] == 1.0


def test_the_same_runs_give_the_same_bits() -> None:
    runs = [run(n, Calibration()) for n in range(4)]
    assert calibrate_machine(runs) == calibrate_machine(runs)


def test_no_run_or_one_of_no_time_is_refused() -> None:
    with pytest.raises(InputError, match="no run"):
        calibrate_machine([])
    with pytest.raises(InputError, match="run 1"):
        calibrate_machine([replace(run(0, Calibration()), step_seconds=0.0)])


def a_run(folder: Path, seconds: float, steps: int = 10) -> Path:
    row = {"positions": JOB.global_batch * JOB.sequence, "peak_memory_bytes": 5e10}
    row |= {"passes_seconds": 0.9 * seconds, "optimizer_seconds": 0.1 * seconds}
    slow = [{**row, "step_seconds": 9 * seconds, "data_seconds": 1.0}] * 3  # warming up
    rows = slow + [{**row, "step_seconds": seconds, "data_seconds": 0.0}] * steps
    rows.append({**row, "step_seconds": 1.0, "skipped": True})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def test_a_run_is_set_against_the_plan_term_by_term(tmp_path: Path) -> None:
    best = plan(SEVEN, TWO, JOB, calibration=PLAIN, top=1).best[0]
    exact = best.step_seconds.middle
    terms = {t.name: t for t in terms_of_run(best, a_run(tmp_path / "run", exact))}
    assert terms["step"].measured == exact
    assert terms["step"].within
    assert terms["step"].ratio == pytest.approx(1)
    assert terms["rate of a device"].measured == pytest.approx(
        best.tokens_per_second_per_device.middle
    )
    parts = ("passes", "optimizer", "waiting for data")
    assert sum(terms[name].predicted for name in parts) == pytest.approx(exact)
    assert terms["waiting for data"].measured == 0.0
    late = {t.name: t for t in terms_of_run(best, a_run(tmp_path / "late", 3 * exact))}
    assert late["step"].within is False
    rows = table(list(late.values()))
    assert {len(row) for row in rows} == {5}
    assert rows[1][-1] == "no"


def test_a_folder_without_steps_is_one_sentence(tmp_path: Path) -> None:
    best = plan(SEVEN, TWO, JOB, calibration=PLAIN, top=1).best[0]
    with pytest.raises(InputError, match="name the folder of a run"):
        terms_of_run(best, tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step_seconds": 1, "skipped": true}\n')
    with pytest.raises(InputError, match="no step that changed weights"):
        terms_of_run(best, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.raises(InputError, match="1 is not JSON"):
        terms_of_run(best, tmp_path)
