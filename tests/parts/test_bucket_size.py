"""Bucket sizes against a timetable that is played through, and what must hold of any choice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.comm.link_model import (
    LATENCY_SHARE,
    MB,
    bucket_seconds,
    by_link,
    by_window,
    exposed,
)
from hasten.parts.comm.topology import Link, Topology

SECONDS = st.floats(1e-6, 10.0)
LINKS = st.builds(Link, st.floats(1e-6, 0.05), st.floats(1e5, 1e10))


def two_hosts(link: Link) -> Topology:
    return Topology(((0,), (1,)), link, link, "planted")


def played(seconds: float, count: int, window: float) -> float:
    """The timetable, bucket by bucket."""
    free = 0.0
    for k in range(1, count + 1):
        free = max(free, k * window / count) + seconds
    return free - window


@given(SECONDS, st.integers(1, 60), SECONDS)
def test_the_formula_is_the_timetable(seconds: float, count: int, window: float) -> None:
    wanted = played(seconds, count, window)
    assert exposed(seconds, count, window) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@given(LINKS, st.integers(1, 400), SECONDS)
def test_no_size_shows_less_than_the_chosen_one(link: Link, megabytes: int, window: float) -> None:
    topology, size = two_hosts(link), megabytes * MB

    def shown(cap: int) -> float:
        count = math.ceil(size / (cap * MB))
        return played(bucket_seconds(topology, size / count), count, window)

    chosen = by_window(topology, size, window).megabytes
    assert all(shown(chosen) <= 1.011 * shown(2**k) + 1e-9 for k in range(9))


@given(LINKS)
def test_delays_take_a_tenth_of_a_bucket_by_the_link(link: Link) -> None:
    topology = two_hosts(link)
    chosen = by_link(topology).megabytes
    delays = 2 * link.latency
    share = delays / bucket_seconds(topology, chosen * MB)
    assert 1 <= chosen <= 256
    assert share <= LATENCY_SHARE * 1.001 or chosen == 256


def test_a_slow_link_without_delay_wants_small_buckets_and_delay_large_ones() -> None:
    quick = two_hosts(Link(1e-5, 12e6))
    slow = two_hosts(Link(0.02, 12e6))
    assert by_window(quick, 40 * MB, 0.3).megabytes < by_window(slow, 40 * MB, 0.3).megabytes
    assert by_link(quick).megabytes == 1
    assert by_link(slow).megabytes > 1
