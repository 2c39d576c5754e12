"""LAYOUT: each rank keeps a shard of every weight (FSDP2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.models.memory import ADAMW_FLOAT32
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed.fsdp import Sharding
from hasten.techniques.layout.parallel import LayoutOptions, forecast, lay_out, proof
from hasten.techniques.layout.ranks import no_torch_distributed


@dataclass(frozen=True)
class FSDP2(Technique):
    """Weights, gradients and moments in shards; a block's weights are gathered for its pass."""

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    reshard: bool = knob(True, "let a block's weights go between its two passes")
    whole_gradients: bool = knob(
        False, "keep whole gradients until a step's last micro-batch: fewer messages, more memory"
    )
    replicas: int = setting(
        1,
        "copies of the sharded model, such as one per host; their gradients are averaged",
        least=1,
    )
    offload: bool = setting(False, "pieces lie in host memory, where the optimizer runs (GPU)")

    def apply(self, setup: Setup) -> None:
        sharding = Sharding(self.reshard, self.offload)
        sizes = self._sizes(setup.context)
        lay_out(setup, LayoutOptions(self.name(), sizes, sharding, self.whole_gradients))

    def _sizes(self, context: JobContext) -> MeshSizes:
        shards = max(context.world.size // self.replicas, 1)
        return MeshSizes(dp=self.replicas, shard=shards)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        reasons = list(no_torch_distributed(context))
        if context.world.size % self.replicas:
            reasons.append(
                f"{context.world.size} ranks can't be dealt into {self.replicas} copies of equal "
                f"size"
            )
        if self.offload and not context.on_gpu:
            reasons.append(
                f"the weights of {context.model.architecture} are in host memory already on a "
                "processor; leave offload out"
            )
        return tuple(reasons)

    def forecast(self, context: JobContext) -> Forecast:
        """Adds an all-gather for each pass: 3/2 of an all-reduce, or 1; removes offloaded state."""
        sizes = self._sizes(context)
        common = forecast(context, sizes)
        if sizes.shard == 1 or context.world.size == 1:
            return common
        gone = common.resident_bytes
        if self.offload and context.on_gpu:
            gone = -ADAMW_FLOAT32 * context.model.parameters
        return replace(common, comm_bytes=1.5 if self.reshard else 1.0, resident_bytes=gone)

    def check_effect(self, session: Session) -> EffectCheck:
        return proof(session)
