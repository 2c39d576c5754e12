"""Processes that are ordered, answer, and are stopped between two turns with all they started."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from evidence.loop_jobs import SPIN
from hasten.measure import crew as crew_module
from hasten.measure.crew import Crew, CrewFailedError, interpreter
from hasten.measure.loops import LoopProcess

# Speaks the pipes' language; what it does when it is told to fail stands in its variables.
MEMBER = """
import json, os, signal, subprocess, sys, time
inbox, outbox = os.fdopen(int(sys.argv[-2])), os.fdopen(int(sys.argv[-1]), "w", buffering=1)
def say(**found):
    outbox.write(json.dumps(found) + "\\n")
spin, own = os.environ.get("SPIN"), str(os.getpid())
beside = [subprocess.Popen([sys.executable, "-c", spin, own]).pid] if spin else []
say(pid=os.getpid(), beside=beside)
for line in inbox:
    order = json.loads(line)
    how = os.environ.get("HOW", "answers") if order["do"] == "fail" else "answers"
    while how in ("killed", "waits") and not os.path.exists(os.environ.get("AFTER", "/")):
        time.sleep(0.005)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        time.sleep(600)
    if how == "garbles":
        outbox.write("no JSON\\n")
    if how == "says":
        say(failed="InputError: the data has too few records")
    if how == "complains":
        say(failed="RuntimeError: connection closed by peer")
        sys.exit(1)
    if how == "ends":
        print("last words", flush=True)
        sys.exit(7)
    say(heard=order["do"])
for child in beside:
    os.kill(child, signal.SIGKILL)
"""
START = interpreter(lambda *pipes: ["-c", MEMBER, *map(str, pipes)])
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and asks the kernel")
JOBS = str(Path(__file__).with_name("loop_jobs.py"))
PARENT = """
import sys, tempfile, time
from hasten.measure.loops import LoopProcess
loop = LoopProcess("spinning", sys.argv[1], tempfile.TemporaryFile(), 60.0, {"note": sys.argv[2]})
loop.__enter__()
loop.begin(0)
print("ready", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def crew(folder: Path, *environs: dict[str, str]) -> Iterator[Crew]:
    with contextlib.ExitStack() as stack:
        paths = [folder / f"log-{number}" for number in range(len(environs))]
        logs = [stack.enter_context(path.open("w+b")) for path in paths]
        found = Crew(START, environs, logs)
        stack.callback(found.end, at_once=True)
        yield found


def stopped(pids: Sequence[int]) -> bool:
    """Whether all threads of all processes have come to their stop, not the first ones alone."""
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
    states = [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads]
    return set(states) == {"T"}


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def wait_until(true: object, *arguments: object) -> None:
    deadline = time.monotonic() + 60
    while not true(*arguments):  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@LINUX
def test_an_order_is_done_in_parts_with_all_standing_still_between_them(tmp_path: Path) -> None:
    after = tmp_path / "now"
    slow = {"HOW": "waits", "AFTER": str(after)}
    with crew(tmp_path, {}, slow) as both:
        pids = [answer["pid"] for answer in both.answers(60.0)]
        both.give({"do": "fail"})
        wait_until(stopped, pids)
        for _ in range(3):
            assert both.go_on(0.1) is None
            wait_until(stopped, pids)
        after.touch()
        assert both.go_on(60.0) == [{"heard": "fail"}] * 2
        wait_until(stopped, pids)
        assert both.ask({"do": "more"}, 60.0) == [{"heard": "more"}] * 2


@LINUX
def test_all_ranks_and_what_they_started_stand_still_between_two_orders(tmp_path: Path) -> None:
    with crew(tmp_path, {"SPIN": SPIN}, {"SPIN": SPIN}) as found:
        said = found.answers(60)
        pids = [pid for answer in said for pid in (answer["pid"], *answer["beside"])]
        assert len(pids) == 4
        wait_until(stopped, pids)
        before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
        time.sleep(0.3)
        assert [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids] == before
        for do in ("steps", "evaluate"):
            assert found.ask({"do": do}, 60) == [{"heard": do}] * 2
            wait_until(stopped, pids)
        found.end()
        assert not any(psutil.pid_exists(answer["pid"]) for answer in said)
        for child in pids:
            wait_until(gone, child)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "killed",
            "rank 1: the process ended with code -9: killed, most likely for want of memory",
        ),
        ("ends", "rank 1: the process ended with code 7: last words"),
        ("says", "rank 1: the data has too few records"),
        ("garbles", "rank 1: its answer can't be read"),
        ("hangs", "no answer within 60 s: rank 1 didn't answer"),
    ],
)
def test_the_rank_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    with crew(tmp_path, {}, {"HOW": how}, {}) as found:
        found.answers(60)
        if how == "hangs":
            monkeypatch.setattr(Crew, "_hear", until_two_were_heard(Crew._hear))
        with pytest.raises(CrewFailedError, match=words):
            found.ask({"do": "fail"}, 60)


def until_two_were_heard(hear: Any) -> Any:
    """The time is up as soon as only one is left to be heard, however slow the others are."""

    def heard_or_late(self: Crew, heard: dict[int, Any], deadline: float) -> bool:
        return bool(hear(self, heard, deadline if len(heard) < 2 else time.monotonic()))

    return heard_or_late


def test_one_that_was_killed_is_named_before_one_that_complains_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, failure = tmp_path / "told", Crew._failure

    def complained(self: Crew, heard: dict[int, Any]) -> CrewFailedError:
        told.touch()  # from here on the other one dies, in its own time
        return failure(self, heard)

    monkeypatch.setattr(Crew, "_failure", complained)
    monkeypatch.setattr(crew_module, "SETTLE_SECONDS", 60.0)
    with crew(tmp_path, {"HOW": "complains"}, {"HOW": "killed", "AFTER": str(told)}) as found:
        found.answers(60)
        with pytest.raises(CrewFailedError, match=r"rank 1: .* code -9"):
            found.ask({"do": "fail"}, 60)


def test_a_single_process_has_no_rank_to_name(tmp_path: Path) -> None:
    with crew(tmp_path, {"HOW": "says"}) as found:
        found.answers(60)
        with pytest.raises(CrewFailedError, match=r"^the data has too few records$"):
            found.ask({"do": "fail"}, 60)


def test_a_crew_that_has_ended_may_be_ended_again(tmp_path: Path) -> None:
    before = descriptors()
    with crew(tmp_path, {}, {}) as found:
        found.answers(60)
        found.end()
        found.end()
    assert descriptors() <= before


def descriptors() -> int:
    """How many are open, those left out that nobody uses any more; 0 where it can't be told."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


@LINUX
def test_a_loop_s_threads_and_children_stand_still_between_its_turns(tmp_path: Path) -> None:
    note = tmp_path / "children"
    with (tmp_path / "log").open("w+b") as log:
        target = f"{JOBS}:spinning"
        with LoopProcess("spinning", target, log, 60.0, {"note": str(note)}) as loop:
            loop.begin(1)
            pids = [int(word) for word in note.read_text().split()]
            wait_until(stopped, pids)
            before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
            time.sleep(0.3)
            assert [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids] == before
            loop.turn(2)
            wait_until(stopped, pids)
            assert len(loop.rounds) == 1
    for pid in pids:
        wait_until(gone, pid)


@LINUX
def test_a_stopped_loop_ends_with_a_comparison_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "children"
    command = [sys.executable, "-c", PARENT, f"{JOBS}:spinning", str(note)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        own = int(note.read_text().split()[0])
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(gone, own)
