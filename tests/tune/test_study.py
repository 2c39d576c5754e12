"""Studies on a machine that is made up: budget, noise, failures, resumption, early end."""

from __future__ import annotations

import itertools
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.measure.record import ExperimentRecord
from hasten.measure.schedule import OutOfTimeError
from hasten.progress import SilentProgress
from hasten.tune.bench import ReferencePair
from hasten.tune.report import page, result_sentence, study_document
from hasten.tune.samplers import ForecastProposer, PriorKnowledge, Proposer, TriedPoint
from hasten.tune.study import FINALISTS, Search, Study
from hasten.tune.study_folder import StudyFolder
from hasten.tune.surrogate import importance
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

    clock = machine.clock
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=clock) as bench:
        more = {"proposer": own, **more}
        proposer = more.pop("proposer")
        search = Search(
            SPACE,
            proposer,
            bench,
            record or ExperimentRecord(),
            budget_seconds=budget,
            clock=clock,
            **more,
        )
        return search.run()


def test_the_fastest_settings_lead_and_no_process_is_left() -> None:
    machine = Machine(SPACE, seconds, noise=0.01)
    study = searched(machine)
    assert SPACE.settings(study.leaders()[0]) == {"batch": 8, "fused": True, "dtype": "bf16"}
    assert machine.alive == 0
    assert 0.003 < study.noise < 0.05


def test_trials_leave_the_duel_its_part_of_the_budget() -> None:
    machine = Machine(SPACE, seconds, noise=0.01)
    study = searched(machine, budget=130.0)
    assert study.ended == "the budget's time for trials was used"
    assert machine.clock.now <= 130 * 0.75
    assert len(study.rows) >= 2


def test_what_leads_by_luck_in_its_trials_is_told_from_what_is_faster() -> None:
    """By trials alone it was in 20 of these 24 studies."""

    def lost(place: int) -> float:
        machine = Machine(SPACE, seconds, noise=0.12)
        machine.draw.seed(place)
        study = searched(machine, proposer=lambda noise, memory: Proposer(SPACE, place), most=12)
        tried = [seconds(r["settings"]) for r in study.rows]
        assert machine.alive == 0
        return seconds(SPACE.settings(study.leaders(1)[0])) / min(tried) - 1

    assert sum(lost(place) < 0.03 for place in range(24)) >= 23


def test_the_final_is_of_rounds_side_by_side_and_over_the_start() -> None:
    machine = Machine(SPACE, seconds)
    machine.seconds = lambda s: seconds(s) * (1 + machine.clock.now / 300)
    record = ExperimentRecord()
    study = searched(machine, record=record)
    assert len(study.final) == FINALISTS
    first = seconds(SPACE.settings(SPACE.start))
    for point, logs in study.final.items():
        expected = math.log(first / seconds(SPACE.settings(point)))
        assert logs == pytest.approx([expected] * len(logs), abs=0.1)
    best = min(study.final, key=lambda p: seconds(SPACE.settings(p)))
    assert study.leaders(1) == [best]
    assert len(study.final[best]) == max(len(logs) for logs in study.final.values())
    (event,) = [e for e in record.events if e["event"] == "final"]
    assert [SPACE.point(variant["settings"]) for variant in event["variants"]] == list(study.final)


def test_the_final_leaves_out_what_memory_has_no_room_for() -> None:
    machine = Machine(SPACE, seconds, memory=lambda s: 2e9)
    assert len(searched(machine, room=lambda: 5e9).final) == 2
    assert searched(Machine(SPACE, seconds, memory=lambda s: 2e9), room=lambda: 3e9).final == {}


def test_nobody_is_a_finalist_who_is_far_behind() -> None:
    def one_is_fast(s: dict[str, Any]) -> float:
        return seconds(s) * (0.5 if s["batch"] == 8 and s["fused"] else 1.0)

    study = searched(Machine(SPACE, one_is_fast))
    assert study.final == {}  # the second is at 0.6 of the first's speed
    assert SPACE.settings(study.leaders()[0]) == {"batch": 8, "fused": True, "dtype": "bf16"}


def test_one_lucky_round_is_no_finalist_before_those_that_all_trials_speak_for() -> None:
    own, machine = ForecastProposer(SPACE, PriorKnowledge(noise=0.3)), Machine(SPACE, seconds)
    plain = Proposer(SPACE)
    lucky = (3, 0, 0)
    rows = [(lucky, (0.5,))] + [((batch, 1, 1), (0.45,) * 3) for batch in range(4)]
    study = Study(SPACE, "tokens", 0.3, 1.0, None)
    for point, rounds in rows:
        study.tried.append(TriedPoint(point, "ok", rounds[0], rounds=rounds))
        study.rows.append({"log_rate": rounds[0]})
        own.tell(study.tried[-1])
        plain.tell(study.tried[-1])
    with ReferencePair(machine.start, SPACE.start, 2, clock=machine.clock) as bench:
        search = Search(SPACE, lambda *_: own, bench, ExperimentRecord(), budget_seconds=1.0)
        assert lucky not in search._finalists(study, own)
        assert search._finalists(study, plain)[0] == lucky  # it alone is asked


def test_it_ends_early_when_nothing_more_is_expected() -> None:
    study = searched(Machine(SPACE, lambda s: 1.0, noise=0.001), budget=1e5)
    assert "no untried point" in study.ended
    assert len(study.rows) < len(SPACE.points()) - 1


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
    assert 1 <= len(gone) <= 2
    assert [machine.started.count(point) for point in gone] == [1] * len(gone)
    assert all(SPACE.settings(p)["batch"] <= 2 for p in study.leaders())


@pytest.mark.parametrize("why", ["OutOfMemoryError: CUDA out of memory", "std::bad_alloc"])
def test_words_of_memory_are_understood(why: str) -> None:
    machine = Machine(SPACE, seconds, fails=lambda s: why if s["fused"] else None)
    study = searched(machine)
    assert {r["state"] for r in study.rows if r["settings"]["fused"]} == {"out of memory"}


def test_a_job_that_fails_as_it_is_is_refused() -> None:
    machine = Machine(SPACE, seconds, fails=lambda s: "ValueError: no such column")
    with pytest.raises(InputError, match=r"fails as it is.*no such column"):
        searched(machine)
    assert machine.alive == 0


def test_a_job_that_fails_in_every_trial_is_told_with_the_last_reason() -> None:
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


@pytest.mark.parametrize("budget", [1.0, 8.0, 40.0])
def test_a_budget_that_is_too_short_is_refused_with_the_time_needed(budget: float) -> None:
    machine = Machine(SPACE, seconds)
    with pytest.raises(InputError, match=r"budget: .* is too short"):
        searched(machine, budget=budget)
    assert machine.clock.now <= budget
    assert machine.alive == 0


def test_time_that_went_by_before_the_start_is_no_time_that_the_job_needs() -> None:
    machine = Machine(SPACE, seconds)
    machine.clock.now = 50.0  # data, or a wait for another measurement
    with pytest.raises(InputError, match=r"take about .*, and 50 s of it went by before") as late:
        searched(machine, budget=90.0, began=0.0)
    again = Machine(SPACE, seconds)
    with pytest.raises(InputError) as short:
        searched(again, budget=40.0)
    needed = [str(error.value).partition("take about ")[2][:5] for error in (late, short)]
    assert needed[0] == needed[1]


def test_a_trial_that_hangs_is_given_up_and_the_study_goes_on() -> None:
    slow = {"batch": 8, "fused": True, "dtype": "bf16"}
    machine = Machine(SPACE, lambda s: 1e6 if s == slow else seconds(s))
    study = searched(machine, budget=900.0)
    given_up = [r for r in study.rows if r["state"] == "failed"]
    assert [r["settings"] for r in given_up] == [slow]
    assert given_up[0]["why"] == "given up: far too slow"
    assert machine.clock.now <= 900 * 0.75
    assert machine.alive == 0


def test_the_time_being_up_is_no_measurement() -> None:
    machine = Machine(SPACE, seconds)
    with ReferencePair(machine.start, SPACE.start, 2, clock=machine.clock) as bench:
        bench.open(100.0)
        with pytest.raises(OutOfTimeError):
            bench.measure(SPACE.start, machine.clock.now + 1.0)


def test_a_study_that_was_killed_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    machine = Machine(SPACE, seconds, noise=0.01)
    path = tmp_path / "record.jsonl"
    with ExperimentRecord(path, "key") as record:
        first = searched(machine, record=record, most=4, proposer=any_order)
    with path.open("ab") as file:
        file.write(b'{"event": "trial", "settings": {"bat')  # the line in which it was killed
    again = Machine(SPACE, seconds, noise=0.01)
    with ExperimentRecord(path, "key") as record:
        none = {"room": lambda: 0.0}  # for a final
        second = searched(again, record=record, most=7, proposer=any_order, **none)
    assert second.rows[:4] == first.rows
    assert len(again.started) == 1 + 3  # the start, no noise again, three new trials
    points = [t.point for t in second.tried]
    assert len(points) == len(set(points)) == 7


def test_the_best_so_far_is_handed_out_after_every_trial() -> None:
    seen: list[float] = []
    searched(
        Machine(SPACE, seconds, noise=0.01),
        most=5,
        on_trial=lambda study: seen.append(max(t.value or 0 for t in study.tried)),
    )
    assert len(seen) == 5
    assert seen == sorted(seen)


def test_memory_as_objective_leads_to_the_smallest() -> None:
    machine = Machine(SPACE, seconds, memory=lambda s: 1e9 * (8 - s["batch"] / 2))
    study = searched(machine, objective="memory", most=15)
    assert study.final == {}
    assert SPACE.settings(study.leaders()[0])["batch"] == 8


def test_two_processes_of_one_study_take_turns_and_lose_nothing(tmp_path: Path) -> None:
    """The second one waits, and goes on from what the first has left."""
    machine, told = Machine(SPACE, seconds, noise=0.01), list[str]()

    class Noting(SilentProgress):
        def tell(self, text: str) -> None:
            told.append(text)
            inside.set()

    inside, rows = threading.Event(), list[int]()

    def second() -> None:
        with StudyFolder(tmp_path, {}, Noting()).opened(fresh=False) as record:
            rows.append(sum(e["event"] == "trial" for e in record.events))

    with StudyFolder(tmp_path, {}, SilentProgress()).opened(fresh=False) as record:
        other = threading.Thread(target=second)
        other.start()
        assert inside.wait(60.0)
        searched(machine, record=record, most=4, proposer=any_order)
        assert not rows
    other.join(60.0)
    assert rows == [4]
    assert "waiting for" in told[0]


def test_importance_names_the_decision_that_matters_and_adds_up() -> None:
    measured = [(p, -math.log(seconds(SPACE.settings(p)))) for p in SPACE.points()]
    shares = importance(SPACE, measured, noise=0.01)
    assert next(iter(shares)) == max(shares, key=lambda name: shares[name])
    assert shares["batch"] > shares["dtype"] > shares["fused"] > 0  # 1.8, 1.7 and 1.25 times
    assert math.fsum(shares.values()) == pytest.approx(1, abs=1e-3)


def test_the_page_draws_and_escapes(tmp_path: Path) -> None:
    study = searched(Machine(SPACE, seconds, fails=lambda s: "<b>" if s["batch"] == 2 else None))
    found = study_document(study, None, None, {"batch": 0.7, "<i>": 0.3}, {"title": "t"})
    text = page(found, "a & b", result_sentence(found))
    assert found["final"][0]["changes"] == SPACE.changes(study.leaders(1)[0])
    assert "<h2>Final</h2>" in text
    assert "<h2>Final</h2>" not in page({**found, "final": []}, "a", result_sentence(found))
    assert "a &amp; b" in text
    assert "<b>" not in text
    assert "<i>" not in text
    assert text.count("<svg") == 2
    assert "keep the settings" in result_sentence(found)


def test_a_small_budget_is_spent_as_long_as_nothing_is_better() -> None:
    """Of a final comparison that has nobody to fight with, little is kept."""
    machine = Machine(SPACE, lambda s: 1.0, noise=0.05)
    machine.seconds = lambda s: 1.0 if s == SPACE.settings(SPACE.start) else 1.1
    study = searched(machine, budget=150.0, proposer=any_order)
    assert study.ended == "the budget's time for trials was used"
    assert not study.leaders()
    assert machine.clock.now > 0.7 * 150
    assert len(study.rows) >= 2


def test_two_changes_are_tried_before_a_final_takes_its_share() -> None:
    machine = Machine(SPACE, seconds, noise=0.01)
    study = searched(machine, budget=105.0)
    assert len(study.rows) >= 2
    assert machine.clock.now + 3.5 * 5.0 <= 105.0  # a final comparison has the time to start


def test_what_a_larger_budget_would_try_is_named() -> None:
    study = searched(Machine(SPACE, seconds, noise=0.01), budget=130.0)
    found = study_document(study, None, None, {}, {"title": "t"})
    assert 1 <= len(found["next"]) <= 2
    tried = [row["changes"] for row in study.rows]
    assert not [changes for changes in found["next"] if changes in tried]
    assert all(SPACE.distance(*pair) > 1 for pair in itertools.combinations(study.next, 2))
    first = ", ".join(f"{k}={v}" for k, v in found["next"][0].items())
    assert f"A larger budget would try: {first}" in result_sentence(found)
    whole = searched(Machine(SPACE, seconds, noise=0.01))
    assert whole.ended != "the budget's time for trials was used"
    assert "larger budget" not in result_sentence(
        study_document(whole, None, None, {}, {"title": "t"})
    )
    assert result_sentence({k: v for k, v in found.items() if k != "next"})  # a study of before
