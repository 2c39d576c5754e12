"""The line per step that a callback in another trainer's loop writes, as ``hasten train`` does.

``tokens`` counts positions that the attention mask keeps, padding not among them; a batch without a
mask that packs documents (``position_ids`` or ``cu_seq_lens``) has no padding. Where neither is
there, tokens aren't known: the line says null, and `hasten report` prints "not measured".
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.errors import InputError
from hasten.machine import host

PACKED = ("position_ids", "cu_seq_lens", "cu_seq_lens_q", "seq_idx")


class TokenCount:
    """Tokens and slots of a step's batches; nothing waits for the device before `take`."""

    def __init__(self) -> None:
        self._tokens: Tensor | int | None = 0
        self._slots = 0

    def add(self, batch: Any) -> None:
        """Count a batch: a mapping with ``input_ids``; anything else makes the step unknown."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor):
            self._tokens = None
            return
        self._slots += ids.numel()
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            own: Tensor | int = mask.detach().sum()
        elif mask is None and any(batch.get(key) is not None for key in PACKED):
            own = ids.numel()
        else:
            self._tokens = None
        if self._tokens is not None:
            self._tokens = self._tokens + own

    def take(self) -> tuple[int | None, int]:
        """Tokens (None: not known) and slots since the last call; waits for the device."""
        tokens, slots = self._tokens, self._slots
        self._tokens, self._slots = 0, 0
        return (None if tokens is None or not slots else int(tokens)), slots


class MetricsFile:
    """``metrics.jsonl`` in a folder of its own, written line by line.

    Args:
        folder: made if it isn't there.

    Raises:
        InputError: an earlier run's lines stand there, or the folder can't be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self._device = host.default_device()
        self._last = 0.0
        self._waiting: dict[str, Any] | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("x", buffering=1, encoding="utf-8")
        except FileExistsError as error:
            raise InputError(f"{self.path} exists; give every run a folder of its own") from error
        except OSError as error:
            raise InputError(f"{self.path} can't be written: {error.strerror or error}") from error

    def begin(self) -> None:
        """What follows belongs to the next step; called too after evaluation and saving."""
        self._last = time.perf_counter()

    def step(self, step: int, count: TokenCount, loss: float | None = None) -> None:
        """A step has ended: note it. Waits for the device, so that its time is the step's own."""
        if not self._device.startswith("cpu"):
            torch.accelerator.synchronize(self._device)
        seconds = time.perf_counter() - self._last
        tokens, slots = count.take()
        self.flush()
        known = tokens is not None and seconds > 0
        self._waiting = {
            "step": step,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "tokens": tokens,
            "slots": slots or None,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds if known and tokens is not None else None,
            "padding_share": 1 - tokens / slots if known and tokens is not None else None,
            "peak_memory_bytes": host.memory_peak(self._device),
        }
        self.begin()

    def loss(self, value: object) -> None:
        """The loss of the step that ended last, where a trainer tells it afterwards."""
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
