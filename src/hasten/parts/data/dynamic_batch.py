"""Batches sized by free memory (`DynamicBatcher`) or by a token budget (`DynamicBatchSampler`).

    batcher = DynamicBatcher(initial_size=32)
    for batch in batcher.batches(loader):
        train(batch)
        batcher.update_after_step()

A batch is a tensor, or a mapping, tuple or list of tensors (columns with one row per
example). It can also be a list of other objects (examples). Examples keep their order
and none is lost. Warnings report examples that wait for a later call, and batches of the
loader that are smaller than the chosen size.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from hasten.errors import require_real, require_whole
from hasten.machine.memory import Headroom, Meter, is_out_of_memory, memory_meter
from hasten.parts.data.collate import filled

Result = TypeVar("Result")


class DynamicBatcher:
    """Cuts the loader's output into batches; their size follows the free memory.

    Args:
        initial_size: examples of the first batch.
        max_size: maximum examples of a batch.
        growth_factor: factor by which a batch grows if there is free memory.
        memory_threshold: largest share of the memory that a step may use.
        device: device with the measured memory; default: the current accelerator, or the
            host if there is none.
        meter: ``() -> (bytes used, bytes in total)``, instead of the device's own.
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
        require_whole(initial_size=initial_size, max_size=max_size)
        require_real(growth_factor=growth_factor, memory_threshold=memory_threshold)
        self.initial_size, self.max_size = initial_size, max_size
        self.growth_factor, self.memory_threshold = growth_factor, memory_threshold
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        meter = meter or memory_meter(device or accelerator or torch.device("cpu"))
        self._headroom = Headroom(initial_size, max_size, growth_factor, memory_threshold, meter)
        self._waiting: list[Any] = []
        self._last = 0  # examples of the last returned batch
        self._received = 0  # examples of the last batch from the loader
        self._warned: set[str] = set()  # kinds of warnings already issued
        weakref.finalize(self, _warn_of_waiting, self._waiting)  # also at the program's end

    @property
    def size(self) -> int:
        """Returns the number of examples of the next batch."""
        return self._headroom.size

    @property
    def waiting_examples(self) -> int:
        """Returns the number of examples that wait for the next call."""
        return sum(example_count(part) for part in self._waiting)

    def adjust_batch(self, data: Any) -> Any:
        """Returns the waiting examples and ``data``, as far as they fit.

        Until a size has exceeded the memory, it returns all of them, at most ``max_size``. From
        then on it returns ``size`` examples, and the others wait. Since each call returns one
        batch, waiting examples may accumulate, and small batches aren't joined; with
        ``batches`` neither happens.

        Warns:
            UserWarning: once if examples wait, and once if the loader's batches are too small
                for the size to matter.
        """
        count = example_count(data)
        if count:
            self._waiting.append(data)
        if not self._headroom.ceiling:
            self._headroom.reach(self.waiting_examples)
        batch = self._take()
        if self.waiting_examples:
            self._warn(
                "waits",
                f"{self.waiting_examples} examples wait: the loader gives {count} and a step takes "
                f'{self._last}. Take "for batch in batcher.batches(loader)", which trains every '
                "example once",
            )
        elif self._last == self._received == count < self.size:  # two in a row: not an epoch's end
            self._warn(
                "small",
                f"the loader gives {count} examples at a time, so batches stay at {count} of "
                f"{self.size}; batcher.batches(loader) joins them",
            )
        self._received = count
        return batch

    def flush(self) -> Iterator[Any]:
        """Yields the examples that still wait, in batches of the current size."""
        while self._waiting:
            yield self._take()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields every example of a loader once, in batches of the current size."""
        for data in loader:
            if example_count(data):
                self._waiting.append(data)
            while self.waiting_examples >= self.size:
                yield self._take()
        yield from self.flush()

    def update_after_step(self, loss: object = None) -> None:
        """Measures the memory and chooses the next size.

        If ``loss`` is a number that isn't finite, the size stays. A tensor isn't read, because
        that would wait for the device.
        """
        if isinstance(loss, int | float) and not math.isfinite(loss):
            return
        if self._last:  # without a batch the memory doesn't depend on the size
            self._headroom.observe(self._last)

    def on_out_of_memory(self) -> None:
        """Halves the next batch after an out-of-memory error; the failed size isn't used again."""
        self._headroom.on_out_of_memory(self._last or None)

    def run_step(
        self, step: Callable[[Any, float], Result], batch: Any, forget: Callable[[], object]
    ) -> list[Result]:
        """Runs ``step(piece, share)`` on pieces of a batch: at first on the full batch.

        If memory runs out, it starts again from the first example with smaller pieces.

        Args:
            step: forward and backward of a piece. ``share`` of the batch's examples is in it:
                ``(loss(piece) * share).backward()``.
            ``forget``: clears the gradients of a failed attempt: ``optimizer.zero_grad``.

        Raises:
            The error of ``step``, if it isn't about memory, or if a single example doesn't fit.
        """
        batch_size = example_count(batch)
        if not batch_size:
            raise ValueError("run_step was given a batch without examples")
        size = batch_size
        while True:
            try:
                pieces = (select_examples(batch, i, i + size) for i in range(0, batch_size, size))
                return [
                    step(micro_batch, example_count(micro_batch) / batch_size)
                    for micro_batch in pieces
                ]
            except (RuntimeError, MemoryError) as error:
                if size <= 1 or not is_out_of_memory(error):
                    raise
            # Outside the except block the error is freed, and with it the failed pass's tensors.
            forget()
            release_memory()
            self._headroom.on_out_of_memory(size)
            self._last = size = max(1, min(size // 2, self.size))

    def settings(self) -> dict[str, Any]:
        """Returns the constructor's arguments, to construct an equal batcher."""
        names = ("initial_size", "max_size", "growth_factor", "memory_threshold")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Returns the size, the measured memory limits, and the waiting examples."""
        return {
            "room": self._headroom.state_dict(),
            "held": list(self._waiting),
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._headroom.load_state_dict(state["room"])
        self._waiting[:], self._last = state["held"], int(state["last"])

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=3)

    def _take(self) -> Any:
        wanted, parts = self.size, []
        while self._waiting and wanted:
            first = self._waiting.pop(0)
            count = example_count(first)
            if count > wanted:
                self._waiting.insert(0, select_examples(first, wanted, count))
                first, count = select_examples(first, 0, wanted), wanted
            parts.append(first)
            wanted -= count
        if not parts:
            raise ValueError("there are no examples to make a batch of")
        self._last = self.size - wanted
        return parts[0] if len(parts) == 1 else join_batches(parts)


def _warn_of_waiting(batches: list[Any]) -> None:
    if batches:
        count = sum(map(example_count, batches))
        message = f"{count} examples still wait in a DynamicBatcher and aren't trained"
        warnings.warn(f"{message}; train those of batcher.flush()", ResourceWarning, stacklevel=2)


def example_count(data: Any) -> int:
    """Returns the number of examples of a batch.

    Raises:
        ValueError: the batch has neither tensors nor a list, or its columns differ in length.
    """
    if isinstance(data, Tensor) and data.ndim:
        return int(data.shape[0])
    if _is_examples(data):
        return len(data)
    if isinstance(data, Mapping | tuple | list) and len(data):
        columns = list(data.values()) if isinstance(data, Mapping) else list(data)
        counts = {example_count(column) for column in columns}
        if len(counts) == 1:
            return counts.pop()
        raise ValueError(f"the columns of a batch have {sorted(counts)} rows; they must be equal")
    raise ValueError(f"a batch of type {type(data).__name__} has no rows; give tensors or a list")


def select_examples(data: Any, start: int, stop: int) -> Any:
    """Returns examples ``start:stop`` in the form of the batch; tensors are views."""
    if isinstance(data, Tensor) or _is_examples(data):
        return data[start:stop]
    if isinstance(data, Mapping):
        return filled(data, {k: select_examples(v, start, stop) for k, v in data.items()})
    columns = [select_examples(column, start, stop) for column in data]
    return columns if isinstance(data, list) else _as_tuple(data, columns)


def join_batches(parts: list[Any]) -> Any:
    """Joins batches with equal columns and row shapes.

    Raises:
        ValueError: their columns or the shapes of their rows differ.
    """
    first = parts[0]
    forms = {_form(part): None for part in parts}
    if len(forms) > 1:
        raise ValueError(
            f"batches of {' and of '.join(forms)} can't be joined; give the loader a collate_fn "
            "with the same columns, and rows of one shape, in each batch"
        )
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if _is_examples(first):
        return [example for part in parts for example in part]
    if isinstance(first, Mapping):
        return filled(first, {k: join_batches([part[k] for part in parts]) for k in first})
    columns = [join_batches(list(column)) for column in zip(*parts, strict=True)]
    return columns if isinstance(first, list) else _as_tuple(first, columns)


def _form(batch: Any) -> str:
    """Describes columns or row shape, which must be equal in batches to be joined."""
    if isinstance(batch, Tensor):
        return f"rows of shape {list(batch.shape[1:])}"
    if isinstance(batch, Mapping):
        return f"the columns {', '.join(sorted(map(str, batch)))}"
    return "examples" if _is_examples(batch) else f"{len(batch)} columns"


def _as_tuple(like: tuple[Any, ...], columns: list[Any]) -> tuple[Any, ...]:
    return type(like)(*columns) if hasattr(like, "_fields") else tuple(columns)


def _is_examples(data: Any) -> bool:
    """Returns True for a list of examples; a list of tensors has columns, as from DataLoader."""
    return isinstance(data, list) and not (data and all(isinstance(v, Tensor) for v in data))


def release_memory() -> None:
    """Returns cached blocks of a failed pass to the device, for blocks of other sizes."""
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


# A batch sampler whose batches fit a token budget.
#
# Use it as ``batch_sampler`` of ``DataLoader``, the Hugging Face Trainer or Lightning.
#
# 1. Shuffle the examples with a seed from (seed, epoch).
# 2. Sort pools of examples by length, so that rows of a batch have similar lengths.
# 3. End a batch before the example that would exceed the budget.
# 4. Make the number of batches a multiple of the ranks.
# 5. Give ranks batches of about equal cost in each step; shuffle the steps.
#
# Every rank computes the plan of all ranks and uses its own part, without communication.

# Examples sorted together: enough for similar lengths, few enough for other batches each epoch.
POOL = 8192
Batches = list[list[int]]
TooLong = Literal["alone", "error", "drop"]


class DynamicBatchSampler(Sampler[list[int]]):
    """Batches of example indices within a token budget.

    All ranks get the same number of batches, and every example comes exactly once per epoch
    over all ranks. If the number of batches isn't a multiple of the ranks, the largest
    batches are halved. If the largest is a single example, the first batches are repeated.
    With ``drop_last`` the surplus batches, at most ``world_size - 1``, are left out instead.

    An iteration after a finished one has the next epoch's order, as if ``set_epoch`` had been
    called.

    Args:
        dataset: source of the lengths, unless ``lengths`` is given: its ``lengths``, else each
            example's ``input_ids``, ``input``, ``inputs`` or ``tokens``, else ``len(example)``.
            The length of a tuple is that of its first member.
        max_tokens: budget of one batch.
        lengths: tokens of each example.
        shuffle: a new order each epoch; without it examples keep their order.
        padded: if True, a batch costs its longest example x its number of examples;
            otherwise its sum of tokens.
        too_long: treatment of an example above the budget: "alone" makes it a batch, "drop"
            leaves it out (both warn with the number of such examples), "error" raises.

    Raises:
        ValueError: an example has no length, or exceeds the budget with "error".
    """

    def __init__(
        self,
        dataset: Any,
        max_tokens: int = 4096,
        *,
        lengths: Sequence[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        padded: bool = True,
        too_long: TooLong = "alone",
    ) -> None:
        if too_long not in get_args(TooLong):
            raise ValueError(f"too_long is {too_long!r}; give {', '.join(get_args(TooLong))}")
        require_whole(max_tokens=max_tokens, seed=seed, rank=rank, world_size=world_size)
        if max_tokens < 1 or seed < 0:
            raise ValueError(
                f"max_tokens is {max_tokens} and seed {seed}; give at least 1, and at least 0"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must lie in 0..{world_size - 1} (world_size - 1)")
        self.lengths = (
            example_lengths(dataset) if lengths is None else _checked_lengths(dataset, lengths)
        )
        self._examples = _trainable_examples(self.lengths, max_tokens, too_long)
        self.max_tokens, self.shuffle, self.seed = max_tokens, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.drop_last, self.padded = drop_last, padded
        self.epoch = 0
        self._done = 0  # batches returned in this epoch
        self._start = 0  # index of the next iteration's first batch
        self._ended = False  # True if this epoch's batches are used up
        self._planned: tuple[int, Batches] | None = None  # (epoch, batches of all ranks)

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch; with the current epoch's number the position in it stays."""
        if epoch != self.epoch:
            self.epoch, self._done, self._start = epoch, 0, 0
        self._ended = False

    def __len__(self) -> int:
        """Returns the number of batches of this rank in the full epoch, equal on every rank."""
        return len(self._plan()) // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        if self._ended:
            self.set_epoch(self.epoch + 1)
        rank_batches = self._plan()[self.rank :: self.world_size]
        start, self._start = self._start, 0
        self._done = start
        for batch in rank_batches[start:]:
            self._done += 1
            yield list(batch)
        self._ended = True

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Returns the position in the epoch.

        Worker processes fetch ahead of the training loop. With them, pass ``batches_done``, the
        trained batches of this epoch.
        """
        done = self._done if batches_done is None else batches_done
        return {"epoch": self.epoch, "batches_done": done, "plan": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the next iteration to continue after the completed batches.

        Raises:
            ValueError: the state has other examples, settings or another number of ranks.
        """
        identity = self._identity()
        differing = [name for name, value in identity.items() if state["plan"].get(name) != value]
        if differing:
            raise ValueError(
                f"the sampler's state has {differing[0]}={state['plan'].get(differing[0])!r} and "
                f"this sampler {identity[differing[0]]!r}; resume with the settings it was saved "
                "with"
            )
        self.epoch, self._ended = int(state["epoch"]), False
        self._done = self._start = int(state["batches_done"])

    def _identity(self) -> dict[str, Any]:
        names = ("max_tokens", "shuffle", "seed", "world_size", "drop_last", "padded")
        tokens = int(self.lengths[self._examples].sum())
        settings = {name: getattr(self, name) for name in names}
        return {"examples": len(self._examples), "tokens": tokens, **settings}

    def _plan(self) -> Batches:
        """Returns the epoch's batches of all ranks, those of one step adjacent."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = (self.epoch, self._make_plan())
        return self._planned[1]

    def _make_plan(self) -> Batches:
        if not self.shuffle:
            order = self._examples
            return self._divisible_by_ranks(_cut(order, self.lengths, self.max_tokens, self.padded))
        generator = np.random.default_rng([self.seed, self.epoch])
        order = generator.permutation(self._examples)
        if self.padded and len(order):
            pools = [order[i : i + POOL] for i in range(0, len(order), POOL)]
            ordered = [pool[np.argsort(self.lengths[pool], kind="stable")] for pool in pools]
            order = np.concatenate(ordered)
        batches = _cut(order, self.lengths, self.max_tokens, self.padded)
        batches = self._divisible_by_ranks(
            [batches[i] for i in generator.permutation(len(batches))]
        )
        batches.sort(key=lambda b: (self._cost(b), len(b)))
        steps = generator.permutation(len(batches) // self.world_size)
        size = self.world_size
        return [batch for step in steps for batch in batches[step * size : (step + 1) * size]]

    def _divisible_by_ranks(self, batches: Batches) -> Batches:
        """Makes the number of batches a multiple of the ranks: drops, halves or repeats some."""
        surplus = len(batches) % self.world_size
        if not surplus:
            return batches
        if self.drop_last:
            return batches[:-surplus]
        batches = list(batches)
        for _ in range(self.world_size - surplus):
            at = max(range(len(batches)), key=lambda i: len(batches[i]))
            largest = batches[at]
            if len(largest) == 1:
                break
            batches[at : at + 1] = [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
        single, missing = len(batches), -len(batches) % self.world_size
        return batches + [batches[i % single] for i in range(missing)]

    def _cost(self, batch: Sequence[int]) -> int:
        batch_lengths = self.lengths[batch]
        return int(batch_lengths.max() * len(batch) if self.padded else batch_lengths.sum())


def example_lengths(dataset: Any) -> NDArray[np.int64]:
    """Returns tokens of each example, from ``dataset.lengths`` or from the examples."""
    lengths = getattr(dataset, "lengths", None)
    if lengths is not None:
        return np.asarray(lengths, np.int64)
    return np.asarray([_length(dataset[i], i) for i in range(len(dataset))], np.int64)


def _checked_lengths(dataset: Any, lengths: Any) -> NDArray[np.int64]:
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths has the shape {given.shape} in {given.dtype}; give one whole number for each "
            "example"
        )
    if hasattr(dataset, "__len__") and len(dataset) != len(given):
        raise ValueError(
            f"lengths has {len(given)} numbers and the dataset {len(dataset)} examples; give one "
            "number for each example"
        )
    return given.astype(np.int64)


LENGTH_KEYS = ("input_ids", "input", "inputs", "tokens")


def _length(example: Any, index: int) -> int:
    for key in LENGTH_KEYS:
        sequence = example.get(key) if isinstance(example, Mapping) else getattr(example, key, None)
        if sequence is not None and _has_length(sequence):
            return len(sequence)
    if isinstance(example, tuple) and example:
        first = example[0]
        if _has_length(first) and getattr(first, "ndim", 1) == 1 and not isinstance(first, str):
            return len(first)
        if not any(_has_length(part) for part in example):
            return len(example)  # a tuple of token ids
    elif not isinstance(example, Mapping) and _has_length(example):
        return len(example)
    raise ValueError(
        f"example {index} is a {type(example).__name__} of unknown length: "
        f"it has no {', '.join(LENGTH_KEYS)} with a length; give lengths="
    )


def _has_length(value: Any) -> bool:
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


def _trainable_examples(
    lengths: NDArray[np.int64], max_tokens: int, too_long: TooLong
) -> NDArray[np.int64]:
    """Returns the indices of examples to train; warns of or raises for those above the budget."""
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"example {int(lengths.argmin())} is empty; leave it out")
    above = np.flatnonzero(lengths > max_tokens)
    if not len(above):
        return np.arange(len(lengths))
    if too_long == "error":
        index = int(above[0])
        raise ValueError(
            f"example {index} has {lengths[index]} tokens, more than max_tokens={max_tokens} "
            f"({len(above)} such examples, the longest {lengths.max()}); raise max_tokens or "
            "cut the examples"
        )
    done = "are left out" if too_long == "drop" else "are a batch each"
    warnings.warn(
        f"{len(above)} examples have more than max_tokens={max_tokens} tokens, the longest "
        f"{lengths.max()}, and {done}",
        stacklevel=3,
    )
    return np.flatnonzero(lengths <= max_tokens) if too_long == "drop" else np.arange(len(lengths))


def _cut(
    order: NDArray[np.int64], lengths: NDArray[np.int64], max_tokens: int, padded: bool
) -> Batches:
    """Cuts the order into batches: a batch ends before the example that exceeds the budget."""
    batches: Batches = []
    batch: list[int] = []
    longest = tokens = 0
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        longest, tokens = max(longest, length), tokens + length
        if batch and (longest * (len(batch) + 1) if padded else tokens) > max_tokens:
            batches.append(batch)
            batch, longest, tokens = [], length, length
        batch.append(index)
    return [*batches, batch] if batch else batches
