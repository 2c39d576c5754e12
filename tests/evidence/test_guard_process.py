"""Orders to processes: who shares one, what ranks say together, what is known after a death."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.measure.crew import ALONE
from hasten.measure.quality.guard_process import CheckRequest, Processes, together
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.recompute import Recompute
from hasten.techniques.threads import Threads

# Stands for ``python -m hasten.measure.quality RECIPE FOLDER ORDERS ANSWERS``.
FAKE = """
import json, os, signal, sys, time
inbox, outbox = os.fdopen(int(sys.argv[-2])), os.fdopen(int(sys.argv[-1]), "w", buffering=1)
rank = os.environ.get("PLACE", "")
def say(**found):
    outbox.write(json.dumps(found) + "\\n")
if os.environ.get("X") == "never ready":
    sys.exit("no such data")
say(ready=True)
for line in inbox:
    order = json.loads(line)
    here = order.get("on", rank) == rank
    if order["do"] == "die" and here:
        print("last words", flush=True)
        os._exit(7)
    if order["do"] == "killed" and here:
        os.kill(os.getpid(), signal.SIGKILL)
    if order["do"] == "half" and here:
        outbox.write('{"cut')
        outbox.flush()
        os._exit(0)
    if order["do"] == "hang" and here:
        time.sleep(60)
    if order["do"] == "refuse" and here:
        say(refused="not with this plan")
        continue
    say(pid=os.getpid(), variable=os.environ.get("X"), rank=rank, error=0.5 if rank == "1" else 0.1)
"""


@pytest.fixture
def performs(tmp_path: Path) -> Any:
    def environ(plan: Plan) -> dict[str, str]:
        return {"X": "threads" if "threads" in str(plan) else "plain"}

    def places(folder: Path) -> Sequence[Mapping[str, str]]:
        assert folder.is_dir()
        return [{"PLACE": "0"}, {"PLACE": "1"}]

    def perform(
        *orders: CheckRequest, patience: float = 30.0, ranks: int = 1, variable: str | None = None
    ) -> list[dict[str, Any]]:
        wanted = environ if variable is None else lambda plan: {"X": variable}
        meet = places if ranks > 1 else lambda folder: ALONE
        recipe, folder = tmp_path / "recipe.yaml", tmp_path / "guard"
        return Processes(recipe, folder, wanted, patience, meet, ("-c", FAKE))(orders)

    return perform


def order(do: str = "go", *techniques: Any, alone: bool = False, **details: Any) -> CheckRequest:
    return CheckRequest(do, Plan(), Plan(techniques), details, alone)


def test_plans_that_differ_in_what_a_process_keeps_have_processes_of_their_own(
    performs: Any,
) -> None:
    plain, loss, threads, more = performs(
        order(), order("go", LabelledTokenLoss()), order("go", Threads()), order("go", Recompute())
    )
    assert plain["pid"] == loss["pid"] == more["pid"] != threads["pid"]
    assert (plain["variable"], threads["variable"]) == ("plain", "threads")


@pytest.mark.parametrize(
    ("do", "why"), [("die", "code 7: last words"), ("killed", "memory"), ("half", "code 0")]
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
    (found,) = performs(order("hang"), patience=0.5)
    assert "hangs" in found["failed"]


def test_it_is_known_whether_a_process_died_on_the_way(tmp_path: Path) -> None:
    def after(do: str) -> bool:
        perform = Processes(tmp_path / "r.yaml", tmp_path, lambda plan: {}, entry=("-c", FAKE))
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
    assert together([{"error": 0.0}, {"refused": "why"}]) == {"failed": "why"}


def test_weights_of_all_ranks_count_and_a_part_has_no_error_of_its_own() -> None:
    first = {"losses": ["0x1p+0"], "weights": "aa"}
    assert together([first, {**first, "weights": "ab"}])["weights"] == ["aa", "ab"]
    whole = {"error": 0.2, "worst": 0.3, "loss_error": 0.0, "ranks": 2}
    assert together([whole, {"ranks": 2}]) == whole


def test_an_error_that_is_not_a_number_is_the_furthest_off() -> None:
    assert math.isnan(together([{"error": 9.0}, {"error": math.nan}])["error"])
    assert together([{"change": 0.0}, {"change": 1.0, "document": 3}])["document"] == 3
