"""Foreign load: what others take is seen, and what we take ourselves isn't."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.machine import processes
from hasten.machine.processes import Instant, LoadMeter, read_clocks

SPIN = "import time\nwhile time.process_time() < 0.6: pass"


def foreign_share(before: Instant, after: Instant, cores: int) -> float:
    """What a meter tells of the time between two instants."""
    instants = iter((before, after))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "read_clocks", lambda tree: next(instants))
        patch.setattr(processes, "tree", list)
        meter = LoadMeter(cores)
        meter.lap("a")
        return meter.share("a")


@given(*[st.floats(0, 1e6) for _ in range(6)], st.integers(1, 64))
def test_a_share_lies_between_zero_and_one(
    a: float, b: float, c: float, d: float, e: float, f: float, cores: int
) -> None:
    assert 0 <= foreign_share(Instant(a, b, c), Instant(d, e, f), cores) <= 1


def test_a_share_is_what_the_cores_did_less_what_we_did() -> None:
    before, after = Instant(100, 500, 20), Instant(110, 515, 23)
    assert foreign_share(before, after, 2) == pytest.approx(12 / 20)
    assert foreign_share(before, Instant(110, 503, 23), 2) == 0


def test_a_span_of_a_few_ticks_counts_as_calm() -> None:
    assert foreign_share(Instant(1, 1, 1), Instant(1.1, 1.2, 1), 2) == 0


@pytest.mark.timing
def test_the_time_of_started_processes_is_ours_even_after_their_end() -> None:
    before = processes.tree_seconds()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert processes.tree_seconds() - before >= 0.4  # ticks are of 10 ms, and others may be over


def test_the_clocks_see_work_that_is_done() -> None:
    before = read_clocks()
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    after = read_clocks()
    assert after.busy - before.busy >= 0.3  # one core's ticks, whoever else was there
    assert after.ours - before.ours >= 0.3
    assert after.wall > before.wall


def test_available_memory_stays_below_the_limit() -> None:
    assert processes.available_bytes(1000) == 1000
    assert 0 < processes.available_bytes(1 << 60) <= psutil.virtual_memory().total
