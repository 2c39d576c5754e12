"""LAYOUT: the experts of a layer are divided over ranks, all other weights are replicated."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.errors import as_input_error
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed.expert_parallel import ADAPTED
from hasten.techniques.experts import ARCHITECTURES
from hasten.techniques.layout.parallel import LayoutOptions, ParallelLayout, forecast, lay_out
from hasten.techniques.layout.ranks import no_torch_distributed


@dataclass(frozen=True)
class ExpertParallel(Technique):
    """Each rank holds a part of every layer's experts and receives their tokens.

    Ranks keep their own examples, and what isn't an expert is averaged as under ``ddp``.
    """

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    size: int = setting(0, "neighbouring ranks that share the experts out; 0: all ranks", least=0)
    bucket_cap_mb: int = knob(
        25, "size of a gradient bucket of the rest in MB", low=1, high=256, log=True, least=1
    )

    def apply(self, setup: Setup) -> None:
        if (world := setup.context.world.size) == 1:
            return
        with as_input_error(self.name()):
            sizes = MeshSizes(dp=world, ep=self.size or world)
        lay_out(setup, LayoutOptions(self.name(), sizes, bucket_cap_mb=self.bucket_cap_mb))

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        world = context.world.size
        ranks = self.size or world
        reasons = cannot_share(context, ranks)
        if world == 1 or not world % ranks:
            return reasons
        text = f"{world} ranks can't form groups of {ranks}; give a size that divides {world}"
        return (*reasons, text)

    def forecast(self, context: JobContext) -> Forecast:
        ranks = self.size or context.world.size
        return forecast(context, MeshSizes(dp=ranks, ep=ranks))

    def check_effect(self, session: Session) -> EffectCheck:
        return proof(session)


def cannot_share(context: JobContext, ranks: int) -> tuple[str, ...]:
    """Returns why so many ranks can't share this model's experts."""
    model = context.model
    if reasons := (
        model.why_not_of(ARCHITECTURES, needs_experts=True) or no_torch_distributed(context)
    ):
        return reasons
    if model.merged_weights:
        return (ADAPTED,)
    if model.experts % ranks:
        return (
            f"{model.experts} experts of a layer can't be shared evenly by {ranks} ranks; give "
            f"a size that divides {model.experts}",
        )
    return ()


def proof(session: Session) -> EffectCheck:
    """Returns a check with the experts per rank, and the rows sent to other ranks."""
    layout = session.setup.layout
    if not isinstance(layout, ParallelLayout) or layout.shared is None:
        return EffectCheck(False, "every rank holds all experts")
    layers, sent = list(layout.shared.layers.values()), layout.shared.traffic
    if not layers:
        return EffectCheck(True, "this rank's stages have no experts")
    gone = sent.rows / ((sent.rows + sent.local_rows) or 1)
    pieces = ""
    if layout.weights is not None:
        local_count = sum(p.numel() for p in layout.weights.parameters())
        pieces = f"; this rank holds {local_count:,} weights"
    return EffectCheck(
        sent.rows > 0,
        f"{layers[0].here} of {layers[0].total} experts of each of {len(layers)} layers on a "
        f"rank; {sent.rows} rows ({gone:.0%}) went to other ranks, {sent.bytes / 1e6:.2f} MB "
        f"with what came back, in {sent.messages} exchanges{pieces}",
    )
