"""Ranks killed, stopped and asked to leave: the losses are those of a run that nothing happened to.

A sample; ``python tests/faults/rank_soak.py`` and ``signal_storm.py`` take any number.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hasten.launch import supervisor
from hasten.launch.supervisor import Attempt, RankTimeouts
from hasten.machine.processes import Heartbeat
from offspring import started_by
from told import json_lines

HERE = Path(__file__).parent
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl(2) is Linux's")


def start(script: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)  # up to fourteen attempts, on a busy machine
@pytest.mark.parametrize("each", [1, pytest.param(6, marks=pytest.mark.long)])
def test_kills_and_stops_cost_nothing_but_time(each: int, tmp_path: Path) -> None:
    process = start("rank_soak.py", tmp_path, each, each, 4)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["code"] == 0
    assert len(found["recoveries"]) == 2 * each
    trained = json_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in trained] == list(range(1, found["steps"] + 1))
    assert trained == json_lines(tmp_path / "reference" / "metrics.jsonl")
    restarts = json_lines(tmp_path / "restarts.jsonl")
    assert len(restarts) == 2 * each
    assert sum(not line["hung"] for line in restarts) == each
    stopped = [line for line in restarts if "its process is stopped" in line["cause"]]
    assert len(stopped) == each
    told = [line for line in err.splitlines() if line.startswith("hasten: ")]
    assert len(told) == len(restarts), "each is told once"
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen starts of ranks, on a busy machine
@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        ("fsdp2 2", 5),
        *(pytest.param(name, 10, marks=pytest.mark.long) for name in ("pp 2 x shard 2", "ep 2")),
    ],
)
def test_a_rank_that_is_killed_costs_no_checkpoint(layout: str, kills: int, tmp_path: Path) -> None:
    process = start("rank_kills.py", tmp_path / "run", kills, 3, layout)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["same"]
    assert found["damaged"] == []
    assert len({kill["wanted"] for kill in found["kills"]}) == 5
    for kill in found["kills"]:
        assert kill["resumed"] >= kill["saved"]
        assert kill["waited"] < 10


def is_over(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@linux
def test_no_rank_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text("3")  # ranks wait after this step
    process = start("rank_soak.py", tmp_path, 0, 0, 1)
    children: list[psutil.Process] = []
    try:
        until((tmp_path / "metrics.jsonl").exists, 120)
        children += started_by(process.pid)
        assert len(children) >= 2
        os.kill(children[0].pid, signal.SIGSTOP)  # a stopped process can't end itself
        process.kill()
        until(lambda: all(map(is_over, children)), 60)
    finally:
        process.kill()
        hold.unlink()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        process.communicate()


@pytest.mark.timeout(900)  # many lives, on a busy machine
@pytest.mark.parametrize("times", [8, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_asked_to_leave_many_times_loses_no_step(times: int, tmp_path: Path) -> None:
    process = start("signal_storm.py", tmp_path, times, 10)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    found = json.loads(out)
    codes = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}
    for life in found["lives"]:
        assert life["code"] == codes[life["signal"]]
        assert life["saved"] == life["steps"]
    assert {life["signal"] for life in found["lives"]} == set(codes)
    assert found["reference"] == 0
    trained = json_lines(tmp_path / "metrics.jsonl")
    assert trained == json_lines(tmp_path / "reference" / "metrics.jsonl")


states_are_seen = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="states are Linux's"
)


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


@states_are_seen
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
