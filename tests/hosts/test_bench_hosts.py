"""The benchmark of ``speed_up`` in other trainers runs, and prints a row for each trainer."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import bench_hosts


def test_its_smoke_mode_compares_a_trainer_with_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_hosts.py", "--smoke", "--hosts", "trainer"])
    bench_hosts.main()
    row = next(line for line in reversed(capsys.readouterr().out.splitlines()) if "trainer" in line)
    found = re.fullmatch(r"\| trainer \| (\S+)x \[\S+, \S+\] \| (\S+) \|", row)
    assert found, row
    assert float(found[1]) > 0
    assert float(found[2]) < 1e-3
