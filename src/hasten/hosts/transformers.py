"""A callback for Hugging Face's Trainer and TRL that leaves a line per step for ``hasten report``.

    trainer = Trainer(..., callbacks=[StepEvidence("runs/theirs")])
    trainer.train()
    # hasten report runs/theirs runs/ours

A step's time runs from the end of the step before, so waiting for data is part of it; evaluation,
logging and saving between two steps are not. Tokens are counted where the model is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from hasten.core import facts
from hasten.hosts.metrics_file import MetricsFile, TokenCount


class StepEvidence(TrainerCallback):
    """Writes ``metrics.jsonl``; of several ranks the first writes, about its own share.

    Args:
        folder: of its own for every run.

    Raises:
        InputError: the folder holds an earlier run's lines or can't be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self._file = MetricsFile(folder) if facts.world().is_main else None
        self._count = TokenCount()
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        if self._hook is None:
            self._hook = model.register_forward_pre_hook(self._called, with_kwargs=True)
        self._begin()

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:  # an evaluation's tokens are nobody's step
            given = {"input_ids": args[0]} if args else {}
            self._count.add({**given, **kwargs})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._file is not None:
            self._file.step(state.global_step, self._count)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._file is not None and isinstance(logs, dict):
            self._file.loss(logs.get("loss"))
        self._begin()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        if self._file is not None:
            self._file.begin()
