"""The moments of a Lightning training at which WIRE and CHECKPOINT are called, as a callback.

    (1) training begins      DDP stands: the wire hooks into it, and takes back what it remembered
    (2) before an update     the step counts
    (3) after an update      weights are compared at times, a checkpoint is begun
    (4) Lightning saves      what the wire has left out so far goes into Lightning's own checkpoint

Lightning isn't one of hasten's dependencies, so its class is imported when the function is called.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from hasten.core.setup import Setup
from hasten.errors import InputError
from hasten.integrations.adapt import attach
from hasten.integrations.saving import Saves, travels


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


def seams(setup: Setup, model: nn.Module, saves: Saves | None) -> Any:
    """A callback that calls them for the model of one training."""
    base = callback_class()
    remembers = travels(setup)
    wire: Any = setup.wire

    class Seams(base):  # type: ignore[misc, valid-type]  # known only now
        def __init__(self) -> None:
            self.setup, self._step = setup, 0
            self._remembered: dict[str, Any] | None = None

        @property
        def state_key(self) -> str:
            """The name of its state in Lightning's checkpoints."""
            return "hasten"

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._step = trainer.global_step
            attach(setup, trainer.strategy.model)
            if remembers and self._remembered is not None:
                wire.load_state_dict(self._remembered)
                self._remembered = None
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

        def state_dict(self) -> dict[str, Any]:
            """Of all ranks; Lightning calls it on each, and the first one writes."""
            return {"wire": wire.state_dict()} if remembers else {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._remembered = state_dict["wire"]

        def _parameters(self) -> list[Any]:
            return [p for p in model.parameters() if p.requires_grad]

    return Seams()
