"""LAYOUT: several layouts on one mesh; the product of their sizes is the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed.fsdp import Sharding
from hasten.techniques.layout import experts
from hasten.techniques.layout.experts import ExpertParallel, ExpertsInFSDP
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.pipeline_stages import StagesInPieces
from hasten.techniques.layout.ranks import no_torch_distributed
from hasten.techniques.layout.tensor import cut, forecast, no_plan, proof


@dataclass(frozen=True)
class Hybrid(Technique):
    """Replicas, shards and tensor parallelism, also in pipelines, or shared experts with shards."""

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    dp: int = setting(1, "copies that average their gradients")
    shard: int = setting(1, "pieces of each weight, brought together for a block's pass (FSDP2)")
    tp: int = setting(1, "pieces of each layer (tensor parallel)")
    pp: int = setting(1, "pipeline stages, each on ranks of its own", least=1)
    ep: int = setting(
        1, "ranks that share the experts, a divisor of dp x shard; not with tp, pp", least=1
    )
    reshard: bool = knob(
        True, "let a block's weights go between its two passes", choices=(True, False)
    )
    whole_gradients: bool = knob(
        False,
        "keep whole gradients until a step's last micro-batch: fewer messages, more memory",
        choices=(True, False),
    )
    sequence: bool = knob(
        True, "cut the sequence between attention and MLP too", choices=(True, False)
    )
    parallel_loss: bool = knob(
        True, "deal embedding, head and loss out by vocabulary", choices=(True, False)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        others = [n for n in ("tp", "pp") if getattr(self, n) > 1]
        if self.ep > 1 and others:
            raise ValueError(
                f"ep goes with dp and shard only, and {others[0]} is given too: its ranks get "
                "the same tokens, or hold other layers"
            )
        if self.dp * self.shard % self.ep:
            raise ValueError(
                f"ep is {self.ep} and must divide dp x shard, which is {self.dp * self.shard}"
            )
        self._sizes()

    def _sizes(self) -> MeshSizes:
        return MeshSizes(self.dp, self.shard, self.tp)

    def _other(self) -> Technique | None:
        """Returns the technique for stages or experts; it copies them to the remaining ranks."""
        if self.pp > 1:
            return Pipeline(stages=self.pp)
        return ExpertParallel(size=self.ep) if self.ep > 1 else None

    def apply(self, setup: Setup) -> None:
        other, sizes = self._other(), self._sizes()
        alone = sizes.shard == sizes.tp == 1 or setup.context.world.size == 1
        if isinstance(other, Pipeline) and not alone:
            other.fill(setup, StagesInPieces(setup, other.settings_on(self.pp), sizes))
        elif other is not None and not alone:
            gradients = self.whole_gradients
            setup.layout = ExpertsInFSDP(setup, sizes, self.ep, self.reshard, gradients)
        elif other is not None:
            other.apply(setup)
        if other is not None:
            return
        sharding = Sharding(reshard=self.reshard and self.shard > 1)
        pieces = self.sequence, self.parallel_loss
        cut(setup, sizes, self.name(), pieces, sharding, self.whole_gradients)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        size, world = self._sizes().size * self.pp, context.world.size
        if size != world:
            axes = [f"{n} {getattr(self, n)}" for n in ("dp", "shard", "tp", "pp")]
            return (
                f"{' x '.join(axes)} is {size} ranks and {world} are running; change the sizes, "
                "or nproc",
            )
        other = self._other()
        reasons = other.unsupported_reasons(context) if other else no_torch_distributed(context)
        return (*reasons, *no_plan(context, self.tp))

    def forecast(self, context: JobContext) -> Forecast:
        other, sizes = self._other(), self._sizes()
        if self.pp > 1 and sizes.shard * sizes.tp > 1:
            return forecast(context, replace(sizes, shard=sizes.shard * self.pp))
        if self.ep > 1:
            return experts.forecast(context, self.ep, self.shard)
        return other.forecast(context) if other else forecast(context, sizes)

    def check_effect(self, session: Session) -> EffectCheck:
        other, layout = self._other(), session.setup.layout
        if isinstance(layout, ExpertsInFSDP) and layout.shared is not None:
            local_count = sum(p.numel() for p in layout.weights.parameters())
            return experts.proof(layout.shared, f"; this rank holds {local_count:,} weights")
        return other.check_effect(session) if other else proof(session)
