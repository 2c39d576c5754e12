"""Sources: what a recipe names as data, with the user's column names, and how often each is seen.

A weight is how many times one epoch sees each record of a source: 2 is every record twice, 0.25 a
quarter of the records, 1.5 every record and half of them once more. Which ones is drawn by the
seed, once for the run; the order of the epoch is the trainer's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hasten.data.columns import Columns
from hasten.data.datasetinfo import entry_of
from hasten.data.spool import Choice, Indexed
from hasten.errors import InputError

PLAIN = Columns()


@dataclass(frozen=True)
class Source:
    """One file or folder."""

    path: Path
    columns: Columns = PLAIN


def source_of(name: str, columns: Columns = PLAIN) -> Source:
    """The source that a path, or `FOLDER[/dataset_info.json]:NAME`, stands for.

    Raises InputError for an entry that can't be used, or one whose columns are given twice.
    """
    entry = entry_of(name)
    if entry is None:
        return Source(Path(name), columns)
    if columns != PLAIN:
        raise InputError(f"columns: {name} brings its own columns; leave one of them out")
    return Source(*entry)


def weighted(groups: Sequence[Indexed], weights: Sequence[float], seed: int) -> Choice:
    """The records of an epoch: each group as often as its weight says, group after group.

    A fraction f of n records is round(f * n) of them, without repetition and in their order.
    """
    kept: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    first = 0
    for number, (group, weight) in enumerate(zip(groups, weights, strict=True)):
        whole, part = divmod(weight, 1)
        every = np.arange(first, first + len(group), dtype=np.int64)
        order = np.random.default_rng([seed, number]).permutation(len(group))
        kept += [*[every] * int(whole), every[np.sort(order[: round(part * len(group))])]]
        first += len(group)
    return Choice(groups, np.concatenate(kept))
