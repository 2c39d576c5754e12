"""The articles' trainer: trains any model, optimizer and loss function, with switches.

The model is trained in place, by hasten's own loop. Each switch is off (False), on with its usual
technique (True), or a technique of the caller's choice. If a usual technique can't work on this
machine, it is left out, and that is reported. A technique of the caller's choice is refused
instead. Gradients are communicated between ranks only.

A step of several batches has the gradient of the one batch that they make together. For
that, the sum and count of the loss function are used if it is one of torch's own means.
Ignored labels and weights of classes are taken into account. Any other mean is weighted
by ``count`` or by examples.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hasten.core.context import JobContext
from hasten.core.health import BusyMachine
from hasten.core.job import Job, Stop
from hasten.core.loop import EvaluationSchedule, fit
from hasten.core.plan import Plan
from hasten.core.setup import Session, Setup, prepare, unsupported_reasons
from hasten.core.slot import Slot
from hasten.core.step import PlainEngine, assemble
from hasten.core.technique import Technique
from hasten.core.timing import StepMetrics
from hasten.errors import InputError, as_input_error
from hasten.integrations.adapt import context_of
from hasten.integrations.given_loader import GivenLoader, by_batch, micro_batch
from hasten.launch.cluster import CloudConfig
from hasten.launch.ranks import process_group
from hasten.parts.checkpoint import checkpoints
from hasten.parts.comm.gradient_compressor import GradientCompressor
from hasten.parts.data.dynamic_batch import DynamicBatcher
from hasten.parts.nn.losses import ObjectiveLoss
from hasten.parts.nn.torch_means import check_reduction, with_sum
from hasten.progress import Display, SilentProgress
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
        model: trained in place, on the device it is on. Of a ``DistributedDataParallel`` without
            hooks its ``module`` is trained.
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

    Raises:
        InputError: a switch is neither a bool nor a technique, or two settings decide the same, or
            a number is out of its range.
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
        self.replicated, self.accum_steps = DDP(bucket_cap_mb), accum_steps
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
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InputError(f"max_grad_norm is {max_grad_norm}; give a number above 0, or None")
        if type(accum_steps) is not int or accum_steps < 1:
            raise InputError(f"accum_steps is {accum_steps!r}; give a number of batches from 1 on")
        if accum_steps > 1 and Slot.BATCH in self.plan:
            raise InputError(
                f"accum_steps={accum_steps} and dynamic_batch both decide how many examples a step "
                "takes; give one of them"
            )

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
        context = self._context()
        if cloud_config is not None and context.world.is_main:
            print(
                f"cloud_config: {cloud_config.devices} devices, {cloud_config.topology} and "
                f"network_priority {cloud_config.network_priority} are for planning; training "
                f"takes the {max(context.world.size, len(context.hardware.accelerators), 1)} "
                "devices and the network that are here. `hasten launch` writes the files that "
                "start a recipe on a cluster"
            )
        with process_group(context.world, context.device):
            loader = GivenLoader(train_loader, context.world, deal, self.accum_steps)
            return self._train(self._prepared(loader, epochs, context, folder), loader, resume)

    def session(self, train_loader: Iterable[Any], epochs: int) -> Session:
        """Returns a training for the caller's steps; each rank trains all that its loader gives."""
        context = self._context()
        loader = GivenLoader(train_loader, context.world, deal=False)
        return assemble(self._prepared(loader, epochs, context))

    def _context(self) -> JobContext:
        device = next((str(p.device) for p in self.model.parameters()), "cpu")
        return context_of(self.model, device)

    def _prepared(
        self, loader: GivenLoader, epochs: int, context: JobContext, folder: Path | None = None
    ) -> Setup:
        plan = self._possible(context)
        if folder is not None:
            plan = plan.with_(Checkpoints(interval="epoch"))
        if context.world.size > 1:
            plan = plan.with_(self.replicated)
        reasons = unsupported_reasons(plan, context)
        if reasons:
            raise InputError("this job can't use " + "; ".join(reasons))
        with as_input_error("OptimizedTrainer"):
            check_reduction(self.loss_fn, self._joins_means(plan, context))
        setup = prepare(self._job(loader, epochs, context), plan, context, folder)
        if self.accum_steps > 1:
            setup.split_micro_batches = by_batch
        grows = any(isinstance(t, AdaptiveBatch) and t.grow for t in plan)
        if grows and isinstance(setup.run_passes, AdaptiveCut):
            loader.growing = setup.run_passes
        return setup

    def _train(self, setup: Setup, loader: GivenLoader, resume: bool) -> dict[str, Any]:
        session, world = assemble(setup), setup.context.world
        checkpoint = session.resume() if resume else None
        if resume and checkpoint is None:
            print(f"{setup.folder}: no checkpoint yet, starting from the beginning")
        if session.changes and world.is_main:
            print(f"going on from {checkpoint}: {'; '.join(session.changes)}")
        steps: list[StepMetrics] = []
        sums: dict[int, tuple[float, float]] = {}  # epoch -> sum of the loss, sum of its weights
        epochs, epoch_steps, text = setup.job.stop.epochs or 1, loader.steps, ""
        machine = BusyMachine(_LOG.warning) if world.size == 1 else None
        shows = self.progress and world.is_main
        # Loaders fork their workers while the display is there.
        display = Display(by_thread=False) if shows else contextlib.nullcontext(SilentProgress())
        with display as audience:

            def after_step(metrics: StepMetrics) -> None:
                nonlocal text
                if not steps and world.is_main:
                    self._report_weights(session)
                steps.append(metrics)
                if machine is not None:
                    machine.note(metrics)
                assert isinstance(session.engine, PlainEngine)  # no switch brings another
                count = session.engine.loss_count  # the last loss is the mean over it, all ranks'
                assert count is not None  # the job isn't counted before its passes
                number, step = metrics.epoch, session.progress.step_in_epoch
                loss, total = sums.get(number, (0.0, 0.0))
                loss, total = sums[number] = loss + metrics.loss * count, total + count
                speed = metrics.examples / max(metrics.step_seconds, 1e-9)
                mean = f"loss {_mean(loss, total):.4f}, {speed:,.0f} examples/s"
                text = f"epoch {number + 1} of {epochs}, step {step:,}: {mean}"
                done = (step - 1) / epoch_steps if epoch_steps else 0.0
                audience.show(text, (number + done) / epochs)  # the end has a line of its own

            outcome = fit(session, EvaluationSchedule(on_step=after_step))
            if text:
                audience.tell(text)
        effective = {
            name: asdict(technique.check_effect(session))
            if technique is not None and self.live_settings[name] != "off"
            else {"effective": False, "evidence": "off"}
            for name, technique in self.techniques.items()
        }
        session.finish()
        sizes, seconds = [step.examples for step in steps], sum(outcome.step_seconds)
        first_examples = loader.first_size * world.size
        if loader.growing is not None and world.is_main and max(sizes, default=0) > first_examples:
            print(
                f"dynamic_batch: {first_examples} -> {max(sizes)} examples a step; the learning "
                "rate stays as it is"
            )
        return {
            "stopped": outcome.stopped,
            "steps": len(steps),
            "seconds": outcome.seconds,
            "examples_per_second": sum(sizes) / loader.copies / seconds if seconds else None,
            "examples_per_step": {
                "least": min(sizes, default=None),
                "mean": sum(sizes) / len(sizes) if sizes else None,
                "most": max(sizes, default=None),
            },
            "peak_memory_bytes": outcome.peak_memory_bytes,
            "switches": dict(self.live_settings),
            "plan": setup.plan.to_list(),
            "resumed_from": str(checkpoint) if checkpoint else None,
            "world_size": world.size,
            "epoch_losses": {number: _mean(*pair) for number, pair in sums.items()},
            "effective": effective,
        }

    def _joins_means(self, plan: Plan, context: JobContext) -> bool:
        """Returns True if a step may have several batches."""
        return self.accum_steps > 1 or context.world.size > 1 or Slot.BATCH in plan

    def _report_weights(self, session: Session) -> None:
        """Reports that only the examples give the weights of the batches in a step."""
        loss, setup = session.loss_module, session.setup
        unknown = isinstance(loss, ObjectiveLoss) and loss.returns_mean and self.count is None
        if unknown and self._joins_means(setup.plan, setup.context):
            print(
                f"loss_fn {getattr(self.loss_fn, '__name__', type(self.loss_fn).__name__)} isn't "
                "one of torch's own means: each batch of a step is weighted by its number of "
                "examples. If it is a mean over labels, give count=, their number in a batch, or "
                "let it return (sum, count)"
            )

    def _job(self, loader: GivenLoader, epochs: int, context: JobContext) -> Job:
        loss_fn = with_sum(self.loss_fn) if self.count is None else self.loss_fn
        groups = self.optimizer.param_groups  # with numbers, the learning rate among these
        numbers = {key: [g.get(key) for g in groups] for key in DECISIVE if key in groups[0]}
        terms = json.loads(json.dumps(numbers, default=float))
        return Job(
            model=_unwrapped(self.model),
            loss=lambda model: ObjectiveLoss(model, loss_fn),
            optimizer=lambda named: self.optimizer,
            stop=Stop(epochs=epochs),
            collate=lambda rows: micro_batch(rows, self.count),
            stream=loader.epoch,
            counted=False,
            max_grad_norm=self.max_grad_norm,
            device=context.device,
            seed=torch.initial_seed() % 2**31,
            terms={
                "optimizer": type(self.optimizer).__name__,
                "accum_steps": self.accum_steps,
                **terms,
            },
        )

    def _possible(self, context: JobContext) -> Plan:
        """The plan without those usual techniques that can't work here, nor a communication method
        of one rank.
        """
        plan = self.plan
        for name, technique in self.techniques.items():
            if technique is None:
                continue
            reasons = technique.unsupported_reasons(context) if technique is USUAL[name] else ()
            if technique.slot is Slot.COMMUNICATION and context.world.size == 1:
                reasons = ("with one rank no gradient travels, so none is compressed",)
            if reasons:
                print(f"{name}: continuing without {technique}: {reasons[0]}")
                self.live_settings[name] = "off"
                plan = plan.without(technique)
        return plan


def _mean(loss: float, count: float) -> float:
    return loss / count if count else math.nan


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


def _unwrapped(model: nn.Module) -> nn.Module:
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
    return model.module
