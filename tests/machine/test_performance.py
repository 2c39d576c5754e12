"""``monitor_performance`` prints what the machine does, and ends when it is told to."""

from __future__ import annotations

import io
import re
import time

import pytest

from hasten import monitor_performance
from hasten.machine import performance
from hasten.machine.gpu import Description, GpuReading, Gpus


def test_a_line_per_interval_until_the_seconds_are_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "Gpus", lambda: Gpus([]))
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
    monkeypatch.setattr(performance, "Gpus", TwoGpus)
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
