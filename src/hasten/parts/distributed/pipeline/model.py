"""AsyncPipeline: a model in stages, and steps that send micro-batches through them.

    pipeline = AsyncPipeline(stages=4, microbatch_size=8, overlap_communication=True)
    model = pipeline.partition_model(model)           # this process's stages, balanced by cost

    optimizer = AdamW(model.parameters())
    for batch in loader:                              # the same batch on every rank
        loss = pipeline.step(model, batch)            # computes gradients, returns the loss
        optimizer.step(); optimizer.zero_grad()

Without an optimizer over its parameters the pipeline creates its own, see :class:`Update`.

With a process group of ``stages`` ranks each rank keeps its own part of the model, and
``torch.distributed.pipelining`` runs the schedule. Without one, all stages run in this
process on the available devices.

A Hugging Face causal language model takes its usual batch (``input_ids``, ``labels``,
...). The loss is the mean over all trained tokens of the batch, for any cut. An
``nn.Sequential`` takes ``(x, y)`` and a ``loss_fn(output, y)``. This is a mean over
rows, or one of torch's own over labels, which may be ignored or weighted. The default
is cross-entropy if ``y`` has whole numbers, else the mean squared error.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from hasten.errors import require_real, require_whole
from hasten.parts.comm.groups import gathered_objects
from hasten.parts.distributed.pipeline.one_process import LocalRunner, stage_devices
from hasten.parts.distributed.pipeline.runtime import (
    IGNORED,
    PipelineSettings,
    PipelineWork,
    RanksRunner,
    equal_micro_batches,
)
from hasten.parts.distributed.pipeline.schedules import (
    StageEvent,
    bubble_share,
    enough_micro_batches,
    why_impossible,
)
from hasten.parts.distributed.pipeline.stages import (
    Cuttable,
    LanguageModel,
    Layers,
    TiedEmbedding,
    balanced_layers,
    stages_of,
)
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.parts.nn.torch_means import (
    SummedMean,
    check_reduction,
    class_error,
    is_torch_mean,
    label_count,
    squared_error,
)
from hasten.parts.optim.master_weights import load_optimizer

LossFunction = Callable[[Any, Any], Tensor]
TAKES = (
    "a language model takes a batch with input_ids and labels; an nn.Sequential takes (x, y): give "
    "loss_fn(output, y)"
)
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class AsyncPipeline:
    """Splits a model into a pipeline and runs its steps.

    Dropout of a stage draws from its rank's random state. Ranks with equal states drop equal
    entries; seed each rank differently after ``partition_model``, and give the loader a
    generator of its own.

    Args:
        stages: number of ranks (or devices of this process) for the model.
        microbatch_size: rows of a micro-batch. A batch that it doesn't divide is cut into
            the largest equal pieces that are no larger.
        overlap_communication: messages are sent while ranks compute. False: the code waits
            for each one as in torch's plain schedules, for comparison.
        schedule: one of :data:`hasten.parts.distributed.pipeline.schedules.SCHEDULES`.
        checkpoint: "never". "always": a stage stores only its inputs and computes its
            activations again in the backward pass. "except_last": the same for all
            micro-batches but the last.
        group: the ranks of the pipeline; None: all, if torch.distributed is initialised.
        loss_fn: for an ``nn.Sequential``, if ``step`` gets none.
        optimizer: creates one from parameters. ``step`` then moves the weights too, and
            starts without gradients. None: AdamW with ``learning_rate``, unless an
            optimizer exists or the partitioned model's parameters were read. False:
            gradients are only computed.
    """

    def __init__(
        self,
        stages: int = 4,
        microbatch_size: int = 8,
        overlap_communication: bool = True,
        *,
        schedule: str = "1f1b",
        checkpoint: str = "never",
        group: dist.ProcessGroup | None = None,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory | Literal[False] | None = None,
        learning_rate: float = 1e-3,
    ) -> None:
        require_whole(microbatch_size=microbatch_size)
        require_real(learning_rate=learning_rate)
        if microbatch_size < 1:
            raise ValueError(f"microbatch_size is {microbatch_size}; give 1 at least")
        self.settings = PipelineSettings(schedule, stages, checkpoint, overlap_communication)
        self.microbatch_size = microbatch_size
        self._group = group
        self._loss_fn, self._update = loss_fn, Update(optimizer, learning_rate)
        self.events: list[StageEvent] = []  # passes of all ranks in the last recorded step

    def partition_model(
        self,
        model: nn.Module,
        costs: Sequence[float] | None = None,
        device: torch.device | str | None = None,
    ) -> PipelineModel:
        """Returns this process's stages of a model; the cut makes the slowest as fast as possible.

        Args:
            model: a Hugging Face causal language model of a known kind, or an ``nn.Sequential``.
            costs: a number per layer; None: estimated from the layers' matrices.
            device: where this rank's stages go; None: where the model is.

        Raises:
            ValueError: more stages than layers, or a model that can't be cut.
        """
        layered = isinstance(model, nn.Sequential)
        cuttable: Cuttable = Layers(model) if layered else LanguageModel(WholeLogitsLoss(model))
        group = self._joined()
        if costs is not None and len(costs) != cuttable.layers:
            raise ValueError(
                f"costs must be a number for each of the {cuttable.layers} layers, not {costs}"
            )
        each = cuttable.costs() if costs is None else [float(c) for c in costs]
        sizes = balanced_layers(each, len(self.settings.homes))
        return PipelineModel(cuttable, sizes, self.settings, group, device)

    def step(self, model: PipelineModel, batch: Any, loss_fn: LossFunction | None = None) -> Tensor:
        """Runs forward and backward passes of all micro-batches; the mean loss, on every rank.

        Gradients that are left are added to those there are. Raises ValueError where the batch
        can't be cut.
        """
        if not isinstance(model, PipelineModel):
            raise ValueError(
                f"step takes what partition_model returned, and this is a {type(model).__name__}"
            )
        pieces, weight = self._pieces(model, batch, loss_fn or self._loss_fn)
        self._update.before(model.stages, model.asked, model.group)
        model.tied.begin()
        total = model.runner.run(pieces, weight)
        model.tied.add()
        self._update.after()
        work = model.runner.work
        if work.recording:
            every = [work.events]
            if model.group is not None:
                every = gathered_objects(work.events, model.group)
            self.events = [event for events in every for event in events]
        return total.double() * weight

    def _pieces(
        self, model: PipelineModel, batch: Any, loss_fn: LossFunction | None
    ) -> tuple[list[dict[str, Any]], float]:
        """Returns a batch in pieces for the schedule, and the factor of their summed losses.

        A mean over labels is taken over those of the whole batch; any other mean is one of equal
        rows.
        """
        if model.language and isinstance(batch, Mapping):
            if loss_fn is not None:
                raise ValueError(
                    "a language model's loss is computed in its last stage from the batch's "
                    "labels; leave loss_fn out, or cut an nn.Sequential"
                )
            if "input_ids" not in batch or "labels" not in batch:
                raise ValueError("a language model's batch needs input_ids and labels")
            # Aligned with the position that predicts them.
            aligned = F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]
            full_batch = {**batch, "labels": aligned}
            # Waits for the device; labels come from the host.
            weight = 1 / max(int((aligned != IGNORED).sum()), 1)
        elif not model.language and isinstance(batch, tuple | list) and len(batch) == 2:
            if loss_fn is None:
                loss_fn, name = usual_loss(batch[1])
                self._update.say(f"AsyncPipeline: no loss_fn was given, so {name} is taken")
            check_reduction(loss_fn, joined=True)
            full_batch, weight = {"x": batch[0], "y": batch[1]}, 0.0  # by the pieces below
        else:
            raise ValueError(TAKES)
        moved = {
            k: v.to(model.place) if isinstance(v, Tensor) else v for k, v in full_batch.items()
        }
        pieces = piece_rows(moved, self.microbatch_size)
        schedule, ranks = self.settings.schedule, self.settings.ranks
        if problem := why_impossible(schedule, ranks, len(pieces)):
            if not model.language:
                raise ValueError(f"{problem}; change the batch or microbatch_size")
            pieces = equal_micro_batches(pieces, enough_micro_batches(schedule, ranks, len(pieces)))
        if loss_fn is None:
            return pieces, weight
        labels = label_count(loss_fn, moved["y"]) if is_torch_mean(loss_fn) else None
        weight = 1 / len(pieces)
        if labels is not None:
            summed, weight = SummedMean(loss_fn), 1 / float(labels) if labels else 0.0
            loss_fn = lambda out, y: summed(out, y)[0]  # noqa: E731
        return [{**micro_batch, "loss_fn": loss_fn} for micro_batch in pieces], weight

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the pipeline's own optimizer, over this process's stages."""
        return self._update.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._update.load_state_dict(state)

    @contextmanager
    def recording(self, model: PipelineModel) -> Iterator[None]:
        """Times each pass inside; on accelerators ranks then wait for each."""
        model.runner.work.recording = True
        try:
            yield
        finally:
            model.runner.work.recording = False

    @property
    def bubble(self) -> float:
        """Returns the idle share of the ranks' time in the last recorded step."""
        return bubble_share(self.events)

    def _joined(self) -> dist.ProcessGroup | None:
        """Returns the pipeline's ranks; None if all stages are in this process."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = self._group or dist.group.WORLD
        size = dist.get_world_size(group)
        if size == 1:
            return None
        if size != self.settings.ranks:
            raise ValueError(
                f"the pipeline has {self.settings.ranks} stages and its group {size} ranks; start "
                "as many processes as stages, or give the group of one pipeline"
            )
        return group


class PipelineModel(nn.Module):
    """The stages of this process, with only their parameters."""

    def __init__(
        self,
        cuttable: Cuttable,
        sizes: Sequence[int],
        settings: PipelineSettings,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.asked = False  # True if its parameters were read, because other code may update them
        self.sizes, self.group = tuple(sizes), group
        rank = None if group is None else dist.get_rank(group)
        stages = stages_of(cuttable, sizes, settings.homes, rank)
        self.stages = nn.ModuleList(stages.values())
        own_device = next((p.device for p in self.stages.parameters()), torch.device("cpu"))
        self.place = own_device if device is None else torch.device(device)
        work = PipelineWork(settings, self.place)
        self.runner: LocalRunner | RanksRunner
        if group is None:
            local = stage_devices(settings.ranks, self.place)
            if len(local) > 1 and isinstance(cuttable, LanguageModel) and cuttable.tied:
                raise ValueError(
                    "a head tied to the embedding can't be on two devices of one process; start a "
                    "process per stage (torchrun), or untie it"
                )
            self.runner = LocalRunner(stages, work, local)
        else:
            self.stages.to(self.place)
            message = None
            if isinstance(cuttable, LanguageModel):
                message = cuttable.message(cuttable.dtype)
            self.runner = RanksRunner(stages, work, group, message)
        self.tied = TiedEmbedding(cuttable, settings.homes, group)
        self.language = isinstance(cuttable, LanguageModel)
        if isinstance(cuttable, LanguageModel):
            # frees other ranks' layers unless other code refers to them
            cuttable.loss.model = nn.Module()

    def named_parameters(self, *args: Any, **more: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.asked = True
        parameters: Iterator[tuple[str, nn.Parameter]] = super().named_parameters(*args, **more)
        return parameters


class Update:
    """The optimizer step of a pipeline: by the caller's optimizer, or by the pipeline's own.

    A loop that partitions a model and only calls ``step`` would train nothing. So the pipeline
    creates an optimizer, unless one exists or the stages were asked for their parameters: a loop
    may update these itself. If gradients are left to the user and no optimizer uses them, a message
    is printed.

    Args:
        build: creates the optimizer; None: AdamW if no other one exists; False: gradients
            are only computed.
    """

    def __init__(
        self, build: OptimizerFactory | Literal[False] | None, learning_rate: float
    ) -> None:
        self._build, self._rate = build, learning_rate
        self.optimizer: Optimizer | None = None
        self._parameters: list[nn.Parameter] = []
        self._marks: list[Any] = []  # versions of weights and gradients after the last step
        self._state: Mapping[str, Any] | None = None  # loaded before the optimizer exists
        self._said: set[str] = set()

    def before(
        self, stages: nn.Module, parameters_taken: bool, group: dist.ProcessGroup | None
    ) -> None:
        """Prepares the update before a step's passes; every rank of the pipeline calls it.

        ``parameters_taken``: this rank's parameters were read by other code.
        """
        trainable = [p for p in stages.parameters() if p.requires_grad]
        if [*map(id, trainable)] != [*map(id, self._parameters)]:
            self._parameters, self._marks = trainable, []
            self._create(parameters_taken or _has_optimizer(trainable), group)
        elif self._marks and self._marks == _marks(trainable):
            self.say("gradients of two steps add up and no optimizer has moved a weight")
        if self.optimizer is not None:
            self.optimizer.zero_grad()  # cleared here, so gradients can be read after a step

    def after(self) -> None:
        """After a step's passes: updates the weights if the optimizer is the pipeline's own."""
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            self._marks = _marks(self._parameters)

    def say(self, message: str) -> None:
        """Warns the caller of ``AsyncPipeline.step``, once."""
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        """Returns the own optimizer's state; None without one."""
        return {"optimizer": self.optimizer.state_dict() if self.optimizer else self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state; before the first step the optimizer receives it when it is created."""
        self._state = state["optimizer"]
        self._load()

    def _load(self) -> None:
        if self.optimizer is not None and self._state is not None:
            load_optimizer(self.optimizer, dict(self._state))

    def _create(self, taken: bool, group: dist.ProcessGroup | None) -> None:
        if group is not None:  # all ranks must do the same
            taken = any(gathered_objects(taken, group))
        build, self.optimizer = self._build, None
        if build is False or (build is None and taken) or not self._parameters:
            return
        if build is None:
            self.say(
                "AsyncPipeline: no optimizer was built over model.parameters(), so "
                f"AdamW(lr={self._rate:g}) is used; give optimizer= for another"
            )
            build = partial(torch.optim.AdamW, lr=self._rate)
        self.optimizer = build(self._parameters)
        self._load()


def _has_optimizer(parameters: list[nn.Parameter]) -> bool:
    """Returns True if an optimizer of this process has one, perhaps from before the split."""
    parameter_ids = {*map(id, parameters)}
    optimizers = (one for one in gc.get_objects() if issubclass(type(one), Optimizer))
    return any(
        id(p) in parameter_ids for one in optimizers for g in one.param_groups for p in g["params"]
    )


def _marks(parameters: list[nn.Parameter]) -> list[Any]:
    """Returns torch's version counters: equal ones mean unchanged weights and gradients."""
    return [(p._version, id(p.grad), p.grad._version) for p in parameters if p.grad is not None]


def usual_loss(target: Any) -> tuple[LossFunction, str]:
    """Returns the default loss of a target, and its name; ValueError if it has no numbers."""
    if not isinstance(target, Tensor) or target.is_complex():
        raise ValueError(f"a target of type {type(target).__name__} has no usual loss; {TAKES}")
    if target.is_floating_point():
        return squared_error, "the mean squared error"
    return class_error, "cross-entropy"


def piece_rows(batch: Mapping[str, Any], rows: int) -> list[dict[str, Any]]:
    """Returns the largest equal pieces of at most ``rows`` rows; inputs without rows go to all."""
    total = len(batch["input_ids" if "input_ids" in batch else "x"])
    if not total:
        raise ValueError("a batch has no rows; leave it out")
    most = min(rows, total)
    rows = next(size for size in range(most, 0, -1) if total % size == 0)
    count = total // rows
    if 2 * rows < most:
        message = f"microbatch_size={most} doesn't divide a batch of {total} rows, so it goes in"
        warnings.warn(f"{message} {count} pieces of {rows}", stacklevel=4)
    parts = [
        v.split(rows) if isinstance(v, Tensor) and v.dim() and len(v) == total else [v] * count
        for v in batch.values()
    ]
    return [dict(zip(batch, piece, strict=True)) for piece in zip(*parts, strict=True)]
