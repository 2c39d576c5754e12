"""Code that techniques of several ranks share: a layout of all ranks, checks, traffic counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hasten.core.context import JobContext
from hasten.core.layout import CommTiming, Communication, Layout, NoCompression
from hasten.errors import InputError, as_input_error
from hasten.machine.environment import World
from hasten.parts.comm.groups import sum_over_ranks
from hasten.parts.distributed.ddp import ring_bytes, under_way, watch_reducer


class RanksLayout(Layout):
    """A layout of all ranks of the process group.

    Args:
        partners: ranks that process the same examples, each with its part of the model.
    """

    partners = 1

    def __init__(self, world: World) -> None:
        """Every rank has its own examples."""
        self.size = self.data_size = self.averages = world.size
        self.data_rank = world.rank
        self._world = world

    def all_reduce_data(self, values: Tensor) -> Tensor:
        return self.all_reduce_world(values) / self.partners

    def all_reduce_world(self, values: Tensor) -> Tensor:
        return sum_over_ranks(values)


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


class StepCounts:
    """Returns by how much counts grow from step to step; None for an unknown count."""

    def __init__(self, read: Callable[[], Sequence[float | None]]) -> None:
        self._read, self._before = read, read()

    def take(self) -> list[Any]:
        """Returns the differences since the last call."""
        before, self._before = self._before, self._read()
        pairs = zip(before, self._before, strict=True)
        return [None if old is None or new is None else new - old for old, new in pairs]


class ReplicaTraffic:
    """Reads the seconds from DDP's reducer and the bytes from the communication method.

    ``late`` is set if the first bucket left after the passes, so that no computation hid it.
    """

    def __init__(self, module: DistributedDataParallel, communication: Communication) -> None:
        self.late, self._module = False, module
        self._dense = ring_bytes(module) if isinstance(communication, NoCompression) else None
        self._counts = StepCounts(lambda: [communication.sent_bytes])
        self._reducer = watch_reducer(module)

    def traffic(self) -> CommTiming | None:
        """Returns the timing of the last step; None if the reducer has no clock."""
        timing = under_way(self._module) if self._reducer else None
        late, self.late, (sent,) = self.late, False, self._counts.take()
        if timing is None:
            return None
        hidden = 0.0 if late else timing.hidden
        sent = self._dense if sent is None else sent
        return CommTiming(timing.exposed + timing.hidden - hidden, hidden, sent)
