"""Compares a training step with the simulated limit of its GPU, after a few steps.

    step 4:   its operators are counted as they run, by part: bytes, FLOPs, seconds
    step 5:   it runs as usual, on the session's clock
    one line: the step's share of the limit; below 40 % also the slowest part

Counting changes no number. The counted step takes several times as long. If counting
fails, training continues without it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hasten.core.context import JobContext
from hasten.core.session import Session
from hasten.core.timing import BACKWARD, FORWARD, OPTIMIZER, Clock, StepMetrics, step_total
from hasten.errors import InputError
from hasten.measure.gpu_simulation.operators import cost
from hasten.measure.gpu_simulation.roofline import SimulatedDevice, simulated_device

LOG = logging.getLogger(__name__)
COUNTED_STEP = 4  # the first steps build kernels and the optimizer's state
FAR = 0.4  # of paper: below it the line says which part is farthest
PARTS = (FORWARD, BACKWARD, OPTIMIZER)
ELSEWHERE = ("c10d", "_c10d_functional", "prim")  # messages between ranks; questions about tensors


def comparison_of(
    session: Session, context: JobContext, tell: Callable[[str], None]
) -> SimulationComparison | None:
    """For a training on one GPU that is known; compiled code hides its operators."""
    compiled = any(t.name() == "compiled" for t in session.setup.plan)
    if not context.on_gpu or context.world.size > 1 or compiled:
        return None
    name = context.hardware.accelerators[0].name
    try:
        device = simulated_device(name.removeprefix("NVIDIA "))
    except InputError:
        return None
    return SimulationComparison(session, device, name, tell)


class SimulationComparison:
    """Counts one step of a session, and reports the comparison with the next step.

    Args:
        session: with a clock that counts; its steps go through `note`.
        device: the simulated GPU.
        name: the GPU's name in its driver.
        ``tell``: receives the line.
    """

    def __init__(
        self, session: Session, device: SimulatedDevice, name: str, tell: Callable[[str], None]
    ) -> None:
        self._session, self._name, self._tell = session, name, tell
        self._counter = OperatorCounter(device)
        self._inner: Clock = session.setup.clock
        self._counted_positions = self._steps = 0

    def note(self, metrics: StepMetrics) -> None:
        """After each step."""
        self._steps += 1
        if self._steps == COUNTED_STEP - 1:
            self._inner = self._session.setup.clock
            clock: Any = MarkedClock(self._counter.mark, self._inner)
            self._session.setup.clock = clock
            self._counter.__enter__()
        elif self._steps == COUNTED_STEP:
            self._end()
            self._counted_positions = metrics.positions
        elif self._steps == COUNTED_STEP + 1 and not self._counter.failed:
            by = metrics.positions / max(self._counted_positions, 1)
            paper = {  # passes grow with the tokens of a step, the optimizer doesn't
                part: seconds * (1.0 if part == OPTIMIZER else by)
                for part, seconds in self._counter.seconds.items()
            }
            self._tell(line(self._inner.steps[-1], paper, self._name))

    def between_steps(self, *_: Any) -> None:
        """Discards the operators since the last step, for example those of an evaluation."""
        self._counter.forget()

    def close(self) -> None:
        """Stop counting, where a training ends in the counted step."""
        if self._session.setup.clock is not self._inner:
            self._end()

    def _end(self) -> None:
        self._counter.__exit__(None, None, None)
        self._session.setup.clock = self._inner


class OperatorCounter(TorchDispatchMode):
    """Adds up the simulated seconds of the operators of real tensors, by part of the step."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._pending = 0.0
        self._documents: dict[int, tuple[int, ...]] = {}
        self.failed = False
        self.seconds: dict[str, float] = defaultdict(float)

    def mark(self, part: str) -> None:
        """Assigns the operators since the last mark to this part."""
        self.seconds[part] += self._pending
        self.forget()

    def forget(self) -> None:
        """Discards the operators since the last mark."""
        self._pending = 0.0
        self._documents = {}  # of tensors that are freed, whose memory others may get

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # its operator comes again with the tensors inside
        out = func(*args, **(kwargs or {}))
        if not self.failed and func.namespace not in ELSEWHERE:
            try:
                call_cost = cost(func, args, kwargs or {}, out, self._lengths(func, args))
                self._pending += self._device.seconds(call_cost)
            except Exception:  # whatever an operator has that nobody thought of
                self.failed = True
                LOG.debug("a step's operators couldn't be counted", exc_info=True)
        return out

    def _lengths(self, func: Any, args: Any) -> tuple[int, ...]:
        """Lengths of the documents in a packed row, from an attention's start offsets."""
        if "varlen" not in func._schema.name:
            return ()
        flat = (t for t in tree_leaves(args) if isinstance(t, Tensor))
        starts = next((t for t in flat if t.dtype is torch.int32 and t.dim() == 1), None)
        if starts is None:
            return ()
        if starts.data_ptr() not in self._documents:
            self._documents[starts.data_ptr()] = tuple(starts.diff().tolist())
        return self._documents[starts.data_ptr()]


class MarkedClock:
    """A session's clock that also forwards its marks to a counter of operators."""

    def __init__(self, mark: Callable[[str], None], inner: Clock) -> None:
        self._mark, self._inner = mark, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def mark(self, part: str) -> None:
        self._mark(part)
        self._inner.mark(part)


def line(measured: Mapping[str, float], paper: Mapping[str, float], name: str) -> str:
    """One sentence that compares a step's seconds by part with the simulated seconds."""
    total, least = step_total(measured), sum(paper.values())
    share = least / total
    text = (
        f"a step takes {1e3 * total:,.0f} ms on {name}, and {1e3 * least:,.0f} ms at least "
        f"by simulation: {share:.0%} of the speed that the GPU allows"
    )
    if share >= FAR:
        return text
    part_shares = {p: paper[p] / measured[p] for p in PARTS if measured.get(p) and paper.get(p)}
    if not part_shares:
        return text
    part = min(part_shares, key=lambda p: part_shares[p])
    return f"{text}; farthest is {part} with {part_shares[part]:.0%}: see `hasten profile`"
