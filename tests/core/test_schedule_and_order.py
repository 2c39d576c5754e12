"""Learning rates and data order as pure functions."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.job import GlobalBatch, Schedule, ShuffledOrder, permutation
from hasten.errors import InputError


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_a_schedule_rises_reaches_the_peak_and_falls_to_its_floor(kind: str) -> None:
    schedule = Schedule(kind, warmup_steps=10, total_steps=100, floor=0.1)  # type: ignore[arg-type]
    rates = [schedule(step) for step in range(100)]
    assert 0 < rates[0] < rates[5] < rates[9] < 1
    assert rates[10] == pytest.approx(1)
    assert 0.1 < rates[-1] < 0.21
    assert schedule(100) == pytest.approx(0.1)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[10:]))


@pytest.mark.parametrize("steps", [1, 2, 51])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_rates_are_those_of_other_trainers(steps: int, floor: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    curves = {
        "linear": transformers.get_linear_schedule_with_warmup(optimizer, 0, steps),
        "cosine": transformers.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, 0, steps, min_lr_rate=floor
        ),
    }
    for kind, curve in curves.items():
        lowest = floor if kind == "cosine" else 0.0
        schedule = Schedule(kind, total_steps=steps, floor=lowest)  # type: ignore[arg-type]
        rates = [schedule(step) for step in range(steps)]
        assert rates == pytest.approx([curve.lr_lambdas[0](step) for step in range(steps)])
        assert min(rates) > 0


def test_wsd_holds_the_peak_until_its_last_tenth() -> None:
    schedule = Schedule("wsd", warmup_steps=5, total_steps=100)
    assert {schedule(step) for step in range(5, 91)} == {1.0}
    assert [schedule(step) for step in range(90, 100)] == pytest.approx(
        [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    )


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
