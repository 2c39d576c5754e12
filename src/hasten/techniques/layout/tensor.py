"""LAYOUT: each rank computes a part of every layer."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed.fsdp import Sharding
from hasten.parts.distributed.tensor_plans import TENSOR_PARALLEL, uneven_heads
from hasten.techniques.layout.parallel import LayoutOptions, forecast, lay_out, proof
from hasten.techniques.layout.ranks import no_torch_distributed


@dataclass(frozen=True)
class TensorParallel(Technique):
    """Divides heads, MLP widths and vocabulary over ranks, which process the same examples."""

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    size: int | None = setting(None, "ranks that share each layer; none: all of them", least=1)
    sequence: bool = knob(True, "cut the sequence between attention and MLP too")
    parallel_loss: bool = knob(True, "deal embedding, head and loss out by vocabulary")

    def apply(self, setup: Setup) -> None:
        sizes, split = self._sizes(setup.context), (self.sequence, self.parallel_loss)
        lay_out(setup, LayoutOptions(self.name(), sizes, Sharding(), False, *split))

    def _sizes(self, context: JobContext) -> MeshSizes:
        return MeshSizes(tp=self.size or context.world.size)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        size = self.size or context.world.size
        reasons = [*no_torch_distributed(context), *no_plan(context, size)]
        if self.size is not None and self.size != context.world.size:
            reasons.append(
                f"{size} ranks share each layer and {context.world.size} are running; use "
                f"hybrid with tp: {size}, or change nproc"
            )
        return tuple(reasons)

    def forecast(self, context: JobContext) -> Forecast:
        return forecast(context, self._sizes(context))

    def check_effect(self, session: Session) -> EffectCheck:
        return proof(session)


def no_plan(context: JobContext, size: int) -> tuple[str, ...]:
    """Returns why this model's layers can't be split over so many ranks."""
    if size == 1:
        return ()
    model = context.model
    if reasons := model.why_not_of(TENSOR_PARALLEL):
        return reasons
    heads = model.heads, model.key_value_heads
    return tuple(filter(None, [uneven_heads(model.architecture, *heads, size)]))
