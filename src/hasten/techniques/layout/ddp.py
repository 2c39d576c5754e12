"""LAYOUT: every rank holds the full model, and gradients are averaged (DDP)."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique, knob
from hasten.parts.comm.groups import MeshSizes
from hasten.techniques.layout.parallel import LayoutOptions, ParallelLayout, lay_out
from hasten.techniques.layout.ranks import no_torch_distributed


@dataclass(frozen=True)
class DDP(Technique):
    """Every rank holds the full model and its own examples; gradients are averaged in buckets."""

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    bucket_cap_mb: int = knob(
        25,
        "size of a gradient bucket in MB; 0: by the link, measured",
        least=0,
        low=1,
        high=256,
        log=True,
    )

    def apply(self, setup: Setup) -> None:
        sizes = MeshSizes(dp=setup.context.world.size)
        lay_out(setup, LayoutOptions(self.name(), sizes, bucket_cap_mb=self.bucket_cap_mb))

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        return no_torch_distributed(context)

    def check_effect(self, session: Session) -> EffectCheck:
        replicated = isinstance(session.module, DistributedDataParallel)
        layout, steps = session.setup.layout, session.progress.step
        size = layout.size
        if session.setup.rank_sync.diverged:
            return EffectCheck(
                size > 1 and steps > 0, f"{size} rank(s) that train apart, {steps} steps"
            )
        buckets = layout.buckets if isinstance(layout, ParallelLayout) else ""
        # torch's counters of the reducer miss gradients that are sent late (adaptive_batch).
        return EffectCheck(
            replicated and steps > 0,
            f"{size} rank(s), {'' if replicated else 'not '}replicated, {steps} steps{buckets}",
        )
