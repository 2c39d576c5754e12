"""Variants that take turns: one real experiment, and the rules with variants that only pretend."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique
from hasten.errors import InputError
from hasten.measure.ablation import Design, Variant, Which, plans_of
from hasten.measure.experiment import experiment_context, measure_variants
from hasten.measure.workers import WorkerPool, WorkerSpec
from hasten.recipe.build import prepare_run
from hasten.recipe.schema import Recipe
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.optimizer import FusedAdamW


@dataclass(frozen=True)
class UnheardOf(Technique):
    """Stands in no catalogue, so a variant's process can't know it."""

    slot = Slot.LOSS

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, setup: Any) -> None:
        raise NotImplementedError

    def check_effect(self, session: Any) -> EffectCheck:
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
        eval_data=4,
        vocabulary=300,
        cutoff_len=32,
        global_batch_size=4,
        max_steps=DESIGN.steps_in_all,
        device="cpu",
        output=str(folder / "out"),
    )
    prepare_run(recipe, lambda text: None)
    resolved = folder / "out" / "data" / "variants.yaml"
    resolved.write_text(recipe.to_yaml())
    return resolved


@pytest.fixture(scope="module")
def measured(recipe: Path) -> dict[str, Variant]:
    """A plain variant, one that is killed in its second round, and one that can't start."""

    def tell(text: str, share: float) -> None:
        assert 0 <= share <= 1
        if text == "round 2/2":
            # Its process, just before its order is given.
            plan = json.dumps(PLANS["packed"].to_list())
            (group,) = [w._group for w in pool._workers if plan in str(w._group._spec)]
            group.signal("SIGKILL")

    environ = {"OMP_NUM_THREADS": "1"}

    def spec(name: str) -> WorkerSpec:
        given = {"recipe": str(recipe), "plan": PLANS[name].to_list()}
        return WorkerSpec("recipe", given, environ)

    with WorkerPool(recipe.parent) as pool:
        variants = measure_variants(experiment_context(pool, spec), PLANS, DESIGN, tell).variants
    assert [variant.name for variant in variants] == list(PLANS)
    return {variant.name: variant for variant in variants}


@pytest.mark.slow
def test_variants_see_equal_tokens_in_every_step(measured: dict[str, Variant]) -> None:
    base, packed = measured["baseline"], measured["packed"]
    assert len(packed.losses) == 2  # the warm-up and the first round; it died in the second
    assert [tokens for tokens, _ in packed.losses] == [tokens for tokens, _ in base.losses[:2]]
    for (_, one), (_, other) in zip(packed.losses, base.losses[:2], strict=True):
        assert one == pytest.approx(other, rel=1e-4)  # the same examples and the same weights
    assert packed.steps[0]["positions"] == packed.steps[0]["tokens"] < base.steps[0]["positions"]
    assert packed.eval_data[0] == (0, pytest.approx(base.eval_data[0][1], rel=1e-4))


def test_an_variant_killed_in_its_turn_is_reported_and_the_others_finish(
    measured: dict[str, Variant],
) -> None:
    base, packed = measured["baseline"], measured["packed"]
    assert packed.failed is not None
    assert "code -9: killed" in packed.failed
    assert base.failed is base.unfinished is None
    assert len(base.rounds) == len(base.steps) == DESIGN.rounds
    assert base.losses[-1][0] == sum(s["tokens"] for s in base.steps) + base.losses[0][0]
    assert [tokens for tokens, _ in base.eval_data] == [0, base.losses[-1][0]]
    assert base.samples  # it got as far as writing


def test_the_eval_loss_is_taken_at_the_start_and_evenly_to_the_end() -> None:
    assert Design(evaluations=3).looks(8) == {3, 5, 8}
    assert Design(evaluations=1).looks(2) == {2}
    assert 1 in Design(evaluations=3).looks(1)
    assert Design(evaluations=0).looks(8) == set()


PLAN = Plan([Packed(), DocumentAttention(), FusedAdamW()])


@pytest.mark.parametrize(
    ("which", "only", "names"),
    [
        ("full", (), ["baseline", "plan"]),
        ("cumulative", (), ["baseline", "+ packed", "+ document_attention", "+ fused_adamw"]),
        (
            "single",
            (),
            ["baseline", *(f"only {t.name()}" for t in PLAN), "all"],
        ),
        ("leave-one-out", (), ["baseline", *(f"without {t.name()}" for t in PLAN), "all"]),
        ("full", ("packed",), ["baseline", "only packed", "all"]),
        ("all", ("packed",), ["baseline", "only packed", "without packed", "all"]),
        (
            "cumulative",
            ("document_attention",),
            ["baseline", "+ document_attention", "+ fused_adamw"],
        ),
    ],
)
def test_the_variants_are_those_that_were_asked_for(
    which: Which, only: tuple[str, ...], names: list[str]
) -> None:
    plans, kinds = plans_of(PLAN, which, only)
    assert list(plans) == list(kinds) == names
    assert not len(plans[names[0]])
    assert plans[names[-1]] == PLAN
    assert (kinds[names[0]], kinds[names[-1]]) == ("baseline", "all")


def test_all_variants_are_those_of_the_plan_itself() -> None:
    for count in (1, 2, 3):
        plan = Plan(PLAN.techniques[:count])
        assert set(map(str, plans_of(plan, "all")[0].values())) == set(
            map(str, plan.variants().values())
        )
        assert list(plans_of(plan, "cumulative")[0]) == list(plan.cumulative())


def test_what_is_not_in_the_plan_cannot_be_measured() -> None:
    with pytest.raises(InputError, match=r"'paked' is not in the plan \(did you mean 'packed'"):
        plans_of(PLAN, "all", ["paked"])
    with pytest.raises(InputError, match="nothing to compare"):
        plans_of(Plan(), "full")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"rounds": 2, "builds": 3}, "3 builds of every variant need as many rounds"),
        ({"foreign_load": 1.5}, "share from 0 to 1"),
        ({"grouping": "pairs"}, "there is no 'pairs'"),
    ],
)
def test_a_design_that_cannot_be_run_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Design(**settings)
