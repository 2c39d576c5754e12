"""Memory before a run: what its fullest rank will need, and what would help where it is too much.

Techniques say in their forecasts how many bytes they add or save, so that no technique is known
here but those that are offered as help. What isn't known (a loader of the user's own) isn't judged.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

from hasten.core.facts import Facts
from hasten.core.plan import Plan
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Forecast, Technique
from hasten.errors import InputError, StoppedError
from hasten.machine.environment import ranks_here
from hasten.machine.memory import is_out_of_memory
from hasten.machine.processes import available_bytes
from hasten.models.flops import config_flops
from hasten.models.load import read_config
from hasten.models.memory import (
    BytesNeeded,
    ModelSize,
    activation_bytes,
    gigabytes,
    logits_bytes,
    state_bytes,
)
from hasten.recipe.schema import Recipe
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import Accumulate
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW
from hasten.techniques.precision import BF16MasterWeights
from hasten.techniques.recompute import Recompute

OVERHEAD = 0.6e9  # a process with torch and transformers; about the same as a GPU's context
FIRST_STEPS = 4  # that are looked at for the largest micro-batch
STATE_SLOTS = (
    *(Slot.ADAPTER, Slot.OBJECTIVE, Slot.PRECISION, Slot.OPTIMIZER, Slot.AVERAGE, Slot.WIRE),
)
# Offered in this order: what costs nothing comes first.
HELP: tuple[Technique, ...] = (
    LabelledTokenLoss(),
    Accumulate(micro_batch_size=1),
    BF16MasterWeights(),
    Recompute(),
    CompactAdamW(),
    FSDP2(),
)


# Another training, so offered where no technique helps.
ADAPTERS = {
    "finetuning_type: lora": LoRA(),
    "finetuning_type: lora and lora_base: int8": LoRA(base="int8"),
    "finetuning_type: lora and lora_base: nf4": LoRA(base="nf4"),
}


class MemoryRanOutError(StoppedError):
    """Memory ran out in training; the message says what would help."""


def settle_memory(recipe: Recipe, setup: Setup, tell: Callable[[str], None]) -> str:
    """Tell in one line what a rank will need; the advice for when memory runs out all the same.

    Raises:
        InputError: weights, gradients and optimizer alone don't fit.
    """
    text, helps = memory_words(recipe, setup)
    tell(f"memory of a rank: {text}")
    return helps


def memory_words(recipe: Recipe, setup: Setup) -> tuple[str, str]:
    """What the fullest rank will need of what there is, in words, and what would help.

    Raises:
        InputError: weights, gradients and optimizer alone don't fit; with what would.
    """
    known, room = setup.facts, room_of(setup.facts)
    size, slots, adapter = size_of(recipe, known), largest_micro_batch(setup), _adapter(recipe)
    needs = needs_of(size, known, setup.plan.with_(*adapter), slots)
    helps = help_for(size, known, setup.plan.with_(*adapter), slots, room)
    if needs.state + needs.overhead > room:
        raise InputError(
            f"memory: weights, gradients and optimizer of {recipe.model} take "
            f"{gigabytes(needs.state)} on each rank, and {known.device} has {gigabytes(room)} for "
            f"it; {helps}"
        )
    text = f"about {needs} of {gigabytes(room)} on {known.device}"
    if not known.on_gpu:
        text += f", {gigabytes(available_bytes(int(room)))} free now"
    if needs.total > room:
        text += f"; it may run out: {helps}"
    return text, helps


def _adapter(recipe: Recipe) -> tuple[Technique, ...]:
    """The recipe's LoRA, which isn't in the plan, for what it says of memory."""
    return (LoRA(base=recipe.lora_base),) if recipe.finetuning_type == "lora" else ()


def size_of(recipe: Recipe, known: Facts) -> ModelSize:
    """The model's sizes; experts count as far as a token meets them."""
    model = known.model
    config = read_config(recipe.model, needs_weights=not recipe.from_scratch)
    active = float(model.parameters)
    with contextlib.suppress(ValueError):  # an architecture that isn't counted
        active = config_flops(config).per_token / 6
    chosen = getattr(config, "num_experts_per_tok", 0) if model.experts else 0
    sizes = model.hidden_size, model.layers, model.vocabulary
    return ModelSize(model.parameters, active, *sizes, chosen or 0)


def needs_of(size: ModelSize, known: Facts, plan: Plan, slots: int) -> BytesNeeded:
    """What the fullest rank needs under a plan, with micro-batches of so many slots."""
    told = {t.slot: t.forecast(known) for t in plan}
    if FusedAdamW() in plan.techniques and Slot.PRECISION not in plan:
        told.pop(Slot.OPTIMIZER)  # what it saves is a copy that only master weights have
    if Slot.ADAPTER in told:
        told.pop(Slot.OPTIMIZER, None)  # frozen weights have no moments that it could shrink
    none = Forecast()
    more = sum(told[slot].resident_bytes for slot in STATE_SLOTS if slot in told)
    dealt = -min(told.get(Slot.LAYOUT, none).resident_bytes, 0.0)
    row = 4.0 * known.model.vocabulary * known.records.longest
    slots = round(slots * min(told.get(Slot.COLLATE, none).slots, 1.0))
    saved = told.get(Slot.LOSS, none).resident_bytes
    share = 1 + saved / row if row and saved < 0 else 1.0
    return BytesNeeded(
        state=state_bytes(size.parameters, more, dealt),
        activations=activation_bytes(
            size,
            slots,
            4.0 * min(told.get(Slot.PRECISION, none).bytes, 1.0),
            min(3 * max(told.get(Slot.RECOMPUTE, none).flops - 1, 0.0), 1.0),
        ),
        logits=logits_bytes(size, slots, max(share, 0.0)),
        overhead=OVERHEAD,
    )


def largest_micro_batch(setup: Setup) -> int:
    """Slots of the largest micro-batch of this rank's first steps, padded; 0: it can't be known.

    Laid out as the job does without a technique, as one would count these records as its own.
    """
    sampler, collate = setup.sampler, setup.job.collate
    if sampler is None:
        return 0
    layout, records = setup.layout, setup.job.records
    found = 0
    steps = sampler.local_steps(0, layout.data_rank, layout.data_size)
    for pieces in itertools.islice(steps, FIRST_STEPS):
        parts = [p for piece in pieces if piece for p in setup.cut([records[i] for i in piece])]
        found = max([found, *(collate(part).counts.slots for part in parts)])
    return found


def room_of(known: Facts) -> float:
    """Bytes that one rank may use: its device's, or its share of what the container allows."""
    hardware = known.hardware
    if known.on_gpu and hardware.accelerators:
        return float(min(gpu.memory_bytes for gpu in hardware.accelerators))
    return hardware.memory_limit_bytes / ranks_here(known.world)


def help_for(size: ModelSize, known: Facts, plan: Plan, slots: int, room: float) -> str:
    """The nearest job that would fit, and its peak: more techniques, then LoRA; as advice."""

    def adapts(adapter: LoRA) -> bool:
        return Slot.ADAPTER not in plan and not adapter.obstacles(known)

    added: list[str] = []
    for technique in HELP:
        if technique.slot in plan or technique.obstacles(known):
            continue
        if technique.slot is Slot.LAYOUT and known.world.size == 1:
            continue
        before = needs_of(size, known, plan, slots)
        fewer = min(slots, known.records.longest) if technique.slot is Slot.BATCH else slots
        needs = needs_of(size, known, plan.with_(technique), fewer)
        if needs.total > 0.98 * before.total:
            continue
        plan, slots = plan.with_(technique), fewer
        added.append(str(technique))
        if needs.total <= room:
            return f"with {', '.join(added)} in the plan it would be about {gigabytes(needs.total)}"
    for keys, adapter in ADAPTERS.items():
        if not adapts(adapter):
            continue
        needs = needs_of(size, known, plan.with_(adapter), slots)
        if needs.total <= room:
            with_them = f", with {', '.join(added)} in the plan," if added else ""
            return f"{keys}{with_them} would need about {gigabytes(needs.total)}"
    others = "take a smaller model, or a shorter cutoff_len"
    if known.world.size == 1:
        others += ", or more ranks with fsdp2"
    if not added:
        return others
    last = needs_of(size, known, plan, slots)
    return f"even with {', '.join(added)} it would be about {gigabytes(last.total)}: {others}"


@contextlib.contextmanager
def advising(helps: str) -> Iterator[None]:
    """An error of memory in training ends the run with advice.

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
