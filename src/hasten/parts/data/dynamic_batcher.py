"""Batches whose size follows the memory, for any training loop.

    batcher = DynamicBatcher(initial_size=32)
    for batch in batcher.batches(loader):
        train(batch)
        batcher.update_after_step()

A batch is a tensor, a mapping, tuple or list of tensors (columns with one row per record), or a
list of anything else (records). Records keep their order and none is lost: what waits for a later
call is said, and so is a loader whose batches are too small to grow.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from hasten.machine.memory import Headroom, Meter, is_out_of_memory, memory_meter

Result = TypeVar("Result")


class DynamicBatcher:
    """Cuts what a loader gives into batches of a size that grows and shrinks with the memory.

    Args:
        initial_size: records of the first batch.
        max_size: records of a batch at most.
        growth_factor: how much a batch grows where there is head-room.
        memory_threshold: share of the memory that a step may use.
        device: whose memory counts; the current accelerator, or the host where there is none.
        meter: ``() -> (bytes used, bytes there are)``, in place of the device's own.
    """

    def __init__(
        self,
        initial_size: int = 32,
        max_size: int = 512,
        growth_factor: float = 1.2,
        memory_threshold: float = 0.8,
        *,
        device: str | torch.device | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.initial_size, self.max_size = initial_size, max_size
        self.growth_factor, self.memory_threshold = growth_factor, memory_threshold
        meter = meter or memory_meter(device or _here())
        self._room = Headroom(initial_size, max_size, growth_factor, memory_threshold, meter)
        self._held: list[Any] = []
        self._last = 0  # records of the batch that was given last
        self._came = 0  # records that the loader gave last
        self._said: set[str] = set()
        weakref.finalize(self, _tell_what_waits, self._held)  # at the program's end, too

    @property
    def size(self) -> int:
        """Records of the next batch."""
        return self._room.size

    @property
    def held(self) -> int:
        """Records that wait for the next call."""
        return sum(rows(part) for part in self._held)

    def adjust_batch(self, data: Any) -> Any:
        """What waited and ``data``, as far as they fit.

        As long as no size was too much for the memory, all of it, at most ``max_size``: without a
        batcher the loader's batch would be trained whole. After that, ``size`` records; the rest
        waits. A loop over the loader can't catch up with what waits, nor join small batches:
        ``batches`` does both.

        Warns:
            UserWarning: once where records wait, and once where the loader's batches are too small
                for the size to matter.
        """
        count = rows(data)
        if count:
            self._held.append(data)
        if not self._room.ceiling:
            self._room.reach(self.held)
        batch = self._take()
        if self.held:
            self._warn(
                "waits",
                f"{self.held} records wait: the loader gives {count} and a step takes "
                f'{self._last}. Take "for batch in batcher.batches(loader)", which trains every '
                "record once",
            )
        elif self._last == self._came == count < self.size:  # not the tail of an epoch
            self._warn(
                "small",
                f"the loader gives {count} records at a time, so batches stay at {count} of "
                f"{self.size}; batcher.batches(loader) joins them",
            )
        self._came = count
        return batch

    def flush(self) -> Iterator[Any]:
        """What still waits, in batches of the current size."""
        while self._held:
            yield self._take()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Every record of a loader once, in batches of the size that is current at each moment."""
        for data in loader:
            if rows(data):
                self._held.append(data)
            while self.held >= self.size:
                yield self._take()
        yield from self.flush()

    def update_after_step(self, loss: object = None) -> None:
        """Read the memory and choose the next size; a batch that wasn't full changes little.

        ``loss`` may be given: after a number that isn't finite the size stays. A tensor isn't read,
        as that would wait for the device.
        """
        if isinstance(loss, int | float) and not math.isfinite(loss):
            return
        if self._last:  # before the first batch the memory says nothing of any size
            self._room.observe(self._last)

    def on_out_of_memory(self) -> None:
        """The last batch didn't fit: half of it comes next, and its size never again."""
        self._room.on_out_of_memory(self._last or None)

    def run_step(
        self, step: Callable[[Any, float], Result], batch: Any, forget: Callable[[], object]
    ) -> list[Result]:
        """``step(piece, share)`` over a batch, from the start in smaller pieces if memory runs out.

        Args:
            step: forward and backward of a piece whose mean loss counts ``share`` of the batch:
                ``(loss(piece) * share).backward()``.
            forget: drops the gradients of an attempt that failed: ``optimizer.zero_grad``.

        Raises:
            The error itself, if a single record doesn't fit, or if it isn't about memory.
        """
        whole = rows(batch)
        size = whole
        while True:
            try:
                pieces = (select(batch, i, i + size) for i in range(0, whole, size))
                return [step(piece, rows(piece) / whole) for piece in pieces]
            except (RuntimeError, MemoryError) as error:
                if size <= 1 or not is_out_of_memory(error):
                    raise
            # Here the error is gone, and with it the frames that held the failed pass's tensors.
            forget()
            release_memory()
            self._room.on_out_of_memory(size)
            self._last = size = max(1, min(size // 2, self.size))

    def settings(self) -> dict[str, Any]:
        """The settings it was made with, to build another from."""
        return {
            "initial_size": self.initial_size,
            "max_size": self.max_size,
            "growth_factor": self.growth_factor,
            "memory_threshold": self.memory_threshold,
        }

    def state_dict(self) -> dict[str, Any]:
        """The size, what is known of the memory, and the records that wait."""
        return {"room": self._room.state_dict(), "held": list(self._held), "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._room.load_state_dict(state["room"])
        self._held[:], self._last = state["held"], int(state["last"])

    def _warn(self, what: str, words: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(words, stacklevel=3)

    def _take(self) -> Any:
        wanted, parts = self.size, []
        while self._held and wanted:
            first = self._held.pop(0)
            found = rows(first)
            if found > wanted:
                self._held.insert(0, select(first, wanted, found))
                first, found = select(first, 0, wanted), wanted
            parts.append(first)
            wanted -= found
        if not parts:
            raise ValueError("there are no records to make a batch of")
        self._last = self.size - wanted
        return parts[0] if len(parts) == 1 else join(parts)


def _tell_what_waits(held: list[Any]) -> None:
    if held:
        words = f"{sum(map(rows, held))} records still wait in a DynamicBatcher and aren't trained"
        warnings.warn(f"{words}; train those of batcher.flush()", ResourceWarning, stacklevel=2)


def rows(data: Any) -> int:
    """Records of a batch.

    Raises:
        ValueError: it has no tensor and is no list, or its columns differ in length.
    """
    if isinstance(data, Tensor) and data.ndim:
        return int(data.shape[0])
    if _is_records(data):
        return len(data)
    if isinstance(data, Mapping | tuple | list) and len(data):
        columns = list(data.values()) if isinstance(data, Mapping) else list(data)
        counts = {rows(column) for column in columns}
        if len(counts) == 1:
            return counts.pop()
        raise ValueError(f"the columns of a batch have {sorted(counts)} rows; they must be equal")
    raise ValueError(f"a batch of type {type(data).__name__} has no rows; give tensors or a list")


def select(data: Any, start: int, stop: int) -> Any:
    """Some records of a batch, in its form; tensors are views."""
    if isinstance(data, Tensor) or _is_records(data):
        return data[start:stop]
    if isinstance(data, Mapping):
        return {name: select(column, start, stop) for name, column in data.items()}
    columns = [select(column, start, stop) for column in data]
    return columns if isinstance(data, list) else _as_tuple(data, columns)


def join(parts: list[Any]) -> Any:
    """Batches of one form end to end."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if _is_records(first):
        return [record for part in parts for record in part]
    if isinstance(first, Mapping):
        return {name: join([part[name] for part in parts]) for name in first}
    columns = [join(list(column)) for column in zip(*parts, strict=True)]
    return columns if isinstance(first, list) else _as_tuple(first, columns)


def _as_tuple(like: tuple[Any, ...], columns: list[Any]) -> tuple[Any, ...]:
    return type(like)(*columns) if hasattr(like, "_fields") else tuple(columns)


def _is_records(data: Any) -> bool:
    """A list of anything but tensors; a ``DataLoader`` gives columns as a list of tensors."""
    return isinstance(data, list) and not (data and all(isinstance(v, Tensor) for v in data))


def release_memory() -> None:
    """Give blocks that a failed pass left in the device's cache back, for blocks of other sizes."""
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def _here() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")
