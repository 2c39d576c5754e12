"""Copies to an accelerator beside its computing: pinned memory, a stream of their own, an event.

``send`` runs in the thread that reads ahead and returns at once; ``receive`` runs where the batch
is used and lets the device, not the host, wait for the copy. A batch may be a tensor or any nesting
of mappings, tuples, lists and dataclasses; everything else in it is handed on as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class DeviceCopies:
    """The way of batches to one device.

    On a processor, and on a device without streams, it is a plain ``tensor.to(device)``.
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        # Streams belong to one index, and the current one differs between threads: settle it here.
        if self.device.type != "cpu" and self.device.index is None and _is_accelerator(self.device):
            index = torch.accelerator.current_device_index()
            self.device = torch.device(self.device.type, index)
        self.stream = _stream(self.device)

    def send(self, batch: Any) -> tuple[Any, Any]:
        """The batch on the device, maybe still on its way, and the event of its arrival."""
        if self.stream is None:
            return each_tensor(batch, lambda t: t.to(self.device)), None
        with self.stream:
            sent = each_tensor(batch, self._send)
            return sent, self.stream.record_event()

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """The batch, which work queued from now on finds arrived."""
        batch, arrival = sent
        if arrival is None:
            return batch
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(arrival)

        def keep(tensor: Tensor) -> Tensor:
            # The memory is the side stream's: without this it could be reused while still read.
            if tensor.device == self.device:
                tensor.record_stream(current)
            return tensor

        return each_tensor(batch, keep)

    def _send(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # only from pinned memory does a copy not block the host
        return tensor.to(self.device, non_blocking=True)


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: each_tensor(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its fields
        return type(value)(*(each_tensor(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(each_tensor(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f.name for f in dataclasses.fields(value) if f.init)
        changed = {name: each_tensor(getattr(value, name), change) for name in fields}
        return dataclasses.replace(value, **changed)
    return value


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a batch."""
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    each_tensor(value, count)
    return total


def _is_accelerator(device: torch.device) -> bool:
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return here is not None and here.type == device.type


def _stream(device: torch.device) -> Any:
    """A stream beside the computing one, or None where the device has none."""
    if device.type == "cpu" or not _is_accelerator(device):
        return None
    try:
        return torch.Stream(device=device)
    except (RuntimeError, NotImplementedError):
        return None
