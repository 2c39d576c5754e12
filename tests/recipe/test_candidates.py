"""What ``plan: auto`` begins with: by padding, by a measurement of bf16, by memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hasten.core.facts import Facts, RecordFacts
from hasten.core.plan import Plan
from hasten.parts.nn.bf16_gain import Gain
from hasten.recipe.build import facts_of
from hasten.recipe.candidates import candidates, first_plan, fitted
from hasten.recipe.schema import Recipe
from hasten.techniques import precision
from hasten.techniques.loss import LabelledTokenLoss


def recipe(**changes: Any) -> Recipe:
    return Recipe(
        **{
            "model": "deepseek-llm-tiny",
            "dataset": "stdlib",
            "max_steps": 1,
            "plan": "auto",
            "device": "cpu",
            **changes,
        }
    )


def facts(mean: int, longest: int) -> Facts:
    known: Facts = facts_of(recipe())
    return replace(known, records=RecordFacts(1000, 1000 * mean, longest, 0.5))


def names(plan: Plan) -> set[str]:
    return {technique.name() for technique in plan}


@pytest.mark.parametrize(("mean", "longest", "packs"), [(100, 100, False), (60, 400, True)])
def test_packing_is_in_the_first_plan_where_lengths_differ(
    mean: int, longest: int, packs: bool
) -> None:
    known = facts(mean, longest)
    found = candidates(recipe(), known, "rounding")
    plan = names(first_plan(found, Plan(), known))
    assert ("packed" in plan, "document_attention" in plan) == (packs, packs)


@pytest.mark.parametrize(
    ("gain", "chosen", "words"),
    [
        (Gain(1.7, 1.6, 1.8, 9), True, "bytes moved"),
        (Gain(0.6, 0.5, 0.7, 9), False, "bf16 was measured at 0.60× [0.50, 0.70]"),
        (Gain(1.1, 0.9, 1.3, 9), False, "which leaves it open"),
    ],
)
@pytest.mark.parametrize("flags", [("avx512f", "avx512_bf16"), ("avx512f",)])
def test_bf16_is_a_candidate_by_its_measurement_whatever_the_flags(
    monkeypatch: pytest.MonkeyPatch, gain: Gain, chosen: bool, words: str, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(precision, "bf16_gain", lambda cpu: gain)
    known = facts(60, 400)
    known = replace(
        known, hardware=replace(known.hardware, accelerators=(), instruction_sets=flags)
    )
    found = candidates(recipe(), known, "rounding")
    (bf16,) = [c for c in found if c.technique.name() == "bf16_master_weights"]
    assert bf16.refused is not chosen
    assert words in bf16.why
    assert ("bf16_master_weights" in names(first_plan(found, Plan(), known))) is chosen


def test_a_large_step_is_cut() -> None:
    found = candidates(recipe(global_batch_size=512), facts(60, 400), "rounding")
    (cut,) = [c for c in found if c.technique.name() == "accumulate"]
    assert cut.usual
    assert cut.technique.settings()["micro_batch_tokens"] == 8192


def test_what_memory_needs_joins_and_is_told() -> None:
    known = facts(60, 400)
    small = replace(known, hardware=replace(known.hardware, memory_limit_bytes=10**9))
    plan = Plan([LabelledTokenLoss()])
    assert fitted(plan, recipe(), known, 10_000) == (plan, "")
    fuller, why = fitted(plan, recipe(), small, 300_000)
    assert len(fuller) > len(plan)
    assert "else memory would run out" in why
