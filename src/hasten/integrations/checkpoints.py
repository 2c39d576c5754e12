"""Checkpoints (CHECKPOINT) and a line of metrics per step, in another trainer's loop.

The data's position belongs to the host, so nothing is restored automatically. The
checkpointer's own ``protect(...).restore()`` restores the state where the reader wants
it. A host that resumes from its own checkpoints lacks only the memory of a
communication method. That memory is stored next to them.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.errors import InputError
from hasten.machine import environment, host
from hasten.machine.files import replacing
from hasten.parts.checkpoint import SmartCheckpointer, checkpoints
from hasten.parts.checkpoint.state import of_all_ranks
from hasten.techniques.checkpoint import EPOCH, Checkpoints

COMMUNICATION_FILE = "hasten_communication.pt"


class CheckpointSchedule:
    """A technique's rhythm and folder, for as long as one training lasts; idle without one.

    Raises:
        InputError: an earlier run's checkpoints are in the folder.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._chosen = next((t for t in setup.plan if isinstance(t, Checkpoints)), None)
        self._keeper: SmartCheckpointer | None = None
        folder = (self._chosen and self._chosen.folder) or str(setup.folder)
        if self._chosen and "://" not in folder and checkpoints(Path(folder)):
            raise InputError(
                f"{folder} holds checkpoints of an earlier run; give checkpoints another "
                "folder, or move them away"
            )

    def begin(self, **objects: Any) -> None:
        """Training begins with these; a communication method that remembers is saved with them."""
        if self._chosen is None:
            return
        if has_communication_memory(self._setup):
            objects["communication"] = self._setup.communication
        self._keeper = self._chosen.keeper(self._setup.folder).protect(**objects)

    def after_step(self, step: int) -> None:
        if self._keeper is None:
            return
        if self._by_epoch:
            self._keeper.saver.look()
        else:
            self._keeper.after_step(step)

    def after_epoch(self, step: int) -> None:
        if self._keeper is not None and self._by_epoch:
            self._keeper.save(step)

    @property
    def _by_epoch(self) -> bool:
        return self._chosen is not None and self._chosen.interval == EPOCH

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None


def has_communication_memory(setup: Setup) -> bool:
    """Returns True if there is a communication method that may hold memory."""
    return Slot.COMMUNICATION in setup.plan and setup.context.world.size > 1


def communication_state(setup: Setup) -> Any:
    """Returns the communication method's memory, of all ranks if each has its own.

    Every rank calls it.
    """
    communication: Any = setup.communication
    state = communication.state_dict()
    return of_all_ranks(state) if getattr(communication, "each_rank", False) else state


def keep_communication(setup: Setup, folder: Path) -> None:
    """Stores the communication method's memory in a host's checkpoint; every rank calls it."""
    if not has_communication_memory(setup):
        return
    state = communication_state(setup)
    if setup.context.world.is_main:
        with replacing(folder / COMMUNICATION_FILE) as file:
            torch.save(state, file)


def take_communication(setup: Setup, folder: Path) -> None:
    """Restores the communication method from the checkpoint in the folder.

    Every rank calls it.

    Raises:
        InputError: the checkpoint is of another communication method.
    """
    if not has_communication_memory(setup):
        return
    communication: Any = setup.communication
    if (folder / COMMUNICATION_FILE).is_file():
        communication.load_state_dict(torch.load(folder / COMMUNICATION_FILE, weights_only=True))
    else:
        text = f"{folder} has no state of the communication method: it starts again, dense"
        warnings.warn(text, stacklevel=2)


# The line per step that a callback in another trainer's loop writes, as ``hasten train`` does.
#
# ``tokens`` counts positions that the attention mask keeps, padding not among them; a batch without
# a mask that packs documents (``position_ids`` or ``cu_seq_lens``) has no padding. Where neither is
# there, tokens aren't known: the line says null, and `hasten report` prints "not measured".

PACKED = ("position_ids", "cu_seq_lens", "cu_seq_lens_q", "seq_idx")


class TokenCount:
    """Tokens and positions of a step's batches; nothing waits for the device before `take`."""

    def __init__(self) -> None:
        self._tokens: Tensor | int | None = 0
        self._positions = 0

    def add(self, batch: Any) -> None:
        """Count a batch: a mapping with ``input_ids``; anything else makes the step unknown."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor):
            self._tokens = None
            return
        self._positions += ids.numel()
        mask, tokens = batch.get("attention_mask"), self._tokens
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            self._tokens = None if tokens is None else tokens + mask.detach().sum()
        elif mask is None and any(batch.get(key) is not None for key in PACKED):
            self._tokens = None if tokens is None else tokens + ids.numel()
        else:
            self._tokens = None

    def before_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook of a model: counts what it trains. That of the model's copy has its own count."""
        if module.training:  # an evaluation's tokens are nobody's step
            self.add(dict(zip(("input_ids",), args, strict=False)) | kwargs)

    def take(self) -> tuple[int | None, int]:
        """Tokens (None: not known) and positions since the last call; waits for the device."""
        tokens, positions = self._tokens, self._positions
        self._tokens, self._positions = 0, 0
        return (None if tokens is None or not positions else int(tokens)), positions


class StepLog:
    """Receives a host's steps from its callback; this one drops them.

    A step's time runs from the end of the step before, or from what came between them.
    """

    steps_to_compare = 0  # number of first steps to run without techniques too

    def __init__(self, device: str = "cpu") -> None:
        self._device, self._last = device, time.perf_counter()

    def begin(self) -> None:
        """Assigns everything that follows to the next step."""
        self._last = time.perf_counter()

    def exclude(self, seconds: float) -> None:
        """Subtracts seconds that a check of hasten's took from the time of the current step."""
        self._last += seconds

    def take(self, count: TokenCount) -> tuple[float, int | None, int]:
        """Seconds, tokens and positions of the step that has ended; waits for the device."""
        if not self._device.startswith("cpu"):
            torch.accelerator.synchronize(self._device)
        seconds = time.perf_counter() - self._last
        self.begin()
        return (max(seconds, 1e-9), *count.take())

    def step(self, step: int, count: TokenCount, loss: float | None = None) -> None:
        """A step has ended."""

    def loss(self, value: object) -> None:
        """The loss of the step that ended last."""

    def close(self) -> None:
        """The training has ended."""


class MetricsFile(StepLog):
    """``metrics.jsonl`` in a folder of its own, written line by line.

    Args:
        folder: created if it doesn't exist.

    Raises:
        InputError: the folder contains an earlier run's lines, or it can't be written.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(host.default_device())
        self.path = Path(folder) / "metrics.jsonl"
        self._waiting: dict[str, Any] | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("x", buffering=1, encoding="utf-8")
        except FileExistsError as error:
            raise InputError(f"{self.path} exists; give every run a folder of its own") from error
        except OSError as error:
            raise InputError(f"{self.path} can't be written: {error.strerror or error}") from error

    def step(self, step: int, count: TokenCount, loss: float | None = None) -> None:
        seconds, tokens, positions = self.take(count)
        self.flush()
        self._waiting = {
            "step": step,
            "loss": None,
            "tokens": tokens,
            "positions": positions or None,
            "step_seconds": seconds,
            "tokens_per_second": None if tokens is None else tokens / seconds,
            "padding_share": None if tokens is None else 1 - tokens / positions,
            "peak_memory_bytes": host.memory_peak(self._device),
        }
        self.loss(loss)

    def loss(self, value: object) -> None:
        """Sets the loss of the last finished step, for trainers that report it afterwards."""
        if self._waiting is not None and isinstance(value, int | float) and math.isfinite(value):
            self._waiting["loss"] = float(value)

    def flush(self) -> None:
        """Write the line that waited for its loss."""
        if self._waiting is not None:
            self._file.write(json.dumps(self._waiting) + "\n")
            self._waiting = None

    def close(self) -> None:
        """Write what waits; harmless when called again."""
        if not self._file.closed:
            self.flush()
            self._file.close()


def step_log(destination: str | Path | StepLog) -> StepLog:
    """Returns the log for the first rank's callback; one that drops all on the others.

    Raises:
        InputError: the folder holds an earlier run's lines or can't be written.
    """
    if not environment.world().is_main:
        return StepLog()
    return MetricsFile(destination) if isinstance(destination, str | Path) else destination
