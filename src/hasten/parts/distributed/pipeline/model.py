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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from hasten.errors import require_real, require_whole
from hasten.parts.comm.groups import gathered_objects, message_device
from hasten.parts.distributed.pipeline import stages as partition
from hasten.parts.distributed.pipeline.runtime import (
    Inputs,
    LossFunction,
    PassHooks,
    PipelineSettings,
    PipelineWork,
    RanksRunner,
    StageRunner,
    is_pair,
    micro_batches,
    usual_loss,
)
from hasten.parts.distributed.pipeline.schedules import (
    Op,
    orders,
)
from hasten.parts.distributed.pipeline.stages import (
    Cuttable,
    LanguageModel,
    Layers,
    OtherStage,
    TiedEmbedding,
)
from hasten.parts.distributed.pipeline.timetable import (
    StageEvent,
    bubble_share,
    drawing,
    gather_events,
)
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
        self._events: list[StageEvent] = []

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
        each, first, last = cuttable.costs()
        if costs is not None:
            if len(costs) != cuttable.layers:
                raise ValueError(
                    f"costs must be a number for each of the {cuttable.layers} layers, not {costs}"
                )
            each, first, last = [float(c) for c in costs], 0.0, 0.0
        sizes = partition.balanced_layers(each, len(self.settings.homes), first, last)
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
        if model.runner.work.recorder.on:
            self._events = gather_events(model.runner.work.recorder.events, model.group)
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
    def events(self) -> list[StageEvent]:
        """Returns the passes of all ranks in the last recorded step."""
        return self._events

    @property
    def bubble(self) -> float:
        """Returns the idle share of the ranks' time in the last recorded step."""
        return bubble_share(self._events)

    def timetable(self) -> str:
        """Returns the last recorded step as an SVG drawing."""
        name = f"{self.settings.schedule} on {self.settings.ranks} ranks, measured"
        return drawing(self._events, name)

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
        homes = settings.homes
        rank = None if group is None else dist.get_rank(group)
        local_stages = {
            index: cuttable.stage(span)
            for index, span in enumerate(partition.ranges(sizes))
            if rank in (None, homes[index])
        }
        self.stages = nn.ModuleList(local_stages.values())
        own_device = next((p.device for p in self.stages.parameters()), torch.device("cpu"))
        target_device = own_device if device is None else torch.device(device)
        work = PipelineWork(settings, PassHooks(), target_device)
        self.runner: StageRunner
        if group is None:
            local = stage_devices(settings.ranks, target_device)
            if len(local) > 1 and isinstance(cuttable, LanguageModel) and cuttable.tied:
                raise ValueError(
                    "a head tied to the embedding can't be on two devices of one process; start a "
                    "process per stage (torchrun), or untie it"
                )
            self.runner = LocalRunner(local_stages, work, local)
        else:
            self.stages.to(target_device)
            self.runner = RanksRunner(local_stages, work, group, target_device, _shape_of(cuttable))
        self.tied = TiedEmbedding(cuttable, homes, group)
        self.language = isinstance(cuttable, LanguageModel)
        if isinstance(cuttable, LanguageModel):
            # frees other ranks' layers unless other code refers to them
            cuttable.loss.model = nn.Module()
        self.place = target_device

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


def hidden_shape(width: int, dtype: Callable[[], torch.dtype]) -> Callable[[Inputs], Any]:
    """Returns shape and format of the messages between the stages of a language model."""

    def shape(inputs: Inputs) -> tuple[tuple[int, ...], torch.dtype]:
        return (*inputs["input_ids"].shape, width), dtype()

    return shape


def _shape_of(cuttable: Cuttable) -> Callable[[Inputs], Any]:
    """Returns it for any model; None lets torch find out in a pass. The model isn't kept."""
    if not isinstance(cuttable, LanguageModel):
        return lambda inputs: None
    dtype = cuttable.dtype
    return hidden_shape(cuttable.causal.config.hidden_size, lambda: dtype)


# Removes other stages' modules from a model in place, and restores them to save it.
#
# :func:`prune_stage` removes other ranks' layers, embedding, norm and head. The remaining modules
# keep their names, because the list of layers keeps its numbers. In :func:`with_absent` the others
# are back without memory, and :func:`send_to_first` brings the first rank one tensor at a time.


@dataclass
class Pruned:
    """The rank of each module of a language model, and the structure of absent modules."""

    model: LanguageModel
    places: dict[str, int]  # rank by name: ``layers.3``, ``embed_tokens``, ``norm``, ``lm_head``
    rank: int
    absent: dict[str, nn.Module] = field(default_factory=dict)  # on the meta device
    tied: bool = False

    def owner(self, name: str) -> nn.Module:
        """Returns the parent of a module."""
        is_head = name == self.model.head
        module: nn.Module = self.model.causal if is_head else self.model.trunk
        return module.layers if name.startswith("layers.") else module


def prune_stage(
    model: LanguageModel, sizes: Sequence[int], homes: Sequence[int], rank: int
) -> Pruned:
    """Removes the modules of other ranks from the model.

    Modules that predict further tokens are on the last stage's rank, with a copy of the embedding.
    """
    places: dict[str, int] = {"embed_tokens": homes[0], "norm": homes[-1], model.head: homes[-1]}
    for index, span in enumerate(partition.ranges(sizes)):
        places |= {f"layers.{layer}": homes[index] for layer in span}
    pruned = Pruned(model, places, rank, tied=model.tied)
    copied = ""
    if rank != homes[-1] and getattr(model.loss, "ahead", None) is not None:
        model.loss.ahead.modules_ahead.clear()
    elif model.ahead is not None:
        model.embedding = model.trunk.embed_tokens
        if rank != homes[0] and model.tied:  # the state has the matrix under the head's name
            model.embedding = partition.view(model.embedding)
            model.embedding._parameters = dict(model.embedding._parameters)
        else:
            copied = "embed_tokens"
    for name, home in places.items():
        if home != rank and name != copied:
            owner, key = pruned.owner(name), name.rpartition(".")[2]
            module = owner._modules[key]
            assert module is not None  # the names come from the model itself
            pruned.absent[name] = module.to("meta")
            _replace(owner, key, None)
    return pruned


@contextmanager
def with_absent(pruned: Pruned, group: dist.ProcessGroup) -> Iterator[dict[int, int]]:
    """Context in which the model has the modules of other ranks, without memory.

    Every rank of the group enters. Yields the rank that holds each tensor, by the tensor's id.
    """
    for name, absent in pruned.absent.items():
        _replace(pruned.owner(name), name.rpartition(".")[2], absent)
    causal, embedding = pruned.model.causal, pruned.model.trunk.embed_tokens
    head = getattr(causal, pruned.model.head)
    if pruned.tied:
        own_head, head.weight = head.weight, embedding.weight
    homes: dict[int, int] = {}
    tensors: dict[tuple[int, str], Tensor] = {}
    for name, home in pruned.places.items():
        module = pruned.owner(name)._modules[name.rpartition(".")[2]]
        assert module is not None  # put there above
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            homes.setdefault(id(tensor), home)
            tensors[home, f"{name}.{key}"] = tensor
    # Precision may have cast a module since its removal elsewhere.
    formats = gathered_objects({key: t.dtype for (_, key), t in tensors.items()}, group)
    for (home, key), tensor in tensors.items():
        if tensor.is_meta:
            tensor.data = tensor.data.to(formats[home][key])
    try:
        yield homes
    finally:
        if pruned.tied:
            head.weight = own_head
        for name in pruned.absent:
            _replace(pruned.owner(name), name.rpartition(".")[2], None)


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


def _replace(owner: nn.Module, key: str, module: nn.Module | None) -> None:
    """Sets a module at its position or removes it; layers stay in numerical order."""
    if not isinstance(owner, nn.ModuleList):
        setattr(owner, key, OtherStage() if module is None else module)
        return
    modules: dict[str, Any] = dict(owner._modules)
    modules.pop(key, None)
    if module is not None:
        modules[key] = module
    owner._modules.clear()
    owner._modules.update({k: modules[k] for k in sorted(modules, key=int)})


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
        self._homes = work.settings.homes
        self._devices = [devices[home % len(devices)] for home in self._homes]
        self._sent: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (input, output)
        self._returned: dict[tuple[int, int], Tensor] = {}  # gradients for the previous stage
        for index, stage in stages.items():
            stage.to(self._devices[index])

    def run(self, micro_batches: Sequence[Inputs], scale: float) -> Tensor:
        settings = self.work.settings
        listed = orders(settings.schedule, settings.ranks, len(micro_batches))
        self.work.begin([dict(m) for m in micro_batches], scale=scale)
        self._sent.clear()  # messages of a failed step must not be used
        self._returned.clear()
        at = [0] * len(listed)
        while any(at[r] < len(ops) for r, ops in enumerate(listed)):
            before = sum(at)
            for rank, ops in enumerate(listed):
                while at[rank] < len(ops) and self._ready(ops[at[rank]]):
                    self._pass(rank, ops[at[rank]], micro_batches, scale)
                    at[rank] += 1
            if sum(at) == before:
                raise RuntimeError(f"{settings.schedule}: ranks wait for each other for ever")
        return self.work.total

    def _ready(self, op: Op) -> bool:
        kind, stage, number = op
        if kind == "F":
            return stage == 0 or (stage - 1, number) in self._sent
        if kind == "W":
            return True
        forward_done = (stage, number) in self._sent
        return forward_done and (stage == self.work.last or (stage, number) in self._returned)

    def _pass(self, rank: int, op: Op, batches: Sequence[Inputs], scale: float) -> None:
        kind, stage, number = op
        if kind == "W":
            return
        with self.work.recorder.noting(rank, "F" if kind == "F" else "B", stage, number):
            if kind == "F":
                self._forward(stage, number)
            else:
                hidden, out = self._sent.pop((stage, number))
                if stage == self.work.last:
                    (out * scale).backward()
                else:
                    out.backward(self._returned.pop((stage, number)))
                if hidden is not None and hidden.grad is not None:
                    self._returned[stage - 1, number] = self._to(hidden.grad, stage - 1)
                self.work.seams.after_backward()

    def _forward(self, stage: int, number: int) -> None:
        hidden = None
        if stage:
            hidden = self._to(self._sent[stage - 1, number][1].detach(), stage)
            hidden = hidden.requires_grad_(hidden.is_floating_point())
        inputs: Any = self.work.inputs(number)  # a micro-batch is sent with its hidden states
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                inputs[name] = self._to(value, stage)
        out = self.work.forward(self._stages[stage], stage, number, hidden)
        self._sent[stage, number] = hidden, out

    def _to(self, tensor: Any, stage: int) -> Any:
        """Moves a tensor to the stage's device, without waiting if memory and device allow it."""
        if tensor is None:
            return None
        return tensor.to(self._devices[stage], non_blocking=self.work.settings.overlap)
