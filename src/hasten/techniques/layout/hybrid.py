"""LAYOUT: several layouts on one mesh; the product of their sizes is the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed.fsdp import Sharding
from hasten.techniques.layout.experts import cannot_share
from hasten.techniques.layout.experts import proof as shared_proof
from hasten.techniques.layout.parallel import LayoutOptions, forecast, proof
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.ranks import no_torch_distributed
from hasten.techniques.layout.tensor import no_plan


@dataclass(frozen=True)
class Hybrid(Technique):
    """Replicas, shards, tensor parallelism, pipelines and shared experts on one mesh."""

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    dp: int = setting(1, "copies that average their gradients")
    shard: int = setting(1, "pieces of each weight, brought together for a block's pass (FSDP2)")
    tp: int = setting(1, "pieces of each layer (tensor parallel)")
    pp: int = setting(1, "pipeline stages, each on ranks of its own", least=1)
    ep: int = setting(
        1, "ranks that share the experts of a stage, a divisor of dp x shard", least=1
    )
    reshard: bool = knob(True, "let a block's weights go between its two passes")
    whole_gradients: bool = knob(
        False, "keep whole gradients until a step's last micro-batch: fewer messages, more memory"
    )
    sequence: bool = knob(True, "cut the sequence between attention and MLP too")
    parallel_loss: bool = knob(True, "deal embedding, head and loss out by vocabulary")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sizes()  # raises ValueError

    def _sizes(self) -> MeshSizes:
        return MeshSizes(self.dp, self.shard, self.tp, self.pp, self.ep)

    def apply(self, setup: Setup) -> None:
        sizes = self._sizes()
        # Stages and experts of whole weights train in DistributedDataParallel.
        plain = sizes.shard == sizes.tp == 1 and sizes.pp * sizes.ep > 1
        staged = sizes.pp > 1
        how = LayoutOptions(
            self.name(),
            sizes,
            None if plain else Sharding(staged or (self.reshard and sizes.shard > 1)),
            self.whole_gradients,
            self.sequence and not staged,  # between stages hidden states travel whole
            self.parallel_loss and not staged,
        )
        Pipeline(stages=self.pp).lay_out(setup, how)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        try:
            self._sizes().check(context.world.size)
        except ValueError as error:
            return (f"{error}; change the sizes, or nproc",)
        reasons = [*no_torch_distributed(context), *no_plan(context, self.tp)]
        if self.pp > 1:
            reasons += Pipeline(stages=self.pp).unsupported_stages(context, self.pp)
        if self.ep > 1:
            reasons += cannot_share(context, self.ep)
        return tuple(reasons)

    def forecast(self, context: JobContext) -> Forecast:
        return forecast(context, self._sizes())

    def check_effect(self, session: Session) -> EffectCheck:
        checks = [Pipeline(stages=self.pp).check_effect(session)] if self.pp > 1 else []
        if self.ep > 1:
            checks.append(shared_proof(session))
        checks = checks or [proof(session)]
        evidence = "; ".join(check.evidence for check in checks)
        return EffectCheck(all(check.effective for check in checks), evidence)
