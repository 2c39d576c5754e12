"""COMMUNICATION by topology: gradients are summed hierarchically."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hasten.core.context import JobContext
from hasten.core.layout import Communication
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.errors import as_input_error
from hasten.parts.comm.codecs import codec
from hasten.parts.comm.collective_plan import CODECS, Route
from hasten.parts.comm.collectives import RoutedBuckets, TopoAwareCollective
from hasten.parts.comm.topology import check_name
from hasten.techniques.layout.ranks import no_torch_distributed

NUMBERS = 2**20  # a forecast takes this codec's ratio


@dataclass(frozen=True)
class Hierarchical(Technique):
    """Sums gradients within each host first; only a share per rank is sent between hosts."""

    slot = Slot.COMMUNICATION
    auto = "try"
    within: str = knob("none", "codec within a host", choices=("none", "bf16"), only=CODECS)
    between: str = knob("none", "codec between hosts", only=CODECS)
    feedback: bool = setting(True, "add what a codec left out between hosts to the next step")
    topology: str = setting("detect", "detect, measure, or a name such as dgx_a100")
    timeout: float = setting(120.0, "seconds a collective may take before the ranks are called")
    check_every: int = setting(
        100, "steps between two comparisons of all ranks' weights; 0: never", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.topology)
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}; it must be more than 0 seconds")

    @property
    def fidelity(self) -> Fidelity:
        plain = self.within == self.between == "none"
        return Fidelity.ROUNDING if plain else Fidelity.LOSSY

    def apply(self, setup: Setup) -> None:
        if setup.context.world.size > 1:
            route = Route("hierarchical", self.within, self.between)
            backend = "nccl" if setup.context.on_gpu else "gloo"
            collective = TopoAwareCollective(backend, self.topology, timeout=self.timeout)
            scale = lambda: setup.loss_factor  # noqa: E731
            buckets = (collective, route, self.feedback, scale)
            setup.communication = RoutedCommunication(*buckets, self.name(), self.check_every)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        return no_torch_distributed(context)

    def forecast(self, context: JobContext) -> Forecast:
        """Returns the forecast for a host of one rank; with more, it sends less than a ring."""
        if context.world.size == 1:
            return Forecast()
        return Forecast(comm_bytes=codec(self.between).message_bytes(NUMBERS) / (4 * NUMBERS))

    def check_effect(self, session: Session) -> EffectCheck:
        buckets = session.setup.communication
        if not isinstance(buckets, RoutedCommunication):
            return EffectCheck(False, "one rank: nothing travels")
        sent = buckets.collective.bytes_sent / max(buckets.steps, 1)
        text = (
            f"{buckets.routed} buckets routed in {buckets.steps} steps, {sent / 1e6:.3g} MB a step "
            "from this rank to other hosts"
        )
        return EffectCheck(buckets.routed > 0, text)


class RoutedCommunication(RoutedBuckets, Communication):
    """Sends buckets on a route, and compares weights."""

    def __init__(
        self,
        collective: TopoAwareCollective,
        route: Route,
        feedback: bool,
        scale: Callable[[], float],
        kind: str,
        check_every: int,
    ) -> None:
        super().__init__(collective, route, feedback, scale)
        self._kind, self._every, self._updates = kind, check_every, 0

    @property
    def sent_bytes(self) -> int:
        return self.collective.bytes_sent

    def attach(self, module: nn.Module) -> None:
        with as_input_error(self._kind):  # hosts or settings that can't be combined
            super().attach(module)

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        self.step()
        self._updates += 1
        if self._every and self._updates % self._every == 0:
            self.check(parameters)
