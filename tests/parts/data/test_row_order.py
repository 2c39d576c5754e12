"""Orders of an epoch: every example once, the same steps for any number of ranks of equal cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hasten.parts.data.epoch_order import (
    GroupedOrder,
    PackedOrder,
    deal_rows,
    quadratic_share,
    row_costs,
    stratified,
)

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


RANKS, PER_RANK, ROW = 8, 8, 4096
COSTS = st.lists(st.floats(0.1, 100), max_size=40)


def straggler_loss(costs: Sequence[float] | NDArray[np.float64], hands: list[list[int]]) -> float:
    """Returns the share of the ranks' time spent waiting for the slowest: 1 - mean / maximum."""
    table = np.asarray(costs, np.float64)
    totals = np.array([table[hand].sum() for hand in hands])
    return float(1 - totals.mean() / totals.max()) if totals.max() > 0 else 0.0


def two_modes(draw: np.random.Generator, count: int, share: float = 0.5) -> NDArray[np.float64]:
    """Lengths of nearly a row, a share of all, and of somewhat more than half a row."""
    high = draw.random(count) < share
    return np.where(high, draw.normal(3900, 20, count), draw.normal(2250, 20, count))


def lengths_of(shape: str, count: int = 20_000) -> NDArray[np.int64]:
    draw = np.random.default_rng(1)
    lengths = {
        "skewed": lambda: draw.lognormal(5.8, 1.0, count),
        "uniform": lambda: draw.integers(1, ROW + 1, count),
        "two modes": lambda: two_modes(draw, count),
        "constant": lambda: draw.normal(500, 8, count),
    }[shape]()
    return np.clip(lengths, 8, ROW).astype(np.int64)


def order(kind: str, lengths: Any, seed: int = 0) -> PackedOrder | GroupedOrder:
    if kind == "packed":
        return PackedOrder(lengths, 64, 5, seed, quadratic=0.01)
    if kind == "grouped by examples":
        return GroupedOrder(lengths, window=20, examples=6, seed=seed)
    return GroupedOrder(lengths, window=20, tokens=120, seed=seed)


kinds = pytest.mark.parametrize("kind", ["packed", "grouped by examples", "grouped by tokens"])


@kinds
@given(sizes=LENGTHS, ranks=st.integers(1, 4), epoch=st.integers(0, 3))
def test_ranks_share_the_same_steps_without_loss(
    kind: str, sizes: list[int], ranks: int, epoch: int
) -> None:
    made = order(kind, sizes)
    whole = [sorted(step) for step in made.steps(epoch)]
    assert sorted(i for step in whole for i in step) == list(range(len(sizes)))
    parts = [list(made.local_steps(epoch, rank, ranks)) for rank in range(ranks)]
    assert all(len(part) == len(whole) for part in parts)
    for number, step in enumerate(whole):
        assert sorted(i for part in parts for piece in part[number] for i in piece) == step


@kinds
def test_an_order_depends_on_seed_and_epoch_alone(kind: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 51, 300)
    found = [
        [tuple(step) for step in order(kind, lengths, seed).steps(epoch)]
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len({tuple(steps) for steps in found}) == 9
    assert found[4] == [tuple(step) for step in order(kind, lengths, 1).steps(1)]


def test_rows_stay_whole_within_their_tokens_and_have_new_company_each_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 51, 400)
    made = PackedOrder(lengths, 64, 8, quadratic=0.01)
    rows = [row for rank in range(4) for step in made.local_steps(0, rank, 4) for row in step]
    assert sorted(map(sorted, rows)) == sorted(map(sorted, made.rows(0)))
    assert max(int(lengths[row].sum()) for row in rows) <= 64
    assert len(rows) == made.efficiency.rows
    first, second = ({frozenset(r) for r in made.rows(epoch)} for epoch in (0, 1))
    assert len(first & second) < len(first) / 2
    assert [len(step) for step in made.row_steps(0)][:-1] == [8] * ((len(rows) - 1) // 8)


@given(
    costs=st.lists(st.floats(0.1, 100), max_size=200),
    of_step=st.integers(1, 70),
    seed=st.integers(0, 3),
)
def test_a_stratified_order_has_every_row_once(costs: list[float], of_step: int, seed: int) -> None:
    found = stratified(np.array(costs), of_step, np.random.default_rng(seed))
    assert sorted(found.tolist()) == list(range(len(costs)))


@pytest.mark.parametrize("shape", ["skewed", "uniform", "two modes", "constant"])
def test_no_step_of_two_rows_a_rank_waits_more_than_three_in_a_thousand(shape: str) -> None:
    """The first hundred steps, as in the benchmark; rows that have no like may wait longer."""
    made = PackedOrder(lengths_of(shape, 100_000), ROW, 16, 0, quadratic_share(4096))
    rows = made.rows(0)[: 100 * 16]
    costs = row_costs(rows, made.lengths, made.quadratic).reshape(100, 16)
    losses = [straggler_loss(step, deal_rows(step, 8)) for step in costs]
    assert np.mean(losses) <= 0.0015
    assert max(losses) <= 0.003


def test_steps_have_one_mixture_of_cheap_and_dear_rows_and_new_company_each_epoch() -> None:
    costs = np.repeat([1.0, 2.0], 512)
    first, second = (
        stratified(costs, 64, np.random.default_rng(seed)).reshape(-1, 64) for seed in (0, 1)
    )
    assert (costs[first].sum(1) == 96).all()
    pairs = [
        {(a, b) for step in order.tolist() for a in step for b in step if a < b}
        for order in (first, second)
    ]
    expected = len(pairs[0]) * 64 / len(costs)  # of those that met, so many meet again by chance
    assert len(pairs[0] & pairs[1]) < 2 * expected
    places = np.argsort(first.ravel())
    assert abs(float(np.corrcoef(places // 64, costs)[0, 1])) < 0.01  # cost doesn't drift


@given(sizes=LENGTHS, budget=st.integers(50, 200))
def test_grouped_steps_stay_within_the_token_budget(sizes: list[int], budget: int) -> None:
    for step in GroupedOrder(sizes, window=16, tokens=budget).steps(0):
        assert 0 < sum(sizes[i] for i in step) <= budget


def test_grouped_steps_hold_records_of_like_length() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 1.0, 20_000), 8, 4096).astype(int)
    shuffled = GroupedOrder(lengths, window=1, examples=16).padding_share()
    window = GroupedOrder(lengths, window=1024, examples=16).padding_share()
    epoch = GroupedOrder(lengths, window=20_000, examples=16).padding_share()
    assert shuffled > 0.5
    assert window < 0.06
    assert epoch < 0.01


def test_steps_of_like_length_come_in_no_order_of_length() -> None:
    lengths = np.arange(1, 1001)
    longest = [
        int(lengths[s].max()) for s in GroupedOrder(lengths, window=1000, examples=10).steps(0)
    ]
    assert longest != sorted(longest)
    assert abs(float(np.corrcoef(longest, range(100))[0, 1])) < 0.3


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 0, "examples": 4},
        {"window": 4},
        {"window": 4, "examples": 2, "tokens": 9},
        {"window": 4, "tokens": 5},
    ],
)
def test_an_impossible_grouping_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"window|longest example of 9"):
        GroupedOrder([3, 9], **settings)  # type: ignore[arg-type]


def test_an_impossible_packing_is_refused() -> None:
    with pytest.raises(ValueError, match="rows_per_step is 0"):
        PackedOrder([3], 10, 0)
    with pytest.raises(ValueError, match="example 1 has 12 tokens"):
        PackedOrder([3, 12], 10, 1)


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
