"""The articles' trainer: trains any model, optimizer and loss function, with switches.

The model is trained in place. Each switch is off (False), on with its usual technique
(True), or a technique of the caller's choice. If a usual technique can't work on this
machine, it is left out, and that is reported. A technique of the caller's choice is
refused instead. Gradients are communicated between ranks only. With one rank,
compressing them is reported to have no effect.

A step of several batches has the gradient of the one batch that they make together. For
that, the sum and count of the loss function are used if it is one of torch's own means.
Ignored labels and weights of classes are taken into account. Any other mean is weighted
by ``count`` or by examples.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hasten.core import context as facts
from hasten.core.context import JobContext, ModelFacts
from hasten.core.health import BusyMachine
from hasten.core.job import Job, Stop
from hasten.core.loop import EvaluationSchedule, Outcome, fit
from hasten.core.plan import Plan
from hasten.core.setup import Session, Setup, prepare, unsupported_reasons
from hasten.core.slot import Slot
from hasten.core.step import PlainEngine, assemble
from hasten.core.technique import Technique
from hasten.core.timing import StepMetrics
from hasten.errors import InputError, as_input_error
from hasten.integrations.given_loader import GivenLoader, by_batch, micro_batch
from hasten.launch.cluster import CloudConfig
from hasten.launch.ranks import process_group
from hasten.parts.checkpoint import checkpoints
from hasten.parts.comm.gradient_compressor import GradientCompressor
from hasten.parts.data.dynamic_batch import DynamicBatcher
from hasten.parts.nn.losses import ObjectiveLoss
from hasten.parts.nn.torch_means import check_reduction, with_sum
from hasten.progress import Audience, Display, SilentProgress
from hasten.techniques.batch import AdaptiveBatch, AdaptiveCut
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.communication.compress import Quantised, technique_of
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.precision import Autocast

LiveSetting = bool | Technique | DynamicBatcher | GradientCompressor | None
_LOG = logging.getLogger(__name__)
DECISIVE = ("lr", "betas", "eps", "weight_decay", "momentum")
USUAL: Mapping[str, Technique] = {
    "compress_gradients": Quantised(),
    "mixed_precision": Autocast(),
    "dynamic_batch": AdaptiveBatch(grow=True),
}


class OptimizedTrainer:
    """Trains any module with any loss function and loader.

    Args:
        model: trained in place, on the device it is on.
        optimizer: over the model's parameters; not stepped before.
        loss_fn: ``loss_fn(output, target)`` returns the mean over the batch, or (sum,
            count). The divisors of torch's own means are built in: the labels that aren't
            ignored, the weights of their classes, or the elements.
        compress_gradients, mixed_precision, dynamic_batch: the articles' switches. With
            ``dynamic_batch=True`` a step takes as many batches of the loader as memory
            allows.
        count: weight of a batch in the mean, from the batch. If it is left out, a mean that
            isn't torch's own is weighted by the number of examples, which is printed once.
        max_grad_norm: clip gradients to this norm; no clipping if left out.
        bucket_cap_mb: size of DDP's gradient buckets on several ranks, in MB; 0: by the
            measured link.
        accum_steps: batches of the loader that a step takes. Its gradient is that of their
            examples in one batch. This also holds for the shorter step at the end of an
            epoch.
        progress: show epoch, loss and speed on stderr: a bar on a terminal, otherwise plain
            lines.

    A model in ``DistributedDataParallel`` is trained as its ``module`` and replicated once.

    Raises:
        InputError: a switch is neither a bool nor a technique, or two are for the same
            slot. It is also raised for ``accum_steps`` together with ``dynamic_batch``,
            which decide the same. Other reasons are a ``max_grad_norm`` that isn't above
            0, an optimizer with a closure, and sparse gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        compress_gradients: LiveSetting = False,
        mixed_precision: LiveSetting = False,
        dynamic_batch: LiveSetting = False,
        *,
        count: Callable[[Any], int] | None = None,
        max_grad_norm: float | None = None,
        bucket_cap_mb: int = 25,
        accum_steps: int = 1,
        progress: bool = True,
    ) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.count, self.max_grad_norm, self.progress = count, max_grad_norm, progress
        norm: Any = max_grad_norm
        if norm is not None and not (isinstance(norm, int | float) and norm > 0):
            raise InputError(
                f"max_grad_norm is {max_grad_norm!r}, which would stop or turn round each update; "
                "give a number above 0, or None for no clipping"
            )
        updated = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        if not any(id(weight) in updated for weight in model.parameters()):
            raise InputError(
                f"{type(optimizer).__name__} has none of the model's parameters, so no step would "
                "move one; build it over model.parameters()"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise InputError(
                f"{type(optimizer).__name__} needs a closure that computes the loss again, "
                "which this trainer doesn't have; take another optimizer, such as AdamW"
            )
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise InputError(
                    f"{name or type(module).__name__} has sparse gradients, and their norm isn't "
                    "computed here; build it with sparse=False"
                )
        self.replicated = DDP(bucket_cap_mb)
        settings = {
            "compress_gradients": compress_gradients,
            "mixed_precision": mixed_precision,
            "dynamic_batch": dynamic_batch,
        }
        self.techniques = {name: _resolve(name, switch) for name, switch in settings.items()}
        self.live_settings = {
            name: str(technique or "off") for name, technique in self.techniques.items()
        }
        self.plan = Plan(t for t in self.techniques.values() if t is not None)
        if type(accum_steps) is not int or accum_steps < 1:
            raise InputError(f"accum_steps is {accum_steps!r}; give a number of batches from 1 on")
        if accum_steps > 1 and any(t.slot is Slot.BATCH for t in self.plan):
            raise InputError(
                f"accum_steps={accum_steps} and dynamic_batch both decide how many examples a step "
                "takes; give one of them"
            )
        self.accum_steps = accum_steps

    def train(
        self,
        train_loader: Iterable[Any],
        epochs: int = 1,
        cloud_config: CloudConfig | None = None,
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
        deal: bool = True,
    ) -> dict[str, Any]:
        """Trains for some epochs over a loader of (inputs, target) pairs or dictionaries.

        Several ranks share the examples of a plain ``DataLoader``. Another loader has to give
        each rank its own. A sampler or data set with ``set_epoch`` receives each epoch.

        Args:
            cloud_config: the target machines, for planning and launching. The run uses the
                current machine and prints that.
            checkpoint_dir: the whole state is stored there at the end of each epoch.
            resume: continue from the newest checkpoint of ``checkpoint_dir``, if there is one.
            deal: False: every rank trains all that its loader gives, the same examples or not.

        Returns:
            A summary: steps, losses per epoch, examples per second and per step, peak memory,
            switches and the detected effect of each (``effective``).

        Raises:
            InputError: two ranks get the same examples, or the model's DDP has a hook.
        """
        folder = Path(checkpoint_dir) if checkpoint_dir is not None else None
        if resume and folder is None:
            raise InputError("resume=True needs checkpoint_dir, the folder to resume from")
        if folder is not None and not resume and checkpoints(folder):
            raise InputError(
                f"{folder} holds checkpoints of an earlier run; set resume=True to continue from "
                "them, or give another checkpoint_dir"
            )
        context = context_of(self.model)
        _say_what_is_here(cloud_config, context)
        model, plan = _bare(self.model, context.world.is_main), self._whole_plan(folder, context)
        with as_input_error("OptimizedTrainer"):
            check_reduction(self.loss_fn, self._joins_means(plan, context))
        with process_group(context.world, context.device):
            loader = GivenLoader(train_loader, context.world, deal, self.accum_steps)
            job = self._job(model, loader, epochs, context)
            return self._train(self._prepared(job, plan, context, folder, loader), loader, resume)

    def session(self, train_loader: Iterable[Any], context: JobContext, epochs: int) -> Session:
        """Returns a training for the caller's steps; each rank trains all that its loader gives."""
        loader = GivenLoader(train_loader, context.world, deal=False)
        job = self._job(_bare(self.model, False), loader, epochs, context)
        return assemble(self._prepared(job, self._whole_plan(None, context), context, None, loader))

    def _prepared(
        self, job: Job, plan: Plan, context: JobContext, folder: Path | None, loader: GivenLoader
    ) -> Setup:
        setup = prepare(job, plan, context, folder)
        if self.accum_steps > 1:
            setup.split_micro_batches = by_batch
        grows = any(isinstance(t, AdaptiveBatch) and t.grow for t in plan)
        if grows and isinstance(setup.run_passes, AdaptiveCut):
            loader.growing = setup.run_passes
        return setup

    def _train(self, setup: Setup, loader: GivenLoader, resume: bool) -> dict[str, Any]:
        session = assemble(setup)
        checkpoint = session.resume() if resume else None
        if resume and checkpoint is None:
            print(f"{setup.folder}: no checkpoint yet, starting from the beginning")
        if session.changes and setup.context.world.is_main:
            print(f"going on from {checkpoint}: {'; '.join(session.changes)}")
        steps: list[StepMetrics] = []
        before = replace(session.progress)  # of the run that is resumed
        shows = self.progress and setup.context.world.is_main
        # Loaders fork their workers while the display is there.
        display = Display(by_thread=False) if shows else contextlib.nullcontext(SilentProgress())
        with display as audience:
            epochs = EpochProgress(audience, setup.job.stop.epochs or 1, loader.steps)
            machine = BusyMachine(_LOG.warning) if setup.context.world.size == 1 else None

            def after_step(metrics: StepMetrics) -> None:
                if not steps and self._weighs_by_examples(session) and setup.context.world.is_main:
                    _say_how_means_are_weighted(self.loss_fn)
                steps.append(metrics)
                if machine is not None:
                    machine.note(metrics)
                assert isinstance(session.engine, PlainEngine)  # no switch brings another
                count = session.engine.loss_count  # the last loss is the mean over it, all ranks'
                assert count is not None  # the job isn't counted before its passes
                epochs.after_step(metrics, count, session.progress.step_in_epoch)

            outcome = fit(session, EvaluationSchedule(on_step=after_step))
            epochs.finish()
        effective = self._acted(session)
        session.finish()
        now = session.progress
        examples = loader.of_the_data(now.examples - before.examples, now.epoch - before.epoch)
        if loader.growing is not None and setup.context.world.is_main:
            first_examples = loader.first_size * setup.context.world.size
            most = max((step.examples for step in steps), default=0)
            if most > first_examples:
                print(
                    f"dynamic_batch: {first_examples} -> {most} examples a step; the learning rate "
                    "stays as it is"
                )
        summary = self._summary(outcome, examples, steps, checkpoint, setup)
        return {**summary, "epoch_losses": epochs.losses, "effective": effective}

    def _joins_means(self, plan: Plan, context: JobContext) -> bool:
        """Returns True if a step may have several batches."""
        several = self.accum_steps > 1 or context.world.size > 1
        return several or any(t.slot is Slot.BATCH for t in plan)

    def _weighs_by_examples(self, session: Session) -> bool:
        """Returns True if a step has several batches and only their examples give the weights."""
        several = self._joins_means(session.setup.plan, session.setup.context)
        loss = session.loss_module
        unknown = isinstance(loss, ObjectiveLoss) and loss.returns_mean
        return several and self.count is None and bool(unknown)

    def _job(self, model: nn.Module, loader: GivenLoader, epochs: int, context: JobContext) -> Job:
        return Job(
            model=model,
            loss=lambda model: ObjectiveLoss(
                model, with_sum(self.loss_fn) if self.count is None else self.loss_fn
            ),
            optimizer=lambda named: self.optimizer,
            stop=Stop(epochs=epochs),
            collate=lambda rows: micro_batch(rows, self.count),
            stream=loader.epoch,
            counted=False,
            max_grad_norm=self.max_grad_norm,
            device=context.device,
            seed=torch.initial_seed() % 2**31,
            terms=_terms(self.optimizer)
            | ({"accum_steps": self.accum_steps} if self.accum_steps > 1 else {}),
        )

    def _whole_plan(self, folder: Path | None, context: JobContext) -> Plan:
        more: list[Technique] = []
        if folder is not None:
            more.append(Checkpoints(interval="epoch"))
        if context.world.size > 1:
            more.append(self.replicated)
        plan = self._possible(context).with_(*more)
        reasons = unsupported_reasons(plan, context)
        if reasons:
            raise InputError("this job can't use " + "; ".join(reasons))
        return plan

    def _possible(self, context: JobContext) -> Plan:
        """The plan without those usual techniques that can't work here, nor a communication method
        of one rank.
        """
        plan = self.plan
        for name, technique in self.techniques.items():
            if technique is None:
                continue
            if technique.slot is Slot.COMMUNICATION and context.world.size == 1:
                print(f"{name}: with one rank no gradient travels, so none is compressed")
            elif technique is USUAL[name] and (reasons := technique.unsupported_reasons(context)):
                print(f"{name}: continuing without {technique}: {reasons[0]}")
            else:
                continue
            self.live_settings[name] = "off"
            plan = plan.without(technique)
        return plan

    def _acted(self, session: Session) -> dict[str, dict[str, Any]]:
        off = {"effective": False, "evidence": "off"}
        return {
            name: asdict(technique.check_effect(session))
            if technique is not None and self.live_settings[name] != "off"
            else off
            for name, technique in self.techniques.items()
        }

    def _summary(
        self,
        outcome: Outcome,
        examples: int,
        steps: Sequence[StepMetrics],
        checkpoint: Path | None,
        setup: Setup,
    ) -> dict[str, Any]:
        trained = sum(outcome.step_seconds)
        sizes = [step.examples for step in steps]
        return {
            "stopped": outcome.stopped,
            "steps": len(outcome.step_seconds),
            "seconds": outcome.seconds,
            "examples_per_second": examples / trained if trained else None,
            "examples_per_step": {
                "least": min(sizes, default=None),
                "mean": sum(sizes) / len(sizes) if sizes else None,
                "most": max(sizes, default=None),
            },
            "peak_memory_bytes": outcome.peak_memory_bytes,
            "switches": dict(self.live_settings),
            "plan": setup.plan.to_list(),
            "resumed_from": str(checkpoint) if checkpoint else None,
            "world_size": setup.context.world.size,
        }


def context_of(model: nn.Module) -> JobContext:
    """Returns the facts available before such a model trains here."""
    parameters = sum(p.numel() for p in model.parameters())
    device = next((str(p.device) for p in model.parameters()), "cpu")
    model_facts = ModelFacts(type(model).__name__, parameters)
    context = replace(facts.seen_at_start(), device=device, model=model_facts)
    if not (dist.is_available() and dist.is_initialized()):
        return context
    # A group that stands already decides: a script may have numbered its ranks by itself.
    joined = replace(context.world, rank=dist.get_rank(), size=dist.get_world_size())
    return replace(context, world=joined)


def _terms(optimizer: Optimizer) -> dict[str, Any]:
    """Each number of its parameter groups, learning rate among them."""
    groups = optimizer.param_groups
    numbers = {key: [group.get(key) for group in groups] for key in DECISIVE if key in groups[0]}
    return {"optimizer": type(optimizer).__name__, **json.loads(json.dumps(numbers, default=float))}


def _resolve(name: str, switch: Any) -> Technique | None:
    if switch is None or switch is False:
        return None
    if isinstance(switch, Technique):
        return switch
    if name == "dynamic_batch" and isinstance(switch, DynamicBatcher):
        # A part has state: only its settings are read.
        return AdaptiveBatch(**switch.settings(), grow=True)
    if name == "compress_gradients" and isinstance(switch, GradientCompressor):
        return technique_of(switch)
    if switch is not True:
        raise InputError(f"{name} is {switch!r}; give True, False or a technique")
    return USUAL[name]


def _bare(model: nn.Module, says: bool) -> nn.Module:
    """The model itself: the layout replicates it.

    Raises:
        InputError: it is in a DDP with a hook, which the layout's DDP wouldn't have.
    """
    if not isinstance(model, DistributedDataParallel):
        return model
    if model._comm_hooks:
        raise InputError(
            "this model's DDP has a communication hook, which would be lost; give "
            "compress_gradients= here, or train model.module"
        )
    if says:
        print("the model is in DistributedDataParallel: its module is trained, and replicated once")
    return model.module


def _say_how_means_are_weighted(loss_fn: Any) -> None:
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    print(
        f"loss_fn {name} isn't one of torch's own means: each batch of a step is weighted by its "
        "number of examples. If it is a mean over labels, give count=, their number in a batch, or "
        "let it return (sum, count)"
    )


def _say_what_is_here(cloud: CloudConfig | None, context: JobContext) -> None:
    device_count = max(context.world.size, len(context.hardware.accelerators), 1)
    if cloud is None or not context.world.is_main:
        return
    if cloud.devices > device_count:
        print(
            f"cloud_config asks for {cloud.devices} devices and this machine has {device_count}: "
            f"training "
            "on what is here. `hasten launch` writes the files that start a recipe on a cluster"
        )
    print(
        f"cloud_config: {cloud.topology} is for planning; training takes the network that is here, "
        f"and network_priority {cloud.network_priority} changes nothing"
    )


# Loss and speed of each epoch, and their display at intervals.
#
# All numbers are those of ``StepMetrics``, which a step has read from its device anyway, so that
# the host doesn't wait for the display. An epoch's line stays only if a second has passed since
# the line before it: short epochs don't fill the screen.

SHOWN_EVERY_SECONDS = 0.1
LINE_EVERY_SECONDS = 1.0


@dataclass
class _Epoch:
    number: int  # from 0
    loss: float = 0.0  # summed over what carries loss
    count: float = 0.0
    examples: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        return self.loss / self.count if self.count else math.nan

    def __str__(self) -> str:
        speed = self.examples / self.seconds if self.seconds else 0.0
        return f"loss {self.mean:.4f}, {speed:,.0f} examples/s"


class EpochProgress:
    """Sums the steps of each epoch, and shows where the training is.

    Args:
        epochs: at which the training ends.
        steps: of an epoch; None if the loader has no length, then the epoch before counts.
    """

    def __init__(self, audience: Audience, epochs: int, steps: int | None) -> None:
        self.losses: dict[int, float] = {}  # mean over what carried loss, as each step found it
        self._audience, self._epochs, self._steps = audience, epochs, steps
        self._epoch: _Epoch | None = None
        self._last_step = 0
        self._shown = self._printed = time.monotonic()

    def after_step(self, metrics: StepMetrics, count: float, step: int) -> None:
        """Adds a step, number ``step`` of its epoch from 1, with a mean loss over ``count``."""
        epoch = self._epoch
        if epoch is None or epoch.number != metrics.epoch:
            self._end_epoch()
            epoch = self._epoch = _Epoch(metrics.epoch)
        epoch.loss += metrics.loss * count
        epoch.count += count
        epoch.examples += metrics.examples
        epoch.seconds += metrics.step_seconds
        self.losses[epoch.number] = epoch.mean
        self._last_step = step
        now, share = time.monotonic(), self._share(epoch.number, step)
        if now - self._shown >= SHOWN_EVERY_SECONDS and share < 1:  # the epoch's line comes then
            self._shown = now
            of_steps = f"{step:,} of {self._steps:,}" if self._steps else f"{step:,}"
            text = f"epoch {epoch.number + 1} of {self._epochs}, step {of_steps}: {epoch}"
            self._audience.show(text, share)

    def finish(self) -> None:
        """The training is over; its last epoch has its line even if it was short."""
        self._end_epoch(last=True)

    def _end_epoch(self, last: bool = False) -> None:
        epoch, now = self._epoch, time.monotonic()
        if epoch is None:
            return
        if self._steps is None and not last:
            self._steps = self._last_step
        if last or now - self._printed >= LINE_EVERY_SECONDS:
            self._printed = now
            self._audience.tell(f"epoch {epoch.number + 1} of {self._epochs}: {epoch}")

    def _share(self, epoch: int, step: int) -> float:
        part = min(step / self._steps, 1.0) if self._steps else 0.0
        return (epoch + part) / self._epochs
