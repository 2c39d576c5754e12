"""A job is the user's material: model, records, loss, optimizer, held-out data, and when to stop.

Factories build a fresh object per run, which is what an experiment needs; an object that was handed
over is used as it is and trained in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from hasten.core.batch import Collate
from hasten.core.order import GlobalBatch
from hasten.core.schedule import Schedule
from hasten.errors import InputError

NamedParameters = Iterable[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer]
Metric = Callable[[nn.Module], float]


@runtime_checkable
class KnowsSkeleton(Protocol):
    """A model's factory that also builds it without memory for weights, on torch's meta device."""

    def skeleton(self) -> nn.Module: ...


class Indexed(Protocol):
    """Records by position: a list, or a file that is mapped and not read."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Stop:
    """When a run ends: the first of these to be reached.

    Raises:
        InputError: none is given, or one is not positive.
    """

    steps: int | None = None
    epochs: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.steps, self.epochs, self.tokens) if v is not None]
        if not given or min(given) < 1:
            raise InputError("give max_steps, epochs or max_tokens, and at least 1 of each")

    def reached(self, steps: int, tokens: int) -> bool:
        """Whether a run that has done so much is over; epochs end by themselves."""
        return (self.steps is not None and steps >= self.steps) or (
            self.tokens is not None and tokens >= self.tokens
        )


@dataclass(frozen=True)
class Job:
    """What is trained, on what, until when.

    Args:
        model: builds the model, or is it; a factory that ``KnowsSkeleton`` spares ranks from it.
        loss: wraps the model into a module whose forward takes a micro-batch's inputs and returns
            (loss summed over what carries loss, their count).
        optimizer: builds the optimizer from named parameters, or returns one that exists.
        collate: lays records out as a micro-batch without any technique's help.
        records: what a sampler indexes; empty when ``stream`` delivers batches instead.
        lengths: tokens of each record, 1 where records have no length.
        stream: this rank's records of a given epoch, step by step: a loader of the user's own
            takes the place of records and sampler.
        counted: the loss divides by the counts that ``collate`` found; False: only the forward
            pass tells the loss's own count, and gradients are scaled once it is known.
        adapter: part of the job itself (a run that asks for LoRA has it in every arm).
        held_out: records for the held-out loss; ``metrics`` are the user's own measures.
        terms: what else decides the training, as JSON: checkpoints note it
            (:mod:`hasten.core.job_record`).
    """

    model: Callable[[], nn.Module] | nn.Module
    loss: Callable[[nn.Module], nn.Module]
    optimizer: OptimizerFactory
    stop: Stop
    collate: Collate
    records: Indexed = ()
    lengths: Sequence[int] = ()
    stream: Callable[[int], Iterator[Sequence[Any]]] | None = None
    counted: bool = True
    batch: GlobalBatch = field(default_factory=GlobalBatch)
    adapter: Callable[[nn.Module], nn.Module] = lambda model: model
    held_out: Indexed = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    max_grad_norm: float | None = 1.0
    seed: int = 0
    device: str = "cpu"
    terms: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.stream is None) == (not len(self.records)):
            raise InputError("a job needs records or a stream of batches, one of the two")

    @property
    def skeleton(self) -> Callable[[], nn.Module] | None:
        """Builds the model's modules for ranks that are sent weights; None: nobody knows how."""
        return self.model.skeleton if isinstance(self.model, KnowsSkeleton) else None

    def build_model(self) -> nn.Module:
        """A fresh model, or the one that was handed over."""
        if isinstance(self.model, nn.Module):
            return self.model
        return self.model()
