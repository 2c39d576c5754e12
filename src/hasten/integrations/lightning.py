"""Techniques in Lightning, and a callback that leaves a line per step for ``hasten report``.

    trainer = lightning.Trainer(..., callbacks=[step_evidence("runs/theirs")])
    trainer.fit(*with_techniques(trainer, module, loader, [LengthGrouped(), Packed()]))

Of several processes each calls this; they are started by torchrun, with strategy="ddp".
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten.core.setup import Setup
from hasten.core.slot import CHANGES_A_PASS, Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.adapt import (
    EDITS,
    HostRun,
    HostSlots,
    optimizer_of,
    ordered_loader,
    prepare_recognised,
)
from hasten.integrations.batches import StepCollator
from hasten.integrations.checkpoints import (
    StepLog,
    TokenCount,
    communication_state,
    has_communication_memory,
    step_log,
)
from hasten.integrations.hosted import HostedTraining
from hasten.machine import environment
from hasten.parts.nn.causal_lm import causal_lm

_LOG = logging.getLogger(__name__)
HOST = HostSlots(
    "Lightning",
    frozenset(
        (*EDITS, Slot.SAMPLER, Slot.COLLATE, Slot.COMMUNICATION, Slot.OPTIMIZER, Slot.CHECKPOINT)
    ),
    {
        Slot.FEED: "give the DataLoader num_workers and prefetch_factor",
        Slot.BATCH: "give lightning.Trainer accumulate_grad_batches",
        Slot.ADAPTER: "give the module a model that peft.get_peft_model has wrapped",
        Slot.COMPILE: "call torch.compile on the module",
        Slot.PRECISION: 'give lightning.Trainer precision="bf16-mixed"',
        Slot.LAYOUT: 'give lightning.Trainer strategy="ddp"',
        Slot.AVERAGE: "give lightning.Trainer its callback WeightAveraging",
        Slot.ALLOCATOR: "start the program with the variables that `hasten check` names",
    },
)
REPLICATED = ("SingleDeviceStrategy", "DDPStrategy")  # every process holds the whole model


def with_techniques(
    trainer: Any,
    module: Any,
    loader: DataLoader[Any],
    techniques: Iterable[Technique],
    *,
    seed: int = 0,
) -> tuple[Any, DataLoader[Any]]:
    """Returns the arguments of ``trainer.fit``: module with edited model, and loader.

    The module's model is the Hugging Face causal language model among its attributes. Its
    ``training_step`` has to return ``self.model(**batch).loss``. Lightning takes the mean
    of the losses of a step's passes and processes. If hasten chooses the examples and their
    layout, each loss is weighted. Then Lightning's mean is the mean over the step's trained
    tokens.

    Args:
        loader: over examples; it keeps its dataset and batch size if a SAMPLER changes the
            order.

    Raises:
        InputError: a technique can't work on this job, or Lightning doesn't offer its slot;
            then the message has what to do instead.
    """
    adapter = HostModule(trainer, module, loader, seed)
    setup = prepare_recognised(adapter, techniques)
    training = HostedTraining(adapter, setup)
    model, usual = adapter.model(), module.training_step
    if Slot.OPTIMIZER in setup.plan:
        configure = module.configure_optimizers
        module.configure_optimizers = lambda: _optimizers(setup, model, configure())

    @functools.wraps(usual)  # Lightning reads the parameters of the module's own
    def training_step(batch: Any, *index: Any, **more: Any) -> Any:
        training.close()  # a pass may have ended early
        training.open(packs_calls=True)
        return usual(batch, *index, **more)

    module.training_step = training_step
    trainer.callbacks.insert(0, _callback(Moments)(training))  # before those that save
    if Slot.SAMPLER not in setup.plan:
        return module, loader
    # Without packing a loss is weighted as Lightning does.
    return module, ordered_loader(
        setup,
        StepCollator(loader.collate_fn),
        trainer.accumulate_grad_batches,
        weighted=Slot.COLLATE in setup.plan,
        num_workers=loader.num_workers,
    )


class HostModule:
    """A Lightning trainer and a module as a :class:`~hasten.integrations.adapt.TrainerAdapter`.

    Raises:
        InputError: the module has no Hugging Face causal language model.
    """

    slots = HOST

    def __init__(self, trainer: Any, module: Any, loader: Any, seed: int = 0) -> None:
        self.trainer, self._module, self._loader, self._seed = trainer, module, loader, seed
        self._model = model_of(module)

    def model(self) -> nn.Module:
        return self._model

    def replicas(self) -> Any:
        return self.trainer.strategy.model

    def run(self) -> HostRun:
        trainer = self.trainer
        size = (self._loader.batch_size or 1) * trainer.accumulate_grad_batches
        return HostRun(
            device=str(trainer.strategy.root_device),  # the module goes there when `fit` begins
            batch=size * environment.world().size,
            steps=trainer.max_steps if trainer.max_steps > 0 else None,
            epochs=max(trainer.max_epochs or 1, 1),
            seed=self._seed,
            folder=Path(trainer.default_root_dir) / "hasten",
        )

    def examples(self) -> Any:
        return self._loader.dataset

    def reason(self, technique: Technique) -> str:
        trainer, slot, size = self.trainer, technique.slot, environment.world().size
        if trainer.world_size != size:
            return (
                f"Lightning will start {trainer.world_size} processes by itself; start them with "
                "torchrun, so that techniques know of each other"
            )
        strategy = type(trainer.strategy).__name__
        if strategy not in REPLICATED:
            return (
                f"{strategy} deals the model out or has a step of its own, and techniques work on "
                'a whole one; give lightning.Trainer strategy="ddp", or train with `hasten train`'
            )
        if slot in CHANGES_A_PASS and not getattr(self._module, "automatic_optimization", True):
            return (
                f"{type(self._module).__name__} has automatic_optimization = False, so its "
                "training_step also updates the weights and can't be compared before; leave it out"
            )
        replaced = trainer._accelerator_connector.use_distributed_sampler
        if slot is Slot.SAMPLER and size > 1 and replaced:
            return (
                "Lightning would replace it with a sampler of its own; give lightning.Trainer "
                "use_distributed_sampler=False"
            )
        if slot is Slot.COMMUNICATION and trainer.scaler is not None:
            return "with 16-mixed Lightning scales gradients; use bf16-mixed instead"
        return ""

    def has_already(self, technique: Technique) -> bool:
        return False

    def autocast(self) -> None:
        """Returns None: Lightning's is around ``training_step``, as in each recorded call."""

    def loss(self) -> None:
        """Returns None: ``training_step`` is the user's code."""

    def packs_calls(self) -> bool:
        return False

    def reference(self) -> None:
        """Returns None: a module's further models are the user's."""

    def step(self) -> int:
        return int(self.trainer.global_step)

    def steps(self) -> float:
        return float(self.trainer.estimated_stepping_batches)

    def evidence(self) -> list[Any]:
        callbacks = self.trainer.callbacks
        return [one for one in callbacks if isinstance(getattr(one, "lines", None), StepLog)]


class Moments:
    """The moments of a Lightning training, as methods of a callback."""

    def __init__(self, training: HostedTraining) -> None:
        self.training, self.setup, self._step = training, training.setup, 0
        self._communication: Any = self.setup.communication
        self._remembered: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        """The name of its state in Lightning's checkpoints."""
        return "hasten"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        self.training.begin(self._restore, optimizer=trainer.optimizers[0])
        model = self.training.model
        if self.training.techniques and model is not None and not model.training:
            self.training.report(
                "the model is in eval mode, as from_pretrained leaves it. Its dropout is off, "
                "with and without hasten. To switch it on, call model.train() in the module"
            )

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.training.prove()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.training.before_update()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.training.close()
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.training.after_update(self._step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.training.after_epoch(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.training.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks; Lightning calls it on each, the first writes."""
        remembers = has_communication_memory(self.setup)
        return {"communication": communication_state(self.setup)} if remembers else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._remembered = state_dict["communication"]

    def _restore(self) -> None:
        if self._remembered is not None and has_communication_memory(self.setup):
            self._communication.load_state_dict(self._remembered)
            self._remembered = None


def _callback(kind: type[Any]) -> Any:
    """Returns a Lightning callback with the methods of ``kind``.

    Lightning isn't one of hasten's dependencies, so its class is imported when it is needed.
    """
    return type(kind.__name__, (kind, callback_class()), {})


def callback_class() -> Any:
    """Lightning's class of callbacks.

    Raises:
        InputError: Lightning isn't installed.
    """
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise InputError("Lightning is not installed here: pip install lightning")


def model_of(module: nn.Module) -> nn.Module:
    """The Hugging Face causal language model among a module's attributes.

    Raises:
        InputError: there is none.
    """
    for child in module.children():
        try:
            causal_lm(child)
        except ValueError:
            continue
        return child
    raise InputError(
        f"{type(module).__name__} has no Hugging Face causal language model among its attributes"
    )


def _optimizers(setup: Setup, model: nn.Module, configured: Any) -> Any:
    """Returns the module's optimizer, or the technique's if no schedule holds the module's."""
    if isinstance(configured, Optimizer):
        return optimizer_of(setup, model, configured)
    is_one = isinstance(configured, list | tuple) and len(configured) == 1
    if is_one and isinstance(configured[0], Optimizer):
        return [optimizer_of(setup, model, configured[0])]
    name = next(t.name() for t in setup.plan if t.slot is Slot.OPTIMIZER)
    _LOG.warning(
        "speed_up: %s is left out: configure_optimizers returns more than an optimizer; a "
        "schedule keeps the optimizer that it was made for",
        name,
    )
    return configured


def step_evidence(folder: str | Path | StepLog) -> Any:
    """A Lightning callback that writes ``metrics.jsonl`` into a folder of its own.

    A batch is counted where it is a mapping with ``input_ids``, as Transformers' collators make
    it. With accumulation a line is an optimizer step, and its loss the mean of the step's batches.

    Raises:
        InputError: Lightning isn't installed, or the folder can't be written.
    """
    return _callback(LightningEvidence)(folder)


class LightningEvidence:
    """Counts and logs the steps of a Lightning training, as methods of a callback."""

    def __init__(self, folder: str | Path | StepLog) -> None:
        self.lines, self.count, self._step = step_log(folder), TokenCount(), 0
        self._losses: list[Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        self.lines.begin()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.count.add(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not environment.world().is_main:  # nobody waits for the device there
            return
        self._losses += _loss(outputs)
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            losses, self._losses = self._losses, []
            # Lightning has divided each batch's by how many make up a step.
            loss = float(torch.stack(losses).sum()) if losses else None
            self.lines.step(self._step, self.count, loss)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.lines.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.lines.close()


def _loss(outputs: Any) -> list[Tensor]:
    """The loss in what ``training_step`` returned, a tensor or a mapping; nothing without one."""
    value = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(value, Tensor) or value.numel() != 1:
        return []
    return [value.detach().flatten()]
