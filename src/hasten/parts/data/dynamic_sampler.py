"""A batch sampler whose batches hold as many records as fit a budget of tokens.

Works wherever a ``batch_sampler`` does: ``DataLoader``, the Hugging Face Trainer, Lightning.

    Step (1) => shuffle the records, from (seed, epoch) alone
    Step (2) => sort pools of them by length, so that rows of a batch are about equally long
    Step (3) => cut where the next record would exceed the budget
    Step (4) => make the number of batches a multiple of the ranks
    Step (5) => deal: the ranks' batches of one step cost about the same; steps are shuffled

Every rank computes the whole plan and takes its own part; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

POOL = 8192  # records sorted together: enough for equal rows, few enough for new company each epoch
Batches = list[list[int]]


class DynamicBatchSampler(Sampler[list[int]]):
    """Batches of record indices within a budget of tokens.

    All ranks get the same number of batches. Where the number isn't a multiple of the ranks, the
    largest batches are halved, so that every record comes exactly once per epoch over all ranks;
    only where each batch is a single record already are the first ones repeated. With
    ``drop_last`` the surplus batches, at most ``world_size - 1``, are left out instead.

    Args:
        dataset: read for its length, and for lengths: its ``lengths``, else each record's
            ``input_ids``, else ``len(record)``. Not read if ``lengths`` is given.
        max_tokens: budget of one batch.
        lengths: tokens of each record.
        shuffle: a new order each epoch; without it records keep their order.
        padded: a batch costs its longest record x its number of records; else its sum of tokens.

    Raises:
        ValueError: a record exceeds the budget (the first such is named), or has no length.
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
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must lie in 0..{world_size - 1} (world_size - 1)")
        self.lengths = record_lengths(dataset) if lengths is None else np.asarray(lengths, np.int64)
        _check(self.lengths, max_tokens)
        self.max_tokens, self.shuffle, self.seed = max_tokens, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.drop_last, self.padded = drop_last, padded
        self.epoch = 0
        self._done = 0  # batches handed out in this epoch
        self._start = 0  # where the next iteration begins
        self._planned: tuple[int, Batches] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; naming the current one again keeps a resumed position."""
        if epoch != self.epoch:
            self.epoch, self._done, self._start = epoch, 0, 0

    def __len__(self) -> int:
        """Batches of this rank in the whole epoch, the same on every rank."""
        return len(self._plan()) // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        mine = self._plan()[self.rank :: self.world_size]
        start, self._start = self._start, 0
        self._done = start
        for batch in mine[start:]:
            self._done += 1
            yield list(batch)

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Where the epoch stands.

        Worker processes fetch ahead of the training loop; with them, give ``batches_done``, the
        batches of this epoch that were trained.
        """
        done = self._done if batches_done is None else batches_done
        return {"epoch": self.epoch, "batches_done": done, "plan": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on after the batches that were done.

        Raises:
            ValueError: the state is of other records, settings or another number of ranks.
        """
        here = self._identity()
        wrong = [name for name, value in here.items() if state["plan"].get(name) != value]
        if wrong:
            raise ValueError(
                f"the sampler's state has {wrong[0]}={state['plan'].get(wrong[0])!r} and this "
                f"sampler {here[wrong[0]]!r}; resume with the settings it was saved with"
            )
        self.epoch = int(state["epoch"])
        self._done = self._start = int(state["batches_done"])

    def _identity(self) -> dict[str, Any]:
        return {
            "records": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "max_tokens": self.max_tokens,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "world_size": self.world_size,
            "drop_last": self.drop_last,
            "padded": self.padded,
        }

    def _plan(self) -> Batches:
        """The epoch's batches of all ranks, those of one step side by side."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = (self.epoch, self._make_plan())
        return self._planned[1]

    def _make_plan(self) -> Batches:
        if not self.shuffle:
            order = np.arange(len(self.lengths))
            return self._even(_cut(order, self.lengths, self.max_tokens, self.padded))
        draw = np.random.default_rng([self.seed, self.epoch])
        order = draw.permutation(len(self.lengths))
        if self.padded:
            order = _sorted_in_pools(order, self.lengths)
        batches = _cut(order, self.lengths, self.max_tokens, self.padded)
        batches = self._even([batches[i] for i in draw.permutation(len(batches))])
        batches.sort(key=lambda b: (self._cost(b), len(b)))
        steps = draw.permutation(len(batches) // self.world_size)
        size = self.world_size
        return [batch for step in steps for batch in batches[step * size : (step + 1) * size]]

    def _even(self, batches: Batches) -> Batches:
        """As many batches as ranks x steps: surplus dropped, or batches halved, or repeated."""
        surplus = len(batches) % self.world_size
        if not surplus:
            return batches
        if self.drop_last:
            return batches[:-surplus]
        batches = list(batches)
        for _ in range(self.world_size - surplus):
            at = max(range(len(batches)), key=lambda i: len(batches[i]))
            whole = batches[at]
            if len(whole) == 1:
                break
            batches[at : at + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
        single, missing = len(batches), -len(batches) % self.world_size
        return batches + [batches[i % single] for i in range(missing)]

    def _cost(self, batch: Sequence[int]) -> int:
        found = self.lengths[batch]
        return int(found.max() * len(batch) if self.padded else found.sum())


def record_lengths(dataset: Any) -> NDArray[np.int64]:
    """Tokens of each record, from ``dataset.lengths`` or from the records themselves."""
    known = getattr(dataset, "lengths", None)
    if known is not None:
        return np.asarray(known, np.int64)
    return np.asarray([_length(dataset[i], i) for i in range(len(dataset))], np.int64)


def _length(record: Any, index: int) -> int:
    if isinstance(record, Mapping) and "input_ids" in record:
        return len(record["input_ids"])
    ids = getattr(record, "input_ids", None)
    if ids is not None:
        return len(ids)
    columns = isinstance(record, tuple) and any(hasattr(part, "__len__") for part in record)
    if columns or isinstance(record, Mapping) or not hasattr(record, "__len__"):
        raise ValueError(
            f"record {index} is a {type(record).__name__} and doesn't say how many tokens it has; "
            "give lengths="
        )
    return len(record)


def _check(lengths: NDArray[np.int64], max_tokens: int) -> None:
    too_long = np.flatnonzero(lengths > max_tokens)
    if len(too_long):
        index = int(too_long[0])
        raise ValueError(
            f"record {index} has {lengths[index]} tokens, more than max_tokens={max_tokens} "
            f"({len(too_long)} such records, the longest {lengths.max()}); raise max_tokens or "
            "cut the records"
        )
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"record {int(lengths.argmin())} is empty; leave it out")


def _sorted_in_pools(order: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    pools = [order[i : i + POOL] for i in range(0, len(order), POOL)]
    ordered = [pool[np.argsort(lengths[pool], kind="stable")] for pool in pools]
    return np.concatenate(ordered) if ordered else order


def _cut(
    order: NDArray[np.int64], lengths: NDArray[np.int64], max_tokens: int, padded: bool
) -> Batches:
    """Consecutive records as long as they fit the budget."""
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
