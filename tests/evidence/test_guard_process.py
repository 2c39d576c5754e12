"""Orders to processes: who shares one, and what is known after one has died."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.evidence import guard_process
from hasten.evidence.guard_process import Order, Processes
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.recompute import Recompute
from hasten.techniques.threads import Threads

# Stands for ``python -m hasten.guarding RECIPE FOLDER ORDERS ANSWERS``.
FAKE = """#!{python}
import json, os, signal, sys, time
orders, answers = sys.argv[5], sys.argv[6]
with open(answers, "a", buffering=1) as out:
    for order in json.load(open(orders)):
        if order["do"] == "die":
            print("last words", flush=True)
            os._exit(7)
        if order["do"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if order["do"] == "half":
            out.write('{{"cut')
            out.flush()
            os._exit(0)
        if order["do"] == "hang":
            time.sleep(60)
        out.write(json.dumps({{"pid": os.getpid(), "variable": os.environ.get("X")}}) + "\\n")
"""


@pytest.fixture
def performs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = tmp_path / "python"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    monkeypatch.setattr(guard_process.sys, "executable", str(fake))

    def environ(plan: Plan) -> dict[str, str]:
        return {"X": "threads" if "threads" in str(plan) else "plain"}

    def perform(*orders: Order, patience: float = 30.0) -> list[dict[str, Any]]:
        processes = Processes(tmp_path / "recipe.yaml", tmp_path / "guard", environ, patience)
        return processes(orders)

    return perform


def order(do: str = "go", *techniques: Any) -> Order:
    return Order(do, Plan(), Plan(techniques))


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
