"""An arm that waits for its turn takes nothing from the others; none outlives its experiment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hasten.core.plan import Plan
from hasten.measure.trial import Trial

SPINNER = """
import json, os, sys, threading
from hasten.machine.processes import end_with_parent
end_with_parent()
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
inbox, outbox = os.fdopen(int(sys.argv[-2])), os.fdopen(int(sys.argv[-1]), "w", buffering=1)
outbox.write(json.dumps({"pid": os.getpid()}) + "\\n")
for line in inbox:
    outbox.write(json.dumps({"heard": json.loads(line)["do"]}) + "\\n")
"""
PARENT = """
import sys, time
from pathlib import Path
from hasten.core.plan import Plan
from hasten.measure.trial import Trial
trial = Trial(Path("none"), Plan(), {}, Path(sys.argv[2]), entry=("-c", sys.argv[1]))
print(trial.answer()["pid"], flush=True)
time.sleep(60)
"""


def wait_until(true: Callable[[int], bool], pid: int) -> None:
    deadline = time.monotonic() + 60
    while not true(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stopped(pid: int) -> bool:
    """Whether all its threads have come to their stop; where they can't be seen, the process."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    states = {file.read_text().rpartition(")")[2].split()[0] for file in threads}
    return states == {"T"} if states else psutil.Process(pid).status() == psutil.STATUS_STOPPED


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def busy(pid: int, seconds: float) -> float:
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return sum(process.cpu_times()[:2]) - before


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system can't stop a process")
def test_threads_that_spin_get_no_time_while_others_have_their_turn(tmp_path: Path) -> None:
    with Trial(Path("none"), Plan(), {}, tmp_path / "log", entry=("-c", SPINNER)) as trial:
        pid = trial.answer()["pid"]
        wait_until(stopped, pid)
        assert busy(pid, 0.5) == 0
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
        assert trial.ask("steps", patience=60)["heard"] == "steps"
        assert trial.ask("more", patience=60)["heard"] == "more"
    assert not psutil.pid_exists(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_stopped_arm_ends_with_an_experiment_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, SPINNER, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(gone, pid)
