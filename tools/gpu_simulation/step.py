"""One simulated step of a session: one or two warm-up steps, then one that counts.

Blocks of a model are alike, and so are the passes of a step. Each count is a + bL + cM
+ dLM in layers L and passes M. Therefore traces with two values of each determine the
counts of the full model.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpu_simulation.tracer import Key, RankMessage, Tracer
from hasten.core.plan import Plan
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.timing import Clock, StepMetrics
from hasten.techniques.activation_checkpointing import ActivationCheckpointing

PEAK, BETWEEN_STEPS, TOKENS = ("peak", "", ""), ("between_steps", "", ""), ("tokens", "", "")
MODEL_FLOPS = ("model_flops", "", "")
# Steps: in the first an optimizer makes its state, in the second of several ranks DDP its buckets.
WARM_UP, WARM_UP_OF_RANKS = 1, 2
FEW_PASSES = 3  # a step of so many is traced as it is


@dataclass(frozen=True)
class Traced:
    """A step's counts, and what was seen of devices."""

    counts: Mapping[Key, float]
    devices: frozenset[str]
    messages: Mapping[RankMessage, int]


class MarkedClock:
    """A session's clock that also forwards its marks to a counter of operators."""

    def __init__(self, mark: Callable[[str], None], inner: Clock) -> None:
        self._mark, self._inner = mark, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def mark(self, part: str) -> None:
        self._mark(part)
        self._inner.mark(part)


def traced(build: Callable[[], Session], tracer: Tracer) -> Traced:
    """Build a session, warm up, and count the next step."""
    with on_simulated_device(tracer):
        session = build()
        session.setup.clock = MarkedClock(tracer.mark, session.setup.clock)
        running = training(session)
        alone = session.setup.context.world.size == 1
        for _ in range(WARM_UP if alone else WARM_UP_OF_RANKS):
            next(running)
        between = tracer.live
        tracer.clear()
        metrics: StepMetrics = next(running)
        tracer.mark("")
    counts = dict(tracer.counts)
    counts |= {PEAK: tracer.peak, BETWEEN_STEPS: between, TOKENS: metrics.tokens}
    counts[MODEL_FLOPS] = metrics.model_flops or 0.0
    return Traced(counts, frozenset(tracer.devices), dict(tracer.messages))


def extrapolated(
    trace: Callable[[int, int], Mapping[Key, float]],
    layers: int,
    passes: int,
    fewest: int = 2,
) -> dict[Key, float]:
    """The counts of a step with so many layers and passes, from those of a few.

    The peak is that of the last pass that was traced: from the third on, all are alike. Before,
    a first gradient may still have the narrow format in which a sum isn't kept.
    """
    few_passes = (passes,) if passes <= FEW_PASSES else (2, 3)
    few_layers = (layers,) if layers <= fewest + 1 else (fewest, fewest + 1)
    traces = {(n, m): trace(n, m) for n, m in itertools.product(few_layers, few_passes)}

    def over_layers(key: Key, m: int) -> float:
        first = traces[few_layers[0], m].get(key, 0.0)
        more = traces[few_layers[-1], m].get(key, 0.0) - first
        return first + more * (layers - few_layers[0])

    counts = {}
    for key in {key for one in traces.values() for key in one}:
        first, last = over_layers(key, few_passes[0]), over_layers(key, few_passes[-1])
        beyond = 1 if key == PEAK else passes - few_passes[0]
        counts[key] = first + (last - first) * beyond
    return counts


def treats_alike(plan: Plan) -> bool:
    """Returns True if a plan treats all layers alike, instead of only a share of them."""
    return not any(isinstance(t, ActivationCheckpointing) and t.budget is not None for t in plan)


@contextlib.contextmanager
def on_simulated_device(tracer: Tracer) -> Iterator[None]:
    """Operators inside run on the simulated device, and the tracer counts them.

    It is also given what doesn't come to it: calls of modules, storages, waits, threads.
    """
    call, resize = torch.nn.Module.__call__, torch.UntypedStorage.resize_
    run = threading.Thread.run
    accelerator: Any = torch.accelerator
    cuda: Any = torch.cuda
    module: Any = torch.nn.Module
    storage: Any = torch.UntypedStorage
    waits = accelerator.synchronize

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with tracer.module_call():
            return call(self, *args, **kwargs)

    def resized(self: Any, size: int) -> Any:
        out = resize(self, size)
        tracer.resized(self)
        return out

    def run_traced(self: Any) -> None:
        with tracer:
            run(self)

    module.__call__, storage.resize_ = called, resized
    thread: Any = threading.Thread
    thread.run = run_traced
    accelerator.synchronize = cuda.synchronize = lambda *_, **__: tracer.synchronised("synchronize")
    try:
        # On the device's own thread torch.tensor(.., device="cuda") would ask for memory.
        with torch.autograd.set_multithreading_enabled(False), tracer:
            yield
    finally:
        module.__call__, storage.resize_, thread.run = call, resize, run
        accelerator.synchronize = cuda.synchronize = waits
