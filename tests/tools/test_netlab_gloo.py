"""gloo in a lab: a cut link is an error with a name, a healed one isn't, and bytes are counted."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from labs import job, lab_with_links
from netlab import Lab, RunningCommand

pytestmark = pytest.mark.waits

NUMBERS, TIMES = 100_000, 12


def reduced(step: int, running: RunningCommand) -> None:
    """Wait until a rank has done so many all-reduces."""
    path = running.place / f"rendezvous.step-{step}"
    while not path.exists() and not running.done():
        time.sleep(0.02)


def sums(results: list[Any]) -> list[float]:
    assert [r.code for r in results] == [0] * len(results), results
    return [json.loads(r.output)["sum"] for r in results]


def between_hosts(ranks: int) -> list[float]:
    """What hosts 0 and 1 send each other in that job.

    Of a ring's edges two lie between the hosts, one each way. A broadcast from rank 1 goes to 0
    where there are two ranks; of four it reaches 2 first, then 1 sends to 3, and 2 to 0.
    """
    size, world = 4 * NUMBERS, 2 * ranks
    ring = TIMES * 2 * (world - 1) / world * size + (world - 1) * size
    pairs = ranks * ranks * size
    broadcast = [0, size] if ranks == 1 else [2 * size, size]
    return [ring + pairs + b for b in broadcast]


def test_a_link_cut_for_a_second_delays_a_job_and_its_bytes_are_those_of_the_collectives() -> None:
    with lab_with_links(rate="40mbit") as lab:
        running = lab.begin(job("reduce", NUMBERS, TIMES, 120.0), seconds=200)
        reduced(1, running)
        lab.cut(1)
        time.sleep(1)
        lab.heal(1)
        results = running.wait()
        sent = [lab.bytes(host)[0] for host in (0, 1)]
        received = [lab.bytes(host)[1] for host in (0, 1)]
    assert sums(results) == [NUMBERS] * 2
    # Headers are 3 to 5 % at this rate, and what was lost in the cut was sent twice.
    assert sent == pytest.approx(between_hosts(1), rel=0.1)
    assert received == pytest.approx(sent[::-1], rel=0.05)


def test_a_link_cut_for_good_is_an_error_with_a_name_within_the_time_limit() -> None:
    with lab_with_links(rate="20mbit") as lab:
        running = lab.begin(job("reduce", NUMBERS, 1000, 2.0), seconds=200)
        reduced(1, running)
        lab.cut(1)
        begun = time.monotonic()
        results = running.wait()
        taken = time.monotonic() - begun
    assert taken < 60  # TCP itself would try for a quarter of an hour
    assert [r.code for r in results] == [1, 1]
    for r in results:
        assert "RuntimeError" in r.output or "DistBackendError" in r.output
        assert "gloo" in r.output.lower()


def test_a_reduce_scatter_sends_what_an_all_reduce_does() -> None:
    """What the planner takes for true of processors: half of it would do."""
    with lab_with_links(rate="400mbit") as lab:
        results = lab.run(job("scatter", NUMBERS, TIMES), seconds=200)
        sent = [lab.bytes(host)[0] for host in (0, 1)]
    assert sums(results) == [NUMBERS] * 2
    whole = TIMES * 4 * NUMBERS  # an all-reduce of two ranks: 2 (2 - 1) / 2 of the bytes
    assert sent == pytest.approx([whole, whole], rel=0.1)


@pytest.mark.slow
def test_ranks_without_interfaces_count_the_same_bytes_at_their_collectives() -> None:
    with Lab(2, 2, mode="loopback") as lab:
        results = lab.run(job("reduce", NUMBERS, TIMES, 120.0), seconds=200)
        found = [lab.bytes(host) for host in (0, 1)]
    assert sums(results) == [NUMBERS] * 4
    first, second = between_hosts(2)
    assert found == [(first, second), (second, first)]
    assert {json.loads(r.output)["ddp"] for r in results} == {2 * 3 / 4 * 4 * 310}
