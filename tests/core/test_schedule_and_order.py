"""Learning rates and data order as pure functions."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.job import GlobalBatch, Schedule, ShuffledOrder, permutation
from hasten.errors import InputError


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_a_schedule_rises_reaches_the_peak_and_ends_on_its_floor(kind: str) -> None:
    schedule = Schedule(kind, warmup_steps=10, total_steps=100, floor=0.1)  # type: ignore[arg-type]
    rates = [schedule(step) for step in range(100)]
    assert 0 < rates[0] < rates[5] < rates[9] < 1
    assert rates[10] == pytest.approx(1)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[10:]))


def test_cosine_is_the_textbook_curve() -> None:
    schedule = Schedule("cosine", total_steps=51)
    for step in range(51):
        assert schedule(step) == pytest.approx((1 + math.cos(math.pi * step / 50)) / 2)


def test_wsd_holds_the_peak_until_its_last_tenth() -> None:
    schedule = Schedule("wsd", warmup_steps=5, total_steps=100)
    assert {schedule(step) for step in range(5, 91)} == {1.0}
    assert schedule(95) < 1
    assert schedule(99) == pytest.approx(0)


def test_constant_stays() -> None:
    assert {Schedule("constant", total_steps=9)(step) for step in range(20)} == {1.0}


@pytest.mark.parametrize(
    "settings", [{"kind": "cosin"}, {"warmup_steps": -1}, {"floor": 2.0}, {"decay_share": 0.0}]
)
def test_an_impossible_schedule_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Schedule(**settings)  # type: ignore[arg-type]


lengths = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(lengths, st.integers(1, 40), st.integers(0, 5), st.integers(0, 3))
def test_every_record_comes_once_per_epoch_by_count(
    sizes: list[int], batch: int, seed: int, epoch: int
) -> None:
    steps = list(ShuffledOrder(sizes, GlobalBatch(batch), seed).steps(epoch))
    assert sorted(i for step in steps for i in step) == list(range(len(sizes)))
    assert all(len(step) == batch for step in steps[:-1])


@given(lengths, st.integers(50, 200), st.integers(0, 5))
def test_every_record_comes_once_per_epoch_within_the_token_budget(
    sizes: list[int], budget: int, seed: int
) -> None:
    steps = list(ShuffledOrder(sizes, GlobalBatch(None, budget), seed).steps(1))
    assert sorted(i for step in steps for i in step) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in step) <= budget for step in steps)
    for one, two in itertools.pairwise(steps):  # no step had room for the next example
        assert sum(sizes[i] for i in one) + sizes[two[0]] > budget


def test_a_budget_below_the_longest_record_is_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match=r"global_batch_tokens=10 .* 12 tokens"):
        ShuffledOrder([3, 12], GlobalBatch(None, 10))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    assert permutation(50, 1, 2) == permutation(50, 1, 2)
    orders = [permutation(50, seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 16


@given(st.integers(1, 50), st.integers(1, 8))
def test_ranks_share_a_step_without_loss_and_evenly(count: int, world: int) -> None:
    order = ShuffledOrder([1] * count, GlobalBatch(examples=count))
    shares = [next(order.local_steps(0, rank, world))[0] for rank in range(world)]
    assert sorted(i for s in shares for i in s) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("settings", [{"examples": None}, {"tokens": 5}, {"examples": 0}])
def test_a_global_batch_is_records_or_tokens(settings: dict[str, int | None]) -> None:
    with pytest.raises(InputError):
        GlobalBatch(**settings)
