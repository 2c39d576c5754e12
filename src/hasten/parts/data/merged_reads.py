"""Merged reads: examples that lie near to each other are read in one request.

A store that charges per request (a disk, an object store) serves a range for the price
of an example. Reads are near to each other if they are in order, strided, or shuffled
within blocks. Then a read requests a range around its example and keeps the others. This
ends when few of them are used. In any other order, examples are requested one by one.
Bits and order never depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader

WATCHED = 16  # reads before anything is concluded from them
NEAR = 128  # examples that all of them lie within
RANGE = 64  # examples of a merged request, which begins at a multiple of it
WORTH = 4  # examples of a range that have to be used, and half as many of the one before
MOST_KEPT = 256  # examples


@runtime_checkable
class RangeStore(Protocol):
    """Examples that can be read as a range for the price of one request.

    ``read_range(i, i + 1)[0]`` is what ``store[i]`` is.
    """

    def __len__(self) -> int: ...
    def read_range(self, start: int, stop: int) -> Sequence[Any]: ...


class MergedReads:
    """A map-style data set over a store: any order, few requests where reads are near."""

    def __init__(self, store: RangeStore) -> None:
        self.store = store
        self._last: deque[int] = deque(maxlen=WATCHED)
        self._kept: dict[int, Any] = {}  # the oldest first
        self._merges, self._used = False, 0  # examples of ranges

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]  # counts from the end, raises IndexError
        if index in self._kept:
            self._used += 1
            return self._kept.pop(index)
        if self._merges and self._used < WORTH:
            self._merges = False
            self._last.clear()
        if not self._merges:
            self._merges = self._is_near()
            self._last.append(index)
        if not self._merges:
            example: Any = self.store.read_range(index, index + 1)[0]
            return example
        start = index // RANGE * RANGE
        examples = self.store.read_range(start, min(start + RANGE, len(self)))
        self._kept |= {i: example for i, example in enumerate(examples, start) if i != index}
        for oldest in list(self._kept)[: max(len(self._kept) - MOST_KEPT, 0)]:
            del self._kept[oldest]
        self._used //= 2
        return examples[index - start]

    def _is_near(self) -> bool:
        distinct = set(self._last)
        return len(distinct) == WATCHED and max(distinct) - min(distinct) < NEAR


def with_merged_reads(loader: Iterable[Any]) -> Iterable[Any]:
    """Returns the DataLoader over `MergedReads`, or ``loader`` if there is no gain.

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
        MergedReads(torch_loader.dataset),
        batch_sampler=torch_loader.batch_sampler,
        collate_fn=torch_loader.collate_fn,
        pin_memory=torch_loader.pin_memory,
        generator=torch_loader.generator,
    )
    return merged
