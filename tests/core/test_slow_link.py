"""A link that steps wait for is named with its MB/s; made-up metrics, and a link of a lab."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.health import LEAST, LOOK, SHARE, SLOW, SlowLink
from labs import lab_with_links

JOB = Path(__file__).with_name("slow_link_jobs.py")


@dataclass
class Step:
    step_seconds: float = 1.0
    exposed_comm_seconds: float | None = 0.8
    hidden_communication_seconds: float | None = 0.2
    comm_bytes: int | None = 3_000_000


def told(*steps: Step) -> list[str]:
    found: list[str] = []
    link = SlowLink(found.append)
    for step in steps:
        link.note(step)
    return found


def test_a_slow_link_is_told_once_with_its_rate() -> None:
    (text,) = told(*[Step()] * 5 * LOOK)
    assert text.startswith("the exchange between ranks is slow: a step waits 0.80 s of 1.00 s")
    assert "rank 0 sends its 3.00 MB at 3.00 MB/s" in text


def test_it_is_told_again_where_it_became_twice_as_slow() -> None:
    worse = Step(3.0, 2.8, 0.2)
    assert len(told(*[Step()] * LOOK, *[worse] * LOOK, *[worse] * LOOK)) == 2


def test_one_late_step_is_no_slow_link() -> None:
    assert told(*[Step(9.0, 8.8), *[Step(0.2, 0.01)] * (LOOK - 1)]) == []


def test_nothing_is_said_where_nothing_is_known() -> None:
    unknown = [Step(exposed_comm_seconds=None), Step(comm_bytes=None)]
    assert told(*unknown * 5 * LOOK) == []


@given(st.floats(0.01, 100), st.floats(0.01, 1), st.integers(1, 10**12))
def test_fast_links_and_short_waits_are_not_mentioned(
    seconds: float, share: float, sent: int
) -> None:
    exposed = seconds * share
    found = told(*[Step(seconds, exposed, None, sent)] * LOOK)
    quick = exposed < LEAST or exposed < SHARE * seconds or sent / exposed > SLOW
    assert bool(found) == (not quick)


@pytest.mark.timing
def test_a_link_of_two_megabytes_a_second_is_told_as_that() -> None:
    with lab_with_links(rate="16mbit") as lab:
        results = lab.run([sys.executable, "-W", "ignore", str(JOB)], seconds=120)
    assert [r.code for r in results] == [0, 0], results
    found = re.search(r"rank 0 sends its ([\d.]+) MB at ([\d.]+) MB/s", results[0].output)
    assert found, results[0].output
    assert 0.0 < float(found[2]) <= 3  # a burst is faster, a busy machine slower
    assert "slow" not in results[1].output
