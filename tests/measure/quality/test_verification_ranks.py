"""What a verification says of a job on several ranks, from answers that are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.measure.quality.runner import CheckRequest
from hasten.measure.quality.verification import VerificationDesign, verification_report
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.optimizer import FusedAdamW

PLAN = Plan([Packed(), DDP(), Half(), FusedAdamW()])
ANSWERS: dict[str, dict[str, Any]] = {
    "reference": {"loss": 2.0, "examples": 8, "tokens": 90, "layers": 2},
    "leak": {"change": 0.0, "documents": 4, "document": 0},
    "update": {"error": 0.0, "floor": 0.0, "steps": 3},
    "losses": {"losses": ["0x1p+1"] * 3, "weights": ["a", "a"]},
}
Wrong = Callable[[CheckRequest], dict[str, Any]]


class Ranks:
    """Answers every order as an honest plan would, but for what ``wrong`` says of it."""

    def __init__(self, wrong: Wrong = lambda order: {}) -> None:
        self.wrong, self.orders = wrong, list[CheckRequest]()

    def __call__(self, orders: Sequence[CheckRequest]) -> list[dict[str, Any]]:
        self.orders += orders
        return [self.answer(order) for order in orders]

    def answer(self, order: CheckRequest) -> dict[str, Any]:
        error = 2e-3 if sends(order) else 1e-7
        gradient = {"error": error, "worst": error, "name": "w", "loss_error": 1e-8}
        gradient |= {"micro_batches": 1, "ranks": 1 if order.alone else 2}
        return {**ANSWERS.get(order.do, gradient), **self.wrong(order)}


def sends(order: CheckRequest) -> bool:
    return "half" in {t.name() for t in order.plan}


def off(size: float) -> dict[str, Any]:
    return {"error": size, "worst": size}


def report(wrong: Wrong = lambda order: {}, ranks: int = 2) -> dict[str, dict[str, Any]]:
    found = verification_report(PLAN, Ranks(wrong), VerificationDesign(), ranks=ranks)
    split = next(r for r in found["invariance"] if r["what"].startswith("split over"))
    return {**{row["technique"]: row for row in found["verification"]}, "split": split}


def test_one_process_makes_what_needs_no_ranks_and_all_make_the_rest() -> None:
    perform = Ranks()
    verification_report(PLAN, perform, VerificationDesign(), ranks=2)
    alone = [order for order in perform.orders if order.alone]
    assert {order.do for order in alone} == {"reference", "gradient", "update"}
    assert all("ddp" not in str(order.plan) for order in alone)
    shared = [order for order in perform.orders if not order.alone]
    assert {order.do for order in shared} == {"gradient", "leak"}
    assert sum(sends(order) for order in shared if order.do == "gradient") == 1


def test_on_one_rank_every_order_may_share_a_process() -> None:
    perform = Ranks()
    verification_report(PLAN, perform, VerificationDesign())
    assert not any(order.alone for order in perform.orders)


def test_an_honest_plan_on_two_ranks_is_equal_throughout() -> None:
    found = report()
    assert {row["verdict"] for row in found.values()} == {"equal"}
    assert found["split"]["what"] == "split over 2 ranks"
    assert "in one process off by 1e-07" in found["split"]["text"]
    assert found["half"]["allowed"] > found["half"]["measured"] == 2e-3


def test_a_gradient_that_ranks_get_wrong_is_theirs() -> None:
    found = report(lambda o: off(0.5) if o.do == "gradient" and not o.alone else {})
    assert found["split"]["verdict"] == "differs"
    assert "not so in one process" in found["split"]["text"]
    assert found["half"]["verdict"] == "undecided"
    assert found["ddp"]["verdict"] == "differs"


def test_a_gradient_that_is_wrong_in_one_process_too_is_not_the_ranks_fault() -> None:
    found = report(lambda o: off(0.5) if o.do == "gradient" and len(o.plan) else {})
    assert found["split"]["verdict"] == "differs"
    assert "nor is it equal in one process" in found["split"]["text"]


@pytest.mark.parametrize(("size", "verdict"), [(3e-3, "equal"), (2e-2, "differs")])
def test_a_wire_is_judged_by_what_sixteen_bits_can_hold(size: float, verdict: str) -> None:
    row = report(lambda o: off(size) if sends(o) and o.do == "gradient" else {})["half"]
    assert (row["verdict"], row["measured"]) == (verdict, size)


def test_ranks_that_did_not_take_part_prove_nothing() -> None:
    found = report(lambda o: {"ranks": 1} if o.do == "gradient" else {})
    assert found["split"]["verdict"] == found["half"]["verdict"] == "not tested"
    assert "1 of 2 ranks took part" in found["split"]["text"]


def test_ranks_that_failed_are_said_to_have() -> None:
    why = {"failed": "rank 1: the process ended with code -9"}
    found = report(lambda o: why if not o.alone else {})
    assert found["split"]["verdict"] == found["half"]["verdict"] == "not tested"
    assert "rank 1" in found["split"]["text"]
    assert "rank 1" in found["half"]["text"]


def test_with_one_process_layout_wire_and_split_are_not_tested() -> None:
    found = report(ranks=1)
    for name in ("ddp", "half", "split"):
        assert found[name]["verdict"] == "not tested"
        assert "nproc" in found[name]["text"]
    assert found["packed"]["verdict"] == "equal"
