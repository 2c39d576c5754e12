"""What decides a training is noted in its checkpoints, and may not change in silence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.core.job import GlobalBatch, Schedule, Stop
from hasten.core.plan import Plan
from hasten.core.resume_check import changes_since, check_same_job, resume_check
from hasten.core.setup import Setup, prepare
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import TopK
from hasten.techniques.objective import MultiTokenPrediction
from hasten.techniques.optimizer import Muon
from hasten.techniques.sampler import LengthGrouped
from tiny import job_context, language_job

COSINE, WSD = Schedule("cosine", 2, 10), Schedule("wsd", 2, 10)


def setup_of(*plan: Technique, **changes: Any) -> Setup:
    job = replace(language_job(), **changes)
    return prepare(job, Plan(plan), job_context(job), Path("nowhere"))


def record(*plan: Technique, **changes: Any) -> dict[str, Any]:
    return resume_check(setup_of(*plan, **changes))


def test_a_record_is_json_and_is_the_same_after_a_trip_to_disk() -> None:
    found = record(LengthGrouped(), Checkpoints(2), schedule=COSINE, terms={"data": (1, 2)})
    assert json.loads(json.dumps(found)) == found
    assert found["lr_schedule"] == "cosine"
    assert found["total_steps"] == 10
    assert found["plan"]["checkpoints"]["settings"]["interval"] == 2
    assert check_same_job(found, found, step=5) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"seed": 1}, {"seed": 2}, "seed was 1 and is 2 now"),
        (
            {"batch": GlobalBatch(4)},
            {"batch": GlobalBatch(8)},
            "global_batch_size was 4 and is 8 now",
        ),
        ({"max_grad_norm": 1.0}, {"max_grad_norm": None}, "max_grad_norm was 1.0 and is none now"),
        ({"terms": {"data": {"n": 1}}}, {"terms": {"data": {"n": 2}}}, "data was n=1 and is n=2"),
        ({"schedule": COSINE}, {"schedule": WSD}, "lr_schedule was cosine and is wsd now"),
        (
            {"schedule": COSINE},
            {"schedule": replace(COSINE, total_steps=20)},
            r"total_steps \(of lr_schedule cosine\) was 10 and is 20 now",
        ),
        (
            {"schedule": COSINE},
            {"schedule": replace(COSINE, warmup_steps=4)},
            "warmup_steps was 2 and is 4 now",
        ),
    ],
)
def test_what_decides_the_training_is_refused_with_both_values(
    before: dict[str, Any], after: dict[str, Any], said: str
) -> None:
    with pytest.raises(
        InputError, match=f"of another training: {said}.*; continue with the old settings"
    ):
        check_same_job(record(**before), record(**after), step=5)


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(InputError, match="seed was 3 and is 1 now, max_grad_norm was"):
        check_same_job(record(), record(seed=1, max_grad_norm=0.5), step=5)


@pytest.mark.parametrize(
    ("schedule", "longer", "step"),
    [
        (Schedule("constant", 2, 10), {"total_steps": 20}, 9),
        (WSD, {"total_steps": 20}, 9),  # it holds its peak up to the tenth step
        (COSINE, {"total_steps": 20}, 2),  # in the warm-up
        (COSINE, {"total_steps": 20, "kind": "linear"}, 2),
    ],
)
def test_a_schedule_may_change_where_the_steps_that_are_done_had_the_same_rate(
    schedule: Schedule, longer: dict[str, Any], step: int
) -> None:
    before = record(schedule=schedule, stop=Stop(steps=10))
    after = record(schedule=replace(schedule, **longer), stop=Stop(steps=20))
    found = check_same_job(before, after, step)
    assert "max_steps was 10 and is 20 now" in found
    assert len(found) == 1 + len(longer)


def test_a_step_number_out_of_a_forged_checkpoint_costs_no_time() -> None:
    other = record(schedule=Schedule("constant", 2, 20))
    assert check_same_job(record(schedule=Schedule("constant", 2, 10)), other, step=10**12)


def test_techniques_that_keep_the_mathematics_may_change_and_it_is_told() -> None:
    found = check_same_job(record(Checkpoints(2)), record(Checkpoints(5), Packed()), step=1)
    assert [said.split(" was ")[0] for said in found] == [
        "plan: checkpoints: interval",
        "plan: packed",
    ]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((), (Muon(),), r"plan: muon was off and is on \(momentum=0.95\) now"),
        ((Muon(),), (), r"plan: muon was on \(.*\) and is off now"),
        ((Muon(),), (Muon(momentum=0.9),), "plan: muon: momentum was 0.95 and is 0.9 now"),
        ((), (LengthGrouped(),), "plan: length_grouped was off"),
    ],
)
def test_techniques_of_other_mathematics_may_not(
    before: tuple[Technique, ...], after: tuple[Technique, ...], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        check_same_job(record(*before), record(*after), step=1)


def test_a_setting_that_its_card_lets_change_may() -> None:
    ahead = MultiTokenPrediction(weight=0.3), MultiTokenPrediction(weight=0.1)
    (said,) = check_same_job(record(ahead[0]), record(ahead[1]), step=1)
    assert said == "plan: multi_token_prediction: weight was 0.3 and is 0.1 now"
    with pytest.raises(InputError, match="depth was 1 and is 2 now"):
        check_same_job(record(ahead[0]), record(MultiTokenPrediction(depth=2)), step=1)


def test_a_wire_may_go_where_one_rank_is_left_and_the_number_of_ranks_is_told() -> None:
    setup = setup_of()
    setup.plan = Plan([TopK()])
    setup.context = replace(setup.context, world=World(size=2))
    two = resume_check(setup)
    found = check_same_job(two, record(), step=1)
    assert found[0] == "ranks was 2 and is 1 now"
    assert found[1].startswith("plan: topk was on")
    setup.plan = Plan()
    with pytest.raises(InputError, match="plan: topk was on"):
        check_same_job(two, resume_check(setup), step=1)


def resumed(
    schedule: Schedule, longer: Schedule, step: int, stop: int = 20
) -> tuple[Schedule, list[str]]:
    """The schedule after a run of 10 steps resumes after ``step`` with another end."""
    meta = {
        "job": record(schedule=schedule, stop=Stop(steps=10)),
        "progress": {"step": step},
    }
    setup = setup_of(schedule=longer, stop=Stop(steps=stop))
    changes = changes_since(meta, setup)
    return setup.job.schedule, changes


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_every_schedule_is_stretched_where_the_end_alone_changes(kind: Any) -> None:
    old = Schedule(kind, 2, 10, floor=0.1)
    longer = replace(old, total_steps=20, warmup_steps=4)  # a warm-up of 20 % of all steps
    schedule, changes = resumed(old, longer, 10)
    assert schedule == longer
    assert "max_steps was 10 and is 20 now" in changes
    if kind != "constant":
        assert f"the next step has {longer(10):.3g} of the peak" in changes[-1]
    with pytest.raises(InputError, match="warmup_steps was 2 and is 7 now"):
        resumed(old, replace(longer, warmup_steps=7), 10)
    with pytest.raises(InputError, match=r"min_lr_ratio was 0\.1 and is 0\.2 now"):
        resumed(old, replace(longer, floor=0.2), 10)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_extend_constant_keeps_the_last_rate_through_further_resumes(kind: Any) -> None:
    old = Schedule(kind, 2, 10, floor=0.1, extend="constant")
    schedule, _ = resumed(old, replace(old, total_steps=20), 8)
    assert [schedule(s) for s in range(8)] == [old(s) for s in range(8)]
    assert {schedule(s) for s in range(8, 20)} == {old(7)}
    meta = {"job": record(schedule=schedule, stop=Stop(steps=20)), "progress": {"step": 15}}
    for steps in (20, 30):
        again = setup_of(schedule=replace(old, total_steps=steps), stop=Stop(steps=steps))
        changes_since(meta, again)
        assert [again.job.schedule(s) for s in range(30)] == [schedule(s) for s in range(30)]


def test_the_same_end_extends_no_schedule() -> None:
    old = Schedule("cosine", 2, 10, extend="constant")
    assert resumed(old, old, 10, 10)[0] == old
