"""Access patterns: detect the order in which examples are read, and merge requests.

    indices -> classify -> Pattern -> IndexedReader merges the next requests into one

A store that charges per request (a disk, an object store) serves a range for the price
of an example. If the order is sequential, strided, or shuffled within blocks, the
reader requests the range that the pattern predicts. It keeps the examples that it will
need. In any other order it requests single examples, exactly as without this module,
because a wrong guess would read unneeded data. Bits and order never depend on the
guess.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

FEWEST = 16  # reads before anything is concluded from them
WINDOW = 512  # reads that are remembered; two blocks, and the third that has begun, must fit
SPAN = 64  # examples of one merged request, where the pattern has no size of its own
WIDEST_STRIDE = 8  # beyond it a range is mostly examples that nobody wants


class AccessOrder(Enum):
    """The orders that can be detected; RANDOM is any other."""

    SEQUENTIAL = "sequential"
    STRIDED = "strided"
    BLOCKS = "shuffled within blocks"
    RANDOM = "random"


@dataclass(frozen=True)
class Pattern:
    """An order with its one number: the stride, or the examples of a block."""

    order: AccessOrder
    size: int = 1

    def range(self, index: int, count: int) -> tuple[int, int]:
        """[start, stop) worth one request when ``index`` of ``count`` examples is asked for."""
        if self.order is AccessOrder.SEQUENTIAL:
            return index, min(index + SPAN, count)
        if self.order is AccessOrder.STRIDED and 0 < self.size <= WIDEST_STRIDE:
            return index, min(index + SPAN, count)
        if self.order is AccessOrder.STRIDED and -WIDEST_STRIDE <= self.size < 0:
            return max(index - SPAN + 1, 0), index + 1
        if self.order is AccessOrder.BLOCKS:
            start = index // self.size * self.size
            return start, min(start + self.size, count)
        return index, index + 1

    def wants(self, first: int, index: int) -> bool:
        """Returns True if ``index``, read together with ``first``, will be requested soon."""
        return self.order is not AccessOrder.STRIDED or (index - first) % self.size == 0


def classify(indices: Sequence[int]) -> Pattern:
    """The order of example indices; RANDOM for fewer than 16 of them.

    Blocks are counted from example 0, as samplers cut them; a sequence may begin and end within
    one.
    """
    order = np.asarray(indices, np.int64)
    if len(order) < FEWEST:
        return Pattern(AccessOrder.RANDOM)
    steps = np.diff(order)
    if (steps == steps[0]).all() and steps[0]:
        step = int(steps[0])
        return Pattern(AccessOrder.SEQUENTIAL) if step == 1 else Pattern(AccessOrder.STRIDED, step)
    block = _block(order)
    return Pattern(AccessOrder.BLOCKS, block) if block else Pattern(AccessOrder.RANDOM)


@runtime_checkable
class RangeStore(Protocol):
    """Examples that can be read as a range for the price of one request.

    ``read_range(i, i + 1)[0]`` is what ``store[i]`` is.
    """

    def __len__(self) -> int: ...
    def read_range(self, start: int, stop: int) -> Sequence[Any]: ...


class IndexedReader:
    """A map-style data set over a store: any order, few requests where the order has a pattern.

    Holds the examples of one request at most. When half of a merged request was read in vain, the
    order has changed: the pattern is forgotten and watching begins again.
    """

    def __init__(self, store: RangeStore, detect: bool = True) -> None:
        self.store, self.detect = store, detect
        self.pattern = Pattern(AccessOrder.RANDOM)
        self.requests = 0
        self._window: deque[int] = deque(maxlen=WINDOW)
        self._next_look = FEWEST
        self._held: dict[int, Any] = {}
        self._fetched = 0  # examples of the last merged request that were kept

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]  # counts from the end, raises IndexError
        if not self.detect:
            return self._request(index, index + 1)[0]
        if index in self._held:
            return self._held.pop(index)
        if 2 * len(self._held) > self._fetched:  # false, too, when nothing was merged yet
            self._forget()
        start, stop = self.pattern.range(index, len(self))
        return self._merged(index) if stop - start > 1 else self._watched(index)

    def _watched(self, index: int) -> Any:
        self._window.append(index)
        self._next_look -= 1
        if self._next_look <= 0:
            self.pattern = classify(list(self._window))
            self._next_look = max(FEWEST, len(self._window) // 2)
        return self._request(index, index + 1)[0]

    def _merged(self, index: int) -> Any:
        start, stop = self.pattern.range(index, len(self))
        read = self._request(start, stop)
        # a block found half-way will ask for its other half alone
        requested = {index, *self._window}
        self._window.clear()
        self._held = {
            i: example
            for i, example in enumerate(read, start)
            if i not in requested and self.pattern.wants(index, i)
        }
        self._fetched = len(self._held)
        return read[index - start]

    def _forget(self) -> None:
        self.pattern, self._next_look = Pattern(AccessOrder.RANDOM), FEWEST
        self._window.clear()
        self._held, self._fetched = {}, 0

    def _request(self, start: int, stop: int) -> Sequence[Any]:
        self.requests += 1
        return self.store.read_range(start, stop)


def with_merged_reads(loader: Iterable[Any]) -> Iterable[Any]:
    """Returns the DataLoader over an IndexedReader, or ``loader`` if there is no gain.

    There is no gain without ``read_range``, without batches, or if the data set fetches
    whole batches by itself (``__getitems__``). Worker processes don't gain either, because
    each reads only its share of the order.
    """
    if not isinstance(loader, DataLoader):
        return loader
    torch_loader: Any = loader
    fetches_batches = getattr(torch_loader.dataset, "__getitems__", None) is not None
    gains = isinstance(torch_loader.dataset, RangeStore) and not fetches_batches
    if not gains or torch_loader.num_workers or torch_loader.batch_sampler is None:
        return torch_loader  # type: ignore[no-any-return]
    merged: Iterable[Any] = DataLoader(
        IndexedReader(torch_loader.dataset),
        batch_sampler=torch_loader.batch_sampler,
        collate_fn=torch_loader.collate_fn,
        pin_memory=torch_loader.pin_memory,
        generator=torch_loader.generator,
    )
    return merged


def _block(order: NDArray[np.int64]) -> int:
    """Examples of a block if the order is shuffled within blocks, else 0; two must be whole."""
    for size in range(4, len(order) // 2 + 1):
        blocks = order // size
        starts = np.flatnonzero(np.diff(blocks)) + 1  # where another block begins
        runs = np.diff([0, *starts, len(order)])  # the first and the last may be cut off
        if (runs[1:-1] != size).any() or runs.max() > size or (runs == size).sum() < 2:
            continue
        if all(len(set(run)) == len(run) for run in np.split(order, starts)):
            return size
    return 0
