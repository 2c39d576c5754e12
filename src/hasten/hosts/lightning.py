"""A callback for Lightning that leaves a line per step for ``hasten report``.

    trainer = lightning.Trainer(..., callbacks=[step_evidence("runs/theirs")])

Lightning isn't one of hasten's dependencies, so its class is imported when the function is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hasten.core import facts
from hasten.errors import InputError
from hasten.hosts.metrics_file import MetricsFile, TokenCount


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
