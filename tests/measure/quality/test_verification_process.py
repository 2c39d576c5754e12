"""Orders to processes: who shares one, what ranks say together, what is known after a death."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.measure.quality.runner import CheckRequest, QualityRunner
from hasten.measure.workers import merge_replies
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.threads import Threads
from simulation import IMPORTS

JOB = "simulate_job:checks"


@pytest.fixture
def performs(tmp_path: Path) -> Any:
    def environ(plan: Plan) -> dict[str, str]:
        return {"X": "threads" if "threads" in str(plan) else "plain"}

    def perform(
        *requests: CheckRequest, timeout: float = 30.0, ranks: int = 1, variable: str | None = None
    ) -> list[dict[str, Any]]:
        def wanted(plan: Plan) -> dict[str, str]:
            return {**IMPORTS, **(environ(plan) if variable is None else {"X": variable})}

        recipe, folder = tmp_path / "recipe.yaml", tmp_path / "verification"
        return QualityRunner(recipe, folder, wanted, timeout, ranks, JOB)(requests)

    return perform


def order(do: str = "go", *techniques: Any, alone: bool = False, **details: Any) -> CheckRequest:
    return CheckRequest(do, Plan(), Plan(techniques), details, alone)


def test_plans_that_differ_in_what_a_process_keeps_have_processes_of_their_own(
    performs: Any,
) -> None:
    plain, loss, threads, more = performs(
        order(),
        order("go", LabelledTokenLoss()),
        order("go", Threads()),
        order("go", ActivationCheckpointing()),
    )
    assert plain["pid"] == loss["pid"] == more["pid"] != threads["pid"]
    assert (plain["variable"], threads["variable"]) == ("plain", "threads")


@pytest.mark.parametrize(
    ("do", "why"),
    [("die", "code 7: last words"), ("killed", "memory"), ("raise", "no such gradient")],
)
def test_an_order_that_ends_the_process_is_told_from_the_others(
    performs: Any, do: str, why: str
) -> None:
    before, dead, after = performs(order(), order(do), order())
    assert why in dead["failed"]
    assert "pid" in before
    assert "pid" in after
    assert before["pid"] != after["pid"]


def test_a_process_that_hangs_is_ended(performs: Any) -> None:
    (found,) = performs(order("hang"), timeout=0.5)
    assert "hangs" in found["failed"]


def test_what_a_budget_has_no_time_for_is_answered_so(tmp_path: Path) -> None:
    path, began = tmp_path / "r.yaml", time.monotonic()
    perform = QualityRunner(path, tmp_path, lambda plan: IMPORTS, job=JOB, budget_seconds=3)
    found = perform([order("hang"), order()])
    assert [answer["failed"] for answer in found] == ["no time: the budget of 3 s is used up"] * 2
    assert perform.broken
    assert time.monotonic() - began < 10  # and nobody waits for the process


def test_it_is_known_whether_a_process_died_on_the_way(tmp_path: Path) -> None:
    def after(do: str) -> bool:
        path = tmp_path / "r.yaml"
        perform = QualityRunner(path, tmp_path, lambda plan: IMPORTS, job=JOB)
        perform([order(), order(do)])
        return perform.broken

    assert [after(do) for do in ("go", "refuse", "die")] == [False, False, True]


def test_an_order_that_is_refused_costs_no_process(performs: Any) -> None:
    before, refused, after = performs(order(), order("refuse"), order())
    assert refused == {"failed": "not with this plan"}
    assert before["pid"] == after["pid"]


def test_processes_that_never_get_ready_answer_every_order_with_the_reason(performs: Any) -> None:
    found = performs(order(), order(), variable="never ready")
    assert [answer["failed"] for answer in found] == [
        "the process ended with code 1: no such data"
    ] * 2


def test_ranks_are_given_the_same_orders_and_some_are_one_process_s(performs: Any) -> None:
    alone, shared, again = performs(order(alone=True), order(), order(alone=True), ranks=2)
    assert alone["rank"] == again["rank"] == ""
    assert alone["pid"] == again["pid"]
    assert (shared["rank"], shared["error"]) == ("1", 0.5)  # the rank that is furthest off


@pytest.mark.parametrize("do", ["die", "killed"])
def test_a_rank_that_ends_is_named_and_the_rest_goes_on_in_fresh_ranks(
    performs: Any, do: str
) -> None:
    before, dead, after = performs(order(), order(do, on="1"), order(), ranks=2)
    assert dead["failed"].startswith("rank 1: the process ended with code ")
    assert before["pid"] != after["pid"]


def test_what_one_rank_refuses_is_refused() -> None:
    assert merge_replies([{"error": 0.0}, {"refused": "why"}]) == {"failed": "why"}


def test_weights_of_all_ranks_count_and_a_part_has_no_error_of_its_own() -> None:
    first = {"losses": ["0x1p+0"], "weights": "aa"}
    assert merge_replies([first, {**first, "weights": "ab"}])["weights"] == ["aa", "ab"]
    whole = {"error": 0.2, "worst": 0.3, "loss_error": 0.0, "ranks": 2}
    assert merge_replies([whole, {"ranks": 2}]) == whole


def test_an_error_that_is_not_a_number_is_the_furthest_off() -> None:
    assert math.isnan(merge_replies([{"error": 9.0}, {"error": math.nan}])["error"])
    assert merge_replies([{"change": 0.0}, {"change": 1.0, "document": 3}])["document"] == 3
