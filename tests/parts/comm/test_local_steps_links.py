"""Ranks that train apart over real links: bytes on the interface, links that are cut."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from labs import lab_with_links

pytestmark = pytest.mark.waits

JOBS = Path(__file__).with_name("local_link_jobs.py")


def command(*given: Any) -> list[str]:
    return [sys.executable, "-W", "ignore", str(JOBS), *map(str, given)]


def answer(output: str) -> Any:
    return json.loads(output.strip().splitlines()[-1])


def reached(running: Any, step: int) -> None:
    """Wait until a rank has written that it is so far."""
    end = time.monotonic() + 120
    while not list(running.place.glob(f"*.step-{step}")):
        assert time.monotonic() < end, running.log(0).read_text()
        time.sleep(0.02)


def test_the_interface_counts_what_was_predicted() -> None:
    with lab_with_links(hosts=2, ranks=1, rate="1gbit") as lab:
        for name in ("none", "int8", "int4", "sign", "stream"):
            for result in lab.run(command("sent", name, 8), seconds=240):
                assert result.code == 0, result.output
                found = answer(result.output)
                assert found["counted"] == pytest.approx(found["predicted"], rel=0.05), name


def test_a_link_that_is_cut_for_some_seconds_is_waited_for() -> None:
    with lab_with_links(hosts=2, ranks=1, rate="100mbit") as lab:
        running = lab.begin(command("steps", 20, 0.05, 60), seconds=200)
        reached(running, 5)
        lab.cut(1)
        time.sleep(2)
        lab.heal(1)
        one, other = (answer(r.output) for r in running.wait())
    assert one == other
    assert not one["error"]
    assert one["sum"] == pytest.approx(40_000 * 20 * 1.5, rel=1e-5)


def test_a_link_that_is_cut_for_good_is_an_error_on_both_sides() -> None:
    with lab_with_links(hosts=2, ranks=1, rate="100mbit") as lab:
        # More steps than are done before the link is cut.
        running = lab.begin(command("steps", 5000, 0.05, 8), seconds=200)
        reached(running, 5)
        lab.cut(1)
        found = [answer(r.output)["error"] for r in running.wait()]
    for rank, said in enumerate(found):
        assert said.startswith("bringing weights together failed")
        assert f"rank {1 - rank}" in said or "every rank is alive" in said
        assert "resume from the last checkpoint" in said
