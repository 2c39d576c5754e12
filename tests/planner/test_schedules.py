"""Schedules against the papers' closed forms, and against what any order must keep."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.parts.distributed.pipeline.timetable import bubble_share, drawing
from hasten.planner.layout import SIMULATED, why_impossible
from hasten.planner.simulate import (
    Orders,
    StageSeconds,
    draw_schedule,
    orders,
    simulate,
)
from planner.usual import idle_seconds, most_kept

CASES = [
    (schedule, P, M, v)
    for schedule in SIMULATED
    for P, M in ((2, 4), (4, 8), (4, 16), (8, 16), (8, 32), (16, 64))
    for v in ((1, 2, 4) if schedule == "interleaved" else (1,))
]


@pytest.mark.parametrize(("schedule", "P", "M", "v"), CASES)
def test_even_stages_idle_as_the_closed_form_says(schedule: str, P: int, M: int, v: int) -> None:
    even = StageSeconds.even(P * v, 1 / v, 1 / v, 1 / v)
    table = simulate(orders(schedule, P, M, v), even)
    idle, seconds = idle_seconds(schedule, P, 1, 1, 1, v), max(e.end for e in table)
    assert seconds == pytest.approx(3 * M + idle)
    assert bubble_share(table) == pytest.approx(idle / seconds)


@pytest.mark.parametrize(
    ("schedule", "peak"), [("gpipe", 32), ("1f1b", 8), ("zb1p", 8), ("dualpipe", 9)]
)
def test_a_schedule_keeps_as_many_micro_batches_as_its_paper_says(schedule: str, peak: int) -> None:
    table = simulate(orders(schedule, 8, 32), StageSeconds.even(8, 1, 1, 1))
    assert max(most_kept(table, rank) for rank in range(8)) == peak


def test_interleaving_keeps_more_than_1f1b_as_megatron_says() -> None:
    """P (1 + (P-1)/(Pv)) whole stages, of which each counts v here (arXiv 2205.05198)."""
    table = simulate(orders("interleaved", 4, 16, 2), StageSeconds.even(8, 1, 1, 1))
    assert max(most_kept(table, rank) for rank in range(4)) == 2 * 4 + 4 - 1


def test_zero_bubble_reaches_0_068_where_a_greedy_order_reaches_0_086() -> None:
    table = simulate(orders("zb1p", 8, 32), StageSeconds.even(8, 1, 1, 1))
    assert bubble_share(table) == pytest.approx(0.068, abs=0.0005)


def test_the_slowest_stage_sets_the_pace() -> None:
    """With many micro-batches each more costs as much as the slowest stage takes for one."""
    slow = StageSeconds((1, 1, 1, 1.5), (1, 1, 1, 1.5), (1, 1, 1, 1.5))
    few, many = (max(e.end for e in simulate(orders("1f1b", 4, M), slow)) for M in (20, 40))
    assert (many - few) / 20 == pytest.approx(4.5)


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    wrong: Orders = [[(("B", 0, 0),), (("F", 0, 0),)]]
    with pytest.raises(ValueError, match="for ever"):
        simulate(wrong, StageSeconds.even(1, 1, 1, 1))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int, StageSeconds]:
    schedule = draw(st.sampled_from(SIMULATED))
    P = draw(st.integers(1, 6))
    v = draw(st.integers(1, 3)) if schedule == "interleaved" else 1
    M = draw(st.integers(1, 20))
    if schedule == "interleaved":
        M = P * draw(st.integers(1, 4))
    if schedule == "dualpipe":
        P += P % 2
        M = 2 * P + 2 * draw(st.integers(0, 4))
    length = st.floats(0.1, 3)
    times = [
        tuple(draw(st.lists(length, min_size=P * v, max_size=P * v)))
        for _ in ("forward", "inputs", "weights")
    ]
    return schedule, P, M, v, StageSeconds(*times)


@given(pipelines())
def test_any_timetable_is_sound(case: tuple[str, int, int, int, StageSeconds]) -> None:
    schedule, P, M, v, seconds = case
    order = orders(schedule, P, M, v)
    table = simulate(order, seconds)
    done: Counter[tuple[str, int, int]] = Counter()
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * P
    for (rank, start, end), together in itertools.groupby(
        table, key=lambda e: (e.rank, e.start, e.end)
    ):
        assert start >= free[rank] - 1e-9  # one thing at a time
        free[rank] = end
        for kind, stage, micro in ((e.kind, e.stage, e.micro_batch) for e in together):
            done["F" if kind == "F" else "back", stage, micro] += {"F": 2, "B": 2}.get(kind, 1)
            ends[kind, stage, micro] = end
            if kind == "F" and stage:
                assert start >= ends["F", stage - 1, micro] - 1e-9
            if kind in "BI" and stage < P * v - 1:
                after = ends.get(("B", stage + 1, micro), ends.get(("I", stage + 1, micro)))
                assert after is not None
                assert start >= after - 1e-9
    # Each micro-batch goes through each stage once, both ways, weights included.
    assert len(done) == 2 * P * v * M
    assert set(done.values()) == {2}
    assert all(most_kept(table, rank) <= M * v for rank in range(P))


@pytest.mark.parametrize(
    ("schedule", "P", "M", "v", "said"),
    [
        ("interleaved", 4, 6, 2, "multiples of 4"),
        ("dualpipe", 3, 8, 1, "even"),
        ("dualpipe", 4, 6, 1, "twice"),
        ("1f1b", 4, 6, 2, "interleaved"),
        ("zb9", 4, 6, 1, "gpipe"),
        ("1f1b", 0, 6, 1, "at least"),
    ],
)
def test_an_order_that_does_not_exist_is_one_sentence(
    schedule: str, P: int, M: int, v: int, said: str
) -> None:
    assert said in why_impossible(schedule, P, M, v)
    with pytest.raises(InputError, match=said):
        orders(schedule, P, M, v)


@pytest.mark.parametrize(("schedule", "boxes"), [("zb1p", 3 * 4 * 8 + 3), ("dualpipe", 0)])
def test_a_drawing_has_a_box_for_each_piece_of_work(schedule: str, boxes: int) -> None:
    table = simulate(orders(schedule, 4, 8), StageSeconds.even(4, 1, 1, 1))
    root = ET.fromstring(drawing(table, "a <pipeline>"))
    found = [
        (float(r.get("x", "")), float(r.get("y", "")), float(r.get("height", "")))
        for r in root.iter("{http://www.w3.org/2000/svg}rect")
    ]
    assert len(found) == len(table) + len({e.kind for e in table})  # and one each in the key
    assert not boxes or len(found) == boxes
    assert len(set(found)) == len(found)  # passes that overlap lie one above the other


def test_of_many_micro_batches_a_drawing_shows_some_and_says_so() -> None:
    even = StageSeconds.even(16, 0.1, 0.1, 0.1)
    text = draw_schedule("dualpipe", 16, 2000, 1, even)
    assert "drawn of 2000" in text
    assert len(text) < 1_000_000
