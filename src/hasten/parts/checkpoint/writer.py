"""Copies state aside and writes it in a thread, while training goes on: one save at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Staging:
    """Host memory that is kept from save to save: asking the system for it anew costs more time
    than the copy itself."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors as they are now, complete when this returns.

        They are overwritten by the next call.
        """
        self._kept = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        away = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor.detach(), non_blocking=tensor.device in away)
        for device in away:  # by name: in another thread the current device is another rank's
            torch.accelerator.synchronize(device)  # copies must be done before weights move on
        return dict(self._kept)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        pinned = tensor.device.type == "cuda"  # pages that can't move are copied without a detour
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


class Writer:
    """Runs one piece of work at a time beside the training; its error waits to be asked for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a piece of work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work``, after waiting for the one before."""
        self.wait()
        # Not a daemon: an interpreter that ends waits for it, and the save gets done.
        self._thread = threading.Thread(target=self._run, args=(work,), name="hasten-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def error(self) -> BaseException | None:
        """What went wrong since it was last asked, once."""
        found, self._error = self._error, None
        return found

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # whatever it is, the training thread decides about it
            self._error = error
