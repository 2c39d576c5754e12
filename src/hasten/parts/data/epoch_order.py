"""Orders of an epoch with grouped examples: packed rows, or similar lengths.

Both orders are pure functions of (seed, epoch). They contain every example once per
epoch, and give the same steps for any number of ranks.

``steps`` yields the examples of each step over all ranks. ``local_steps`` yields one
rank's part, in lists that must each stay in one micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hasten.parts.data.packing import LengthCounts, plan_rows

# Divides a step's rows among ranks so that no rank waits long for the slowest.
#
# Rows of equal tokens have different costs, because attention grows with the square of each
# example's length. The cost of a row is ``linear * sum(lengths) + quadratic * sum(lengths ** 2)``.
# Rows are assigned by cost: the most expensive first, each to the rank with the least so far
# (Graham's LPT rule, 1969). Then rows are exchanged between the rank with the highest cost and
# others while this lowers the maximum.

EXCHANGES = 200  # most exchanges of rows between ranks; few are needed in practice


def quadratic_share(hidden_size: int) -> float:
    """Returns the factor of squared lengths in a row's cost, if that of lengths is 1.

    A layer does about ``24 * hidden ** 2`` FLOPs per token and ``2 * hidden * length`` in causal
    attention, so the factor is ``1 / (12 * hidden)``; 0 if the width is unknown.
    """
    return 1 / (12 * hidden_size) if hidden_size else 0.0


def row_costs(
    rows: Sequence[Sequence[int]],
    lengths: NDArray[np.int64],
    quadratic: float,
    linear: float = 1.0,
) -> NDArray[np.float64]:
    """Returns the cost of each row of example indices, (rows,)."""
    if not rows:
        return np.zeros(0)
    starts = np.cumsum([0, *(len(row) for row in rows[:-1])])
    sizes = lengths[np.concatenate([np.asarray(row, np.int64) for row in rows])].astype(np.float64)
    costs: NDArray[np.float64] = np.add.reduceat(linear * sizes + quadratic * sizes**2, starts)
    return costs


def deal_rows(costs: Sequence[float] | NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Returns the row indices of each rank: every row once, with nearly equal costs.

    Ties go to the lower index. Raises ValueError if there is no rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; rows are dealt to at least one")
    table = np.asarray(costs, np.float64)
    rank_rows: list[list[int]] = [[] for _ in range(ranks)]
    if not len(table):
        return rank_rows
    heap = [(0.0, rank) for rank in range(ranks)]
    for row in np.argsort(-table, kind="stable").tolist():
        total, rank = heapq.heappop(heap)
        rank_rows[rank].append(row)
        heapq.heappush(heap, (total + float(table[row]), rank))
    _exchange(rank_rows, table)
    return [sorted(hand) for hand in rank_rows]


def _exchange(rank_rows: list[list[int]], costs: NDArray[np.float64]) -> None:
    """Exchanges rows between the rank with the highest cost and others, while the maximum falls."""
    totals = np.array([costs[hand].sum() for hand in rank_rows])
    for _ in range(EXCHANGES):
        expensive_rank = int(totals.argmax())
        for cheap_rank in np.argsort(totals, kind="stable").tolist():
            if cheap_rank != expensive_rank and _swap(
                rank_rows, costs, totals, expensive_rank, cheap_rank
            ):
                break
        else:
            return


def _swap(
    rank_rows: list[list[int]],
    costs: NDArray[np.float64],
    totals: NDArray[np.float64],
    expensive_rank: int,
    cheap_rank: int,
) -> bool:
    """Makes the exchange that brings two ranks' costs closest; returns False if none does."""
    gap = float(totals[expensive_rank] - totals[cheap_rank])
    costs_of_expensive = costs[rank_rows[expensive_rank]]
    taken = np.append(
        costs[rank_rows[cheap_rank]], 0.0
    )  # last column: a row is moved without exchange
    moved = costs_of_expensive[:, None] - taken[None, :]  # (rows of dear, rows of cheap + 1)
    distance = np.abs(moved - gap / 2)
    at, back = np.unravel_index(int(distance.argmin()), distance.shape)
    if float(distance[at, back]) >= gap / 2 * (1 - 1e-9):
        return False
    row = rank_rows[expensive_rank].pop(int(at))
    if back < len(taken) - 1:
        rank_rows[expensive_rank].append(rank_rows[cheap_rank].pop(int(back)))
    rank_rows[cheap_rank].append(row)
    totals[expensive_rank], totals[cheap_rank] = (
        costs[rank_rows[expensive_rank]].sum(),
        costs[rank_rows[cheap_rank]].sum(),
    )
    return True


# The orders

RECORDS_DRAWN, ROWS_DRAWN, STEPS_DRAWN = range(3)  # seeds of the three random draws of an epoch
COST_CLASS = 0.02  # width of a cost class, as a share of the mean cost
# Steps of fewer rows need a narrower class, because differences don't even out over a rank's few
# rows. Draws are less random then: the same rows are together more often.
FEW_ROWS, NARROW_CLASS = 48, 0.0075


class PackedOrder:
    """Rows packed over the full epoch, a fixed number per step, divided over ranks by cost.

    The packing of lengths is computed once. In every epoch, examples of one length are
    assigned to rows at random, and rows to steps. The last step may have fewer rows.

    Steps are a stratified draw. Rows of similar cost form bundles that divide evenly among
    2, 4, 8... ranks. Each step has one bundle from the cheapest rows of the epoch, one from
    the next cost range, and so on (:func:`stratified`).

    - Random: the examples of a row, the rows in a bundle, and the bundles in a step.
    - Not random: all steps have nearly the same mixture of cheap and expensive rows. With a
      plain shuffle it varies.

    Args:
        lengths: tokens of each example.
        row_tokens: maximum tokens of a row.
        rows_per_step: rows of a step, over all ranks.
        quadratic: factor of squared lengths in a row's cost, see ``row_costs``.

    Raises:
        ValueError: an example is longer than a row, or a step has no row.
    """

    def __init__(
        self,
        lengths: LengthCounts,
        row_tokens: int,
        rows_per_step: int,
        seed: int = 0,
        quadratic: float = 0.0,
    ) -> None:
        if rows_per_step < 1:
            raise ValueError(f"rows_per_step is {rows_per_step}; a step has at least one row")
        self.lengths = np.asarray(lengths, np.int64)
        self.rows_per_step, self.seed, self.quadratic = rows_per_step, seed, quadratic
        self._rows = plan_rows(self.lengths, row_tokens)
        self.efficiency = self._rows.efficiency

    def rows(self, epoch: int) -> list[list[int]]:
        """Returns the epoch's rows of example indices, in training order."""
        examples = _generator(self.seed, epoch, RECORDS_DRAWN).permutation(len(self.lengths))
        rows = self._rows.fill(self.lengths, examples)
        generator = _generator(self.seed, epoch, ROWS_DRAWN)
        costs = row_costs(rows, self.lengths, self.quadratic)
        return [rows[i] for i in stratified(costs, self.rows_per_step, generator).tolist()]

    def row_steps(self, epoch: int) -> Iterator[list[list[int]]]:
        """Yields the rows of each step over all ranks."""
        rows = self.rows(epoch)
        for start in range(0, len(rows), self.rows_per_step):
            yield rows[start : start + self.rows_per_step]

    def steps(self, epoch: int) -> Iterator[list[int]]:
        """Yields the examples of each step over all ranks."""
        for rows in self.row_steps(epoch):
            yield [index for row in rows for index in row]

    def local_steps(self, epoch: int, rank: int, world_size: int) -> Iterator[list[list[int]]]:
        """Yields one rank's rows of each step; a step with fewer rows than ranks may give none."""
        for rows in self.row_steps(epoch):
            rank_rows = deal_rows(row_costs(rows, self.lengths, self.quadratic), world_size)
            yield [rows[i] for i in rank_rows[rank]]


def stratified(
    costs: NDArray[np.float64], of_step: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Returns an order of all rows in which each step of ``of_step`` divides evenly over ranks.

    A step can't be balanced if it has an odd number of expensive rows. So a step consists of
    bundles of rows with similar cost. A bundle's size is a power of two, at most twice the root
    of ``of_step``: large enough for many ranks, small enough for several bundles in a step. The
    rows of an incomplete last step are drawn from all rows.
    """
    shuffled = generator.permutation(len(costs))
    steps = len(costs) // of_step
    if not steps:
        return shuffled
    full_steps, remainder = np.split(shuffled, [steps * of_step])
    of_class = NARROW_CLASS if of_step < FEW_ROWS else COST_CLASS
    level = np.floor(costs[full_steps] / (of_class * costs.mean()))
    full_steps = full_steps[np.argsort(level, kind="stable")]
    bundle = 1 << (int(2 * of_step**0.5).bit_length() - 1)
    columns: list[NDArray[np.int64]] = []
    for start in range(0, of_step, min(bundle, of_step)):
        width = min(bundle, of_step - start)
        stretch = full_steps[start * steps : (start + width) * steps].reshape(steps, width)
        columns.append(stretch[generator.permutation(steps)])
    return np.concatenate([np.hstack(columns).ravel(), remainder])


class GroupedOrder:
    """Examples of similar length share a step: windows of the shuffled epoch are sorted by length.

    Every other window is sorted downwards, so a step across two windows has similar lengths, too.
    The steps are then shuffled. Otherwise lengths would rise and fall over the epoch.

    Args:
        lengths: tokens of each example.
        examples: examples of a step. Give this or ``tokens``, the most tokens of a step.
        window: examples that are sorted together; larger windows pad less and mix less.

    Raises:
        ValueError: not one of ``examples`` and ``tokens`` is given, a window is empty, or an
            example is longer than ``tokens``.
    """

    def __init__(
        self,
        lengths: LengthCounts,
        *,
        window: int,
        examples: int | None = None,
        tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        if (examples is None) == (tokens is None) or (examples or tokens or 0) < 1 or window < 1:
            raise ValueError("give window and one of examples and tokens, each at least 1")
        self.lengths = np.asarray(lengths, np.int64)
        self.window, self.examples, self.tokens, self.seed = window, examples, tokens, seed
        longest = int(self.lengths.max(initial=0))
        if tokens is not None and longest > tokens:
            raise ValueError(f"tokens={tokens} can't hold the longest example of {longest} tokens")

    def steps(self, epoch: int) -> Iterator[list[int]]:
        """Returns the examples of each step over all ranks, in ascending or descending length."""
        order = _generator(self.seed, epoch, RECORDS_DRAWN).permutation(len(self.lengths))
        for number, start in enumerate(range(0, len(order), self.window)):
            window = order[start : start + self.window]
            window = window[np.argsort(self.lengths[window], kind="stable")]
            order[start : start + self.window] = window[::-1] if number % 2 else window
        ends = self._ends(self.lengths[order])
        flat = order.tolist()
        begins = [0, *ends[:-1]]
        for i in _generator(self.seed, epoch, STEPS_DRAWN).permutation(len(ends)).tolist():
            yield flat[begins[i] : ends[i]]

    def local_steps(self, epoch: int, rank: int, world_size: int) -> Iterator[list[list[int]]]:
        """Yields one rank's examples of each step as one list: every n-th in order of length."""
        for step in self.steps(epoch):
            yield [step[rank::world_size]]

    def padding_share(self, epoch: int = 0) -> float:
        """Returns padding / positions if each step were one tensor, padded to its longest."""
        widths = [(len(step), int(self.lengths[step].max())) for step in self.steps(epoch)]
        positions = sum(count * width for count, width in widths)
        return 1 - int(self.lengths.sum()) / positions if positions else 0.0

    def _ends(self, sizes: NDArray[np.int64]) -> list[int]:
        if self.examples is not None:
            return [*range(self.examples, len(sizes), self.examples), len(sizes)]
        sums = np.cumsum(sizes)
        ends: list[int] = []
        done = 0
        while not ends or ends[-1] < len(sizes):
            ends.append(int(np.searchsorted(sums, done + (self.tokens or 0), side="right")))
            done = int(sums[ends[-1] - 1]) if len(sums) else 0
        return ends


def _generator(seed: int, epoch: int, draw: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**63, epoch, draw])
