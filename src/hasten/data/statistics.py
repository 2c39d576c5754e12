"""Statistics of a data set: lengths, trained share, duplicates, and cost of padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from hasten.data.token_store import Pairs, StoredExamples, complete_store, row_lengths, token_bytes
from hasten.parts.data.epoch_order import GroupedOrder
from hasten.parts.data.packing import CLOSE, choose_method, plan_rows

QUANTILES = (1, 10, 50, 90, 99)
WINDOW = 4096  # examples that length_grouped sorts together, its default
TIMES = (1, 2, 4)  # sizes of packed rows that are compared, in the shortest useful row


@dataclass(frozen=True)
class Bin:
    """Examples with ``low`` <= tokens < ``high``."""

    low: int
    high: int
    examples: int
    tokens: int


@dataclass(frozen=True)
class DataStatistics:
    """A data set in numbers; an example is a duplicate if its tokens came before.

    Of preference pairs, lengths are those of both answers with their prompt.
    """

    examples: int
    tokens: int
    trained_tokens: int
    shortest: int
    longest: int
    quantiles: dict[int, int]
    duplicates: int
    bins: tuple[Bin, ...]
    longest_row: int
    shared_share: float | None  # pairs: tokens saved if a prompt is once


@dataclass(frozen=True)
class BatchLayout:
    """A layout of examples in rows, its share of used positions, and a lower bound of rows."""

    method: str
    technique: str
    fullness: float
    rows: int
    bound: int | None = None
    row_tokens: int = 0  # length of packed rows


def layouts(
    lengths: NDArray[np.int32],
    batch: int,
    row_tokens: int,
    rows: NDArray[np.int32] | None = None,
) -> list[BatchLayout]:
    """Returns padded and grouped batches of ``batch`` examples, and packed rows of three sizes.

    Rows have ``row_tokens`` or the longest example's tokens, whichever is more, times 1, 2, 4.

    Args:
        rows: tokens of both answers of each pair (pairs, 2); None: the examples aren't pairs.
    """
    rows = lengths[:, None] if rows is None else rows
    batches = -(-len(lengths) // batch)
    # Positions of an example that is padded within itself: a pair has two rows.
    widths = rows.max(1) * np.count_nonzero(rows, 1).astype(np.int32)
    full = float(lengths.sum(dtype=np.int64)) / float(widths.sum(dtype=np.int64))
    grouped = full * (1 - GroupedOrder(widths, window=WINDOW, examples=batch).padding_share())
    padded = full * (1 - padding_share(widths, batch))
    batch_layouts = [
        BatchLayout(f"padded, {batch} at random", "-", padded, batches),
        BatchLayout(f"padded, {batch} of like length", "length_grouped", grouped, batches),
    ]
    for row in _rows(lengths, row_tokens):
        made = plan_rows(lengths, row).efficiency
        name = f"packed, rows of {row:,}"
        batch_layouts.append(
            BatchLayout(name, "packed_epoch", made.fullness, made.rows, made.lower_bound, row)
        )
    return batch_layouts


def layout_advice(lengths: NDArray[np.int32], batch: int, row_tokens: int) -> str:
    """Returns the better one of packed rows and grouped examples, with the figures."""
    rows = _rows(lengths, row_tokens)
    full = {row: plan_rows(lengths, row).efficiency.fullness for row in rows}
    # The shortest row that is nearly as full as the fullest.
    row = next(row for row in full if full[row] >= max(full.values()) - CLOSE)
    choice = choose_method(lengths, row, batch)
    methods = {
        "pack": f"packed_epoch with row_tokens: {row}, and packed",
        "group": "length_grouped",
        "both": f"packed_epoch with row_tokens: {row} and packed, or length_grouped",
    }
    return f"{methods[choice.method]} ({choice.reason})"


def _rows(lengths: NDArray[np.int32], row_tokens: int) -> list[int]:
    return [max(row_tokens, int(lengths.max(initial=1))) * times for times in TIMES]


def statistics_of(examples: StoredExamples) -> DataStatistics:
    """Counts a data set's examples, tokens and duplicates; every example is read once."""
    lengths = np.asarray(examples.lengths, np.int64)
    tokens = (token_bytes(examples[index]) for index in range(len(examples)))
    store = complete_store(examples)
    different = len(set(map(xxhash.xxh3_64_intdigest, tokens)))
    return DataStatistics(
        examples=len(lengths),
        tokens=int(lengths.sum()),
        trained_tokens=int(np.asarray(examples.trained_counts, np.int64).sum()),
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        quantiles={q: int(np.percentile(lengths, q)) for q in QUANTILES},
        duplicates=len(lengths) - different,
        bins=tuple(_bins(lengths)),
        longest_row=int(row_lengths(examples).max()),
        shared_share=store.shared_share if isinstance(store, Pairs) else None,
    )


def padding_share(lengths: NDArray[np.int32], batch: int) -> float:
    """Returns the share of padding if random batches are padded to their longest example."""
    order = np.random.default_rng(0).permutation(len(lengths))
    batches = [lengths[order[i : i + batch]] for i in range(0, len(order), batch)]
    positions = sum(len(b) * int(b.max()) for b in batches)
    return 1 - float(lengths.sum(dtype=np.int64)) / positions if positions else 0.0


def _bins(lengths: NDArray[np.int64]) -> Iterator[Bin]:
    """Yields two bins per doubling, from the shortest example to the longest."""
    low, high = int(lengths.min()), int(lengths.max())
    edges = [1]
    while edges[-1] <= high:
        edges.append(max(edges[-1] + 1, round(edges[-1] * 2**0.5)))
    for start, end in itertools.pairwise(edges):
        inside = lengths[(lengths >= start) & (lengths < end)]
        if end > low:
            yield Bin(start, end, len(inside), int(inside.sum()))
