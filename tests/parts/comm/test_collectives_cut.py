"""Hierarchy over a link that is cut: for a while, and for good."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from labs import lab_with_links

pytestmark = pytest.mark.waits

JOB = Path(__file__).with_name("topology_cut_jobs.py")
LIMIT = 4.0
FEW, ENDLESS = 25, 5000  # steps: some, and more than are done before a link is cut


def answers(cut_seconds: float | None, limit: float) -> list[Any]:
    with lab_with_links(hosts=2, ranks=2, rate="100mbit") as lab:
        steps = str(ENDLESS if cut_seconds is None else FEW)
        command = [sys.executable, "-W", "ignore", str(JOB), steps, "0.05", str(limit)]
        running = lab.begin(command, seconds=250)
        end = time.monotonic() + 150
        while not list(running.place.glob("*.step-5")):
            assert time.monotonic() < end, running.log(0).read_text()
            time.sleep(0.02)
        lab.cut(1)
        if cut_seconds is not None:
            time.sleep(cut_seconds)
            lab.heal(1)
        return [json.loads(r.output.strip().splitlines()[-1]) for r in running.wait()]


def test_a_cut_of_some_seconds_is_waited_for_and_nothing_is_lost() -> None:
    found = answers(2.0, 60.0)
    assert [rank["error"] for rank in found] == [""] * 4
    assert len({rank["sum"] for rank in found}) == 1
    whole = sum(range(5000)) * (1 + 2 + 3 + 4) * FEW + 4 * 5000 * sum(range(FEW))
    assert abs(found[0]["sum"] / whole - 1) < 0.01  # 8 bits


def test_a_cut_for_good_is_an_error_of_all_ranks_within_the_limit() -> None:
    found = answers(None, LIMIT)
    for rank in found:
        assert "all_reduce (hierarchical, int8 between hosts)" in rank["error"]
        assert "rank" in rank["error"]
        # Ranks also ask each other who is missing, which takes as long again at most.
        assert rank["seconds"] < 3 * LIMIT + 30
