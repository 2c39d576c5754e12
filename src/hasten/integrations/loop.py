"""Techniques in a training loop of one's own: the model edited, and what the loop calls.

run = in_loop(model, [LengthGrouped(), Packed(), LabelledTokenLoss()], examples=rows, batch=32)
optimizer = run.optimizer(torch.optim.AdamW(model.parameters()))
for batch in run.loader(epoch=0):
    model(**batch).loss.backward()
    run.step(optimizer)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.adapt import (
    EDITS,
    HostRun,
    HostSlots,
    attach_communication,
    edit_model,
    optimizer_of,
    ordered_loader,
    prepare_host,
    take_off_loss,
)
from hasten.integrations.batches import StepCollator, StepLoader, padded_rows
from hasten.machine import host

HOST = HostSlots(
    "a loop of one's own",
    frozenset((*EDITS, Slot.SAMPLER, Slot.COLLATE, Slot.COMMUNICATION, Slot.OPTIMIZER)),
    {
        Slot.FEED: "wrap the loader in hasten.AsyncPipeline",
        Slot.PRECISION: "put torch.autocast around the forward pass, or train with `hasten train`",
        Slot.CHECKPOINT: "call hasten.SmartCheckpointer where a step ends",
        Slot.LAYOUT: "wrap the model in DistributedDataParallel and give it to attach",
        Slot.AVERAGE: "call hasten.parts.optim.weight_average where the weights have moved",
    },
    is_ordered=True,
)


class _Loop:
    """A loop as a :class:`~hasten.integrations.adapt.LoopAdapter`."""

    slots = HOST

    def __init__(self, model: nn.Module, examples: Sequence[Any], run: HostRun) -> None:
        self._model, self._examples, self._run = model, examples, run

    def model(self) -> nn.Module:
        return self._model

    def examples(self) -> Sequence[Any]:
        return self._examples

    def run(self) -> HostRun:
        return self._run

    def reason(self, technique: Technique) -> str:
        return ""


class LoopParts:
    """The parts that a loop takes from its techniques; the model is edited already."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model, setup

    def loader(self, epoch: int = 0, passes: int = 1) -> StepLoader:
        """The epoch's batches of this rank; each step has so many, the last may have fewer.

        A loss is divided so that the mean over passes and ranks is that over the step's trained
        tokens: with several passes divide each loss by their number, as usual.
        """
        collate = StepCollator(padded_rows, packs=Slot.COLLATE in self.setup.plan)
        return ordered_loader(self.setup, collate, passes, weighted=True, epoch=epoch)

    def optimizer(self, usual: Optimizer) -> Optimizer:
        """The technique's optimizer with the settings of the usual one, which wasn't stepped.

        Build a learning-rate schedule on what this returns: the technique is left out, with a
        warning, if the usual one has a schedule already.
        """
        return optimizer_of(self.setup, self.model, usual)

    def attach(self, module: nn.Module) -> None:
        """COMMUNICATION: hook into the replicas, before the first pass."""
        attach_communication(self.setup, module)

    def step(self, optimizer: Optimizer) -> None:
        """Moves the weights, notifies the communication method, clears the gradients."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.setup.communication.before_update(trained)
        optimizer.step()
        self.setup.communication.after_update(trained)
        optimizer.zero_grad()


def in_loop(
    model: nn.Module,
    techniques: Iterable[Technique],
    *,
    examples: Sequence[Any],
    batch: int,
    steps: int | None = None,
    epochs: int = 1,
    seed: int = 0,
) -> LoopParts:
    """Edits the model and returns the parts that the loop calls.

    A second call for the same model replaces the loss of the first.

    Args:
        examples: rows as :func:`hasten.integrations.batches.example_of` takes them.
        batch: examples of a step over all ranks.
        steps, epochs: length of the run.

    Raises:
        InputError: a loop doesn't support a technique, or it can't work here.
    """
    if not len(examples):
        raise InputError("in_loop needs examples to train on, and there are none")
    device = next((str(p.device) for p in model.parameters()), host.default_device())
    take_off_loss(model)
    run = HostRun(device, batch, steps, epochs, seed)
    setup = prepare_host(_Loop(model, examples, run), techniques)
    edit_model(model, setup)
    return LoopParts(model.train(), setup)
