"""Dealing rows to ranks: every row once, ranks equal in cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hasten.parts.data.epoch_order import deal_rows, quadratic_share, row_costs, straggler_loss
from hasten.parts.data.packing import pack_lengths

RANKS, PER_RANK, ROW = 8, 8, 4096
COSTS = st.lists(st.floats(0.1, 100), max_size=40)


def lengths_of(shape: str, count: int = 20_000) -> NDArray[np.int64]:
    draw = np.random.default_rng(1)
    return {
        "skewed": np.clip(draw.lognormal(5.8, 1.0, count), 8, ROW).astype(np.int64),
        "uniform": draw.integers(1, ROW + 1, count),
        "constant": draw.normal(500, 8, count).astype(np.int64),
    }[shape]


@given(COSTS, st.integers(1, 9))
def test_every_row_is_dealt_once_and_the_same_way_again(costs: list[float], ranks: int) -> None:
    hands = deal_rows(costs, ranks)
    assert len(hands) == ranks
    assert sorted(i for hand in hands for i in hand) == list(range(len(costs)))
    assert hands == deal_rows(np.array(costs), ranks)
    assert 0 <= straggler_loss(costs, hands) <= 1 - 1 / ranks + 1e-9


@given(COSTS, st.integers(1, 9))
def test_the_dearest_rank_is_within_half_of_the_least_there_can_be(
    costs: list[float], ranks: int
) -> None:
    totals = [sum(costs[i] for i in hand) for hand in deal_rows(costs, ranks)]
    ordered = sorted(costs, reverse=True)
    # No rank can do with less than the mean, the dearest row, or two of the ranks + 1 dearest.
    bound = max([sum(costs) / ranks, *ordered[:1], *(2 * c for c in ordered[ranks : ranks + 1])])
    assert max(totals) <= 1.5 * bound + 1e-9


@given(st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_two_ranks_of_a_few_rows_come_close_to_trying_everything(costs: list[int]) -> None:
    hands = deal_rows(costs, 2)
    best = min(
        max(sum(part), sum(costs) - sum(part))
        for size in range(len(costs) + 1)
        for part in itertools.combinations(costs, size)
    )
    assert max(sum(costs[i] for i in hand) for hand in hands) <= 7 / 6 * best


@pytest.mark.parametrize("shape", ["skewed", "uniform", "constant"])
@pytest.mark.parametrize("hidden", [2048, 4096])
def test_eight_ranks_of_eight_rows_wait_less_than_three_in_a_thousand(
    shape: str, hidden: int
) -> None:
    lengths = lengths_of(shape)
    rows = pack_lengths(lengths, ROW)
    costs = row_costs(rows, lengths, quadratic_share(hidden))
    drawn = np.random.default_rng(2).permutation(len(rows))
    size = RANKS * PER_RANK
    balanced, at_random = [], []
    for start in range(0, min(len(rows), 60 * size) - size + 1, size):
        step = costs[drawn[start : start + size]]
        balanced.append(straggler_loss(step, deal_rows(step, RANKS)))
        hands = [list(range(rank, size, RANKS)) for rank in range(RANKS)]
        at_random.append(straggler_loss(step, hands))
    assert np.mean(balanced) <= 0.003
    assert np.mean(at_random) > 5 * np.mean(balanced)


def test_a_row_costs_its_tokens_and_the_squares_of_its_lengths() -> None:
    lengths = np.array([3, 5, 7])
    assert row_costs([[0, 2], [1]], lengths, 0.5, linear=2.0).tolist() == [
        2 * 10 + 0.5 * (9 + 49),
        2 * 5 + 0.5 * 25,
    ]
    assert quadratic_share(4096) == pytest.approx(2 * 4096 / (24 * 4096**2))
    assert quadratic_share(0) == 0


def test_no_rows_and_no_ranks() -> None:
    assert deal_rows([], 3) == [[], [], []]
    assert len(row_costs([], np.array([1]), 1.0)) == 0
    with pytest.raises(ValueError, match="ranks is 0"):
        deal_rows([1.0], 0)
