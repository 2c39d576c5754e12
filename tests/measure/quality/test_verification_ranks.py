"""Verification over processes: shared starts, two real ranks, made-up answers of several."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.machine import environment
from hasten.machine.environment import World
from hasten.measure.quality.checks import reference
from hasten.measure.quality.requirements import COMMUNICATION, FLOAT32, LEAK_FLOAT32
from hasten.measure.quality.runner import CheckRequest, QualityRunner
from hasten.measure.quality.verification import VerificationDesign, verification_report
from hasten.measure.worker import QualityJob
from hasten.measure.workers import merge_replies
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.allocator import Allocator
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half
from hasten.techniques.communication.local import LocalSteps
from hasten.techniques.feed import Prefetched
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import FusedAdamW
from hasten.techniques.precision import BF16MasterWeights
from measure.quality.verify_plants import Louder, Unscaled, bench
from ranks import on_ranks

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_techniques_require_is_proven_before_the_invariances(ranks: int) -> None:
    """The orders that are answered until the budget ends are those that every technique needs."""
    plan = Plan([Packed(), LabelledTokenLoss(), BF16MasterWeights(), FusedAdamW(), Prefetched()])

    def verdicts(count: float) -> tuple[set[str], list[CheckRequest]]:
        perform = Ranks(lambda o: {} if perform.orders.index(o) < count else {"failed": "no time"})
        found = verification_report(plan, perform, VerificationDesign(), ranks=ranks)
        return {row["verdict"] for row in found["verification"]}, perform.orders

    _, orders = verdicts(math.inf)
    enough = next(count for count in range(len(orders)) if verdicts(count)[0] == {"equal"})
    rest = [order.do if order.do == "leak" else order.details["cut"] for order in orders[enough:]]
    assert rest == ["whole", "single", "whole", "leak", "leak", "leak"]  # the second is padded


def test_each_example_in_a_micro_batch_is_checked_on_several_ranks_too() -> None:
    perform = Ranks(lambda o: off(0.5) if o.details.get("cut") == "single" else {})
    found = verification_report(PLAN, perform, VerificationDesign(), ranks=2)["invariance"]
    verdicts = {row["what"]: row["verdict"] for row in found}
    assert verdicts.pop("each example in a micro-batch") == "differs"
    assert set(verdicts.values()) == {"equal"}


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


JOB = "simulate_job:checks"


@pytest.fixture
def performs(tmp_path: Path) -> Any:
    def environ(plan: Plan) -> dict[str, str]:
        return {"X": "allocator" if "allocator" in str(plan) else "plain"}

    def perform(
        *requests: CheckRequest, timeout: float = 30.0, ranks: int = 1, variable: str | None = None
    ) -> list[dict[str, Any]]:
        def wanted(plan: Plan) -> dict[str, str]:
            return environ(plan) if variable is None else {"X": variable}

        recipe, folder = tmp_path / "recipe.yaml", tmp_path / "verification"
        return QualityRunner(recipe, folder, wanted, timeout, ranks, JOB)(requests)

    return perform


def order(do: str = "go", *techniques: Any, alone: bool = False, **details: Any) -> CheckRequest:
    return CheckRequest(do, Plan(), Plan(techniques), details, alone)


def test_plans_that_differ_in_what_a_process_keeps_have_processes_of_their_own(
    performs: Any,
) -> None:
    plain, loss, allocator, more = performs(
        order(),
        order("go", LabelledTokenLoss()),
        order("go", Allocator()),
        order("go", ActivationCheckpointing()),
    )
    assert plain["pid"] == loss["pid"] == more["pid"] != allocator["pid"]
    assert (plain["variable"], allocator["variable"]) == ("plain", "allocator")


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
    perform = QualityRunner(path, tmp_path, lambda plan: {}, job=JOB, budget_seconds=3)
    found = perform([order("hang"), order()])
    assert [answer["failed"] for answer in found] == ["no time: the budget of 3 s is used up"] * 2
    assert perform.broken
    assert time.monotonic() - began < 10  # and nobody waits for the process


def test_it_is_known_whether_a_process_died_on_the_way(tmp_path: Path) -> None:
    def after(do: str) -> bool:
        path = tmp_path / "r.yaml"
        perform = QualityRunner(path, tmp_path, lambda plan: {}, job=JOB)
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


HONEST = (Packed(), GradientAccumulation(micro_batch_size=3), LabelledTokenLoss())
GRADIENTS: dict[str, tuple[tuple[Technique, ...], str, bool]] = {  # plan, cut, padded
    "planned": (HONEST, "planned", False),
    "whole": (HONEST, "whole", False),
    "single": (HONEST, "single", False),
    "padded": (HONEST, "whole", True),
    "sharded": ((Packed(), FSDP2()), "planned", False),
    "cut layers": ((Packed(), TensorParallel()), "planned", False),
    "stages": ((Packed(), Pipeline()), "planned", False),
    "rounded": ((Packed(), Half(minimum=0)), "planned", False),
    "unscaled": ((Packed(), Unscaled()), "planned", False),
    "louder": ((Packed(), Louder()), "planned", False),
}


def proofs(world: World) -> dict[str, Any]:
    """Every kind of order; the reference lies in the folder already."""
    place = environment.variable("HASTEN_RENDEZVOUS")
    assert place is not None
    job = QualityJob(bench(Path(place).parent, world=world), alone=False)

    def asked(do: str, *techniques: Technique, **details: Any) -> dict[str, Any]:
        return job.handle(do, {"plan": Plan(techniques).to_list(), **details})

    found = {
        name: asked("gradient", *plan, cut=cut, padded=padded, step=3)
        for name, (plan, cut, padded) in GRADIENTS.items()
    }
    found["leak"] = asked("leak", Packed())
    found["losses"] = asked("losses", Packed(), steps=2)
    found["again"] = asked("losses", Packed(), steps=2)
    found["train"] = asked("train", Packed(), seed=1, tokens=600)
    found["apart"] = asked("train", Packed(), LocalSteps(every=2), seed=1, tokens=600)
    return found


Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("proofs")
    reference(bench(folder), Plan())
    return on_ranks(proofs, folder)


@pytest.fixture(scope="module")
def found(ranks: list[Found]) -> Found:
    return {name: merge_replies([rank[name] for rank in ranks]) for name in ranks[0]}


@pytest.mark.parametrize(
    "way", ["planned", "whole", "single", "padded", "sharded", "cut layers", "stages"]
)
def test_records_dealt_to_ranks_have_the_gradient_of_one_process(found: Found, way: str) -> None:
    assert found[way]["ranks"] == 2
    assert found[way]["error"] < FLOAT32 / 10
    assert found[way]["loss_error"] < 1e-6


def test_every_replica_is_looked_at_and_of_parts_the_whole(ranks: list[Found]) -> None:
    assert all("error" in rank["planned"] for rank in ranks)
    assert ["error" in rank["sharded"] for rank in ranks] == [True, False]


def test_numbers_that_travel_in_sixteen_bits_round_and_no_more(found: Found) -> None:
    assert FLOAT32 < found["rounded"]["error"] < COMMUNICATION


def test_a_mean_taken_for_a_sum_and_a_wire_that_adds_are_seen(found: Found) -> None:
    assert found["unscaled"]["error"] == pytest.approx(0.5, rel=1e-3)
    assert found["louder"]["error"] == pytest.approx(0.02, rel=1e-2)
    assert found["louder"]["error"] > COMMUNICATION


def test_documents_keep_their_losses_and_two_runs_their_bits(found: Found) -> None:
    assert found["leak"]["change"] < LEAK_FLOAT32
    assert found["losses"] == found["again"]
    assert len(set(found["losses"]["weights"])) == 1  # replicas


def test_a_training_ends_at_its_tokens_and_ranks_apart_near_them(found: Found) -> None:
    assert found["train"]["tokens"] == 600
    assert found["train"]["eval_loss"] > 0
    apart = found["apart"]
    assert "failed" not in apart, apart
    assert apart["eval_loss"] > 0
    assert 0.5 * 600 < apart["tokens"] < 2 * 600
