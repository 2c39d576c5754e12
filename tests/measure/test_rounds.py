"""What a turn is worth: found step by step beside the other variants of its round."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.measure.record import Event
from hasten.measure.rounds import rates

speeds = st.floats(1.0, 1e6)


def turn(found: Sequence[float], tokens: Sequence[int] | None = None) -> Event:
    work = tokens or [100] * len(found)
    steps = [
        {"tokens": count, "tokens_per_second": rate}
        for count, rate in zip(work, found, strict=True)
    ]
    return {"event": "turn", "steps": steps}


def test_an_variant_that_is_faster_by_a_factor_in_every_step_is_worth_that_factor_more() -> None:
    base = [100.0, 900.0, 250.0, 4000.0]
    found = rates({"base": turn(base), "variant": turn([1.3 * rate for rate in base])})
    assert found["variant"] / found["base"] == pytest.approx(1.3)
    assert min(base) < found["base"] < max(base)


@given(st.lists(st.tuples(speeds, speeds), min_size=1, max_size=9))
def test_between_two_variants_it_is_the_median_of_the_ratios_of_like_steps(
    pairs: list[tuple[float, float]],
) -> None:
    found = rates({"a": turn([a for a, _ in pairs]), "b": turn([b for _, b in pairs])})
    expected = math.exp(statistics.median(math.log(b / a) for a, b in pairs))
    assert found["b"] / found["a"] == pytest.approx(expected, rel=1e-9)


def test_a_step_that_was_disturbed_in_one_variant_changes_nothing_between_any_two() -> None:
    base = [100.0, 900.0, 250.0]
    variants = {"base": base, "twice": [200.0, 1800.0, 500.0], "same": [100.0, 900.0, 1.0]}
    found = rates({name: turn(values) for name, values in variants.items()})
    assert found["twice"] / found["base"] == pytest.approx(2.0)
    assert found["same"] / found["base"] == pytest.approx(1.0)


def test_an_variant_that_took_other_tokens_has_the_median_of_its_own_steps() -> None:
    base, other = [100.0, 900.0, 250.0], [700.0, 10.0, 20.0]
    found = rates({"base": turn(base), "packed": turn(other, [300, 0, 0])})
    assert found["packed"] == 20.0
    assert found["base"] == pytest.approx(250.0)


def test_alone_in_its_round_an_variant_is_worth_the_median_of_its_steps() -> None:
    assert rates({"base": turn([10.0, 30.0, 20.0])})["base"] == pytest.approx(20.0)
    assert rates({"base": turn([0.0, 0.0])})["base"] == 0.0


def test_unlike_steps_do_not_add_to_the_noise_between_two_copies() -> None:
    """Steps as unlike as 1 to 4, each with 5 % noise of its own: three of them in a round."""
    draw = random.Random(3)
    paired, unpaired = [], []
    for _ in range(400):
        levels = [draw.choice([1000.0, 2000.0, 4000.0]) * draw.uniform(0.9, 1.1) for _ in range(3)]
        one, two = ([level * draw.gauss(1.0, 0.05) for level in levels] for _ in range(2))
        found = rates({"a": turn(one), "b": turn(two)})
        paired.append(found["b"] / found["a"])
        unpaired.append(statistics.median(two) / statistics.median(one))
    assert statistics.stdev(paired) < 0.85 * statistics.stdev(unpaired)


def test_ranks_that_train_apart_are_worth_their_whole_turn() -> None:
    base = turn([100.0, 100.0, 100.0, 100.0])  # a second each
    apart = turn([200.0, 200.0, 200.0, 40.0]) | {"seconds": 4.0}  # the last one waits for all
    found = rates({"base": base, "apart": apart})
    assert found["apart"] / found["base"] == pytest.approx(1.0)
    assert found["base"] == pytest.approx(100.0)


@given(st.lists(st.tuples(speeds, speeds), min_size=1, max_size=9), st.floats(0.1, 10))
def test_a_turn_of_its_own_length_is_compared_by_that_length(
    pairs: list[tuple[float, float]], factor: float
) -> None:
    base = [rate for rate, _ in pairs]
    seconds = factor * math.fsum(100 / rate for rate in base)
    apart = turn([rate for _, rate in pairs]) | {"seconds": seconds}
    found = rates({"base": turn(base), "apart": apart, "again": turn(base)})
    assert found["apart"] / found["base"] == pytest.approx(1 / factor, rel=1e-9)
    assert found["again"] == pytest.approx(found["base"])
