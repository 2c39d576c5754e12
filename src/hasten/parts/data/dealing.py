"""Dealing: how a step's rows are shared among ranks so that none waits long for the slowest.

Rows of equal tokens don't cost the same: attention grows with the square of each record's length.
The cost of a row is ``linear * sum(lengths) + quadratic * sum(lengths ** 2)``, and rows are dealt
by cost: dearest first, each to the rank with the least so far (Graham's LPT rule, 1969), then
exchanged between the dearest rank and the others as long as that lowers the maximum.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EXCHANGES = 200  # at most; each one lowers the maximum, and few are ever needed


def quadratic_share(hidden_size: int) -> float:
    """Cost of a squared token of length, in units of a token's linear cost, for causal attention.

    A layer does about ``24 * hidden ** 2`` FLOPs per token and ``2 * hidden * length`` in causal
    attention, so the ratio is ``1 / (12 * hidden)``; 0 where the width isn't known.
    """
    return 1 / (12 * hidden_size) if hidden_size else 0.0


def row_costs(
    rows: Sequence[Sequence[int]],
    lengths: NDArray[np.int64],
    quadratic: float,
    linear: float = 1.0,
) -> NDArray[np.float64]:
    """Cost of each row of record indices, (rows,)."""
    if not rows:
        return np.zeros(0)
    starts = np.cumsum([0, *(len(row) for row in rows[:-1])])
    sizes = lengths[np.concatenate([np.asarray(row, np.int64) for row in rows])].astype(np.float64)
    costs: NDArray[np.float64] = np.add.reduceat(linear * sizes + quadratic * sizes**2, starts)
    return costs


def deal(costs: Sequence[float] | NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Row indices of each rank, every row once, ranks as equal in cost as exchanges make them.

    Deterministic: ties go to the lower index. Raises ValueError when there is no rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; rows are dealt to at least one")
    table = np.asarray(costs, np.float64)
    hands: list[list[int]] = [[] for _ in range(ranks)]
    if not len(table):
        return hands
    heap = [(0.0, rank) for rank in range(ranks)]
    for row in np.argsort(-table, kind="stable").tolist():
        total, rank = heapq.heappop(heap)
        hands[rank].append(row)
        heapq.heappush(heap, (total + float(table[row]), rank))
    _exchange(hands, table)
    return [sorted(hand) for hand in hands]


def straggler_loss(costs: Sequence[float] | NDArray[np.float64], hands: list[list[int]]) -> float:
    """Share of the ranks' time spent waiting for the dearest: 1 - mean / maximum."""
    table = np.asarray(costs, np.float64)
    totals = np.array([table[hand].sum() for hand in hands])
    return float(1 - totals.mean() / totals.max()) if totals.max() > 0 else 0.0


def _exchange(hands: list[list[int]], costs: NDArray[np.float64]) -> None:
    """Swap rows between the dearest rank and another, or hand one over, while the maximum falls."""
    totals = np.array([costs[hand].sum() for hand in hands])
    for _ in range(EXCHANGES):
        dear = int(totals.argmax())
        for cheap in np.argsort(totals, kind="stable").tolist():
            if cheap != dear and _swap(hands, costs, totals, dear, cheap):
                break
        else:
            return


def _swap(
    hands: list[list[int]],
    costs: NDArray[np.float64],
    totals: NDArray[np.float64],
    dear: int,
    cheap: int,
) -> bool:
    """The one exchange that brings the two ranks closest; False when none brings them closer."""
    gap = float(totals[dear] - totals[cheap])
    given = costs[hands[dear]]
    taken = np.append(costs[hands[cheap]], 0.0)  # the last: a row goes and none comes back
    moved = given[:, None] - taken[None, :]  # (rows of dear, rows of cheap + 1)
    off = np.abs(moved - gap / 2)
    at, back = np.unravel_index(int(off.argmin()), off.shape)
    if float(off[at, back]) >= gap / 2 * (1 - 1e-9):
        return False
    mine = hands[dear].pop(int(at))
    if back < len(taken) - 1:
        hands[dear].append(hands[cheap].pop(int(back)))
    hands[cheap].append(mine)
    totals[dear], totals[cheap] = costs[hands[dear]].sum(), costs[hands[cheap]].sum()
    return True
