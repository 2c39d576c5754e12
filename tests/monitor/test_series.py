"""Series lose no extreme and no mean, stay small, and can be sent piece by piece."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.formatting import number
from hasten.monitor.series import Series

numbers = st.none() | st.floats(-1e6, 1e6).map(lambda v: round(v, 2))


def merged(old: dict[str, Any] | None, part: dict[str, Any]) -> dict[str, Any]:
    """What the page does with a part, written down once more."""
    if old is None or part["start"] == 0 or old["generation"] != part["generation"]:
        return part
    start, columns = part["start"], {}
    for name, lists in part["columns"].items():
        before = old["columns"].get(name) or [[None] * start] * len(lists)
        columns[name] = [b[:start] + a for b, a in zip(before, lists, strict=True)]
    return {**part, "start": 0, "x": old["x"][:start] + part["x"], "columns": columns}


@settings(max_examples=100, deadline=None)
@given(values=st.lists(numbers, max_size=200), most=st.integers(1, 9), every=st.integers(1, 20))
def test_parts_put_together_are_the_whole(
    values: list[float | None], most: int, every: int
) -> None:
    series = Series(("v", "w"), most)
    held, cursor = None, (0, 0)
    for index, value in enumerate(values):
        series.add(index, {"v": value, "w": 1 if index > 50 else None})
        if index % every == 0:
            held = merged(held, series.since(*cursor))
            cursor = (series.generation, max(len(series) - 1, 0))
            assert held == series.since(0, 0)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), most=st.integers(1, 9))
def test_extremes_and_the_mean_survive_any_number_of_joins(values: list[float], most: int) -> None:
    series = Series(("v",), most)
    for index, value in enumerate(values):
        series.add(index, {"v": value})
    assert len(series) <= 2 * most
    cells = [bucket.cells[0] for bucket in series._buckets]
    assert min(c[2] for c in cells if c) == min(values)
    assert max(c[3] for c in cells if c) == max(values)
    assert sum(c[0] for c in cells if c) == len(values)
    assert sum(c[1] for c in cells if c) == pytest.approx(math.fsum(values), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    "value", [None, "1", [1], {}, float("nan"), float("inf"), 10**400], ids=repr
)
def test_what_is_no_finite_number_leaves_a_gap(value: Any) -> None:
    assert number(value) is None


def test_what_is_sent_is_json_even_at_the_ends_of_float64() -> None:
    series = Series(("v",), 1)
    for index in range(8):
        series.add(index, {"v": 1.7e308 * (-1) ** index})
        series.add(index, {"v": 1.7e308})
    json.dumps(series.since(0, 0), allow_nan=False)


def test_a_column_without_numbers_is_not_sent() -> None:
    series = Series(("v", "w"))
    series.add(1, {"v": 1})
    assert set(series.since(0, 0)["columns"]) == {"v"}
