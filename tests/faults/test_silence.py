"""Of ranks that fall silent one after the other, the one that the others wait for is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hasten.launch import supervisor
from hasten.launch.supervisor import Attempt, RankTimeouts
from hasten.machine.processes import Heartbeat

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="states are Linux's")


class PlantedTime:
    """Goes on where a supervisor sleeps; each rank shows its only heartbeat at its time."""

    def __init__(self, folder: Path, heartbeats: list[float]) -> None:
        self.folder, self.heartbeats, self.now = folder, dict(enumerate(heartbeats)), 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for rank in [rank for rank, due in self.heartbeats.items() if due <= self.now]:
            del self.heartbeats[rank]
            Heartbeat(self.folder, rank).beat(3)


@linux
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_though_another_fell_silent_before_it(
    stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        os.kill(ranks[stopped].pid, signal.SIGSTOP)
        end = time.monotonic() + 60
        while psutil.Process(ranks[stopped].pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < end
        heartbeats = [0.1, 0.1]
        heartbeats[stopped] = 0.2
        monkeypatch.setattr(supervisor, "time", PlantedTime(tmp_path, heartbeats))
        ending = Attempt(tmp_path, 2, lambda rank: ranks[rank], RankTimeouts(1.0, 60.0)).watch()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert (ending.rank, ending.hung) == (stopped, True)
    assert ending.cause == "no step for 1 s: its process is stopped"
