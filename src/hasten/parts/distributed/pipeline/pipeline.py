"""AsyncPipeline: a model in stages, and steps that send micro-batches through them.

    pipeline = AsyncPipeline(stages=4, microbatch_size=8, overlap_communication=True)
    model = pipeline.partition_model(model)           # this process's stages, balanced by cost
    optimizer = AdamW(model.parameters())
    for batch in loader:                              # the same batch on every rank
        loss = pipeline.step(model, batch)            # gradients are left, the loss returned
        optimizer.step(); optimizer.zero_grad()

Without an optimizer over its parameters the pipeline takes one of its own, see
:mod:`hasten.parts.distributed.pipeline.pipeline_update`.

With a process group of ``stages`` ranks each rank keeps its own part of the model and
``torch.distributed.pipelining`` runs the schedule. Without one, all stages run in this process on
the devices there are. A Hugging Face causal language model takes its usual batch (``input_ids``,
``labels``, ...); the loss is the mean over all trained tokens of the batch, whatever the cut.
An ``nn.Sequential`` takes ``(x, y)`` and a ``loss_fn(output, y)`` that is a mean over rows; without
one, cross-entropy where ``y`` has whole numbers, else the mean squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from hasten.parts.distributed.pipeline import partition
from hasten.parts.distributed.pipeline.pipeline_batches import (
    LossFunction,
    is_pair,
    language_batch,
    micro_batches,
    usual_loss,
)
from hasten.parts.distributed.pipeline.pipeline_local import LocalRunner
from hasten.parts.distributed.pipeline.pipeline_ranks import RanksRunner
from hasten.parts.distributed.pipeline.pipeline_stages import (
    Cuttable,
    Inputs,
    LanguageModel,
    Layers,
)
from hasten.parts.distributed.pipeline.pipeline_tied import TiedHead
from hasten.parts.distributed.pipeline.pipeline_update import OptimizerFactory, Update
from hasten.parts.distributed.pipeline.pipeline_work import Runner, Seams, Settings, Work
from hasten.parts.distributed.pipeline.trace import StageEvent, bubble_share, drawing, gathered
from hasten.parts.nn.losses import WholeLogitsLoss


class AsyncPipeline:
    """How a model is laid out as a pipeline and stepped.

    Args:
        stages: ranks (or devices of this process) that the model is spread over.
        microbatch_size: rows of a micro-batch; a batch that it doesn't divide is cut into the
            largest equal pieces that are no larger.
        overlap_communication: messages travel while ranks compute; False: each is waited for
            where torch's plain schedules do, for comparison.
        schedule: one of :data:`hasten.parts.distributed.pipeline.schedules.SCHEDULES`.
        checkpoint: "never"; "always": a stage keeps its inputs alone and computes the rest again in
            the backward pass; "except_last": so for all micro-batches but the last.
        group: the ranks of the pipeline; None: all, where torch.distributed is initialised.
        loss_fn: for an ``nn.Sequential``, where ``step`` isn't given one.
        optimizer: makes one from parameters; ``step`` then moves the weights too, and begins
            without gradients. None: AdamW with ``learning_rate``, unless an optimizer is there or
            somebody has asked the partitioned model for its parameters. False: gradients are left.
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
        if microbatch_size < 1:
            raise ValueError(f"microbatch_size is {microbatch_size}; give 1 at least")
        self.settings = Settings(schedule, stages, checkpoint, overlap_communication)
        self.microbatch_size = microbatch_size
        self._group = group
        self._loss_fn, self._update = loss_fn, Update(optimizer, learning_rate)
        self._events: list[StageEvent] = []

    def partition_model(
        self,
        model: nn.Module,
        costs: Sequence[float] | str = "estimated",
        sample: Any = None,
        device: torch.device | str | None = None,
    ) -> PipelineModel:
        """This process's stages of a model, cut so that the slowest is as fast as can be.

        Args:
            model: a Hugging Face causal language model of a known kind, or an ``nn.Sequential``.
            costs: "estimated" from the layers' matrices, "measured" on ``sample`` (a batch), or a
                number per layer. Ranks take the measurement of the first of them.
            device: where this rank's stages go; None: where the model is.

        Raises:
            ValueError: more stages than layers, or a model that can't be cut.
        """
        whole = _cuttable(model)
        group = self._joined()
        each, first, last = _costs(whole, costs, sample)
        if group is not None and costs == "measured":
            told = [(each, first, last)]
            dist.broadcast_object_list(told, group=group, group_src=0)
            ((each, first, last),) = told
        sizes = partition.balanced(each, len(self.settings.homes), first, last)
        return PipelineModel(whole, sizes, self.settings, group, device)

    def step(self, model: PipelineModel, batch: Any, loss_fn: LossFunction | None = None) -> Tensor:
        """Forward and backward passes of all micro-batches; the mean loss, on every rank.

        Gradients that are left are added to those there are. Raises ValueError where the batch
        can't be cut.
        """
        if not isinstance(model, PipelineModel):
            raise ValueError(
                f"step takes what partition_model returned, and this is a {type(model).__name__}"
            )
        loss_fn = loss_fn or self._loss_fn
        if loss_fn is None and not model.language and is_pair(batch):
            loss_fn, name = usual_loss(batch[1])
            self._update.say(f"AsyncPipeline: no loss_fn was given, so {name} is taken")
        given = batch, self.microbatch_size, loss_fn, model.language
        pieces, weight = micro_batches(*given, model.place, self.settings)
        self._update.before(model.stages, model.asked, model.group)
        model.tied.begin()
        total = model.runner.run(pieces, weight)
        model.tied.add()
        self._update.after()
        if model.runner.work.recorder.on:
            self._events = gathered(model.runner.work.recorder.events, model.group)
        return total.double() * weight

    def state_dict(self) -> dict[str, Any]:
        """The state of the pipeline's own optimizer, over this process's stages."""
        return self._update.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._update.load_state_dict(state)

    @contextmanager
    def recording(self, model: PipelineModel) -> Iterator[None]:
        """Steps in the block are timed pass by pass; on accelerators ranks then wait for each."""
        recorder = model.runner.work.recorder
        recorder.on = True
        try:
            yield
        finally:
            recorder.on = False

    @property
    def events(self) -> list[StageEvent]:
        """What all ranks did in the last recorded step."""
        return self._events

    @property
    def bubble(self) -> float:
        """The share of the ranks' time that the last recorded step left idle."""
        return bubble_share(self._events)

    def timetable(self) -> str:
        """The last recorded step as an SVG drawing."""
        name = f"{self.settings.schedule} on {self.settings.ranks} ranks, measured"
        return drawing(self._events, name)

    def _joined(self) -> dist.ProcessGroup | None:
        """The pipeline's ranks; None where all stages are in this process."""
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
    """The stages of this process; its parameters are theirs."""

    def __init__(
        self,
        whole: Cuttable,
        sizes: Sequence[int],
        settings: Settings,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.asked = False  # for its parameters: somebody may move them
        self.sizes, self.group = tuple(sizes), group
        homes = settings.homes
        rank = None if group is None else dist.get_rank(group)
        own = {
            index: whole.stage(span)
            for index, span in enumerate(partition.ranges(sizes))
            if rank in (None, homes[index])
        }
        self.stages = nn.ModuleList(own.values())
        place = _device(device, self.stages)
        work = Work(settings, Seams(), place)
        self.runner: Runner
        if group is None:
            local = devices(settings.ranks, place)
            if len(local) > 1 and isinstance(whole, LanguageModel) and whole.tied:
                raise ValueError(
                    "a head tied to the embedding can't be on two devices of one process; start a "
                    "process per stage (torchrun), or untie it"
                )
            self.runner = LocalRunner(own, work, local)
        else:
            self.stages.to(place)
            self.runner = RanksRunner(own, work, group, place, _shape_of(whole))
        self.tied = TiedHead(whole, homes, group)
        self.language = isinstance(whole, LanguageModel)
        if isinstance(whole, LanguageModel):
            whole.loss.model = nn.Module()  # other ranks' layers may go once nobody else has them
        self.place = place

    def named_parameters(self, *given: Any, **more: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.asked = True
        found: Iterator[tuple[str, nn.Parameter]] = super().named_parameters(*given, **more)
        return found


def devices(ranks: int, place: torch.device) -> list[torch.device]:
    """Where stages of one process lie: on accelerators, as far as there are, or all in place."""
    if place.type == "cpu":
        return [place]
    count = min(ranks, torch.accelerator.device_count())
    return [torch.device(place.type, index) for index in range(count)]


def hidden_shape(width: int, dtype: Callable[[], torch.dtype]) -> Callable[[Inputs], Any]:
    """Shape and format of what travels between the stages of a language model."""

    def shape(inputs: Inputs) -> tuple[tuple[int, ...], torch.dtype]:
        return (*inputs["input_ids"].shape, width), dtype()

    return shape


def _shape_of(whole: Cuttable) -> Callable[[Inputs], Any]:
    """The same of any model; without an answer torch finds out in a pass. The model isn't kept."""
    if not isinstance(whole, LanguageModel):
        return lambda inputs: None
    dtype = whole.dtype
    return hidden_shape(whole.causal.config.hidden_size, lambda: dtype)


def _cuttable(model: nn.Module) -> Cuttable:
    if isinstance(model, nn.Sequential):
        return Layers(model)
    return LanguageModel(WholeLogitsLoss(model))


def _costs(
    whole: Cuttable, costs: Sequence[float] | str, sample: Any
) -> tuple[list[float], float, float]:
    if costs == "estimated":
        return whole.costs()
    if costs == "measured":
        if sample is None:
            raise ValueError("costs='measured' needs sample, a batch to measure the layers on")
        inputs = sample if isinstance(sample, Mapping) else {"x": sample[0]}
        return whole.measured(language_batch(inputs)[0] if "input_ids" in inputs else inputs)
    if isinstance(costs, str) or len(costs) != whole.layers:
        raise ValueError(
            f"costs must be 'estimated', 'measured' or a number for each of the {whole.layers} "
            f"layers, not {costs!r}"
        )
    return [float(c) for c in costs], 0.0, 0.0


def _device(given: torch.device | str | None, module: nn.Module) -> torch.device:
    if given is not None:
        return torch.device(given)
    return next((p.device for p in module.parameters()), torch.device("cpu"))
