"""Code that techniques of several ranks share: a layout of all ranks, checks, traffic counters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.core.context import JobContext
from hasten.core.job import Job
from hasten.core.layout import CommTiming, Communication, Layout, NoCompression
from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.timing import OPTIMIZER
from hasten.errors import InputError, as_input_error
from hasten.machine.environment import World
from hasten.parts.checkpoint.state import hash_of
from hasten.parts.comm.groups import sum_over_ranks
from hasten.parts.distributed.arrival import Arrival
from hasten.parts.distributed.ddp import ring_bytes, under_way, watch_reducer
from hasten.parts.distributed.weight_broadcast import broadcast_model
from hasten.parts.nn.late_weights import is_late, late_weight


class RanksLayout(Layout):
    """A layout of all ranks of the process group.

    Args:
        partners: ranks that process the same examples, each with its part of the model.
        pieces, keeps, copies: see ``hasten.core.layout.SplitsModel``.
    """

    partners = 1
    pieces = False
    keeps = False
    copies: Mapping[str, str] = MappingProxyType({})

    def __init__(self, world: World) -> None:
        """Every rank has its own examples."""
        self.size = self.data_size = self.averages = world.size
        self.data_rank = world.rank
        self._world = world

    def all_reduce_data(self, values: Tensor) -> Tensor:
        return self.all_reduce_world(values) / self.partners

    def all_reduce_world(self, values: Tensor) -> Tensor:
        return sum_over_ranks(values)


class PartsLayout(RanksLayout):
    """A layout in which a rank keeps parts of the model and reads only these.

    ``_expect`` is called before anything is split, and ``_fill`` when parameters are split.
    """

    replicated = False
    _arrival: Arrival | None = None

    def build(self, job: Job, plan: Plan) -> nn.Module:
        """Returns the model without memory for parameters, if the job can build it so.

        DoRA measures the weights before they are split, so each rank has all of them.
        """
        dora = any(t.slot is Slot.ADAPTER and t.settings().get("dora") for t in plan)
        if self.size == 1 or dora:
            return job.build_model()
        model = job.late_model()
        if model is not None:
            return model
        if job.skeleton is None:
            return job.build_model()
        built = None if self._world.local_rank else job.build_model()
        with as_input_error("model"):
            return broadcast_model(built, job.skeleton())

    def late_hash(self, model: nn.Module, names: Collection[str]) -> str:
        """Reads one weight after the other, all of them on the first rank."""
        state = model.state_dict(keep_vars=True)
        late = [w for n in names if (w := late_weight(state[n])) is not None]
        if not late or not (self._world.is_main or any(w.together for w in late)):
            return ""
        return hash_of(_ReadOnce({n: t for n, t in state.items() if n in set(names)}))

    def _expect(self, module: nn.Module) -> None:
        if is_late(module):
            with as_input_error("plan"):
                self._arrival = Arrival(module)

    def _fill(
        self,
        module: nn.Module,
        device: torch.device | None = None,
        only: Callable[[Tensor], bool] = lambda parameter: True,
    ) -> None:
        if self._arrival is not None:
            with as_input_error("plan"):
                self._arrival.fill(module, device, only)


class _ReadOnce(dict[str, Tensor]):
    """Tensors by name; a late one is read by the iteration, and freed when the next one is."""

    def items(self) -> Any:
        read: dict[int, Tensor] = {}  # tensors stay the same objects while their memory goes
        for name, tensor in super().items():
            weight = late_weight(tensor)
            if weight is None:
                yield name, tensor
            elif id(weight) not in read:
                read[id(weight)] = weight.read()
                yield name, read[id(weight)]
                read[id(weight)].set_()


def no_torch_distributed(context: JobContext) -> tuple[str, ...]:
    """Returns why several ranks can't work together at all; empty if they can, or on one rank."""
    if context.world.size > 1 and not dist.is_available():
        return ("this torch was built without torch.distributed",)
    return ()


@contextmanager
def of_the_same_plan(state: Mapping[str, Any], kind: str) -> Iterator[None]:
    """Context in which a communication method reads its ``state`` of a checkpoint.

    Raises:
        InputError: another technique than ``kind`` has written the state, or it doesn't fit.
    """
    if state["technique"] != kind:
        raise InputError(
            f"the checkpoint was written with {state['technique']} and the plan has {kind}; "
            "resume with the plan that wrote it, or choose another folder"
        )
    with as_input_error(kind, "; resume with the plan that wrote it"):
        yield


@runtime_checkable
class CountsBytes(Protocol):
    """A communication method that counts the bytes that this rank has sent so far."""

    @property
    def sent_bytes(self) -> int: ...


class ReplicaTraffic:
    """Reads the seconds from DDP's reducer and the bytes from the communication method.

    ``late`` is set if the first bucket left after the passes, so that no computation hid it.
    """

    def __init__(self, module: DistributedDataParallel, communication: Communication) -> None:
        self.late = False
        self._module, self._communication, self._before = module, communication, 0
        self._dense = ring_bytes(module) if isinstance(communication, NoCompression) else None
        self._reducer = watch_reducer(module)

    def traffic(self) -> CommTiming | None:
        """Returns the timing of the last step; None if the reducer has no clock."""
        timing = under_way(self._module) if self._reducer else None
        late, self.late, sent = self.late, False, self._sent()
        if timing is None:
            return None
        hidden = 0.0 if late else timing.hidden
        return CommTiming(timing.exposed + timing.hidden - hidden, hidden, sent)

    def _sent(self) -> int | None:
        if not isinstance(self._communication, CountsBytes):
            return self._dense
        total = self._communication.sent_bytes
        sent, self._before = total - self._before, total
        return sent


class CountsExchanges(Protocol):
    """A part that sends weights and counts its exchanges."""

    waited_seconds: float
    hidden_seconds: float | None
    sent_bytes: int


class WeightTraffic:
    """Returns the differences of a part's counts between steps; waiting belongs to the update."""

    def __init__(self, part: CountsExchanges) -> None:
        self._part = part
        self.begin()

    def begin(self) -> None:
        """Begins a step; earlier counts belong to no step."""
        self._waited = self._part.waited_seconds
        self._hidden, self._sent = self._part.hidden_seconds, self._part.sent_bytes

    def traffic(self) -> CommTiming:
        part, hidden = self._part, None
        if part.hidden_seconds is not None and self._hidden is not None:
            hidden = part.hidden_seconds - self._hidden
        timing = CommTiming(
            part.waited_seconds - self._waited, hidden, part.sent_bytes - self._sent, OPTIMIZER
        )
        self.begin()
        return timing
