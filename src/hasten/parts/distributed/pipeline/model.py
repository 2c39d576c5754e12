"""AsyncPipeline: a model in stages, and steps that send micro-batches through them.

    pipeline = AsyncPipeline(stages=4, microbatch_size=8, overlap_communication=True)
    model = pipeline.partition_model(model)           # this process's stages, balanced by cost

    optimizer = AdamW(model.parameters())
    for batch in loader:                              # the same batch on every rank
        loss = pipeline.step(model, batch)            # computes gradients, returns the loss
        optimizer.step(); optimizer.zero_grad()

Without an optimizer over its parameters the pipeline creates its own, see
:mod:`hasten.parts.distributed.pipeline.runtime`.

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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from hasten.errors import require_real, require_whole
from hasten.parts.comm.groups import gathered_objects, message_device
from hasten.parts.distributed.pipeline.runtime import (
    LossFunction,
    PipelineSettings,
    PipelineWork,
    RanksRunner,
    is_pair,
    micro_batches,
    usual_loss,
)
from hasten.parts.distributed.pipeline.schedules import orders
from hasten.parts.distributed.pipeline.stages import (
    Cuttable,
    Inputs,
    LanguageModel,
    Layers,
    OtherStage,
    TiedEmbedding,
    cut,
    ranges,
    stages_of,
    view,
)
from hasten.parts.distributed.pipeline.timetable import StageEvent, bubble_share, simulate
from hasten.parts.distributed.pipeline.update import OptimizerFactory, Update
from hasten.parts.nn.losses import WholeLogitsLoss


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
        sizes = cut(cuttable, len(self.settings.homes), costs)
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
        loss_fn = loss_fn or self._loss_fn
        if loss_fn is None and not model.language and is_pair(batch):
            loss_fn, name = usual_loss(batch[1])
            self._update.say(f"AsyncPipeline: no loss_fn was given, so {name} is taken")
        arguments = batch, self.microbatch_size, loss_fn, model.language
        pieces, weight = micro_batches(*arguments, model.place, self.settings)
        self._update.before(model.stages, model.asked, model.group)
        model.tied.begin()
        total = model.runner.run(pieces, weight)
        model.tied.add()
        self._update.after()
        recorder, group = model.runner.work.recorder, model.group
        if recorder.on:
            parts = [recorder.events] if group is None else gathered_objects(recorder.events, group)
            self.events = [event for events in parts for event in events]
        return total.double() * weight

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the pipeline's own optimizer, over this process's stages."""
        return self._update.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._update.load_state_dict(state)

    @contextmanager
    def recording(self, model: PipelineModel) -> Iterator[None]:
        """Times each pass inside; on accelerators ranks then wait for each."""
        recorder = model.runner.work.recorder
        recorder.on = True
        try:
            yield
        finally:
            recorder.on = False

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
            self.runner = RanksRunner(stages, work, group, cuttable.message())
        self.tied = TiedEmbedding(cuttable, settings.homes, group)
        self.language = isinstance(cuttable, LanguageModel)
        if isinstance(cuttable, LanguageModel):
            # frees other ranks' layers unless other code refers to them
            cuttable.loss.model = nn.Module()

    def named_parameters(self, *args: Any, **more: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.asked = True
        parameters: Iterator[tuple[str, nn.Parameter]] = super().named_parameters(*args, **more)
        return parameters


def stage_devices(ranks: int, device: torch.device) -> list[torch.device]:
    """Returns the devices of one process's stages: all accelerators, or the model's device."""
    if device.type == "cpu":
        return [device]
    count = min(ranks, torch.accelerator.device_count())
    return [torch.device(device.type, index) for index in range(count)]


class Pruned:
    """A language model in place without the modules of other ranks: layers, embedding, norm, head.

    The remaining modules keep their names. Modules that predict further tokens are on the last
    stage's rank, with a copy of the embedding. In :meth:`all_modules` the others are back without
    memory, and :func:`send_to_first` brings the first rank one tensor at a time.
    """

    def __init__(
        self, model: LanguageModel, sizes: Sequence[int], homes: Sequence[int], rank: int
    ) -> None:
        self.model, self._tied = model, model.tied
        prefix = model.causal.base_model_prefix
        embed = f"{prefix}.embed_tokens"
        self._homes = {embed: homes[0], f"{prefix}.norm": homes[-1], model.head: homes[-1]}
        for home, span in zip(homes, ranges(sizes), strict=True):
            self._homes |= {f"{prefix}.layers.{layer}": home for layer in span}
        others = [name for name, home in self._homes.items() if home != rank]
        if rank != homes[-1] and getattr(model.loss, "ahead", None) is not None:
            model.loss.ahead.modules_ahead.clear()
        elif model.ahead is not None:
            model.embedding = model.trunk.embed_tokens
            if rank != homes[0] and model.tied:  # the state has the matrix under the head's name
                model.embedding = view(model.embedding)
                model.embedding._parameters = dict(model.embedding._parameters)
            elif embed in others:
                others.remove(embed)
        # Without memory, on the meta device.
        self._absent = {name: model.causal.get_submodule(name).to("meta") for name in others}
        self._remove()

    def _remove(self) -> None:
        for name in self._absent:
            self.model.causal.set_submodule(name, OtherStage())

    @contextmanager
    def all_modules(self, group: dist.ProcessGroup) -> Iterator[dict[int, int]]:
        """Context in which the model has the modules of other ranks, without memory.

        Every rank of the group enters. Yields the rank that holds each tensor, by the tensor's id.
        """
        causal = self.model.causal
        for name, module in self._absent.items():
            causal.set_submodule(name, module)
        head = causal.get_submodule(self.model.head)
        if self._tied:
            own_head, head.weight = head.weight, self.model.trunk.embed_tokens.weight
        tensors: dict[str, tuple[int, Tensor]] = {}
        for name, home in self._homes.items():
            module = causal.get_submodule(name)
            for key, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensors[f"{name}.{key}"] = home, tensor
        # Precision may have cast a module since its removal elsewhere.
        formats = gathered_objects({k: tensor.dtype for k, (_, tensor) in tensors.items()}, group)
        homes: dict[int, int] = {}
        for key, (home, tensor) in tensors.items():
            homes.setdefault(id(tensor), home)
            if tensor.is_meta:
                tensor.data = tensor.data.to(formats[home][key])
        try:
            yield homes
        finally:
            if self._tied:
                head.weight = own_head
            self._remove()


@torch.no_grad()
def send_to_first(
    weight: Tensor, dtype: torch.dtype, home: int, group: dist.ProcessGroup
) -> Tensor:
    """Returns a tensor of the rank ``home`` on the host of the group's first rank, in ``dtype``.

    Every rank of the group calls it; the return value of the others has no meaning.
    """
    rank, device = dist.get_rank(group), message_device(group)
    if rank == home == 0:
        return weight.detach().to("cpu", dtype)
    if rank == home and weight.numel():
        dist.send(weight.detach().to(device, dtype).contiguous(), group=group, group_dst=0)
    if rank:
        return weight
    received = torch.empty(weight.shape, dtype=dtype, device=device)
    if weight.numel():
        dist.recv(received, group=group, group_src=home)
    return received.cpu()


class LocalRunner:
    """All stages in one process, each on its own device or all on one.

    One thread starts each pass as soon as its inputs exist, rank by rank in the schedule's order.
    On accelerators a pass is only queued. So devices work at the same time, and copies between
    them overlap with it. On a CPU passes follow each other. The two halves of a backward pass
    (I and W) run together: autograd frees what it saved after the first.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], work: PipelineWork, devices: Sequence[torch.device]
    ) -> None:
        self.work, self._stages = work, stages
        self._devices = [devices[home % len(devices)] for home in work.settings.homes]
        self._sent: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (input, output)
        self._returned: dict[tuple[int, int], Tensor] = {}  # gradients for the previous stage
        for index, stage in stages.items():
            stage.to(self._devices[index])

    def run(self, micro_batches: Sequence[Inputs], scale: float) -> Tensor:
        """Computes gradients of ``scale`` x the summed losses; the unscaled sum."""
        settings, work = self.work.settings, self.work
        listed = orders(settings.schedule, settings.ranks, len(micro_batches))
        work.begin([dict(m) for m in micro_batches], scale=scale)
        self._sent.clear()  # messages of a failed step must not be used
        self._returned.clear()
        for pass_ in simulate([[(op,) for op in ops] for ops in listed], lambda op: 0.0):
            if pass_.kind != "W":
                kind = "F" if pass_.kind == "F" else "B"
                with work.recorder.noting(pass_.rank, kind, pass_.stage, pass_.micro_batch):
                    run = self._forward if kind == "F" else self._backward
                    run(pass_.stage, pass_.micro_batch)
        return work.total

    def _forward(self, stage: int, number: int) -> None:
        hidden = None
        if stage:
            hidden = self._to(self._sent[stage - 1, number][1].detach(), stage)
            hidden = hidden.requires_grad_(hidden.is_floating_point())
        inputs: Any = self.work.batches[number]  # a micro-batch is sent with its hidden states
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                inputs[name] = self._to(value, stage)
        out = self.work.forward(self._stages[stage], stage, number, hidden)
        self._sent[stage, number] = hidden, out

    def _backward(self, stage: int, number: int) -> None:
        hidden, out = self._sent.pop((stage, number))
        if stage == self.work.last:
            (out * self.work.scale).backward()
        else:
            out.backward(self._returned.pop((stage, number)))
        if hidden is not None and hidden.grad is not None:
            self._returned[stage - 1, number] = self._to(hidden.grad, stage - 1)
        self.work.after_backward()

    def _to(self, tensor: Tensor, stage: int) -> Tensor:
        """Moves a tensor to the stage's device, without waiting if memory and device allow it."""
        return tensor.to(self._devices[stage], non_blocking=self.work.settings.overlap)
