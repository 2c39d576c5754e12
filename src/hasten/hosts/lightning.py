"""Techniques in Lightning, and a callback that leaves a line per step for ``hasten report``.

    trainer = lightning.Trainer(..., callbacks=[step_evidence("runs/theirs")])
    trainer.fit(*with_techniques(trainer, module, loader, [LengthGrouped(), Packed()]))

Lightning isn't one of hasten's dependencies, so its class is imported when the function is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten.core import facts
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.hosts.batches import StepBatches, StepLoader, collator, record_of
from hasten.hosts.fitting import EDITS, Host, Material, attach, edit, fitted, optimizer_of
from hasten.hosts.metrics_file import MetricsFile, TokenCount
from hasten.hosts.saving import Saves
from hasten.parts.hugging_face import causal_lm

HOST = Host(
    "Lightning",
    frozenset((*EDITS, Slot.SAMPLER, Slot.COLLATE, Slot.WIRE, Slot.OPTIMIZER, Slot.CHECKPOINT)),
    {
        Slot.FEED: "give the DataLoader num_workers and prefetch_factor",
        Slot.BATCH: "give lightning.Trainer accumulate_grad_batches",
        Slot.ADAPTER: "give the module a model that peft.get_peft_model has wrapped",
        Slot.COMPILE: "call torch.compile on the module",
        Slot.PRECISION: 'give lightning.Trainer precision="bf16-mixed"',
        Slot.LAYOUT: 'give lightning.Trainer strategy="ddp"',
        Slot.AVERAGE: "give lightning.Trainer its callback WeightAveraging",
        Slot.ALLOCATOR: "start the program with the variables that `hasten doctor` names",
    },
)


def with_techniques(
    trainer: Any,
    module: Any,
    loader: DataLoader[Any],
    techniques: Iterable[Technique],
    *,
    seed: int = 0,
) -> tuple[Any, DataLoader[Any]]:
    """What to give ``trainer.fit``: the module, its model edited, and the loader.

    The module's model is the Hugging Face causal language model among its attributes, and its
    ``training_step`` is to return ``self.model(**batch).loss``. With ``accumulate_grad_batches``
    Lightning takes the mean of the passes' means, so that a token of a short pass weighs more.

    Args:
        loader: over records; its dataset and batch size stay where a SAMPLER orders it anew.

    Raises:
        InputError: a technique whose slot Lightning doesn't offer, with what to do instead, or one
            that can't work on this job.
    """
    model, plan = _model_of(module), list(techniques)
    setup = fitted(HOST, model, plan, _material(trainer, module, loader, plan, seed))
    saves = Saves.of(setup)
    edit(model, setup)
    if Slot.OPTIMIZER in setup.plan:
        usual = module.configure_optimizers
        module.configure_optimizers = lambda: _optimizers(setup, model, usual())
    trainer.callbacks.append(_seams(setup, model, saves))
    return module, _loader(trainer, setup, loader)


def _model_of(module: nn.Module) -> nn.Module:
    for child in module.children():
        try:
            causal_lm(child)
        except ValueError:
            continue
        return child
    raise InputError(
        f"{type(module).__name__} has no Hugging Face causal language model among its attributes"
    )


def _material(
    trainer: Any, module: Any, loader: Any, plan: Iterable[Technique], seed: int
) -> Material:
    world, sampled = facts.world(), any(t.slot is Slot.SAMPLER for t in plan)
    if trainer.world_size != world.size:
        raise InputError(
            f"Lightning will start {trainer.world_size} processes by itself; start them with "
            "torchrun, so that techniques know of each other"
        )
    if sampled and (world.size > 1 or not hasattr(loader.dataset, "__len__")):
        raise InputError(
            "a sampler in Lightning needs one process, where no sampler of Lightning's own takes "
            "its place, and a dataset with a length; leave it out, or train with `hasten train`"
        )
    data: Any = loader.dataset if sampled else ()
    return Material(
        device=str(module.device),
        records=data,
        lengths=[record_of(data[i]).length for i in range(len(data))],
        batch=(loader.batch_size or 1) * trainer.accumulate_grad_batches * world.size,
        steps=trainer.max_steps if trainer.max_steps > 0 else None,
        epochs=max(trainer.max_epochs or 1, 1),
        seed=seed,
        folder=Path(trainer.default_root_dir) / "hasten",
    )


def _loader(trainer: Any, setup: Setup, loader: DataLoader[Any]) -> DataLoader[Any]:
    assert setup.collate is not None  # prepare() put the job's there
    collate = collator(setup.collate) if Slot.COLLATE in setup.plan else loader.collate_fn
    if Slot.SAMPLER in setup.plan:
        assert setup.sampler is not None  # there are records
        order = StepBatches(setup.sampler, trainer.accumulate_grad_batches)
        return StepLoader(loader.dataset, order, collate, num_workers=loader.num_workers)
    loader.collate_fn = collate
    return loader


def _optimizers(setup: Setup, model: nn.Module, given: Any) -> Any:
    if not isinstance(given, Optimizer):
        raise InputError(
            "an optimizer technique takes the place of the one optimizer that "
            f"configure_optimizers returns; this one returns {type(given).__name__}"
        )
    return optimizer_of(setup, model, given)


def _seams(setup: Setup, model: nn.Module, saves: Saves | None) -> Any:
    """A callback with the moments at which WIRE and CHECKPOINT are called."""
    base = _callback_class()

    class Seams(base):  # type: ignore[misc, valid-type]  # known only now
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._step = trainer.global_step
            attach(setup, trainer.strategy.model)
            if saves is not None:
                saves.begin(model=model, optimizer=trainer.optimizers[0])

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            setup.wire.before_update(self._parameters())

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step > self._step:
                self._step = trainer.global_step
                setup.wire.after_update(self._parameters())
                if saves is not None:
                    saves.after_step(self._step)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if saves is not None:
                saves.after_epoch(trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if saves is not None:
                saves.close()

        def _parameters(self) -> list[Any]:
            return [p for p in model.parameters() if p.requires_grad]

    return Seams()


def step_evidence(folder: str | Path) -> Any:
    """A Lightning callback that writes ``metrics.jsonl`` into a folder of its own.

    A batch is counted where it is a mapping with ``input_ids``, as Transformers' collators make
    it. With accumulation a line is an optimizer step, and its loss that of the last batch.

    Raises:
        InputError: Lightning isn't installed, or the folder can't be written.
    """
    base = _callback_class()

    class StepEvidence(base):  # type: ignore[misc, valid-type]  # known only now
        def __init__(self) -> None:
            self._file = MetricsFile(folder) if facts.world().is_main else None
            self._count, self._step = TokenCount(), 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._step = trainer.global_step
            self._begin()

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            self._count.add(batch)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if self._file is not None and trainer.global_step > self._step:
                self._step = trainer.global_step
                self._file.step(self._step, self._count, _loss(outputs))

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self._begin()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self._file is not None:
                self._file.close()

        def _begin(self) -> None:
            if self._file is not None:
                self._file.begin()

    return StepEvidence()


def _callback_class() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise InputError("Lightning is not installed here: pip install lightning")


def _loss(outputs: Any) -> float | None:
    """What ``training_step`` returned: a tensor, or a mapping with ``loss``."""
    value = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return float(value.detach()) if isinstance(value, Tensor) and value.numel() == 1 else None
