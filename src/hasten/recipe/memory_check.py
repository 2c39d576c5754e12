"""Checks memory before a run: the fullest rank's need, and fixes if it is too high.

Techniques predict the bytes that they add or save. This module therefore names only the
techniques that it suggests as fixes. Unknown sizes (a user's own loader) aren't judged.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Forecast, Technique
from hasten.errors import InputError, StoppedError
from hasten.machine.environment import ranks_here
from hasten.machine.memory import is_out_of_memory
from hasten.machine.processes import available_bytes, resident_bytes
from hasten.models.flops import config_flops
from hasten.models.host_memory import (
    DEVICE_PROCESS,
    FLOAT32,
    MOMENTS_FLOAT32,
    PHASES,
    PROCESS,
    HostBytes,
    RankShare,
    host_bytes,
    lacking,
    largest_weight,
    refusal,
)
from hasten.models.load import read_config
from hasten.models.memory import (
    ADAMW_FLOAT32,
    BlockForm,
    BytesNeeded,
    ModelSize,
    activation_bytes,
    block_bytes,
    chunk_logits_bytes,
    gigabytes,
    logits_bytes,
    state_bytes,
)
from hasten.recipe.schema import Recipe
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.parallel import routed
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW
from hasten.techniques.precision import BF16MasterWeights

FIRST_STEP = 0.06e9  # part of PROCESS that the first step loads; a GPU's context is as large
# Smaller blocks come from the heap, which keeps freed blocks between used ones (mallopt(3)).
HEAP_BLOCK = 32 * 2**20
HEAP_SPARE = 1.3  # measured: resident bytes / used bytes, for activations in such blocks
MAY_RUN_OUT = "it may run out"
BLOCK_BACKWARD = 1.3  # bytes of a block in its backward pass / bytes that its forward pass keeps
FIRST_STEPS = 4  # steps that are searched for the largest micro-batch
STATE_SLOTS = (
    *(Slot.ADAPTER, Slot.OBJECTIVE, Slot.INDEXER, Slot.PRECISION),
    *(Slot.OPTIMIZER, Slot.AVERAGE, Slot.COMMUNICATION),
)
# Suggested in this order: the cheapest first.
HELP: tuple[Technique, ...] = (
    LabelledTokenLoss(),
    GradientAccumulation(micro_batch_size=1),
    BF16MasterWeights(),
    ActivationCheckpointing(),
    CompactAdamW(),
    FSDP2(),
)

# Suggested last, because they change the training.
ADAPTERS = {
    "finetuning_type: lora": LoRA(),
    "finetuning_type: lora and lora_base: int8": LoRA(base="int8"),
    "finetuning_type: lora and lora_base: nf4": LoRA(base="nf4"),
}


class MemoryRanOutError(StoppedError):
    """Memory ran out in training; the message suggests fixes."""


def settle_memory(recipe: Recipe, setup: Setup, tell: Callable[[str], None]) -> str:
    """Prints the memory need of a rank; returns advice in case memory still runs out.

    Raises:
        InputError: weights, gradients and optimizer don't fit, or the host can't load or save.
    """
    text, helps = memory_words(recipe, setup, resident_bytes())
    tell(f"memory of a rank: {text}")
    return helps


def memory_words(recipe: Recipe, setup: Setup, resident: int = 0) -> tuple[str, str]:
    """Returns two texts: the fullest rank's need compared with the memory, and fixes.

    Args:
        resident: bytes that this process already uses, if it will train.

    Raises:
        InputError: weights, gradients and optimizer alone don't fit, or the ranks need more memory
            of this host than is available. The message has fixes.
    """
    context, room = setup.context, room_of(setup.context)
    size, positions = size_of(recipe, context), largest_micro_batch(setup)
    # The recipe's LoRA isn't in the plan, but it needs memory too.
    adapter = (LoRA(base=recipe.lora_base),) if recipe.finetuning_type == "lora" else ()
    plan = setup.plan.with_(*adapter)
    needs = needs_of(size, context, plan, positions, one_pass(setup))
    if not context.on_gpu:
        needs = replace(needs, overhead=max(needs.overhead, resident + FIRST_STEP))
    helps = help_for(size, context, plan, positions, room)
    if needs.state + needs.overhead > room:
        raise InputError(
            f"memory: weights, gradients and optimizer of {recipe.model} take "
            f"{gigabytes(needs.state)} on each rank, and {context.device} has {gigabytes(room)} "
            f"for it; {helps}"
        )
    ranks, available = ranks_here(context.world), host_room(context, resident)
    certain = replace(needs, activations=0.0, logits=0.0)
    if phase := lacking(host := host_needs(size, context, plan, certain), available):
        raise InputError(refusal(host, phase, ranks, available))
    host = host_needs(size, context, plan, needs)
    phases = ", ".join(f"{phase} {gigabytes(getattr(host, phase))}" for phase in PHASES)
    text = (
        f"about {needs} of {gigabytes(room)} on {context.device}; memory of this host: {phases} of "
        f"{gigabytes(available)} available"
    )
    if needs.total > room or lacking(host, available):
        text += f"; {MAY_RUN_OUT}: {helps}"
    return text, helps


def size_of(recipe: Recipe, context: JobContext) -> ModelSize:
    """Returns the model's sizes; only the experts that a token uses count as active."""
    model = context.model
    config = read_config(recipe.model, needs_weights=not recipe.from_scratch)
    active = float(model.parameters)
    with contextlib.suppress(ValueError):  # the FLOPs of the architecture are unknown
        active = config_flops(config).per_token / 6
    chosen = getattr(config, "num_experts_per_tok", 0) if model.experts else 0
    sizes = model.hidden_size, model.layers, model.vocabulary
    shared = model.key_value_heads / model.heads if model.heads else 1.0
    return ModelSize(
        model.parameters,
        active,
        *sizes,
        chosen=chosen or 0,
        repeated=2.0 * model.hidden_size * (1 - shared),
        score_heads=model.heads if keeps_scores(config, context.on_gpu) else 0,
    )


def keeps_scores(config: Any, on_gpu: bool) -> bool:
    """Returns True if attention stores its scores.

    Attention without SDPA does. On a processor, SDPA also does if values and keys have
    different widths.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not getattr(kind, "_supports_sdpa", True):
        return True
    keys = getattr(config, "qk_nope_head_dim", None)
    if on_gpu or keys is None:
        return False
    return bool(keys + config.qk_rope_head_dim != config.v_head_dim)


def needs_of(
    size: ModelSize, context: JobContext, plan: Plan, positions: int, single: bool = False
) -> BytesNeeded:
    """Returns the bytes that the fullest rank needs with a plan and micro-batches of ``positions``.

    Args:
        single: True if a step is one micro-batch; gradients then replace activations.
    """
    forecasts = {t.slot: t.forecast(context) for t in plan}
    precision, adapts = forecasts.get(Slot.PRECISION), Slot.ADAPTER in forecasts
    weight_bytes = context.model.weight_bytes
    number_bytes = min(4.0 * (precision.bytes if precision else 1.0), weight_bytes)
    halves = any(isinstance(t, BF16MasterWeights) for t in plan)
    if FusedAdamW() in plan.techniques and precision is None:
        forecasts.pop(Slot.OPTIMIZER)  # only master weights need the copy that this saves
    if adapts:
        forecasts.pop(Slot.OPTIMIZER, None)  # frozen weights have no moments
    none = Forecast()
    more = sum(forecasts[slot].resident_bytes for slot in STATE_SLOTS if slot in forecasts)
    if halves and adapts:  # frozen weights have 16 bits and no master weights
        quantised = any(isinstance(t, LoRA) and t.base for t in plan)
        more -= (2.0 if quantised else weight_bytes) * size.parameters
    more -= _left_out(weight_bytes, forecasts) * size.parameters
    dealt = -min(forecasts.get(Slot.LAYOUT, none).resident_bytes, 0.0)
    positions = round(positions * min(forecasts.get(Slot.COLLATE, none).positions, 1.0))
    by_document = Slot.ATTENTION in forecasts
    examples = context.examples
    mean = examples.tokens / max(examples.count, 1)
    form = BlockForm(
        fused=Slot.LAYERS in forecasts,
        frozen=adapts,
        repeats=not by_document,
        score_length=mean if by_document else examples.longest,
    )
    logits = _logits(size, context, plan, positions, number_bytes)
    recomputed = min(
        3 * max(forecasts.get(Slot.ACTIVATION_CHECKPOINTING, none).flops - 1, 0.0), 1.0
    )
    activations = activation_bytes(size, positions, number_bytes, recomputed, form)
    if recomputed:  # blocks are recomputed for their backward pass, after the logits are freed
        block = block_bytes(size, positions, number_bytes, form)
        activations += max(BLOCK_BACKWARD * block - logits, 0.0) - block
    if not context.on_gpu and 4.0 * positions * size.hidden < HEAP_BLOCK:
        activations *= HEAP_SPARE
    # PEFT keeps merged weights until backward, which then needs the gradients of one layer.
    merged = number_bytes * context.model.merged_weights
    activations += merged * (1 - recomputed) + 2 * merged / max(size.layers, 1)
    state = state_bytes(size.parameters, more, dealt)
    later = 0.0
    if not adapts:
        gradients = state_bytes(size.parameters, 0.0, dealt) * weight_bytes / ADAMW_FLOAT32
        if single:
            later = gradients
        elif halves and any(isinstance(t, CompactAdamW) for t in plan):
            later = gradients / 2  # CompactAdamW converts 16-bit gradients while it reads them
    gathered = forecasts.get(Slot.LAYOUT, none).passing_bytes * number_bytes / 4
    if not context.on_gpu and 4.0 * size.parameters / max(size.layers, 1) < HEAP_BLOCK:
        gathered *= HEAP_SPARE
    return BytesNeeded(state, activations, logits, PROCESS, later, gathered)


def _left_out(weight_bytes: float, forecasts: Mapping[Slot, Forecast]) -> float:
    """Returns the bytes of a trained weight's state that a narrow format saves."""
    if Slot.ADAPTER in forecasts:  # what is trained has float32
        return 0.0
    # Weight and gradient, and the moments of torch's AdamW; other optimizers have own formats.
    numbers = 2 if Slot.OPTIMIZER in forecasts else 4
    return numbers * (FLOAT32 - weight_bytes)


def host_needs(size: ModelSize, context: JobContext, plan: Plan, needs: BytesNeeded) -> HostBytes:
    """Returns the bytes of all ranks of this host, from those that its fullest rank needs."""
    ranks, adapts = context.world.size, Slot.ADAPTER in plan
    layout = next((t for t in plan if t.slot is Slot.LAYOUT), None)
    offloads = isinstance(layout, FSDP2) and layout.offload and context.on_gpu
    gone = (
        0.0 if layout is None else -layout.forecast(replace(context, device="cpu")).resident_bytes
    )
    fraction = max(1 - gone / (ADAMW_FLOAT32 * max(size.parameters, 1)), 0.0)  # a rank's share
    narrow = context.model.weight_bytes / FLOAT32
    weights = narrow * FLOAT32 * size.parameters * fraction
    if adapts:  # a quantised base is quantised while it is read
        weights = min(weights, needs.state)
    gradients = 0.0 if adapts else min(weights, needs.state / 2)
    learned = context.model.adapter_weights if adapts else narrow * size.parameters
    written = (FLOAT32 + MOMENTS_FLOAT32) * learned / ranks
    if not adapts and fraction and not context.on_gpu:  # the formats of this optimizer
        written = (needs.state - gradients) / fraction / ranks
    sizes = size.hidden, size.vocabulary, size.layers
    largest = narrow * largest_weight(*sizes, routed(context))
    share = RankShare(
        weights=weights,
        largest=largest,
        part=largest * fraction,
        written=written if Slot.CHECKPOINT in plan else 0.0,
        process=DEVICE_PROCESS if context.on_gpu else needs.overhead,
    )
    if offloads:
        share = replace(share, resting=narrow * ADAMW_FLOAT32 * size.parameters * fraction)
    elif not context.on_gpu:
        resting = needs.state - gradients
        share = replace(share, resting=resting, step=gradients + needs.passing)
    return host_bytes(share, ranks_here(context.world))


def host_room(context: JobContext, resident: int = 0) -> float:
    """Returns the bytes of this host that its ranks may use: free ones, and those they have."""
    limit = context.hardware.memory_limit_bytes
    return float(min(available_bytes(limit) + ranks_here(context.world) * resident, limit))


def peak_of(size: ModelSize, context: JobContext, plan: Plan, positions: int) -> float:
    """Returns the most bytes that a rank needs of ``room_of``: on a processor also for a save."""
    needs = needs_of(size, context, plan, positions)
    if context.on_gpu:
        return needs.total
    host, ranks = host_needs(size, context, plan, needs), ranks_here(context.world)
    return max(needs.total, float(host.most) / ranks)


def _logits(
    size: ModelSize, context: JobContext, plan: Plan, positions: int, number_bytes: float
) -> float:
    technique = next((t for t in plan if isinstance(t, LabelledTokenLoss)), None)
    if technique is None:
        return logits_bytes(size, positions)
    labelled = positions if context.on_gpu else round(positions * context.examples.trained_share)
    rows = min(technique.rows(context), labelled)
    return chunk_logits_bytes(size, rows, number_bytes, Slot.ADAPTER in plan)


def one_pass(setup: Setup) -> bool:
    """Returns True if each of this rank's first steps is a single micro-batch."""
    return setup.sampler is not None and all(
        sum(len(setup.split_micro_batches(examples)) for examples in pieces if examples) <= 1
        for pieces in _first_steps(setup)
    )


def _first_steps(setup: Setup) -> Iterator[list[list[Any]]]:
    """Yields this rank's examples of the first steps, as lists that BATCH splits."""
    assert setup.sampler is not None
    layout, examples = setup.layout, setup.job.examples
    steps = setup.sampler.local_steps(0, layout.data_rank, layout.data_size)
    for pieces in itertools.islice(steps, FIRST_STEPS):
        yield [[examples[i] for i in indices] for indices in pieces]


def largest_micro_batch(setup: Setup) -> int:
    """Returns the positions of the largest micro-batch of this rank's first steps; 0: unknown.

    The examples are padded as in a job without techniques.
    """
    if setup.sampler is None:
        return 0
    parts = (
        part
        for pieces in _first_steps(setup)
        for examples in pieces
        if examples
        for part in setup.split_micro_batches(examples)
    )
    return max((setup.job.collate(part).counts.positions for part in parts), default=0)


def room_of(context: JobContext) -> float:
    """Returns the bytes of one rank: its device's, or its share of the container's limit."""
    hardware = context.hardware
    if context.on_gpu and hardware.accelerators:
        return float(min(gpu.memory_bytes for gpu in hardware.accelerators))
    return hardware.memory_limit_bytes / ranks_here(context.world)


def fitting_plan(
    techniques: Sequence[Technique],
    size: ModelSize,
    context: JobContext,
    plan: Plan,
    positions: int,
    room: float,
) -> tuple[Plan, int, float]:
    """Adds techniques that save memory, in their order, until the plan fits.

    Returns:
        The plan, the positions of its micro-batch, and the bytes that it needs.
    """
    needed = peak_of(size, context, plan, positions)
    for technique in techniques:
        if technique.slot in plan or technique.unsupported_reasons(context):
            continue
        if technique.slot is Slot.LAYOUT and context.world.size == 1:
            continue
        longest = context.examples.longest
        fewer = min(positions, longest) if technique.slot is Slot.BATCH else positions
        less = peak_of(size, context, plan.with_(technique), fewer)
        if less <= 0.98 * needed:
            plan, positions, needed = plan.with_(technique), fewer, less
            if needed <= room:
                break
    return plan, positions, needed


def help_for(size: ModelSize, context: JobContext, plan: Plan, positions: int, room: float) -> str:
    """Returns advice: the smallest change that fits, with its peak; techniques, then LoRA."""
    fuller, fewer, needed = fitting_plan(HELP, size, context, plan, positions, room)
    added = ", ".join(str(t) for t in fuller if t not in plan.techniques)
    if added and needed <= room:
        return f"with {added} in the plan it would be about {gigabytes(needed)}"
    for keys, adapter in ADAPTERS.items():
        if Slot.ADAPTER in plan or adapter.unsupported_reasons(context):
            continue
        smaller = peak_of(size, context, fuller.with_(adapter), fewer)
        if smaller <= room:
            with_them = f", with {added} in the plan," if added else ""
            return f"{keys}{with_them} would need about {gigabytes(smaller)}"
    others = "take a smaller model, or a shorter cutoff_len"
    if context.world.size == 1:
        others += ", or more ranks with fsdp2"
    if not added:
        return others
    return f"even with {added} it would be about {gigabytes(needed)}: {others}"


@contextlib.contextmanager
def advising(helps: str) -> Iterator[None]:
    """Context that adds advice to errors of memory.

    Raises:
        MemoryRanOutError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, StoppedError) or not is_out_of_memory(error):
            raise
        first = (str(error).strip().splitlines() or ["no memory"])[0]
        raise MemoryRanOutError(f"memory ran out ({first[:160]}); {helps}") from error
