"""Candidate techniques for ``plan: auto`` on a job, and the predicted initial plan.

The inputs are known before any measurement. They are the reasons why a technique isn't
supported, and the positions, operations and bytes that it predicts to save. Further
inputs are the measured gains of its kernels on this machine, and the memory that the
plan needs. The initial plan has the techniques that usually help. All others that may
help are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Technique
from hasten.machine.gain import Gain
from hasten.models.memory import ModelSize
from hasten.recipe.build import batch_of
from hasten.recipe.memory_check import fitting_plan, peak_of, room_of, size_of
from hasten.recipe.schema import AutoPlan, Recipe
from hasten.recipe.shorthands import catalogue
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.compile import COMPILE_SECONDS, Compiled
from hasten.techniques.precision import BF16MasterWeights

MICRO_BATCH_TOKENS = 8192  # a step with more tokens is split
FEWER_POSITIONS = 0.95  # packing is in the first plan if it leaves a smaller share of positions
COMPILED_FROM = 600.0  # smallest budget in seconds with which compiling is tried
ALLOWED = {
    "exact": (Fidelity.EXACT,),
    "rounding": (Fidelity.EXACT, Fidelity.ROUNDING),
    "lossy": tuple(Fidelity),
}
# Added in this order until the first plan fits into memory.
FOR_MEMORY: tuple[Technique, ...] = (
    GradientAccumulation(micro_batch_size=1),
    ActivationCheckpointing(),
)


@dataclass(frozen=True)
class TechniqueCandidate:
    """A technique of the catalogue that may be tried.

    Args:
        technique: with the settings for this job.
        usual: True if the first plan may have it.
        why: a reason for or against it.
        refused: True if it isn't tried.
    """

    technique: Technique
    usual: bool
    why: str
    refused: bool = False


def candidates(
    recipe: Recipe, context: JobContext, fidelity: str, more: Iterable[type[Technique]] = ()
) -> list[TechniqueCandidate]:
    """Returns every technique that may make this job faster, in the order of the slots.

    Args:
        recipe: the recipe of the job.
        context: the job and the machine.
        fidelity: permitted change of the mathematics: exact, rounding or lossy.
        more: techniques in addition to the catalogue's.
    """
    kinds = [kind for kind in (*catalogue(), *more) if kind.auto != "no"]
    technique_candidates = [_judged(kind(), recipe, context, fidelity) for kind in kinds]
    batch, mean = batch_of(recipe), context.examples.tokens / max(context.examples.count, 1)
    step_tokens = (batch.tokens or mean * (batch.examples or 1)) / context.world.size
    if step_tokens > MICRO_BATCH_TOKENS:
        limit = max(MICRO_BATCH_TOKENS, context.examples.longest)
        cut = _judged(GradientAccumulation(micro_batch_tokens=limit), recipe, context, fidelity)
        why = cut.why if cut.refused else f"a step has {step_tokens:,.0f} tokens"
        technique_candidates.append(replace(cut, usual=not cut.refused, why=why))
    return sorted(technique_candidates, key=lambda c: list(Slot).index(c.technique.slot))


def supported_here(technique: Technique, context: JobContext) -> tuple[Technique, tuple[str, ...]]:
    """Returns the technique with settings for this machine, and reasons if it isn't supported.

    On a processor without bf16 units, hasten's own kernels can multiply bf16. A measurement
    decides if they are used; it takes some seconds on a machine's first job.
    """
    reasons = technique.unsupported_reasons(context)
    if reasons and isinstance(technique, BF16MasterWeights) and not context.on_gpu:
        own_kernels = replace(technique, emulate=True)
        gain = own_kernels.gain(context)
        if gain is not None:
            return (technique, (_no_faster(gain),)) if gain.lost else (own_kernels, ())
    return technique, reasons


def first_plan(
    technique_candidates: Sequence[TechniqueCandidate], base_plan: Plan, context: JobContext
) -> Plan:
    """Returns the base plan; each free slot gets its usual technique with the best forecast."""
    plan = base_plan
    usual = [c.technique for c in technique_candidates if c.usual and not c.refused]
    for technique in sorted(usual, key=lambda t: -expected_gain(t, context)):
        if technique.slot not in plan:
            plan = plan.with_(technique)
    return with_document_attention(plan, technique_candidates)


def first_plan_sentence(recipe: Recipe, context: JobContext) -> str:
    """Returns a sentence with the initial plan of ``plan: auto`` on this job."""
    technique_candidates = candidates(recipe, context, (recipe.auto_plan or AutoPlan()).fidelity)
    why = next(c.why for c in technique_candidates if isinstance(c.technique, Packed))
    return (
        f"plan: auto begins with {first_plan(technique_candidates, Plan(), context)}; packed: {why}"
    )


def with_document_attention(
    plan: Plan, technique_candidates: Iterable[TechniqueCandidate] = ()
) -> Plan:
    """Adds attention within documents to a plan with packed rows, and removes it from others.

    Without it, attention in packed rows also computes the masked scores between documents.
    """
    attends, packs = DocumentAttention(), any(isinstance(t, Packed) for t in plan)
    if attends in plan.techniques and not packs:
        return plan.without(attends)
    usable = any(c.technique == attends and not c.refused for c in technique_candidates)
    if packs and usable and Slot.ATTENTION not in plan:
        return plan.with_(attends)
    return plan


def expected_gain(technique: Technique, context: JobContext) -> float:
    """Returns the logarithm of a technique's measured or predicted gain, to sort techniques."""
    if (gain := technique.gain(context)) is not None:
        return math.log(gain.ratio)
    cast = technique.forecast(context)
    return -math.log(max(cast.positions * cast.flops * cast.bytes * cast.comm_bytes, 1e-9))


def fitted_to_memory(
    plan: Plan, recipe: Recipe, context: JobContext, positions: int
) -> tuple[Plan, str]:
    """Adds techniques until the plan fits into memory; returns it with a reason.

    If no technique helps, the plan doesn't change.
    """
    size, room = size_of(recipe, context), room_of(context)
    if fits_in_memory(plan, size, context, positions):
        return plan, ""
    fuller, _, needed = fitting_plan(FOR_MEMORY, size, context, plan, positions, room)
    if needed > room:
        return plan, ""
    added = ", ".join(str(t) for t in fuller if t not in plan.techniques)
    return fuller, f"{added}: else memory would run out"


def fits_in_memory(plan: Plan, size: ModelSize, context: JobContext, positions: int) -> bool:
    """Returns True if the fullest rank has room for a step; on a processor also for a save."""
    return peak_of(size, context, plan, positions) <= room_of(context)


def _judged(  # noqa: C901  # a clause for each reason
    technique: Technique, recipe: Recipe, context: JobContext, fidelity: str
) -> TechniqueCandidate:
    def refused(why: str) -> TechniqueCandidate:
        return TechniqueCandidate(technique, False, why, refused=True)

    if technique.fidelity not in ALLOWED[fidelity]:
        return refused(f"{technique.fidelity.name} isn't allowed: {technique.fidelity.value}")
    technique, reasons = supported_here(technique, context)
    if reasons:
        return refused(reasons[0])
    if technique.slot is Slot.COMMUNICATION and context.world.size == 1:
        return refused("one rank sends nothing")
    gain = technique.gain(context)
    if gain is not None and gain.lost:
        return refused(_no_faster(gain))
    if isinstance(technique, Compiled):
        if (recipe.auto_budget or 0.0) < COMPILED_FROM:
            return refused(
                f"compiling takes {COMPILE_SECONDS:.0f} s and more: auto_budget: "
                f"{COMPILED_FROM / 60:.0f}m tries it"
            )
        technique = replace(technique, share=1.0)
    if recipe.finetuning_type == "lora" and technique.slot is Slot.ADAPTER:
        return refused("the recipe's own LoRA decides what learns")
    cast = technique.forecast(context)
    usual = technique.auto == "usual"
    if technique.slot is Slot.PRECISION and gain is not None:
        usual = usual and gain.sure  # master weights need memory
    if isinstance(technique, Packed):
        usual = cast.positions < FEWER_POSITIONS
        return TechniqueCandidate(
            technique, usual, f"{1 - cast.positions:.0%} of the positions are padding"
        )
    return TechniqueCandidate(technique, usual, _gain_text(technique, context))


def _no_faster(gain: Gain) -> str:
    return f"measured on this machine: {gain} the speed without it"


def _gain_text(technique: Technique, context: JobContext) -> str:
    gain, cast = technique.gain(context), technique.forecast(context)
    phrases = [] if gain is None else [f"its kernels: {gain} the speed, measured on this machine"]
    phrases += [
        f"{name} {factor:.2f} times"
        for name, factor in (
            ("positions", cast.positions),
            ("operations", cast.flops),
            ("bytes moved", cast.bytes),
            ("bytes sent", cast.comm_bytes),
        )
        if abs(factor - 1) >= 0.005
    ]
    return ", ".join(phrases) or "no forecast"
