"""A user's loader: each rank's own batches of it, epoch by epoch, as micro-batches.

(1) a plain ``DataLoader`` is sharded: it is built again with torch's
    DistributedSampler.
(2) objects with ``set_epoch`` receive the epoch.
(3) a step takes one batch, ``accum_steps`` of them, or as many as memory allows.
(4) a batch becomes rows, which BATCH may cut.
(5) rows become a micro-batch.

A loader that can't be sharded is used as it is. If it gives two ranks the same first
batch, the run is refused, because they would repeat each other's work.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from hasten.core.job import MicroBatch, WorkCounts
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.parts.comm.groups import gathered_objects
from hasten.parts.data.prefetch import each_tensor
from hasten.techniques.batch import AdaptiveCut

COLUMNS = (Tensor, Mapping, tuple, list)  # what a batch is made of
LOADER_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order"),
)


class BatchRow(NamedTuple):
    """One example of a loader's batch: where it is, without a copy."""

    batch: Any
    row: int
    rows: int
    number: int  # number of the batch: a loader may yield one object twice


class GivenLoader:
    """This rank's batches of a loader. On several ranks it is built inside the process group.

    Args:
        deal: share the examples out; False: every rank trains all that its loader gives.
        accum_steps: batches of a step.
    """

    def __init__(
        self, loader: Iterable[Any], world: World, deal: bool, accum_steps: int = 1
    ) -> None:
        self._loader, self._world = loader, world
        self._accum_steps = accum_steps
        self.growing: AdaptiveCut | None = None  # joins batches as far as memory allows
        self.first_size = 0  # examples of the loader's first batch
        self.copies = 1 if deal else world.size  # copies of each example in a step
        self._alike = deal and world.size > 1  # the first batches are still to be compared
        if self._alike and isinstance(loader, DataLoader) and _is_plain(loader):
            self._share_out(loader)
        self._epoch_setters = _with_set_epoch(self._loader)

    @property
    def steps(self) -> int | None:
        """Returns the steps of an epoch; None if the loader has no length."""
        if self.growing is not None:
            return None
        try:
            return -(-len(self._loader) // self._accum_steps)  # type: ignore[arg-type]
        except TypeError:  # also a DataLoader over a stream
            return None

    def epoch(self, number: int) -> Iterator[list[BatchRow]]:
        """The rows of each step of an epoch.

        Raises:
            InputError: two ranks get the same first batch.
        """
        for one in self._epoch_setters:
            one.set_epoch(number)
        source = iter(self._loader)
        first = list(itertools.islice(source, 1))
        self._compare(first)
        self.first_size = sum(map(examples_in, first))
        batches = map(_rows, itertools.count(), itertools.chain(first, source))
        if self.growing is not None:
            yield from self._joined(self.growing, number, batches)
            return
        while group := list(itertools.islice(batches, self._accum_steps)):
            yield [row for batch in group for row in batch]

    def _joined(
        self, growing: AdaptiveCut, epoch: int, batches: Iterator[list[BatchRow]]
    ) -> Iterator[list[BatchRow]]:
        """Steps of as many batches as memory allows, the same number on every rank."""
        ahead: list[list[BatchRow]] = []
        done = growing.begin_epoch(epoch)
        while True:
            if done:  # a run that is resumed in an epoch takes its steps as they were
                count = done.pop(0)
                ahead += itertools.islice(batches, count - len(ahead))
            else:
                local_count = _fitting(growing, ahead, batches)
                count = min(gathered_objects(local_count)) if self._world.size > 1 else local_count
            if not count:
                break
            growing.takes(count)
            yield [row for batch in ahead[:count] for row in batch]
            del ahead[:count]
        if ahead:
            raise InputError(
                f"rank {self._world.rank} has more batches than another rank; give all ranks as "
                "many, or leave dynamic_batch out"
            )

    def _share_out(self, loader: DataLoader[Any]) -> None:
        world, batches = self._world, loader.batch_sampler
        data: Any = loader.dataset
        assert isinstance(batches, BatchSampler)
        sampler, size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
        shuffled = isinstance(sampler, RandomSampler)
        draw = getattr(sampler, "generator", None) or loader.generator
        seed = draw.initial_seed() if draw else torch.initial_seed()
        every = gathered_objects((_fingerprint(data), seed % 2**31))
        if len({mark for mark, _ in every}) > 1:
            if world.is_main:
                print(f"{world.size} ranks have different data sets: each trains its own, whole")
            return
        part = DistributedSampler(data, world.size, world.rank, shuffled, seed=every[0][1])
        settings: dict[str, Any] = {name: getattr(loader, name) for name in LOADER_SETTINGS}
        self._loader = DataLoader(data, size, sampler=part, drop_last=drop_last, **settings)
        self._alike = False
        if world.is_main:
            print(
                f"{world.size} ranks: each trains {len(part)} of {len(data)} examples an epoch, "
                f"{size} at a time ({size * world.size} a step)"
            )

    def _compare(self, first: list[Any]) -> None:
        if not self._alike:
            return
        self._alike = False
        digests = gathered_objects([*map(_digest, first)])
        if any(digests.count(one) > 1 for one in digests if one):
            raise InputError(
                "every rank gets the same examples from this loader. Give it a DistributedSampler "
                "(or DynamicBatchSampler(rank=, world_size=)), or set deal=False to train them all "
                "on every rank"
            )


def _rows(number: int, batch: Any) -> list[BatchRow]:
    size = examples_in(batch)
    return [BatchRow(batch, index, size, number) for index in range(size)]


def _fitting(
    growing: AdaptiveCut, ahead: list[list[BatchRow]], batches: Iterator[list[BatchRow]]
) -> int:
    """How many batches the next step could take; they are put into ``ahead``."""
    room = growing.room
    count = total = 0
    while True:
        if len(ahead) == count:
            ahead += itertools.islice(batches, 1)
        if len(ahead) == count:
            break
        size = len(ahead[count])
        if not count and not room.ceiling:
            room.reach(size)  # without the switch the loader's batch would be trained whole
        # Without a known limit a step is filled up, so that its passes can grow; with one it fits.
        full = total >= room.size or (room.ceiling and total + size > room.size)
        if count and (full or total + size > room.most or not _alike(ahead[0], ahead[count])):
            break
        count, total = count + 1, total + size
    return count


def _alike(one: list[BatchRow], other: list[BatchRow]) -> bool:
    """Returns True if two batches can be joined: rows are alike, and what has none is equal."""
    return bool(_form(one[0].batch, one[0].rows) == _form(other[0].batch, other[0].rows))


def _form(value: Any, batch_size: int) -> Any:
    """Returns the columns' kinds and all that has no rows: equal for batches that can be joined."""
    if isinstance(value, Tensor):
        kind = value.dtype, value.device, tuple(value.shape[1:])
        return kind if _has_rows(value, batch_size) else (*kind, _digest(value))
    if isinstance(value, Mapping):
        return {name: _form(column, batch_size) for name, column in value.items()}
    if isinstance(value, tuple | list) and not _has_rows(value, batch_size):
        return [_form(v, batch_size) for v in value]
    return list if isinstance(value, tuple | list) else value


def _has_rows(column: Any, batch_size: int) -> bool:
    """True for a tensor with a row for each example, and for a list of texts of ``DataLoader``."""
    if isinstance(column, Tensor):
        return column.ndim > 0 and len(column) == batch_size
    return len(column) == batch_size and not any(isinstance(v, COLUMNS) for v in column)


def _columns(change: Callable[[Sequence[Any]], Any], batch_size: int, parts: Sequence[Any]) -> Any:
    """Batches of one form as one: ``change`` gets each column of theirs that has rows.

    ``batch_size`` is that of the first.
    """
    form = parts[0]
    if isinstance(form, Mapping):
        return {k: _columns(change, batch_size, [part[k] for part in parts]) for k in form}
    if isinstance(form, COLUMNS) and _has_rows(form, batch_size):
        return change(parts)
    if isinstance(form, tuple | list):
        return [_columns(change, batch_size, column) for column in zip(*parts, strict=True)]
    return form


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Returns True if a loader takes each example once an epoch, in a fixed or random order."""
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.batch_sampler.sampler
    shuffled = type(sampler) is RandomSampler and not sampler.replacement
    if shuffled and sampler.num_samples != len(sampler.data_source):
        return False
    return (shuffled or type(sampler) is SequentialSampler) and not _with_set_epoch(loader)


def _with_set_epoch(loader: Iterable[Any]) -> list[Any]:
    """The loader and what it takes its examples from, as far as they want to know the epoch."""
    batches = getattr(loader, "batch_sampler", None)
    places = [loader, batches, getattr(loader, "sampler", None), getattr(batches, "sampler", None)]
    places.append(getattr(loader, "dataset", None))
    by_id = {id(one): one for one in places if callable(getattr(one, "set_epoch", None))}
    return list(by_id.values())


def _fingerprint(data: Any) -> str:
    """Returns a value that differs between data sets cut for each rank, except users' classes."""
    marks: list[Any] = [len(data), getattr(data, "_fingerprint", None)]  # Hugging Face's datasets
    if isinstance(data, Subset):
        marks += [list(data.indices), _fingerprint(data.dataset)]
    elif isinstance(data, TensorDataset | list | tuple) and len(data):
        marks.append(_digest(data[0]))
    return hashlib.blake2b(repr(marks).encode()).hexdigest()


def _digest(batch: Any) -> str:
    """Returns a hash that is the same for batches with equal tensors."""
    hasher = hashlib.blake2b()

    def add(tensor: Tensor) -> Tensor:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        hasher.update(plain.view(torch.uint8).numpy().tobytes())
        return tensor

    each_tensor(batch, add)
    return hasher.hexdigest()


def examples_in(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    values = batch.values() if isinstance(batch, Mapping) else batch
    columns = [
        v for v in (values if isinstance(values, Iterable) else ()) if isinstance(v, COLUMNS)
    ]
    for column in sorted(columns, key=lambda v: isinstance(v, Tensor) and not v.ndim):
        return examples_in(column)  # a tensor of one number has no rows, where another has
    raise InputError(f"the loader gave a {type(batch).__name__} without a tensor in it")


def micro_batch(rows: Sequence[BatchRow], count: Callable[[Any], int] | None) -> MicroBatch:
    """The loader's batch as it is, or the rows that a micro-batch takes of one or several."""
    taken = by_batch(rows)
    batch = taken[0][0].batch
    if len(taken) > 1 or len(taken[0]) < taken[0][0].rows:
        chosen = [[row.row for row in group] for group in taken]
        batches = [group[0].batch for group in taken]
        batch = _columns(lambda columns: _rows_of(columns, chosen), taken[0][0].rows, batches)
    weight = len(rows) if count is None else int(count(batch))
    if weight < 0:
        raise InputError(f"count returned {weight} for a batch; it must return 0 or more")
    inputs, named, target = split_batch(batch)
    arguments = {"inputs": inputs, "named": named, "target": target, "weight": weight}
    return MicroBatch(arguments, WorkCounts(len(rows), len(rows), len(rows), weight, units=weight))


def by_batch(rows: Sequence[BatchRow]) -> list[list[BatchRow]]:
    """A micro-batch for each of the loader's batches."""
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.number)]


def _rows_of(columns: Sequence[Any], chosen: Sequence[list[int]]) -> Any:
    """The chosen rows of each column, end to end."""
    pairs = list(zip(columns, chosen, strict=True))
    if not isinstance(columns[0], Tensor):
        return [column[row] for column, rows in pairs for row in rows]
    parts = [
        c if len(rows) == len(c) else c.index_select(0, torch.tensor(rows, device=c.device))
        for c, rows in pairs
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(positional inputs, named inputs, target) of a loader's batch."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return (), {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return tuple(batch[:-1]), {}, batch[-1]
    raise InputError(
        "a batch must be (inputs, target) or a dictionary with 'labels'; "
        f"the loader gave a {type(batch).__name__}"
    )
