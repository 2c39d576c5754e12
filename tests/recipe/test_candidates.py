"""What ``plan: auto`` begins with: by padding, by a measurement of bf16, by memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hasten.core.context import ExampleStats, JobContext
from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.machine.environment import World
from hasten.machine.gain import Gain
from hasten.machine.host import Accelerator
from hasten.parts.kernels import registry
from hasten.parts.kernels.registry import Verdict
from hasten.parts.nn import fused_layers, kernel_variants
from hasten.recipe.build import context_of
from hasten.recipe.candidates import candidates, first_plan, fitted_to_memory
from hasten.recipe.schema import Recipe
from hasten.techniques import layers, precision
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


def facts(mean: int, longest: int) -> JobContext:
    known: JobContext = context_of(recipe())
    return replace(known, examples=ExampleStats(1000, 1000 * mean, longest, 0.5))


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
        (Gain(1.7, 1.6, 1.8, 9), True, "1.70× [1.60, 1.80] the speed, measured on this machine"),
        (Gain(0.6, 0.5, 0.7, 9), False, "measured on this machine: 0.60× [0.50, 0.70] the speed"),
        (Gain(1.1, 0.9, 1.3, 9), False, "its kernels: 1.10× [0.90, 1.30] the speed"),
    ],
)
@pytest.mark.parametrize("flags", [("avx512f", "avx512_bf16"), ("avx512f",), ("avx2",)])
def test_bf16_is_a_candidate_by_its_measurement_whatever_the_flags(
    monkeypatch: pytest.MonkeyPatch, gain: Gain, chosen: bool, words: str, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(precision, "bf16_gain", lambda device: gain)
    context = facts(60, 400)
    context = replace(
        context,
        hardware=replace(
            context.hardware, accelerators=(), instruction_sets=flags, system="Linux 6.1"
        ),
    )
    found = candidates(recipe(), context, "rounding")
    (bf16,) = [c for c in found if c.technique.name() == "bf16_master_weights"]
    assert bf16.refused is gain.lost  # what is left open may be raced, but isn't begun with
    assert bf16.refused or bf16.technique.unsupported_reasons(context) == ()
    assert words in bf16.why
    assert ("bf16_master_weights" in names(first_plan(found, Plan(), context))) is chosen


@pytest.mark.parametrize(
    ("fidelity", "compared"),
    [
        ("exact", set()),
        ("rounding", {"half", "hierarchical"}),
        ("lossy", {"half", "hierarchical", "quantised", "powersgd"}),
    ],
)
def test_ranks_compare_ways_of_sending_gradients(fidelity: str, compared: set[str]) -> None:
    for ranks in (1, 2):
        known = replace(facts(100, 100), world=World(0, 0, ranks))
        communications = {
            c.technique.name()
            for c in candidates(recipe(), known, fidelity)
            if c.technique.slot is Slot.COMMUNICATION and not c.refused
        }
        assert communications == (compared if ranks > 1 else set())


def test_a_large_step_is_cut() -> None:
    found = candidates(recipe(global_batch_size=512), facts(60, 400), "rounding")
    (cut,) = [c for c in found if c.technique.name() == "gradient_accumulation"]
    assert cut.usual
    assert cut.technique.settings()["micro_batch_tokens"] == 8192


def test_what_memory_needs_joins_and_is_told() -> None:
    known = facts(60, 400)
    small = replace(known, hardware=replace(known.hardware, memory_limit_bytes=10**9))
    plan = Plan([LabelledTokenLoss()])
    assert fitted_to_memory(plan, recipe(), known, 10_000) == (plan, "")
    fuller, why = fitted_to_memory(plan, recipe(), small, 300_000)
    assert len(fuller) > len(plan)
    assert "else memory would run out" in why


def test_a_technique_whose_kernel_is_wrong_is_left_out_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = registry.proofs_here("cpu")
    broken = {
        key: Verdict(0.3, 1e-5) if key.startswith(("gated SiLU: hasten", "update")) else proof
        for key, proof in right.items()
    }
    known = facts(60, 400)
    sound = names(first_plan(candidates(recipe(), known, "rounding"), Plan(), known))
    monkeypatch.setattr(registry, "proofs_here", lambda device: broken)
    found = {c.technique.name(): c for c in candidates(recipe(), known, "rounding")}
    for name, kernel in (("fused_layers", "gated SiLU"), ("fused_adamw", "update by AdamW")):
        assert name in sound
        assert found[name].refused
        assert f"its kernel for {kernel} (hasten, float32) can't be used" in found[name].why
        assert "the largest error against float64 is 3.0e-01" in found[name].why
    plan = names(first_plan(list(found.values()), Plan(), known))
    assert sound - plan == {"fused_layers", "fused_adamw"}


def test_layers_that_were_measured_to_be_slower_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slower = Gain(0.8, 0.7, 0.9, 6)
    for name in ("layers_gain", "update_gain"):
        monkeypatch.setattr(kernel_variants, name, lambda device: slower)
    found = {c.technique.name(): c for c in candidates(recipe(), facts(60, 400), "rounding")}
    for name in ("fused_layers", "fused_adamw"):
        assert found[name].refused
        assert "measured on this machine: 0.80× [0.70, 0.90]" in found[name].why


def test_on_a_pretended_gpu_a_kernel_that_fails_its_first_use_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proofs of the GPU that is simulated; how they are made is the same code on any device."""
    asked: list[str] = []

    def proofs(device: str) -> dict[str, Verdict]:
        asked.append(device)
        failed = Verdict(failed="no kernel image is available for execution on the device")
        return {
            each.key: failed if each.by_hasten else Verdict(0, 1) for each in registry.variants()
        }

    context = facts(60, 400)
    gpu = Accelerator("a GPU", 80 * 10**9, "9.0")
    context = replace(
        context, device="cuda:0", hardware=replace(context.hardware, accelerators=(gpu,))
    )
    monkeypatch.setattr(fused_layers, "why_not", lambda device: "")
    monkeypatch.setattr(registry, "is_here", lambda device: True)
    monkeypatch.setattr(registry, "proofs_here", proofs)
    found = {c.technique.name(): c for c in candidates(recipe(), context, "rounding")}
    assert set(asked) == {"cuda:0"}
    assert found["fused_layers"].refused
    assert "can't be used: it can't run here: no kernel image" in found["fused_layers"].why
    assert "fused_layers" not in names(first_plan(list(found.values()), Plan(), context))


def test_of_a_device_that_is_not_here_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(registry, "proofs_here", lambda device: pytest.fail("it was proven"))
    monkeypatch.setattr(registry, "figures_here", lambda device: pytest.fail("it was measured"))
    known = replace(facts(60, 400), device="cuda:0")
    assert registry.faults(known.device, *layers.KERNELS) == ()
    assert kernel_variants.bf16_gain("cuda:0") is kernel_variants.layers_gain("cuda:0") is None
