"""Foreign load is seen and our own isn't; ``monitor_performance`` prints and ends."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten import monitor_performance
from hasten.machine import gpu, processes
from hasten.machine.gpu import Description, GpuReading, Gpus
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
    before = processes.tree_seconds(processes.tree())
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert (
        processes.tree_seconds(processes.tree()) - before >= 0.4
    )  # ticks are of 10 ms, and others may be over


def test_the_clocks_see_work_that_is_done() -> None:
    before = read_clocks(processes.tree())
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    after = read_clocks(processes.tree())
    assert after.busy - before.busy >= 0.3  # one core's ticks, whoever else was there
    assert after.ours - before.ours >= 0.3
    assert after.wall > before.wall


def test_available_memory_stays_below_the_limit() -> None:
    assert processes.available_bytes(1000) == 1000
    assert 0 < processes.available_bytes(1 << 60) <= psutil.virtual_memory().total


def test_a_line_per_interval_until_the_seconds_are_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "Gpus", lambda: Gpus([]))
    monitor_performance(0.05, seconds=0.2)
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 5
    assert all(re.match(r"CPU utilisation: [\d.]+% \| memory: [\d.]+% \| temp", s) for s in lines)


class TwoGpus:
    def __len__(self) -> int:
        return 2

    def descriptions(self) -> list[Description]:
        return [Description("G", "U", 100, None, None, None, 0, None)] * 2

    def readings(self) -> list[GpuReading]:
        return [GpuReading(0.5, 20, 40.0, None), GpuReading(0.9, 40, None, None)]


def test_gpus_are_told_by_mean_and_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "Gpus", TwoGpus)
    said = io.StringIO()
    monitor_performance(0.05, seconds=0.04, file=said)
    assert said.getvalue() == (
        "GPU utilisation: 70.0% ± 20.0 | memory: 30.0% ± 10.0 | temperature: 40.0°C\n"
    )


def test_ctrl_c_ends_it_and_a_busy_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pressed)
    monitor_performance()
    with pytest.raises(ValueError, match="interval is 0 s"):
        monitor_performance(0)
    with pytest.raises(ValueError, match="seconds is nan; give a number"):
        monitor_performance(1, float("nan"))
