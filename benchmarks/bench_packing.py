"""Packing and dealing on four length distributions, beside TRL's packing.

    python benchmarks/bench_packing.py             # hasten alone
    python benchmarks/bench_packing.py --trl       # where trl, datasets and transformers are there

Prints tables. Packing: CPU seconds for all lengths (one thread, median of interleaved rounds), how
full the rows are, and how full micro-batches of 16 examples are when examples are grouped by
length; then sets of few different lengths. Dealing: straggler loss
(1 - mean / maximum of the ranks' costs) of a step of random rows dealt at random, of the same step
dealt by cost, and of the steps that PackedOrder makes (stratified by cost).

TRL's strategy ``bfd`` is measured as its ``pack_dataset`` runs it, on batches of 1,000 examples
(the default of ``datasets.map``), and once on all examples in one batch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from smoke import arguments

from hasten.parts.data.epoch_order import (
    PackedOrder,
    deal_rows,
    quadratic_share,
    row_costs,
)
from hasten.parts.data.packing import choose_method, pack_lengths, plan_rows

RANKS, HIDDEN = 8, 4096
TRL_RECORDS = 100_000  # one list of tokens for each of a million examples would not fit
FEW = 20_000  # examples of few different lengths
DEALT = 200_000  # lengths whose rows are dealt, the first hundred steps of them


def straggler_loss(costs: Sequence[float] | NDArray[np.float64], hands: list[list[int]]) -> float:
    """Returns the share of the ranks' time spent waiting for the slowest: 1 - mean / maximum."""
    table = np.asarray(costs, np.float64)
    totals = np.array([table[hand].sum() for hand in hands])
    return float(1 - totals.mean() / totals.max()) if totals.max() > 0 else 0.0


def distributions(count: int, row: int) -> dict[str, NDArray[np.int64]]:
    draw = np.random.default_rng(0)
    high = draw.random(count) < 0.5
    modes = np.where(high, draw.normal(0.95 * row, 20, count), draw.normal(0.55 * row, 20, count))
    found = {
        "skewed": draw.lognormal(5.8, 1.0, count),
        "uniform": draw.integers(1, row + 1, count),
        "two modes": modes,
        "nearly constant": draw.normal(row / 8 - 12, 8, count),
    }
    return {name: np.clip(v, 8, row).astype(np.int64) for name, v in found.items()}


def seconds_of_packing(lengths: dict[str, NDArray[np.int64]], row: int, rounds: int) -> list[float]:
    """Median CPU seconds per distribution; the distributions take turns."""
    times: dict[str, list[float]] = {name: [] for name in lengths}
    for _ in range(rounds):
        for name, sizes in lengths.items():
            began = time.process_time()
            pack_lengths(sizes, row)
            times[name].append(time.process_time() - began)
    return [statistics.median(t) for t in times.values()]


def trl_fullness(sizes: NDArray[np.int64], row: int, batch: int) -> float:
    """Tokens / slots after TRL's pack_dataset, ``batch`` examples at a time."""
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    ids = pa.ListArray.from_arrays(offsets, np.zeros(int(sizes.sum()), np.int8))
    made = pack_dataset(
        Dataset(pa.table({"input_ids": ids})), row, "bfd", {"batch_size": batch, "num_proc": None}
    )
    return float(sizes.sum()) / (len(made) * row)


def packing(count: int, row: int, rounds: int, trl: bool) -> None:
    lengths = distributions(count, row)
    seconds = seconds_of_packing(lengths, row, rounds)
    some = distributions(TRL_RECORDS, row)
    print(f"\npacking: {count:,} lengths, rows of {row}; * on {TRL_RECORDS:,} lengths")
    print(
        "| lengths | CPU seconds | full | rows / bound | full* | TRL 1,000* | TRL all* | grouped* |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (name, sizes), took in zip(lengths.items(), seconds, strict=True):
        found = plan_rows(sizes, row).efficiency
        choice = choose_method(some[name], row)
        theirs = ["-", "-"]
        if trl:
            theirs = [f"{trl_fullness(some[name], row, b):.2%}" for b in (1000, TRL_RECORDS)]
        print(
            f"| {name} | {took:.2f} | {found.fullness:.2%} | {found.rows / found.lower_bound:.4f} "
            f"| {choice.packed:.2%} | {theirs[0]} | {theirs[1]} | {choice.grouped:.2%} |",
            flush=True,
        )


def few_values(row: int, sets: int) -> None:
    print(f"\nfew different lengths: {FEW:,} examples, rows of {row}, {sets} random sets a line")
    print("| values | of a row | rows / bound, mean | worst | CPU seconds, worst |")
    print("|---|---|---|---|---|")
    for values, low, high in itertools.product((2, 5, 20, 48), (0.05, 0.3), (0.45,)):
        ratios, times = [], []
        for seed in range(sets):
            draw = np.random.default_rng(seed)
            kinds = draw.integers(int(low * row), int(high * row) + 1, values)
            sizes = draw.choice(kinds, FEW, p=draw.dirichlet(np.full(values, 2)))
            began = time.process_time()
            found = plan_rows(sizes, row).efficiency
            times.append(time.process_time() - began)
            ratios.append(found.rows / found.lower_bound)
        figures = f"{np.mean(ratios):.4f} | {max(ratios):.4f} | {max(times):.2f}"
        print(f"| {values} | {low}-{high} | {figures} |", flush=True)


def dealing(count: int, row: int, per_rank: int) -> None:
    size = RANKS * per_rank
    print(f"\ndealing: {RANKS} ranks, {per_rank} rows of {row} each, hidden size {HIDDEN}")
    print("| lengths | at random | by cost | stratified, mean | worst step | ms a step |")
    print("|---|---|---|---|---|---|")
    for name, sizes in distributions(count, row).items():
        order = PackedOrder(sizes, row, size, seed=1, quadratic=quadratic_share(HIDDEN))
        rows = order.rows(0)
        costs = row_costs(rows, sizes, order.quadratic)
        shuffled = costs[np.random.default_rng(1).permutation(len(costs))]
        at_random, by_cost, balanced, spent = [], [], [], 0.0
        for start in range(0, min(len(costs), 100 * size) - size + 1, size):
            step = shuffled[start : start + size]
            at_random.append(straggler_loss(step, [[*range(r, size, RANKS)] for r in range(RANKS)]))
            by_cost.append(straggler_loss(step, deal_rows(step, RANKS)))
            step = costs[start : start + size]
            began = time.perf_counter()
            hands = deal_rows(step, RANKS)
            spent += time.perf_counter() - began
            balanced.append(straggler_loss(step, hands))
        print(
            f"| {name} | {np.mean(at_random):.2%} | {np.mean(by_cost):.2%} "
            f"| {np.mean(balanced):.2%} | {max(balanced):.2%} "
            f"| {1e3 * spent / len(balanced):.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--row", type=int, default=4096)
    parser.add_argument("--dealt", type=int, default=DEALT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sets", type=int, default=8, help="random sets a line")
    parser.add_argument("--trl", action="store_true")
    small = {"count": 100, "row": 256, "dealt": 1500, "rounds": 1, "sets": 1}
    chosen = arguments(parser, **small, TRL_RECORDS=100, FEW=60)
    packing(chosen.count, chosen.row, chosen.rounds, chosen.trl)
    few_values(chosen.row, chosen.sets)
    dealing(chosen.dealt, chosen.row, 8)
    dealing(chosen.dealt, chosen.row, 2)
    dealing(chosen.dealt, 8 * chosen.row, 16)


if __name__ == "__main__":
    main()
