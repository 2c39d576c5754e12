"""The benchmark of tunings: winners are paired, equal plans have one variant, problems are
sound.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from sample_data import STDLIB

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from tuner import real
from tuner.problems import PROBLEMS, wide

from hasten.core.plan import Plan
from hasten.measure.ablation import Variant
from hasten.measure.experiment import Measured
from hasten.measure.recipe_experiment import ExperimentSubject, prepared
from hasten.measure.workers import WorkerError, WorkerPool, WorkerSpec
from hasten.progress import SilentProgress
from hasten.recipe.schema import recipe_from
from hasten.recipe.shorthands import catalogue

KINDS = {kind.name(): kind for kind in catalogue()}
RECIPE = {
    **STDLIB,
    "max_steps": 10,
    "global_batch_size": 8,
}


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> ExperimentSubject:
    output = str(tmp_path_factory.mktemp("real"))
    return prepared(recipe_from({**RECIPE, "output": output}, "test"), SilentProgress())


def side_by_side(speeds: dict[str, float]) -> Any:
    def measured(
        subject: ExperimentSubject, plans: dict[str, Plan], kinds: Any, *_: Any
    ) -> Measured:
        variants = []
        for number, (name, plan) in enumerate(plans.items()):
            factor = 1.0
            for technique in plan:
                factor *= speeds[technique.name()]
            rounds = [100 * factor * (1 + 0.001 * ((i * (number + 1)) % 3)) for i in range(8)]
            variant = Variant(name, plan, rounds=rounds, kind=kinds[name])
            variant.effective = [
                {"technique": t.name(), "effective": True, "evidence": ""} for t in plan
            ]
            variants.append(variant)
        for variant in variants:
            variant.baseline_rounds = variants[0].rounds
        return Measured(variants, {"rounds": 8})

    return measured


@pytest.mark.long
def test_winners_are_paired_and_equal_plans_have_one_variant(
    subject: ExperimentSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    autocast, fused = Plan([KINDS["autocast"]()]), Plan([KINDS["fused_adamw"]()])
    monkeypatch.setattr(real, "measured", side_by_side({"autocast": 1.5, "fused_adamw": 1.47}))
    winners = {"winner 1": autocast, "winner 2": fused, "winner 3": autocast, "winner 4": Plan()}
    found = real._compared(subject, winners, 60.0, real.Told())
    assert found["variant_of"] == {
        "winner 1": "winner 1",
        "winner 2": "winner 2",
        "winner 3": "winner 1",
        "winner 4": "baseline",
    }
    found = real._apart(subject, winners, 60.0, real.Told())
    assert found["variant_of"]["winner 3"] == "winner 1"
    assert found["variant_of"]["winner 4"] == "winner 4"
    ratios = {tuple(r["variants"]): r["ratio"]["median"] for r in found["pairs"]}
    assert ratios[("winner 1", "winner 2")] == pytest.approx(1.5 / 1.47, rel=0.01)
    assert ratios[("winner 1", "winner 4")] == pytest.approx(1.5, rel=0.01)
    assert len(ratios) == 3
    (control,) = found["control"]
    assert control["variants"] == ["baseline again", "winner 1"]
    assert control["ratio"]["median"] == pytest.approx(1.0, abs=0.01)
    same = real._apart(subject, {"winner 1": fused, "winner 2": fused}, 60.0, real.Told())
    assert same["pairs"] == []
    assert "NOT within 3%" in real._verdict(found["pairs"], 3)
    assert "within 3%" in real._verdict(found["pairs"][:1], 2)
    assert "0 pairs of 2 winners" in real._verdict([], 2)
    assert "one and the same" in real._verdict([], 1)


class Speeds:
    """Workers with the speed of their micro-batch; 8 records fail."""

    def __init__(self, worker: WorkerSpec) -> None:
        own = [t["micro_batch_size"] for t in worker.arguments["plan"]]
        self.size = own[0] if own else 8

    def ready(self, timeout: float) -> None:
        if self.size == 8:
            raise WorkerError("out of memory")

    def request(self, op: str, timeout: float, count: int) -> dict[str, Any]:
        speeds = [1.0, 1.0, *[100.0 * {1: 1, 2: 3, 4: 2}[self.size]] * (count - 2)]
        return {"steps": [{"tokens": s, "step_seconds": 1.0} for s in speeds]}  # 3 to 5 count

    def close(self, kill: bool = False) -> None:
        pass


def test_micro_batches_are_doubled_until_one_fails_and_the_fastest_is_taken(
    subject: ExperimentSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerPool, "start", lambda pool, spec, name: Speeds(spec))
    found = real._doubled(subject, 60.0, real.Told())
    assert [r["micro_batch"] for r in found["trials"]] == [1, 2, 4, 8]
    assert [r["tokens_per_second"] for r in found["trials"]] == [100.0, 300.0, 200.0, None]
    assert found["micro_batch"] == 2
    plan = real._cut(subject, found["micro_batch"])
    assert plan.to_list() == [KINDS["gradient_accumulation"](micro_batch_size=2).to_dict()]


def test_the_wide_space_knows_its_best_point() -> None:
    assert set(PROBLEMS) >= {"grid", "synthetic", "wide"}
    problem = wide()
    assert problem.space.size > 20_000_000
    draw, states = random.Random(0), set()
    for point in problem.space.points()[:500]:
        tried = problem.trial(point, draw)
        states.add(tried.state)
        assert tried.state != "ok" or problem.truth(point) <= problem.best + 1e-9
    assert states == {"ok", "out of memory"}
