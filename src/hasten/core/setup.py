"""Setups and sessions: a run before it is built, and the run that was built.

A setup has one field per slot. Techniques edit it, and nothing runs until assembly. First
come the protocols: what a run requires of each slot. A slot that the run can't do
without has a plain default. A slot that is None does nothing. Parts satisfy the
protocols by structure, without inheritance.

Protocols, setup and session name each other, so they share this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.core.context import JobContext
from hasten.core.job import (
    Collate,
    Job,
    MicroBatch,
    OptimizerFactory,
    Routing,
    Sampler,
    ShuffledOrder,
    StepBatch,
    TokenMetric,
    WorkCounts,
)
from hasten.core.layout import (
    Communication,
    KeepsState,
    Layout,
    NoCompression,
    OneProcess,
    SplitsModel,
)
from hasten.core.plan import Plan
from hasten.core.timing import Clock, Meter, NoPhaseTimer, StepMetrics
from hasten.errors import InputError
from hasten.machine.memory import release_freed


class Precision(Protocol):
    """PRECISION: number format of weights and computation, and owner of the true weights."""

    def prepare(self, module: nn.Module) -> None:
        """Converts the module to its working format, in place."""
        return

    def region(self) -> AbstractContextManager[Any]:
        """The context of every forward pass."""

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Makes the optimizer update the true weights of this precision."""

    def before_backward(self, reduces: bool) -> None:
        """Called before each backward pass; ``reduces``: its gradients are sent to other ranks."""
        return

    def accumulate_gradients(self) -> None:
        """Called after each backward pass, to take the gradients over."""
        return

    def parameters(self) -> list[Tensor]:
        """Returns the true weights; ``.grad`` is complete after all micro-batches."""

    def update_model_weights(self) -> None:
        """Called after each update: working weights follow the true ones."""
        return

    def finish(self, module: nn.Module) -> None:
        """Writes the true weights into the module, for saving."""
        return


class Average(Protocol):
    """AVERAGE: a running average of the weights."""

    def attach(self, weights: Mapping[str, Tensor], layout: Layout) -> None:
        """Called once with the true weights of this rank, by their names in a checkpoint."""
        return

    def means_by_name(self) -> Mapping[str, Tensor]:
        """Returns the means for a checkpoint, laid out as their weights; none before an update."""
        return {}

    def load_means(self, means: Iterable[Tensor]) -> None:
        """Continues with this rank's saved means, in the order of the true weights."""
        return

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        """Called after each update of the weights."""
        return

    def versions(self, parameters: Sequence[Tensor]) -> Iterator[str]:
        """Yields the suffixes of the folders to save; the model has that version's weights."""

    @property
    def replaces_model(self) -> bool:
        """Returns True if the average is saved as the model."""


class SeparateLoss(Protocol):
    """INDEXER: a loss inside the layers, for weights of their own (indexers).

    Their optimizer groups have ``CLIP_APART``: norm and clip of the model leave them out.

    Args:
        clip: largest norm of their gradient; 0: unlimited.
    """

    clip: float

    def prepare(self, loss_module: nn.Module) -> None:
        """Makes the weights learn, before the model is cut or wrapped; others may be frozen."""

    def begin(self, tokens: int) -> None:
        """Called before a step's passes with its tokens over all ranks."""

    def marked(self, micro_batch: MicroBatch) -> MicroBatch:
        """Returns a micro-batch for a training pass; copies of others are marked as filler."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call, over all ranks; every rank calls it."""

    def paused(self) -> AbstractContextManager[None]:
        """Inside, the layers compute what they would without this loss, and its weights rest."""


CLIP_APART = "clip_apart"  # key of optimizer groups


class LossScaling(Protocol):
    """Part of PRECISION: the factor of the loss that keeps small fp16 gradients above zero."""

    value: float
    searching: bool  # True if the last step was skipped to find the scale, which is no failure

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divides the complete gradients of a step, in place."""
        return

    def judge(self, finite: bool) -> None:
        """Called after each norm; ``finite`` is the same on all ranks."""
        return


class Frozen(Protocol):
    """Weights that don't learn: checkpoints hold their hash and leave them out.

    Args:
        names: in the loss module's state.
        hash: of all of them as they were loaded.
    """

    names: frozenset[str]
    hash: str

    def watch(self, state: Mapping[str, Tensor]) -> None:
        """The loss module is on its device, with this state."""

    def unchanged(self, state: Mapping[str, Tensor]) -> bool:
        """Returns True if no frozen weight has changed since ``watch``."""


class Checkpointing(Protocol):
    """CHECKPOINT: called between two steps, never inside one."""

    def frozen(self, model: nn.Module, prefix: str) -> Frozen:
        """The frozen weights of a model as it was loaded, in a loss module under ``prefix``."""

    def after_step(self, session: Session) -> None:
        """Called after each step."""
        return

    def after_epoch(self, session: Session) -> None:
        """Called after the last step of an epoch."""
        return

    def resume(self, session: Session, path: Path | None = None) -> Path | None:
        """Loads the newest saved state, or that of ``path``, into a new session; its path."""

    def wait_for_writer(self) -> None:
        """Waits until no write is running, before another process is measured on this machine."""
        return

    def running(self, session: Session) -> AbstractContextManager[None]:
        """Context around all steps: refuses unwritable folders, then completes writes.

        A run that received a request to stop is saved at the end.
        """


class LiveTuner(Protocol):
    """Changes the settings of a run while it is running."""

    def after_step(self, metrics: StepMetrics) -> None:
        """Called on every rank between two steps."""
        return


class StepChecking(Protocol):
    """Checks after each step; raises StoppedError if the run is lost."""

    def store_loss(self, loss_sum: float) -> None:
        """Stores this rank's loss of a step without an update."""

    def after_step(self, session: Session, batch: StepBatch, metrics: StepMetrics) -> None:
        """Checks a step that is done."""

    def require_moved(self, session: Session) -> None:
        """Checks a training that is done."""


class SpikeReaction(Protocol):
    """Reaction to a loss that rises sharply."""

    rate: float  # factor of the learning rate

    @property
    def in_spike(self) -> bool:
        """Returns True if the last losses are unusually high."""

    def rollback_if_spike(self, session: Session, metrics: StepMetrics) -> bool:
        """Checks a step; returns True if the session went back to an earlier one."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its part of a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from its part of a checkpoint."""


class GivenPrecision(Precision):
    """The number format of the user's model; parameters are their own true weights."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []

    def region(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def parameters(self) -> list[Tensor]:
        return self._parameters


# Numbers that ranks exchange in a step besides gradients. The default sums all of them at once.
#
# A communication method may let ranks diverge (local steps). A step that waited for such sums would
# be as slow as the link. So each rank uses its own numbers times the number of ranks.
# ``synchronize`` makes weights and counts of all ranks equal again: before an evaluation, before a
# checkpoint, at the end.


@runtime_checkable
class RankSync(Protocol):
    """Sums over ranks; a communication method with these functions replaces the default."""

    # ranks may differ in weights, optimizer state and progress until they are synchronized
    diverged: bool

    def counts(
        self, local_counts: WorkCounts, stop: bool, passes: int
    ) -> tuple[WorkCounts, bool, int]:
        """Called before a step's first pass, with the number of this rank's micro-batches.

        Returns the counts over all ranks, True if the run stops, and the most micro-batches that
        a rank has to run. The last two are the same on every rank.
        """

    def sum(self, values: Tensor) -> Tensor:
        """Returns other sums over ranks: loss, gradients that aren't finite, load of experts."""

    def skipped(self) -> None:
        """Called for a skipped step, for which the communication's ``after_update`` isn't."""
        return

    def synchronize(self) -> None:
        """Makes weights equal on all ranks, which call it between the same two steps."""
        return


COUNTS = 1 + len(fields(WorkCounts))  # numbers of a step's first sum: the stop, then the counts


@dataclass
class SumsEachStep(RankSync):
    """Sums immediately, so ranks never diverge."""

    layout: Layout
    diverged = False

    def counts(
        self, local_counts: WorkCounts, stop: bool, passes: int
    ) -> tuple[WorkCounts, bool, int]:
        layout, numbers = self.layout, [float(stop), *astuple(local_counts)]
        if not layout.replicated:  # each rank writes its own place of the rest
            numbers += [0.0] * layout.data_size
            numbers[layout.data_rank - layout.data_size] = passes
        sums = layout.all_reduce_data(torch.tensor(numbers, dtype=torch.float64)).tolist()
        totals, of_ranks = sums[1:COUNTS], sums[COUNTS:]
        return WorkCounts(*map(round, totals)), bool(sums[0]), round(max(of_ranks, default=passes))

    def sum(self, values: Tensor) -> Tensor:
        return self.layout.all_reduce_data(values)


# The engine: turns micro-batches into updated weights.


class StepNumbers(NamedTuple):
    """Numbers that the host reads before the weights move.

    Args:
        norm: L2 norm of the gradients over all ranks.
        loss_sum: sum of the loss on this rank.
        finite: norm and loss are finite on every rank.
        total_loss: sum of the loss over all ranks.
        positions: sum over all ranks.
    """

    norm: float
    loss_sum: float
    finite: bool
    total_loss: float
    positions: float


class Engine(Protocol):
    """Called in the order of its methods, once per step."""

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        """Computes gradients of (loss summed over all ranks / denominator); the loss sum."""

    def norm(self, loss_sum: Tensor, positions: int) -> StepNumbers:
        """Returns the step's numbers on the host.

        Args:
            loss_sum: the result of ``gradients``.
            positions: of the micro-batches that ran on this rank.
        """

    def update(self, rate_factor: float) -> None:
        """Clips, moves the weights at ``rate_factor`` x peak learning rate, clears gradients."""

    def zero_grad(self) -> None:
        """Clears the gradients without an update, after a step that wasn't finite."""


@dataclass(frozen=True)
class EngineParts:
    """Objects from which an engine is built, wrapped and on their devices."""

    setup: Setup
    module: nn.Module  # maps a micro-batch's inputs to (loss sum, count)
    optimizer: Optimizer


# Setup

Edit = Callable[[nn.Module], None]
MicroBatchSplit = Callable[[Sequence[Any]], list[list[Any]]]
RunPasses = Callable[[Engine, StepBatch], tuple[Tensor, StepBatch]]
Feed = Callable[[Iterator[tuple[MicroBatch, ...]], str], Iterator[tuple[MicroBatch, ...]]]


def in_one_piece(examples: Sequence[Any]) -> list[list[Any]]:
    """BATCH: lays out all of a rank's examples of a step as one micro-batch."""
    return [list(examples)]


def run_once(engine: Engine, batch: StepBatch) -> tuple[Tensor, StepBatch]:
    """BATCH: runs a step's passes once; an error ends the run. Returns loss sum and passes."""
    return engine.gradients(batch.micro_batches, batch.counts.units), batch


def copy_to_device(
    steps: Iterator[tuple[MicroBatch, ...]], device: str
) -> Iterator[tuple[MicroBatch, ...]]:
    """FEED: copies each step's micro-batches to the device when they are needed."""
    for micro_batches in steps:
        yield tuple(m.to(device) for m in micro_batches)


def leave_model(module: nn.Module) -> None:
    """The default edit of a model: none."""


@dataclass
class Setup:
    """A training run before it is built: the job, the plan, and one field per slot."""

    job: Job
    plan: Plan
    context: JobContext
    folder: Path | None = None  # folder of checkpoints; None: a technique that writes is refused
    sampler: Sampler | None = None
    collate: Collate | None = None
    feed: Feed = copy_to_device
    split_micro_batches: MicroBatchSplit = in_one_piece
    # runs a step's passes; BATCH may cut and repeat them
    run_passes: RunPasses = run_once
    adapter: Callable[[nn.Module], nn.Module] | None = None
    routing: Routing | None = None  # None: the model's own routing
    experts: Edit = leave_model
    attention: Edit = leave_model
    layers: Edit = leave_model
    loss: Callable[[nn.Module], nn.Module] | None = None
    objective: Edit = leave_model  # edits the loss module
    indexer: SeparateLoss | None = None
    recompute: Edit = leave_model
    compile: Edit = leave_model
    precision: Precision = field(default_factory=GivenPrecision)
    loss_scale: LossScaling | None = None  # a technique of PRECISION may set one for fp16
    layout: Layout = field(default_factory=OneProcess)
    communication: Communication = field(default_factory=NoCompression)
    optimizer: OptimizerFactory | None = None
    average: Average | None = None
    checkpoint: Checkpointing | None = None  # None: no checkpoints
    allocator: Callable[[], None] = lambda: None
    engine: Callable[[EngineParts], Engine] | None = None  # a layout may replace the engine
    clock: Clock = field(default_factory=NoPhaseTimer)  # measures the parts of a step
    step_checks: StepChecking = field(init=False, repr=False)  # set by ``assemble``
    spike_policy: SpikeReaction | None = None
    live_tuner: LiveTuner | None = None  # changes settings between two steps

    @property
    def loss_factor(self) -> float:
        """Returns the factor by which losses are multiplied."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    @property
    def rank_sync(self) -> RankSync:
        """Returns the exchange of a step's numbers over ranks; COMMUNICATION's if it has one."""
        return (
            self.communication
            if isinstance(self.communication, RankSync)
            else SumsEachStep(self.layout)
        )


# The session: a run that has been built.


@dataclass
class Progress:
    """How far a run is: all that a checkpoint needs to continue at the same example."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    tokens: int = 0
    positions: int = 0
    micro_batches: int = 0  # number of passes on this rank
    trained_tokens: int = 0
    examples: int = 0


SUMMED = ("tokens", "positions", "trained_tokens", "examples")  # sum of progress over all ranks


@dataclass
class Session:
    """A run's live objects.

    ``model`` is what gets saved, ``loss_module`` maps a micro-batch to (sum, count), ``module`` is
    that as the layout wrapped it.
    """

    setup: Setup
    model: nn.Module
    loss_module: nn.Module
    module: nn.Module
    optimizer: Optimizer
    engine: Engine
    startup_seconds: dict[str, float]
    weight_names: Sequence[str] = ()  # names of its weights, in its order
    frozen: Frozen | None = None  # weights of the model, if CHECKPOINT may write
    progress: Progress = field(default_factory=Progress)
    stop_requested: bool = False
    stop_reason: str = "interrupted"  # reason of a requested stop, for the run's summary
    preempted: bool = False  # the machine shuts down: evaluation and samples are left out
    is_trained: bool = False  # True after the last step
    meter: Meter = field(default_factory=Meter)
    changes: list[str] = field(default_factory=list)  # permitted ones since its checkpoint

    @property
    def has_checkpoints(self) -> bool:
        """Returns True if the run can write checkpoints."""
        return self.setup.checkpoint is not None

    def resume(self, path: Path | None = None) -> Path | None:
        """Resumes from the newest saved state, or from ``path``; returns its path, or None.

        Raises:
            InputError: the state can't be read, or is of another run.
        """
        if self.setup.checkpoint is not None:
            return self.setup.checkpoint.resume(self, path)
        if path is not None:
            raise InputError(
                f"resume: {path} needs checkpoints in the plan, or checkpoint_every, to be read"
            )
        return None

    def synchronize(self) -> None:
        """Makes weights and progress equal on all ranks; every rank calls it."""
        if not self.setup.rank_sync.diverged:
            return
        self.setup.rank_sync.synchronize()
        # Each rank multiplied its own work by the number of ranks, so the mean is the total.
        counts = torch.tensor([getattr(self.progress, n) for n in SUMMED], dtype=torch.float64)
        for name, total in zip(
            SUMMED, self.setup.layout.all_reduce_data(counts).tolist(), strict=True
        ):
            setattr(self.progress, name, round(total / self.setup.layout.data_size))

    def finish(self) -> nn.Module:
        """Ends the training: the model gets its true weights, ready to be saved."""
        self.synchronize()
        release_freed()  # what steps have freed; saving takes whole weights
        self.setup.precision.finish(self.loss_module)
        return self.model

    def versions(self) -> Iterator[str]:
        """After ``finish``: yields each version that AVERAGE saves, with its weights in place."""
        if self.setup.average is None:
            return iter([""])
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self.setup.average.versions(weights)


def prepare(job: Job, plan: Plan, context: JobContext, folder: Path | None = None) -> Setup:
    """Builds a setup: the job's defaults, then the edit of each technique.

    Raises:
        InputError: there are several ranks and nothing in the plan assigns parts to them;
            or checkpoints of ranks that hold different parts.
    """
    setup = Setup(job, plan, context, folder)
    setup.collate = job.collate
    setup.adapter = job.adapter
    if job.routing is not None:
        setup.routing = job.routing()
    setup.loss = job.loss
    setup.optimizer = job.optimizer
    if len(job.examples):
        setup.sampler = ShuffledOrder(job.lengths, job.batch, job.seed)
    for technique in plan:
        technique.apply(setup)
    if context.world.size != setup.layout.size:
        raise InputError(
            f"plan: {context.world.size} ranks are running but the layout is for "
            f"{setup.layout.size}; add a layout technique to the plan"
        )
    of_model = [name for name, m in job.metrics.items() if not isinstance(m, TokenMetric)]
    if of_model and not setup.layout.replicated:
        raise InputError(
            f"metrics: {of_model[0]} needs the full model, and this layout splits it over ranks; "
            "give a TokenMetric, or take ddp as the layout"
        )
    if setup.layout.replicated or setup.checkpoint is None:
        return setup
    # Checkpoints need the complete state.
    if not isinstance(setup.layout, SplitsModel | KeepsState):
        raise InputError(
            "plan: this layout splits the model and can't write checkpoints of the parts; leave "
            "checkpoints out, or take ddp as the layout"
        )
    return setup


def unsupported_reasons(plan: Plan, context: JobContext) -> list[str]:
    """Returns every reason why this plan can't work on this job; each names its technique."""
    return [f"{t.name()}: {reason}" for t in plan for reason in t.unsupported_reasons(context)]
