"""LAYOUT: several layouts on one mesh, their product the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.facts import Facts
from hasten.core.session import Session
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Forecast, Proof, Technique, knob, setting
from hasten.parts.layout.mesh import MeshSizes
from hasten.parts.layout.sharding import Sharding
from hasten.techniques.layout_experts import ExpertParallel
from hasten.techniques.layout_mesh import no_ranks
from hasten.techniques.layout_pipeline import Pipeline
from hasten.techniques.layout_tensor import cut, forecast, no_plan, proof


@dataclass(frozen=True)
class Hybrid(Technique):
    """Copies, shards and pieces of layers, or copies of pipelines, or copies that share experts."""

    slot = Slot.LAYOUT
    dp: int = setting(1, "copies that average their gradients")
    shard: int = setting(1, "pieces of each weight, brought together for a block's pass (FSDP2)")
    tp: int = setting(1, "pieces of each layer (tensor parallel)")
    pp: int = setting(1, "pipeline stages; beside dp alone")
    ep: int = setting(1, "copies that share the experts, a divisor of dp; beside dp alone")
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
        for name in ("pp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        others = [n for n in ("shard", "tp") if getattr(self, n) > 1]
        both = [n for n in ("pp", "ep") if getattr(self, n) > 1]
        if both and len(both + others) > 1:
            raise ValueError(
                f"{both[0]} stands beside dp alone, and {(others or both[1:])[0]} is given too"
            )
        if self.dp % self.ep:
            raise ValueError(f"ep is {self.ep} and must divide dp, which is {self.dp}")
        self._sizes()

    def _sizes(self) -> MeshSizes:
        return MeshSizes(self.dp, self.shard, self.tp)

    def _other(self) -> Technique | None:
        """What holds stages or experts; it makes copies of the ranks that are left by itself."""
        if self.pp > 1:
            return Pipeline(stages=self.pp)
        return ExpertParallel(size=self.ep) if self.ep > 1 else None

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    def apply(self, setup: Setup) -> None:
        other = self._other()
        if other is not None:
            other.apply(setup)
            return
        sharding = Sharding(reshard=self.reshard and self.shard > 1)
        pieces = self.sequence, self.parallel_loss
        cut(setup, self._sizes(), self.name(), pieces, sharding, self.whole_gradients)

    def obstacles(self, facts: Facts) -> tuple[str, ...]:
        size, world = self._sizes().size * self.pp, facts.world.size
        if size != world:
            axes = [f"{n} {getattr(self, n)}" for n in ("dp", "shard", "tp", "pp")]
            return (
                f"{' x '.join(axes)} is {size} ranks and {world} are running; change the sizes, "
                "or nproc",
            )
        other = self._other()
        return other.obstacles(facts) if other else (*no_ranks(facts), *no_plan(facts, self.tp))

    def forecast(self, facts: Facts) -> Forecast:
        other = self._other()
        return other.forecast(facts) if other else forecast(facts, self._sizes())

    def probe(self, session: Session) -> Proof:
        other = self._other()
        return other.probe(session) if other else proof(session)
