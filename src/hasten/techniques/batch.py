"""BATCH: how a step's examples are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hasten.core.context import JobContext
from hasten.core.job import MicroBatch, StepBatch
from hasten.core.layout import rank_rows
from hasten.core.setup import Engine, Session, Setup
from hasten.core.slot import Slot
from hasten.core.step import PlainEngine
from hasten.core.technique import (
    EffectCheck,
    Fidelity,
    Forecast,
    LiveSetting,
    Technique,
    knob,
    setting,
)
from hasten.errors import InputError
from hasten.machine.environment import ranks_here
from hasten.machine.memory import Headroom, is_out_of_memory, memory_meter
from hasten.parts.data import collate as cut
from hasten.parts.data.dynamic_batch import release_memory
from hasten.techniques.feed import PrefetchedFeed

# Memory checks before a technique offers a setting that may change during the run.
#
# The peak of memory so far belongs to the present settings. So the additional bytes of a change are
# compared with the memory above that peak.

FULL = 0.8  # share of the memory that may be used after a change
STEPS = 64  # steps of the order that are read


def steps_read_ahead(session: Session) -> int:
    """Returns the number of steps that may have been cut and laid out already."""
    feed = session.setup.feed
    if not isinstance(feed, PrefetchedFeed) or feed.prefetcher is None:
        return 0
    return feed.prefetcher.statistics.lookahead + 1


def fits(session: Session, more: float) -> bool:
    """Returns True if every rank could use so many bytes beyond its peak; all ranks call it."""
    used, limit = memory_meter(session.setup.job.device)()
    on_host = session.setup.job.device.startswith("cpu")
    ranks = ranks_here(session.setup.context.world) if on_host else 1
    flag = torch.tensor([float(ranks * (used + more) <= FULL * limit)], dtype=torch.float64)
    return bool(session.setup.rank_sync.sum(flag).item() == session.setup.layout.size)


def largest_micro_batch(session: Session) -> int:
    """Returns the positions of this rank's largest micro-batch in many steps; 0 if unknown."""
    setup, layout = session.setup, session.setup.layout
    if setup.sampler is None or not len(setup.job.examples):
        return 0
    collate, examples, largest = setup.collate or setup.job.collate, setup.job.examples, 0
    steps = setup.sampler.local_steps(session.progress.epoch, layout.data_rank, layout.data_size)
    for pieces in islice(steps, STEPS):
        for group in pieces:
            for part in setup.split_micro_batches([examples[i] for i in group]) if group else ():
                largest = max(largest, collate(part).counts.positions)
    return largest


# Techniques

# Cuts save memory. Each further pass reads the weights and adds to the gradients again. The number
# of passes isn't known before the run, so this is the cost of a few.
FURTHER_PASSES = 1.05  # share of a step's memory traffic


@dataclass(frozen=True)
class GradientAccumulation(Technique):
    """Gradient accumulation: a step in several forward and backward passes, one update.

    The loss is divided by the trained tokens of the whole step, so that the cut changes memory and
    speed and nothing else. Give ``micro_batch_size`` in examples or ``micro_batch_tokens``.
    """

    slot = Slot.BATCH
    fidelity = Fidelity.ROUNDING
    micro_batch_size: int = knob(
        8, "examples of one pass; 0: cut by tokens", low=1, high=512, least=0
    )
    micro_batch_tokens: int = knob(
        0,
        "tokens of one pass at most, longest first; 0: cut by examples",
        low=256,
        high=65536,
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.micro_batch_size and not self.micro_batch_tokens:
            raise ValueError("give micro_batch_size or micro_batch_tokens")

    def apply(self, setup: Setup) -> None:
        setup.split_micro_batches = FixedCut(self.micro_batch_size, self.micro_batch_tokens)

    def live_settings(self, session: Session) -> tuple[LiveSetting, ...]:
        """Smaller micro-batches only; larger ones than the plan's may not fit."""
        fixed_cut = session.setup.split_micro_batches
        if not isinstance(fixed_cut, FixedCut) or not session.setup.layout.replicated:
            return ()
        longest = session.setup.context.examples.longest
        by_tokens = self.micro_batch_tokens > 0
        size = self.micro_batch_tokens or self.micro_batch_size
        fewest = longest if by_tokens else 1
        values = [v for v in (size // 8, size // 4, size // 2) if v >= fewest]
        setting = "micro_batch_tokens" if by_tokens else "micro_batch_size"
        return (
            LiveSetting(
                f"{self.name()}.{setting}",
                (*values, size),
                lambda: fixed_cut.tokens if by_tokens else fixed_cut.examples,
                fixed_cut.change,
                lambda: steps_read_ahead(session),
            ),
        )

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        longest = context.examples.longest
        if self.micro_batch_tokens and longest > self.micro_batch_tokens:
            return (
                f"micro_batch_tokens={self.micro_batch_tokens} can't hold the longest example of "
                f"{longest} tokens; raise it or lower cutoff_len",
            )
        return ()

    def forecast(self, context: JobContext) -> Forecast:
        return Forecast(bytes=FURTHER_PASSES)

    def check_effect(self, session: Session) -> EffectCheck:
        passes, steps = session.progress.micro_batches, session.progress.step
        return EffectCheck(passes > steps > 0, f"{passes} passes in {steps} steps on this rank")


class FixedCut:
    """Cuts a step into pieces of a number of examples, or of tokens; the other number is 0."""

    def __init__(self, examples: int, tokens: int) -> None:
        self.examples, self.tokens = examples, tokens

    def change(self, size: int) -> None:
        """Changes the number."""
        if self.tokens:
            self.tokens = size
        else:
            self.examples = size

    def __call__(self, examples: Sequence[Any]) -> list[list[Any]]:
        if self.tokens:
            return cut.by_tokens(examples, [r.length for r in examples], self.tokens)
        return cut.by_count(examples, self.examples)


@dataclass(frozen=True)
class AdaptiveBatch(Technique):
    """Micro-batches as large as memory allows; one that doesn't fit is repeated in smaller ones.

    The examples of a step, and so its loss and gradient, stay what they are: only the cut changes.
    With ``grow`` the batches of a user's own loader are joined to larger steps as well, which is
    another training.
    """

    slot = Slot.BATCH
    initial_size: int = knob(
        32,
        "examples of the first micro-batch, counted as long as the job's longest",
        low=1,
        high=512,
    )
    max_size: int = setting(512, "examples of a micro-batch at most, counted so")
    growth_factor: float = setting(1.2, "how much a micro-batch grows where there is head-room")
    memory_threshold: float = setting(0.8, "share of the memory that a step may use")
    grow: bool = setting(False, "join batches of a loader of your own to larger steps")

    def __post_init__(self) -> None:
        def nothing() -> tuple[float, float]:
            return 0.0, 1.0

        factor, threshold = self.growth_factor, self.memory_threshold
        Headroom(self.initial_size, self.max_size, factor, threshold, nothing)  # raises ValueError

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.LOSSY if self.grow else Fidelity.ROUNDING

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        if not self.grow or not context.examples.count:
            return ()
        return (
            "grow joins the batches of a loader of your own, and here a step has "
            "global_batch_size examples: raise that, and leave grow out",
        )

    def apply(self, setup: Setup) -> None:
        longest = max(setup.context.examples.longest, 1)
        room = Headroom(
            self.initial_size * longest,
            self.max_size * longest,
            self.growth_factor,
            self.memory_threshold,
            memory_meter(setup.job.device),
        )
        adaptive = AdaptiveCut(setup, room)
        setup.split_micro_batches, setup.run_passes = adaptive.cut, adaptive

    def forecast(self, context: JobContext) -> Forecast:
        return Forecast(bytes=FURTHER_PASSES)

    def check_effect(self, session: Session) -> EffectCheck:
        adaptive_cut = session.setup.run_passes
        if not isinstance(adaptive_cut, AdaptiveCut):
            return EffectCheck(False, "steps are not cut by memory")
        larger = f"; {adaptive_cut.larger} steps of several batches" if self.grow else ""
        return EffectCheck(
            adaptive_cut.steps > 0
            and (adaptive_cut.passes > adaptive_cut.steps or adaptive_cut.larger > 0),
            f"{adaptive_cut.passes} passes in {adaptive_cut.steps} steps, {adaptive_cut.redone} "
            f"redone, micro-batch of {adaptive_cut.room.size} positions after "
            f"{adaptive_cut.room.changes} changes{larger}",
        )


class AdaptiveCut:
    """Cuts a step by the available memory; repeats it if memory runs out.

    A micro-batch costs its padded positions. Examples of different micro-batches are never
    joined. Running sums that a forward pass keeps (BatchNorm) also count the passes of a
    failed attempt.

    Of several ranks, each runs and repeats its own passes. Its gradients are communicated
    only after all of its passes. So no message about a failure is needed: the others wait
    for its gradients.
    """

    def __init__(self, setup: Setup, room: Headroom) -> None:
        self.setup, self.room = setup, room
        self.steps = self.passes = self.redone = 0
        self.larger = 0  # steps that were joined from several batches of a loader
        self.joined: list[int] = []  # a loader's batches in each step of the epoch
        self._epoch = -1  # epoch that ``joined`` belongs to

    def cut(self, examples: Sequence[Any]) -> list[list[Any]]:
        return cut.by_positions(examples, [_length(r) for r in examples], self.room.size)

    def begin_epoch(self, epoch: int) -> list[int]:
        """Returns the number of batches in each finished step of this epoch; clears the list."""
        done = self.joined if epoch == self._epoch else []
        self._epoch, self.joined = epoch, []
        return list(done)

    def takes(self, batches: int) -> None:
        """Announces that the next step has so many batches of a loader."""
        self.joined.append(batches)
        self.larger += batches > 1

    def __call__(self, engine: Engine, batch: StepBatch) -> tuple[Tensor, StepBatch]:
        """Runs a step; out-of-memory errors make micro-batches smaller. Loss sum, passes."""
        micro_batches, ceiling = batch.micro_batches, self.room.ceiling
        over = ceiling and _largest([m for m in micro_batches if len(m.examples) > 1])
        if over and over >= ceiling:  # read before the failure, and known not to fit
            batch = replace(batch, micro_batches=self._cut_again(micro_batches))
        while True:
            try:
                finish = self._passes(engine, batch)
                break
            except (RuntimeError, MemoryError) as error:
                single = all(len(m.examples) < 2 for m in batch.micro_batches)
                if single or not is_out_of_memory(error):
                    raise
            # After the except block the error is freed, and with it the tensors of the failed pass.
            engine.zero_grad()
            release_memory()
            micro_batches = batch.micro_batches
            load = _largest([m for m in micro_batches if len(m.examples) > 1])
            self.room.on_out_of_memory(load)
            while sum(len(self.cut(m.examples)) for m in micro_batches) <= len(micro_batches):
                self.room.on_out_of_memory(self.room.size)
            batch = replace(batch, micro_batches=self._cut_again(micro_batches))
            self.redone += 1
        self.room.observe(_largest(batch.micro_batches))
        self.steps += 1
        self.passes += len(batch.micro_batches)
        return finish(), batch

    def _passes(self, engine: Engine, batch: StepBatch) -> Callable[[], Tensor]:
        """Runs this rank's own passes; returns the work to do after they succeeded."""
        layout, units = self.setup.layout, batch.counts.units
        if layout.size == 1:
            total = engine.gradients(batch.micro_batches, units)
            return lambda: total
        if not layout.replicated or not isinstance(engine, PlainEngine):
            raise InputError(
                f"plan: adaptive_batch with {layout.size} ranks needs ddp as the layout, where a "
                "rank can repeat a pass alone; use ddp, or gradient_accumulation instead"
            )
        return engine.gradients_apart(batch.micro_batches, units)

    def _cut_again(self, micro_batches: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
        collate, device = self.setup.collate or self.setup.job.collate, self.setup.job.device
        pieces = []
        for micro_batch in micro_batches:
            of_step = {k: v for k, v in micro_batch.inputs.items() if k == "nll_unit"}
            for part in self.cut(micro_batch.examples):
                smaller = collate(part)
                inputs = {**smaller.inputs, **of_step}
                pieces.append(replace(smaller, inputs=inputs, examples=part).to(device))
        return tuple(pieces)

    def state_dict(self) -> dict[str, Any]:
        """Returns every rank's measured memory limits; all ranks call it together."""
        room, world = self.room, self.setup.context.world
        rows = rank_rows(self.setup.layout, world, [room.size, room.good, room.ceiling])
        rooms = [[int(v) for v in row] for row in rows.tolist()]
        return {"rooms": rooms, "epoch": self._epoch, "joined": list(self.joined)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with this rank's size, or the smallest if the number of ranks changed."""
        world, rooms = self.setup.context.world, state["rooms"]
        row = rooms[world.rank] if len(rooms) == world.size else min(rooms)
        self.room.load_state_dict(dict(zip(("size", "good", "ceiling"), row, strict=True)))
        self._epoch, self.joined = state.get("epoch", -1), list(state.get("joined", ()))


def _length(example: Any) -> int:
    """Returns the tokens of an example; an example of another type counts as one."""
    return int(getattr(example, "length", 1))


def _largest(micro_batches: Sequence[MicroBatch]) -> int:
    """Returns the padded positions of the largest micro-batch."""
    costs = [max(map(_length, m.examples)) * len(m.examples) for m in micro_batches if m.examples]
    return max(costs, default=0)
