"""ACTIVATION_CHECKPOINTING: which activations are kept for the backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import (
    EffectCheck,
    Fidelity,
    Forecast,
    LiveSetting,
    Technique,
    knob,
    setting,
)
from hasten.machine.memory import is_out_of_memory
from hasten.parts.data.dynamic_batch import release_memory
from hasten.parts.nn.recompute import BlockRecompute
from hasten.techniques import batch as changing
from hasten.techniques import probes


@dataclass(frozen=True)
class ActivationCheckpointing(Technique):
    """Blocks keep only their inputs; the backward pass computes the rest again."""

    slot = Slot.ACTIVATION_CHECKPOINTING
    fidelity = Fidelity.EXACT
    segments: int | None = setting(
        None, "recompute in so many runs of blocks, the last kept; none: each block by itself"
    )
    budget: float | None = knob(
        None, "share of the blocks' bytes that may stay", choices=(0.25, 0.5, 0.75)
    )
    offload: bool = setting(False, "recompute nothing, keep activations in host memory (GPU)")

    def __post_init__(self) -> None:
        BlockRecompute(self.segments, self.budget, self.offload)  # raises ValueError

    def apply(self, setup: Setup) -> None:
        setup.recompute = BlockRecompute(self.segments, self.budget, self.offload)

    def live_settings(self, session: Session) -> tuple[LiveSetting, ...]:
        """Returns the setting to turn recomputation off if twice the additional memory is free."""
        recompute = session.setup.recompute
        if (
            not isinstance(recompute, BlockRecompute)
            or self.offload
            or not session.setup.layout.replicated
        ):
            return ()
        sizes, positions = _measured(session, recompute), changing.largest_micro_batch(session)
        more = math.inf  # a rank without a measurement takes part too: all ranks communicate below
        if sizes is not None and positions:
            stored, total, measured = sizes
            more = 2 * (total - stored) * positions / measured
        if not changing.fits(session, more):
            return ()

        def change(on: bool) -> None:
            recompute.resting = not on

        return (LiveSetting(self.name(), (True, False), lambda: not recompute.resting, change),)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        reasons = []
        if self.offload and not context.on_gpu:
            reasons.append(
                f"activations of {context.model.architecture} are in host memory already on a "
                "processor, so there is nothing to move; leave offload out"
            )
        if self.segments is not None and 0 < context.model.layers < self.segments:
            reasons.append(
                f"segments is {self.segments}, but {context.model.architecture} has "
                f"{context.model.layers} blocks here; give at most that"
            )
        return tuple(reasons)

    def forecast(self, context: JobContext) -> Forecast:
        """Counts the forward pass as a third of a step's FLOPs; the recomputed part runs again."""
        if self.offload:
            return Forecast()
        share = 1.0
        if self.budget is not None:
            share = 1 - self.budget
        elif self.segments is not None and context.model.layers:
            size = context.model.layers // self.segments
            share = size * (self.segments - 1) / context.model.layers
        return Forecast(flops=1 + share / 3)

    def check_effect(self, session: Session) -> EffectCheck:
        recompute = session.setup.recompute
        if not isinstance(recompute, BlockRecompute):
            return EffectCheck(False, "every activation is kept")
        effective = recompute.passes > 0
        done = (
            f"{recompute.passes} passes of blocks {'kept on the host' if self.offload else 'again'}"
        )
        if recompute.resting:
            return EffectCheck(effective, f"{done}, until all fitted and was kept: that was faster")
        sizes = _measured(session, recompute)
        if sizes is None:
            return EffectCheck(effective, done)
        stored, total, positions = sizes[0] / 1e6, sizes[1] / 1e6, sizes[2]
        return EffectCheck(
            effective and sizes[0] < sizes[1],
            f"saved {stored:.2f} MB of activations where {total:.2f} MB would be, "
            f"on {positions} positions; {done}",
        )


def _measured(session: Session, recompute: BlockRecompute) -> tuple[int, int, int] | None:
    """Returns the bytes kept for backward by some examples, with and without recomputation.

    Also returns their positions. Returns None for a stream, in a pipeline, and if the device has no
    memory to keep everything.
    """
    setup, job, module = session.setup, session.setup.job, session.loss_module
    batch = probes.few_examples(session)
    if batch is None:
        return None  # reading from the user's stream would consume it

    def forward() -> object:
        with setup.precision.region():
            return module(**batch.inputs)

    passes = recompute.passes
    gpu = [] if job.device == "cpu" else [torch.device(job.device)]
    total = 0
    try:
        with torch.random.fork_rng(devices=gpu):
            stored = recompute.saved_bytes(forward, module)
            with recompute.off():
                total = recompute.saved_bytes(forward, module)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    if not total:  # memory of the failed pass is free by now
        release_memory()
    recompute.passes = passes
    return (
        (stored, total, batch.counts.positions) if total else None
    )  # no rank of a pipeline runs a pass by itself
