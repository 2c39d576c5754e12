"""Studies on a machine that is made up: budget, noise, failures, resumption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.measure.ablation import AGAIN, BASELINE
from hasten.measure.record import ExperimentRecord
from hasten.measure.search import search
from hasten.tune.report import best_row, final_rows, result_sentence, study_document
from hasten.tune.samplers import ForecastProposer, PriorKnowledge, Proposer
from hasten.tune.study import LEADERS, TIME_USED, TOGETHER, Study
from tune.simulated import Machine, of_values

SPACE = of_values({"batch": [1, 2, 4, 8], "fused": [False, True], "dtype": ["fp32", "bf16"]})


def seconds(s: dict[str, Any]) -> float:
    return (
        (1.0 + 1.0 / s["batch"]) * (0.8 if s["fused"] else 1) * (0.6 if s["dtype"] == "bf16" else 1)
    )


def any_order(noise: float, memory: float | None) -> Proposer:
    return Proposer(SPACE, 1)


def searched(
    machine: Machine, budget: float = 2000.0, record: ExperimentRecord | None = None, **more: Any
) -> Study:
    def own(noise: float, memory: float | None) -> ForecastProposer:
        return ForecastProposer(SPACE, PriorKnowledge(noise=noise, limit=machine.limit))

    proposer = more.pop("proposer", own)
    record = record or ExperimentRecord()
    options = {"steps": 2, "budget_seconds": budget, "clock": machine.clock, **more}
    study = Study(SPACE, proposer, record, **options)
    search(study, machine.compare)
    return study


def test_the_fastest_settings_lead_and_no_process_is_left() -> None:
    machine = Machine(SPACE, seconds, noise=0.01)
    study = searched(machine)
    assert SPACE.settings(study.leaders()[0]) == {"batch": 8, "fused": True, "dtype": "bf16"}
    assert machine.alive == 0
    assert 0.003 < study.start["noise"] < 0.05


def test_trials_leave_the_final_comparison_its_part_of_the_budget() -> None:
    machine = Machine(SPACE, seconds, noise=0.01)
    study = searched(machine, budget=300.0)
    assert study.ended == TIME_USED
    assert machine.clock.now <= 300
    assert len(study.rows) >= 2
    assert min(len(variant.rounds) for variant in study.final) >= 3


def test_what_leads_by_luck_in_its_trials_is_told_from_what_is_faster() -> None:
    def lost(seed: int) -> float:
        machine = Machine(SPACE, seconds, noise=0.12)
        machine.draw.seed(seed)
        study = searched(machine, proposer=lambda noise, memory: Proposer(SPACE, seed), most=12)
        tried = [seconds(r["settings"]) for r in study.rows]
        assert machine.alive == 0
        row = best_row(final_rows(study.final)["variants"], "tokens", None)
        assert row is not None
        return seconds(SPACE.settings(study.choices[row["name"]])) / min(tried) - 1

    assert sum(lost(seed) < 0.03 for seed in range(24)) >= 23


def test_the_final_comparison_is_of_the_best_few_with_the_start_and_its_copy() -> None:
    machine = Machine(SPACE, seconds)
    machine.seconds = lambda s: seconds(s) * (1 + machine.clock.now / 300)
    study = searched(machine)
    assert 2 <= len(study.choices) <= LEADERS
    names = [variant.name for variant in study.final]
    assert names == [BASELINE, AGAIN, *reversed(study.choices)]
    first = seconds(SPACE.settings(SPACE.start))
    for row in final_rows(study.final)["variants"][2:]:
        expected = first / seconds(SPACE.settings(study.choices[row["name"]]))
        assert row["ratio"]["median"] == pytest.approx(expected, rel=0.1)
    best = min(study.choices, key=lambda n: seconds(SPACE.settings(study.choices[n])))
    found = best_row(final_rows(study.final)["variants"], "tokens", None)
    assert found is not None
    assert found["name"] == best


def test_points_far_behind_the_best_have_no_place_in_the_final_comparison() -> None:
    def one_is_fast(s: dict[str, Any]) -> float:
        return seconds(s) * (0.5 if s["batch"] == 8 and s["fused"] else 1.0)

    study = searched(Machine(SPACE, one_is_fast))  # the second is at 0.6 of the first's speed
    (point,) = study.choices.values()
    assert SPACE.settings(point) == {"batch": 8, "fused": True, "dtype": "bf16"}


def test_later_points_are_compared_with_the_best_so_far_and_counted_over_the_start() -> None:
    machine, references = Machine(SPACE, seconds), []
    study = Study(SPACE, any_order, ExperimentRecord(), budget_seconds=2000, clock=machine.clock)
    search(
        study,
        lambda proposal: (
            references.append(proposal.variants[BASELINE]) or machine.compare(proposal)
        ),
    )
    assert references[0] == references[1] == SPACE.start != references[2]
    first = seconds(SPACE.settings(SPACE.start))
    for row in study.rows:
        expected = math.log(first / seconds(row["settings"]))
        assert row["log_rate"] == pytest.approx(expected, abs=0.01)


def test_a_machine_that_slows_down_slows_both() -> None:
    machine = Machine(SPACE, seconds)
    machine.seconds = lambda s: seconds(s) * (1 + machine.clock.now / 500)
    study = searched(machine)
    row = next(r for r in study.rows if r["state"] == "ok")
    expected = math.log(seconds(SPACE.settings(SPACE.start)) / seconds(row["settings"]))
    assert row["log_rate"] == pytest.approx(expected, abs=0.05)


def test_out_of_memory_is_noted_and_never_repeated() -> None:
    machine = Machine(SPACE, seconds, memory=lambda s: 1e9 * s["batch"], limit=3e9)
    study = searched(machine)
    gone = [SPACE.point(r["settings"]) for r in study.rows if r["state"] == "out of memory"]
    assert 1 <= len(gone) <= TOGETHER + 1
    assert [machine.started.count(point) for point in gone] == [1] * len(gone)
    assert all(SPACE.settings(p)["batch"] <= 2 for p in study.leaders())


@pytest.mark.parametrize("why", ["OutOfMemoryError: CUDA out of memory", "std::bad_alloc"])
def test_words_of_memory_are_understood(why: str) -> None:
    machine = Machine(SPACE, seconds, fails=lambda s: why if s["fused"] else None)
    study = searched(machine, proposer=any_order)
    assert {r["state"] for r in study.rows if r["settings"]["fused"]} == {"out of memory"}


def test_a_job_that_fails_as_it_is_is_refused() -> None:
    machine = Machine(SPACE, seconds, fails=lambda s: "ValueError: no such column")
    with pytest.raises(InputError, match=r"fails as it is.*no such column"):
        searched(machine)
    assert machine.alive == 0


def test_a_job_that_fails_in_every_trial_is_refused_with_the_last_reason() -> None:
    first = SPACE.settings(SPACE.start)
    machine = Machine(SPACE, seconds, fails=lambda s: None if s == first else "no kernel")
    with pytest.raises(InputError, match="trials failed, the last with: no kernel"):
        searched(machine)


def test_a_loss_that_is_no_number_fails_the_trial_and_not_the_study() -> None:
    machine = Machine(SPACE, seconds, loss=lambda s: s["dtype"] == "fp32")
    study = searched(machine)
    bad = [r for r in study.rows if r["settings"]["dtype"] == "bf16"]
    assert bad
    assert all(r["why"] == "its loss is not a finite number" for r in bad)
    assert SPACE.settings(study.leaders()[0])["dtype"] == "fp32"


def test_a_start_whose_loss_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="before any change: its loss is not a finite number"):
        searched(Machine(SPACE, seconds, loss=lambda s: False))


@pytest.mark.parametrize("budget", [1.0, 8.0, 25.0])
def test_a_budget_that_is_too_short_is_refused(budget: float) -> None:
    machine = Machine(SPACE, seconds)
    with pytest.raises(InputError, match=r"budget: .* is too short"):
        searched(machine, budget=budget)
    assert machine.clock.now <= 1.25 * budget
    assert machine.alive == 0


def test_a_trial_that_hangs_costs_the_others_no_more_than_its_comparison() -> None:
    machine = Machine(SPACE, lambda s: 1e6 if s["batch"] == 8 else seconds(s))
    study = searched(machine, budget=4000.0, proposer=any_order)
    assert all(row["settings"]["batch"] != 8 for row in study.rows)
    assert SPACE.settings(study.leaders(1)[0]) == {"batch": 4, "fused": True, "dtype": "bf16"}


def test_a_killed_study_resumes_and_measures_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with ExperimentRecord(path) as record:
        first = searched(Machine(SPACE, seconds), record=record, proposer=any_order, most=4)
    assert len(first.rows) == 4
    machine = Machine(SPACE, seconds)
    with ExperimentRecord(path) as record:
        study = searched(machine, record=record, proposer=any_order, most=7)
    assert study.rows[:4] == first.rows
    assert study.start == first.start
    points = [str(row["settings"]) for row in study.rows]
    assert len(set(points)) == len(points) == 7
    with ExperimentRecord(path) as record:
        record.append("trial", **{**study.rows[0], "settings": {"batch": 3}})
        edited = searched(machine, record=record, proposer=any_order, most=7)
    assert len(edited.rows) == 7


def test_memory_as_objective_leads_to_the_smallest() -> None:
    machine = Machine(SPACE, seconds, memory=lambda s: 1e9 * (8 - s["batch"] / 2))
    study = searched(machine, objective="memory", most=15)
    row = best_row(final_rows(study.final)["variants"], "memory", None)
    assert row is not None
    assert SPACE.settings(study.choices[row["name"]])["batch"] == 8


@pytest.mark.parametrize(
    ("step_seconds", "steps"), [(0.01, 16), (0.1, 12), (0.3, 4), (0.5, 4), (1.0, 2), (60.0, 2)]
)
def test_turns_have_more_steps_if_these_are_short(step_seconds: float, steps: int) -> None:
    study = Study(SPACE, any_order, ExperimentRecord(), budget_seconds=1.0)
    study.start = {"step_seconds": step_seconds}
    assert study._turn_steps() == steps


def test_the_document_has_the_trials() -> None:
    study = searched(Machine(SPACE, seconds))
    found = study_document(study, None, None, {"title": "t"})
    assert found["trials"] == study.rows
    assert "keep the settings" in result_sentence(found)
