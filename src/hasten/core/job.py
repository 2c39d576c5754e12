"""A job: model, examples, loss, optimizer, eval data and stop of a training.

Factories build a new object for each run, which experiments need. An existing object is
used as it is and trained in place.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.errors import InputError
from hasten.machine import host

# A micro-batch is one forward and backward pass; a step batch is all of them on this rank.
#
# Both store their counts, so no later code reads a tensor to find its padding. *Positions* are
# positions of the tensor, *tokens* those that belong to an example, *trained tokens* those with
# loss. *Attention pairs* are the sum of the examples' squared lengths, which attention's work is
# proportional to. *Units* are what a step's loss is divided by: trained tokens, or pairs. *NLL
# tokens* are those in the cross-entropy that is added to a loss of pairs.


@dataclass(frozen=True)
class WorkCounts:
    """The work of a batch, and the units of its loss."""

    examples: int = 0
    tokens: int = 0
    positions: int = 0
    trained_tokens: int = 0
    attention_pairs: int = 0
    units: int = 0
    nll_tokens: int = 0

    def __add__(self, other: WorkCounts) -> WorkCounts:
        return WorkCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def padding_share(self) -> float:
        # Answers that share their prompt's positions have more tokens than positions.
        return max(1 - self.tokens / self.positions, 0.0) if self.positions else 0.0


@dataclass(frozen=True)
class MicroBatch:
    """Keyword arguments of the training module, with their counts.

    ``examples`` are those it was laid out from, so that BATCH can cut a failed step once more.
    """

    inputs: Mapping[str, Any]
    counts: WorkCounts
    examples: Sequence[Any] = ()

    def to(self, device: str) -> MicroBatch:
        """Returns the micro-batch on a device, copied from pinned memory if that is faster."""
        return replace(self, inputs={k: _move(v, device) for k, v in self.inputs.items()})


Collate = Callable[[Sequence[Any]], MicroBatch]


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step's work on this rank, with the whole step's counts over all ranks."""

    micro_batches: tuple[MicroBatch, ...]
    counts: WorkCounts
    epoch: int


def language_counts(
    examples: Sequence[Any], inputs: Mapping[str, Any], units: int | None = None
) -> WorkCounts:
    """Counts of token examples laid out as ``input_ids`` and ``labels`` (-100: no loss).

    ``units`` None: the trained tokens.
    """
    tokens = pairs = 0
    for example in examples:
        for row in (example,) if units is None else example.rows:
            length = len(row.input_ids)
            tokens, pairs = tokens + length, pairs + length * length
    trained_tokens = int((inputs["labels"] != -100).sum())  # on the host: no wait for a device
    return WorkCounts(
        examples=len(examples),
        tokens=tokens,
        positions=inputs["input_ids"].numel(),
        trained_tokens=trained_tokens,
        attention_pairs=pairs,
        units=trained_tokens if units is None else units,
    )


def with_language_counts(lay_out: Callable[[Sequence[Any]], Mapping[str, Any]]) -> Collate:
    """Returns a collator of token examples, made from a function that only lays out tensors."""

    def collate(examples: Sequence[Any]) -> MicroBatch:
        inputs = lay_out(examples)
        return MicroBatch(inputs, language_counts(examples, inputs))

    return collate


class Reference(Protocol):
    """Log-probabilities of answers under the policy before its first step, or another model."""

    is_start: bool  # the policy itself is the reference

    def of(self, pairs: Sequence[Any]) -> Tensor:
        """Returns the sums of chosen and rejected answers, (pairs, 2) float64; 3 columns for KTO.

        NaN means unknown; a pair without a number has 0.
        """

    def prepare(
        self,
        session: Any,
        file: Path,
        tell: Callable[[str], None],
        on_pass: Callable[[int, int], None] = lambda done, passes: None,
    ) -> None:
        """Computes all sums that a training needs, or reads them; every rank calls it."""

    def ready(self, session: Any) -> None:
        """Computes what an evaluation needs; every rank calls it."""

    def complete(
        self, session: Any, micro_batches: tuple[MicroBatch, ...]
    ) -> tuple[MicroBatch, ...]:
        """Returns a step's micro-batches with all sums; every rank calls it."""


def with_pair_counts(
    lay_out: Callable[..., Mapping[str, Any]], reference: Reference | None = None, **settings: Any
) -> Collate:
    """Returns a collator of preference pairs, made from a function that only lays out tensors.

    ``settings`` are further arguments of that function.
    """

    def collate(pairs: Sequence[Any]) -> MicroBatch:
        inputs = dict(lay_out(pairs, **settings))
        if reference is not None:
            inputs["reference"] = reference.of(pairs)
        nll_tokens = inputs["counts"].sum() - inputs["counts"][:, 1].sum()  # rejected answers
        counts = language_counts(pairs, inputs, units=len(pairs))
        return MicroBatch(inputs, replace(counts, nll_tokens=int(nll_tokens)))

    return collate


def with_nll_unit(micro_batch: MicroBatch, total: WorkCounts) -> MicroBatch:
    """Returns a micro-batch of pairs with its cross-entropy as a mean over ``total``'s tokens."""
    unit = total.units / max(total.nll_tokens, 1)
    return replace(micro_batch, inputs={**micro_batch.inputs, "nll_unit": unit})


def _move(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and host.pins_for(device) and not value.is_pinned():
            value = value.pin_memory()  # a copy from memory that isn't pinned makes the host wait
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {k: _move(v, device) for k, v in value.items()}
    if isinstance(value, tuple | list):
        moved = [_move(item, device) for item in value]
        return tuple(moved) if isinstance(value, tuple) else moved
    return value


# Data order as a pure function of (seed, epoch, index), so runs resume, split and repeat exactly.
#
# A *step plan* of an epoch is a list of steps. Each step lists example indices over all ranks.
# Every rank computes the full plan without communication, then takes its own part. The order also
# decides how a step is divided over ranks: packed rows stay complete and are divided by cost.


@dataclass(frozen=True)
class GlobalBatch:
    """The size of one step over all ranks: a number of examples, or of tokens."""

    examples: int | None = 32
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.examples is None) == (self.tokens is None):
            raise InputError("give global_batch_size or global_batch_tokens, one of the two")
        if (self.examples or self.tokens or 0) < 1:
            raise InputError(
                f"the global batch must hold at least one example or token, not {self}"
            )


class Sampler(Protocol):
    """Chooses the examples of each step, equally on every rank for the same arguments."""

    def steps(self, epoch: int) -> Iterator[list[int]]:
        """Yields the epoch's steps, each with the example indices of all ranks."""

    def local_steps(self, epoch: int, rank: int, world_size: int) -> Iterator[list[list[int]]]:
        """Yields one rank's part of the same steps in pieces; BATCH may cut them, not mix them."""


@dataclass(frozen=True)
class ShuffledOrder:
    """Every example once per epoch, in an order drawn from (seed, epoch).

    Raises:
        InputError: the token budget can't hold the longest example.
    """

    lengths: Sequence[int]
    batch: GlobalBatch
    seed: int = 0

    def __post_init__(self) -> None:
        longest = max(self.lengths, default=0)
        if self.batch.tokens is not None and longest > self.batch.tokens:
            raise InputError(
                f"global_batch_tokens={self.batch.tokens} can't hold the longest example of "
                f"{longest} tokens; raise it to at least {longest} or lower cutoff_len"
            )

    def steps(self, epoch: int) -> Iterator[list[int]]:
        order = permutation(len(self.lengths), self.seed, epoch)
        if self.batch.tokens is None:
            size = self.batch.examples or 1
            for start in range(0, len(order), size):
                yield order[start : start + size]
            return
        step: list[int] = []
        filled = 0
        for index in order:
            if step and filled + self.lengths[index] > self.batch.tokens:
                yield step
                step, filled = [], 0
            step.append(index)
            filled += self.lengths[index]
        if step:
            yield step

    def local_steps(self, epoch: int, rank: int, world_size: int) -> Iterator[list[list[int]]]:
        """Yields every ``world_size``-th example of a step, so ranks differ by one at most."""
        for step in self.steps(epoch):
            yield [step[rank::world_size]]


def permutation(count: int, seed: int, epoch: int) -> list[int]:
    """Returns a shuffle of ``range(count)`` that depends on its arguments only."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


# Learning-rate schedules as a factor of the peak rate: constant, linear, cosine, and WSD.
#
# WSD (warm-up, stable, decay) keeps the peak until the last part of the run: Hu et al., MiniCPM,
# arXiv:2404.06395.

Kind = Literal["constant", "linear", "cosine", "wsd"]
Extend = Literal["stretch", "constant"]


@dataclass(frozen=True)
class Schedule:
    """Factor of the peak learning rate at a step, counted from 0.

    Args:
        kind: shape after the warm-up.
        warmup_steps: steps of linear rise; the first step already has a rate above zero.
        total_steps: steps of the whole run; the floor would be reached by the step after it, so
            that each step of the run learns.
        floor: lowest factor of the decay.
        decay_share: part of the run that WSD decays in.
        extend: what a longer run does with it when it resumes: stretch it over all steps, or keep
            the last rate (:func:`hasten.core.resume_check.extended`).
        shape_steps: steps that the shape covers, if those are not ``total_steps``.
        constant_from: from this step on the rate is that of the step before; None: never.
    """

    kind: Kind = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    floor: float = 0.0
    decay_share: float = 0.1
    extend: Extend = "stretch"
    shape_steps: int | None = None
    constant_from: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine", "wsd"):
            raise InputError(
                f"lr_schedule: {self.kind!r} is not one of constant, linear, cosine, wsd"
            )
        if self.warmup_steps < 0 or not 0 <= self.floor <= 1 or not 0 < self.decay_share <= 1:
            raise InputError(
                f"lr_schedule: warm-up {self.warmup_steps}, floor {self.floor} and decay share "
                f"{self.decay_share} must be >= 0, within 0..1, within 0..1"
            )

    def __call__(self, step: int) -> float:
        if self.constant_from:
            step = min(step, self.constant_from - 1)
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        start, total = self.warmup_steps, self.shape_steps or self.total_steps  # steps of the decay
        if self.kind == "wsd":
            start = max(total - max(round(total * self.decay_share), 1), start)
        length = max(total - start, 1)
        progress = min(max((step - start) / length, 0.0), 1.0)
        shape = 1 - progress
        if self.kind == "constant":
            shape = 1.0
        elif self.kind == "cosine":
            shape = 0.5 * (1 + math.cos(math.pi * progress))
        return self.floor + (1 - self.floor) * shape


def share_of(amount: int | float, steps: int) -> int:
    """Returns a number of steps: ``amount`` itself, or a share of ``steps`` if it is below 1."""
    return math.ceil(amount * steps) if amount < 1 else int(amount)


# The job.

NamedParameters = Iterable[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer]
Metric = Callable[[nn.Module], float]  # takes the full model


@runtime_checkable
class TokenMetric(Protocol):
    """A metric of predicted tokens: the mean score of a trained token, in any layout."""

    def score(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """Returns the summed score of predicted tokens and their labels, both (count,)."""


@runtime_checkable
class BuildsSkeleton(Protocol):
    """A model's factory that can also build it without memory, on torch's meta device."""

    def skeleton(self) -> nn.Module: ...


@runtime_checkable
class BuildsLate(Protocol):
    """A model's factory that can also build it without memory for parameters.

    Each rank then reads the parts that it keeps, as the parameters themselves describe.
    """

    def late(self) -> nn.Module | None:
        """Returns the model, or None if it must be built as a whole; the same on all ranks."""


class Indexed(Protocol):
    """Examples by position: a list, or a memory-mapped file."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Stop:
    """The limits of a run; the first one to be reached ends it.

    Raises:
        InputError: none is given, or one is not positive.
    """

    steps: int | None = None
    epochs: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        limits: list[Any] = [v for v in (self.steps, self.epochs, self.tokens) if v is not None]
        if not limits or any(not isinstance(v, numbers.Integral) or v < 1 for v in limits):
            raise InputError(
                "give max_steps, epochs or max_tokens, and at least 1 of each, as a whole number"
            )

    def reached(self, steps: int, tokens: int) -> bool:
        """Returns True if a run of so many steps and tokens is done; epochs aren't considered."""
        return (self.steps is not None and steps >= self.steps) or (
            self.tokens is not None and tokens >= self.tokens
        )


class Routing(Protocol):
    """ROUTING: balances tokens over experts."""

    def prepare(self, model: nn.Module) -> None:
        """Reads the new model's routers, before other techniques replace modules."""
        return

    def forward(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Runs a micro-batch's forward pass: (loss summed over trained tokens, their number)."""

    def after_update(self, total: Callable[[Tensor], Tensor]) -> None:
        """Called after each update; ``total`` sums a float64 tensor on the host over all ranks."""
        return

    def discard(self) -> None:
        """Discards the passes since the last update."""
        return

    def load_ratio(self) -> float | None:
        """The busiest expert's load / the mean of the last step over layers; None: unknown."""


@dataclass(frozen=True)
class Job:
    """A training: its model, data, loss and optimizer, and when it stops.

    Args:
        model: factory of the model, or the model itself. A factory that implements
            ``BuildsSkeleton`` lets ranks skip building the weights.
        loss: wraps the model into a module. Its forward takes a micro-batch's inputs and
            returns (loss summed over the positions that carry loss, their count).
        optimizer: builds the optimizer from named parameters, or returns an existing one.
        collate: builds a micro-batch from examples, without any technique.
        examples: what a sampler indexes; empty when ``stream`` delivers batches instead.
        lengths: tokens of each example, 1 where examples have no length.
        stream: this rank's examples of an epoch, step by step. It is for the user's own
            loader, which replaces examples and sampler.
        counted: if True, the loss is divided by the counts from ``collate``. If False, only
            the forward pass returns the loss's count, and gradients are scaled afterwards.
        adapter: part of the job itself (a run with LoRA has it in every variant).
        unit: what a step's loss is divided by: trained ``tokens``, or preference ``pairs``.
        with_counts: makes a collator from a function that lays out this job's examples.
        reference: log-probabilities of the answers of preference pairs; None: the loss has none.
        routing: builds the object that runs the forward passes; None: they run unchanged.
        eval_data: examples for the eval loss and for metrics of tokens.
        metrics: further metrics, by name. A function gets the full model, so it needs a layout in
            which every rank has one; the first rank's value counts.
        terms: further settings that decide the training, as JSON. Checkpoints store them
            (:mod:`hasten.core.resume_check`).
    """

    model: Callable[[], nn.Module] | nn.Module
    loss: Callable[[nn.Module], nn.Module]
    optimizer: OptimizerFactory
    stop: Stop
    collate: Collate
    examples: Indexed = ()
    lengths: Sequence[int] = ()
    stream: Callable[[int], Iterator[Sequence[Any]]] | None = None
    counted: bool = True
    batch: GlobalBatch = field(default_factory=GlobalBatch)
    adapter: Callable[[nn.Module], nn.Module] = lambda model: model
    unit: Literal["tokens", "pairs"] = "tokens"
    with_counts: Callable[[Callable[[Sequence[Any]], Mapping[str, Any]]], Collate] = (
        with_language_counts
    )
    reference: Reference | None = None
    routing: Callable[[], Routing] | None = None
    eval_data: Indexed = ()
    metrics: Mapping[str, Metric | TokenMetric] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    max_grad_norm: float | None = 1.0
    seed: int = 0
    device: str = "cpu"
    terms: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.stream is None) == (not len(self.examples)):
            raise InputError("a job needs examples or a stream of batches, one of the two")

    @property
    def skeleton(self) -> Callable[[], nn.Module] | None:
        """Builds the model's modules for ranks that receive weights; None if not possible."""
        return self.model.skeleton if isinstance(self.model, BuildsSkeleton) else None

    def late_model(self) -> nn.Module | None:
        """Returns the model without memory for parameters; None if they can't be read in parts."""
        return self.model.late() if isinstance(self.model, BuildsLate) else None

    def build_model(self) -> nn.Module:
        """Returns a new model, or the job's model if the user handed over a built one."""
        if isinstance(self.model, nn.Module):
            return self.model
        return self.model()
