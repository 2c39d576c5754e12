"""Arms that take turns: one real experiment, and the rules with arms that only pretend."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Proof, Technique
from hasten.evidence import ablation
from hasten.evidence.ablation import Arm, Design, compare
from hasten.evidence.findings import report_of
from hasten.evidence.report_schema import read_report
from hasten.evidence.trial import TrialFailedError
from hasten.recipe.schema import Recipe
from hasten.run import ready
from hasten.techniques.collate import Packed


@dataclass(frozen=True)
class UnheardOf(Technique):
    """Stands in no catalogue, so an arm's process can't know it."""

    slot = Slot.LOSS

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, setup: Any) -> None:
        raise NotImplementedError

    def probe(self, session: Any) -> Proof:
        raise NotImplementedError


PLANS = {
    "baseline": Plan(),
    "packed": Plan([Packed()]),
    "unheard": Plan([UnheardOf()]),
}
DESIGN = Design(rounds=2, steps=1, warmup=1, evaluations=1)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A resolved recipe of a job of some seconds, its tokens ready as an experiment needs them."""
    folder = tmp_path_factory.mktemp("job")
    records = [
        {"instruction": f"Add {a} and {b}.", "output": f"{a + b}" + " indeed" * (a % 3)}
        for a in range(8)
        for b in range(5)
    ]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = Recipe(
        model="deepseek-llm-tiny",
        dataset=str(data),
        held_out=4,
        vocabulary=300,
        cutoff_len=32,
        global_batch_size=4,
        max_steps=DESIGN.steps_in_all,
        device="cpu",
        output=str(folder / "out"),
    )
    ready(recipe, lambda text: None)
    resolved = folder / "out" / "data" / "arms.yaml"
    resolved.write_text(recipe.to_yaml())
    return resolved


def kill_in_its_turn(plan: Plan) -> None:
    """Stop the arm's process now and kill it when its order has been given."""
    text = json.dumps(plan.to_list())
    (arm,) = [p for p in psutil.Process().children() if text in p.cmdline()]
    arm.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, lambda: os.kill(arm.pid, signal.SIGKILL)).start()


@pytest.fixture(scope="module")
def measured(recipe: Path) -> dict[str, Arm]:
    """A plain arm, one that is killed in its second round, and one that can't start."""

    def tell(text: str, share: float) -> None:
        assert 0 <= share <= 1
        if text == "round 2/2: packed":
            kill_in_its_turn(PLANS["packed"])

    environ = {"OMP_NUM_THREADS": "1"}
    arms = compare(recipe, PLANS, lambda plan: environ, recipe.parent, DESIGN, tell)
    assert [arm.name for arm in arms] == list(PLANS)
    return {arm.name: arm for arm in arms}


def test_arms_see_equal_tokens_in_every_step(measured: dict[str, Arm]) -> None:
    base, packed = measured["baseline"], measured["packed"]
    assert len(packed.losses) == 2  # the warm-up and the first round; it died in the second
    assert [tokens for tokens, _ in packed.losses] == [tokens for tokens, _ in base.losses[:2]]
    for (_, one), (_, other) in zip(packed.losses, base.losses[:2], strict=True):
        assert one == pytest.approx(other, rel=1e-4)  # the same records and the same weights
    assert packed.steps[0]["slots"] == packed.steps[0]["tokens"] < base.steps[0]["slots"]
    assert packed.held_out[0] == (0, pytest.approx(base.held_out[0][1], rel=1e-4))


def test_an_arm_killed_in_its_turn_is_reported_and_the_others_finish(
    measured: dict[str, Arm],
) -> None:
    base, packed = measured["baseline"], measured["packed"]
    assert packed.failed is not None
    assert "code -9: killed" in packed.failed
    assert base.failed is base.unfinished is None
    assert len(base.rounds) == len(base.steps) == DESIGN.rounds
    assert base.losses[-1][0] == sum(s["tokens"] for s in base.steps) + base.losses[0][0]
    assert [tokens for tokens, _ in base.held_out] == [0, base.losses[-1][0]]
    assert base.samples  # it got as far as writing


def test_an_arm_that_cannot_start_is_reported_with_its_reason(measured: dict[str, Arm]) -> None:
    unheard = measured["unheard"]
    assert unheard.failed is not None
    assert unheard.failed.startswith("plan: no technique is called 'unheard_of'")
    assert not unheard.rounds


def test_the_report_of_it_says_who_failed_and_why(measured: dict[str, Arm]) -> None:
    found = report_of(
        list(measured.values()),
        title="t",
        command="c",
        hardware={},
        versions={},
        recipe={"seed": 0},
    )
    verdicts = [arm["verdict"] for arm in read_report(found)["arms"]]
    assert verdicts[0] == "baseline"
    assert verdicts[1].startswith("failed: the process ended with code -9")
    assert verdicts[2].startswith("failed: plan: no technique is called")


class FakeTrial:
    """Answers like an arm's process; one that is told to may fail at an order."""

    turns: ClassVar[list[str]] = []
    fails: ClassVar[dict[str, str]] = {}  # arm -> the order at which it fails
    ended: ClassVar[list[str]] = []

    def __init__(self, recipe: Path, plan: Plan, environ: Mapping[str, str], log: Path) -> None:
        self.name = ", ".join(t.name() for t in plan) or "baseline"
        self.tokens = 0

    def __enter__(self) -> FakeTrial:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        self.ended.append(self.name)

    def answer(self) -> dict[str, Any]:
        return {"startup_seconds": {"imports": 1.0}}

    def ask(self, what: str, count: int = 0) -> dict[str, Any]:
        if self.fails.get(self.name) == what:
            raise TrialFailedError(f"no {what}")
        if what == "evaluate":
            return {"held_out_loss": 2.0, "tokens": self.tokens}
        if what == "finish":
            return {"acted": [], "samples": []}
        self.turns.append(self.name)
        self.tokens += 10 * count
        step = {"tokens": 10, "slots": 10, "loss": 2.0, "step_seconds": 0.1}
        step |= {"peak_memory_bytes": 100, "tokens_per_second": 100.0}
        return {"steps": [step] * count}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> type[FakeTrial]:
    monkeypatch.setattr(ablation, "Trial", FakeTrial)
    FakeTrial.turns, FakeTrial.fails, FakeTrial.ended = [], {}, []
    return FakeTrial


def pretend(design: Design, folder: Path) -> list[Arm]:
    return compare(folder, PLANS, lambda plan: {}, folder, design)


def test_every_arm_has_every_round_in_an_order_drawn_anew(
    fakes: type[FakeTrial], tmp_path: Path
) -> None:
    arms = pretend(Design(rounds=12, steps=2, warmup=0), tmp_path)
    rounds = [tuple(fakes.turns[i : i + 3]) for i in range(0, 36, 3)]
    assert len(fakes.turns) == 36
    assert all(len(set(names)) == 3 for names in rounds)
    assert len(set(rounds)) > 3
    firsts = Counter(names[0] for names in rounds)
    assert max(firsts.values()) < 12  # no arm always goes first
    assert all(len(arm.rounds) == 12 and len(arm.steps) == 24 for arm in arms)


def test_the_order_of_turns_belongs_to_the_seed(fakes: type[FakeTrial], tmp_path: Path) -> None:
    orders = []
    for seed in (0, 0, 1):
        fakes.turns.clear()
        pretend(Design(rounds=8, seed=seed), tmp_path)
        orders.append(list(fakes.turns))
    assert orders[0] == orders[1] != orders[2]


def test_the_held_out_loss_is_taken_at_the_start_and_evenly_to_the_end() -> None:
    assert Design(rounds=8, evaluations=3).evaluated_rounds == {3, 5, 8}
    assert Design(rounds=2, evaluations=1).evaluated_rounds == {2}
    assert 1 in Design(rounds=1, evaluations=3).evaluated_rounds
    assert Design(evaluations=0).evaluated_rounds == set()


@pytest.mark.parametrize("order", ["evaluate", "steps"])
def test_the_process_of_a_failed_arm_ends_at_once(
    fakes: type[FakeTrial], order: str, tmp_path: Path
) -> None:
    fakes.fails = {"packed": order}
    _, packed, other = pretend(Design(rounds=3), tmp_path)
    assert packed.failed == f"no {order}"
    assert "packed" not in fakes.turns
    assert fakes.ended.index("packed") == 0  # long before the end, when all are ended
    assert len(other.rounds) == 3


def test_an_arm_that_fails_at_the_end_keeps_what_was_measured(
    fakes: type[FakeTrial], tmp_path: Path
) -> None:
    fakes.fails = {"packed": "finish"}
    _, packed, _ = pretend(Design(rounds=3), tmp_path)
    assert (packed.failed, packed.unfinished) == (None, "no finish")
    assert len(packed.rounds) == 3
    assert packed.held_out[-1][1] == 2.0
