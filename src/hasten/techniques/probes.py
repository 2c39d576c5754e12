"""Inputs of effect checks: operators that a pass really runs, and the data's layout.

A setting proves nothing: a fused kernel may be bound to every layer and refuse every
tensor. So a check runs one forward pass of the finished session on a few of its
examples. It counts the operators that torch dispatches. Kernels of hasten are included
(they are operators under ``hasten::``). Compiled graphs are disabled for that pass.
Random state and counters of the run stay unchanged.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.core.job import Collate, MicroBatch, Sampler, WorkCounts
from hasten.core.setup import Session
from hasten.parts.nn.losses import LabelOnlyLoss
from hasten.parts.nn.multi_token import MultiToken
from hasten.parts.nn.preference import OnePassPreferenceLoss
from hasten.techniques.compile import Compiling

EXAMPLES = 4  # examples of the counted pass
STEPS = 8  # steps of the order that are laid out again


class _Counting(TorchDispatchMode):
    """Counts operators by name, ``aten::mm`` for example."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def few_examples(session: Session) -> MicroBatch | None:
    """Returns a few examples on the device, at most a pass; None if they are a stream."""
    setup, job = session.setup, session.setup.job
    if not len(job.examples):
        return None
    examples = [job.examples[i] for i in range(min(EXAMPLES, len(job.examples)))]
    first = setup.split_micro_batches(examples)[0]
    return (setup.collate or job.collate)(first).to(job.device)


def operators(session: Session) -> Counter[str] | None:
    """Returns the operators of one forward pass over a few examples; None for a stream."""
    batch = few_examples(session)
    return None if batch is None else operators_of(session, batch)


def operators_of(session: Session, batch: MicroBatch) -> Counter[str]:
    """Returns the operators of one forward pass over a micro-batch."""
    setup, job = session.setup, session.setup.job
    gpu = [] if job.device == "cpu" else [torch.device(job.device)]
    counting = _Counting()
    with contextlib.ExitStack() as around:
        around.enter_context(_uncounted(session))
        around.enter_context(torch.random.fork_rng(devices=gpu))
        around.enter_context(torch.compiler.set_stance("force_eager"))
        around.enter_context(setup.precision.region())
        around.enter_context(counting)
        session.loss_module(**batch.inputs)
    return counting.counts


@contextlib.contextmanager
def _uncounted(session: Session) -> Iterator[None]:
    """Context for passes that aren't part of the run: other counters don't include them."""
    compiling, loss = session.setup.compile, session.loss_module
    saved: list[tuple[Any, dict[str, Any]]] = []
    if isinstance(compiling, Compiling):
        blocks = compiling.blocks
        shapes = {name: set(shape_set) for name, shape_set in blocks.seen.items()}
        saved.append((blocks, {"passes": blocks.passes, "eager_passes": blocks.eager_passes}))
    if isinstance(loss, LabelOnlyLoss | OnePassPreferenceLoss):
        sizes = {"largest_logits": loss.largest_logits, "largest_positions": loss.largest_positions}
        saved.append((loss, sizes))
    ahead = getattr(loss, "ahead", None)
    if isinstance(ahead, MultiToken):
        saved.append((ahead, {"passes": ahead.passes, "last": ahead.last}))
    try:
        yield
    finally:
        for holder, values in saved:
            for name, value in values.items():
                setattr(holder, name, value)
        if isinstance(compiling, Compiling):
            for name, shape_set in compiling.blocks.seen.items():
                shape_set &= shapes[name]


def count(op_counts: Counter[str], *prefixes: str) -> int:
    """Returns the number of operators with a name that begins with one of these."""
    return sum(number for name, number in op_counts.items() if name.startswith(prefixes))


def laid_out(session: Session, sampler: Sampler | None, collate: Collate) -> WorkCounts | None:
    """Returns counts of the first trained steps in another order or layout.

    Returns None before the first step, and with a stream of batches.
    """
    setup, layout = session.setup, session.setup.layout
    steps = min(session.progress.step, STEPS)
    if sampler is None or not steps or not len(setup.job.examples):
        return None
    counts = WorkCounts()
    for pieces in islice(sampler.local_steps(0, layout.data_rank, layout.data_size), steps):
        for group in filter(None, pieces):
            # as BATCH does
            parts = setup.split_micro_batches([setup.job.examples[i] for i in group])
            counts = sum((collate(part).counts for part in parts if part), counts)
    return counts
