"""The supervisor with ranks that are small scripts; a failed exchange names its rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hasten.launch.ranks import LinkError, naming_ranks
from hasten.launch.supervisor import (
    WORN_OUT,
    Attempt,
    RankTimeouts,
    SupervisedRanks,
    Supervision,
    supervise,
)
from hasten.machine.environment import World
from hasten.machine.processes import BEAT, Heartbeat
from hasten.machine.signals import StopSignal
from ranks import on_ranks
from verify_rank_jobs import waits_for_one_that_hangs
from waiting import until

pytestmark = pytest.mark.waits

# What scripts use of a rank's world, without the seconds that torch takes to import.
PRELUDE = f"""
import json, os, signal, struct, subprocess, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["HASTEN_ATTEMPT"])
size, seat = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
folder = os.environ["HASTEN_ATTEMPT_FOLDER"]
place = folder + f"/rank-{{rank}}"
count = 0
def beat(step, over=0):
    global count
    count += 1
    handle = os.open(place + ".heartbeat", os.O_WRONLY | os.O_CREAT)
    os.pwrite(handle, struct.pack("{BEAT.format}", count, step, over), 0)  # whole, as ranks do
    os.close(handle)
def words(text, code=1):
    told = dict(time=time.time(), code=code, line=text, traceback="Traceback of " + text)
    open(place + ".part", "w").write(json.dumps(told))
    os.rename(place + ".part", place + ".words")
def wait_for(path):
    while not (os.path.exists(path) and os.path.getsize(path)):
        time.sleep(0.005)
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    """Supervise ranks that run some code; the exit code."""

    def run(
        code: str,
        restarts: int = 3,
        count: int = 2,
        hang: float = 100.0,
        start: float = 100.0,
        fewest: int | None = None,
    ) -> int:
        script = tmp_path / "rank.py"
        script.write_text(PRELUDE + code)
        calls = tmp_path / "calls"

        def arguments(count: int, trained: bool) -> Sequence[str]:
            with calls.open("a") as file:
                file.write(f"{count} {trained}\n")
            return []

        def launch(rank: int, variables: Mapping[str, str], words: Sequence[str]) -> Any:
            return subprocess.Popen([sys.executable, str(script)], env=dict(variables))

        supervision = Supervision(restarts, RankTimeouts(hang, start), fewest)
        ranks = SupervisedRanks(
            arguments, lambda rank, count: {"MINE": str(rank)}, count, 2, launch
        )
        return supervise(ranks, supervision, tmp_path / "data", tmp_path / "restarts.jsonl")

    return run


def noted(folder: Path) -> list[dict[str, Any]]:
    path = folder / "restarts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_ranks_that_end_well_are_not_started_again(run: Any, tmp_path: Path) -> None:
    assert run("beat(1)") == 0
    assert not (tmp_path / "restarts.jsonl").exists()
    assert list((tmp_path / "data").iterdir()) == []


def test_a_killed_rank_is_named_and_all_begin_again_in_a_place_of_their_own(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "open(os.environ['HASTEN_RENDEZVOUS'], 'x') if rank == 0 else None\n"  # new in each attempt
        "beat(0); beat(4)\n"
        "if attempt == 1 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if attempt == 1: time.sleep(60)\n"
    )
    assert run(code) == 0
    (line,) = noted(tmp_path)
    assert (line["rank"], line["step"], line["code"], line["attempt"]) == (1, 4, -9, 1)
    assert "rank 1 failed after step 4: it was ended by SIGKILL" in capfd.readouterr().err
    assert (tmp_path / "calls").read_text().split("\n")[:2] == ["2 False", "2 True"]


def test_the_first_error_is_told_once_and_not_what_follows_from_it(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "beat(0); beat(1)\n"
        "if attempt == 1:\n"
        "    if rank == 2: words('ValueError: the cause'); time.sleep(0.1); sys.exit(1)\n"
        "    wait_for(folder + '/rank-2.words')\n"
        "    words('RuntimeError: connection closed by peer'); sys.exit(1)\n"
    )
    assert run(code, count=3) == 0
    err = capfd.readouterr().err
    assert err.count("Traceback of ValueError: the cause") == 1
    assert "rank 2 failed after step 1: ValueError: the cause; restart 1 of 3" in err
    assert "closed by peer" not in err


def test_a_rank_that_left_words_and_hangs_on_its_way_out_is_not_waited_for(run: Any) -> None:
    assert (
        run("beat(1); words('X') if attempt == 1 else None; time.sleep(60 * (attempt == 1))") == 0
    )


@pytest.mark.parametrize("code", [2, 3, 5, 6, 75, 130])
def test_an_ending_that_a_restart_cannot_better_is_final(
    run: Any, tmp_path: Path, code: int
) -> None:
    assert run(f"beat(1); words('no', {code}); sys.exit({code})", count=1) == code
    assert noted(tmp_path) == []


def test_restarts_are_used_up(run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("beat(0); beat(attempt); sys.exit(9)", restarts=2, count=1) == WORN_OUT
    assert [line["step"] for line in noted(tmp_path)] == [1, 2, 3]
    assert "it ended with code 9; 2 restart(s) are used up" in capfd.readouterr().err


def test_without_restarts_a_failing_rank_ends_the_others_and_gives_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        PRELUDE + "if rank == 1:\n"
        "    print('the disk is gone', file=sys.stderr); sys.exit(1)\n"
        "time.sleep(60)\n"
    )
    real = subprocess.Popen

    def popen(command: list[str], **settings: Any) -> Any:
        assert command == [sys.executable, "-m", "hasten", "train"]
        return real([sys.executable, str(script)], **settings)

    monkeypatch.setattr("hasten.launch.supervisor.subprocess.Popen", popen)
    ranks = SupervisedRanks(lambda count, trained: ["train"], lambda rank, count: {}, 3, 3)
    assert supervise(ranks, Supervision(0), tmp_path / "data") == 1
    said = "rank 1 failed after step 0: it ended with code 1 (the disk is gone)"
    assert capfd.readouterr().err == f"hasten: {said}\n"
    assert list((tmp_path / "data").iterdir()) == []


def test_without_restarts_a_killed_rank_is_named_and_the_code_is_that_of_a_lost_rank(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    assert run(code, restarts=0) == LinkError.code == 7
    assert "it was ended by SIGKILL, as the kernel" in capfd.readouterr().err


def test_a_rank_that_does_not_leave_when_rank_0_is_done_is_ended(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.launch.supervisor.GRACE_SECONDS", 0.5)
    assert run("beat(1); time.sleep(60 * rank)") == 0


def test_a_failure_after_rank_0_is_done_is_still_a_failure(run: Any) -> None:
    assert run("beat(1); time.sleep(rank / 2); sys.exit(5 * rank)") == 5


def test_a_rank_that_stops_stepping_is_named_by_its_step(run: Any, tmp_path: Path) -> None:
    code = (
        "if attempt == 2: sys.exit(0)\n"
        "if rank == 0: wait_for(folder + '/rank-1.heartbeat')\n"  # waits for rank 1 in step 5
        "beat(4 - rank); time.sleep(60)\n"
    )
    assert run(code, hang=0.5) == 0
    (line,) = noted(tmp_path)
    assert (line["rank"], line["hung"]) == (1, True)
    assert line["cause"] == "no step for 0.5 s: it hangs after step 3"


def test_who_waits_for_a_hanging_rank_is_not_blamed_for_having_fallen_silent_a_little_earlier(
    tmp_path: Path,
) -> None:
    process: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
    attempt = Attempt(tmp_path, 2, lambda rank: process, RankTimeouts(hang=10.0))
    Heartbeat(tmp_path, 0).beat(4)
    assert attempt._silent(100.0, [None, None]) is None
    Heartbeat(tmp_path, 1).beat(3)
    assert attempt._silent(100.1, [None, None]) is None
    found = attempt._silent(110.05, [None, None])
    assert found is not None
    assert (found.rank, found.cause) == (1, "no step for 10 s: it hangs after step 3")


def test_a_rank_that_never_begins_is_ended(run: Any, tmp_path: Path) -> None:
    code = "if attempt == 1:\n    if rank == 0: beat(0)\n    time.sleep(60)\n"
    assert run(code, start=2.0) == 0
    assert noted(tmp_path)[0]["cause"].startswith("not started after 2 s")


def test_saving_at_the_end_may_take_longer_than_a_step(run: Any, tmp_path: Path) -> None:
    assert run("beat(1, over=1); time.sleep(1.0)", hang=0.4, count=1) == 0
    assert noted(tmp_path) == []


def test_what_a_rank_has_started_ends_with_it(run: Any, tmp_path: Path) -> None:
    code = (
        "beat(1)\n"
        "if attempt == 1:\n"
        "    child = subprocess.Popen(['sleep', '77'])\n"
        "    open(place + '.child', 'w').write(str(child.pid))\n"
        f"    os.rename(place + '.child', {str(tmp_path)!r} + f'/child-{{rank}}')\n"
        f"    if rank == 0: wait_for({str(tmp_path / 'child-1')!r}); sys.exit(1)\n"
        "    time.sleep(60)\n"
    )
    assert run(code) == 0
    pid = int((tmp_path / "child-1").read_text())
    assert until(lambda: is_over(pid))


def is_over(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_seat_that_fails_twice_in_a_row_is_left_out_where_allowed(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"open({str(tmp_path)!r} + f'/seats-{{attempt}}', 'a').write(f'{{seat}}')\n" + (
        "beat(1); time.sleep(0.3)\nif seat == 1: sys.exit(1)\nif size == 3: time.sleep(60)\n"
    )
    assert run(code, count=3, fewest=2) == 0
    assert sorted((tmp_path / "seats-3").read_text()) == ["0", "2"]
    assert "restart 2 of 3, without device 1: 2 rank(s)" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_who_asks_the_supervisor_to_leave_asks_the_ranks(
    run: Any, tmp_path: Path, number: signal.Signals
) -> None:
    code = (
        "def leave(n, f): beat(3); sys.exit(75 if rank == 0 else 0)\n"
        f"signal.signal({int(number)}, leave)\n"
        "beat(1); time.sleep(60)\n"
    )
    timer = _when_both_beat(tmp_path, lambda: os.kill(os.getpid(), number))
    assert run(code) == 75
    timer.join()
    assert noted(tmp_path) == []


def test_asked_to_leave_before_there_is_anything_to_save_nothing_is_restarted(
    run: Any, tmp_path: Path
) -> None:
    timer = _when_both_beat(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StopSignal, match="SIGTERM"):
        run("beat(0); time.sleep(60)")
    timer.join()


def _when_both_beat(folder: Path, act: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        heartbeats = ".ranks-*/attempt-1/*.heartbeat"
        while sum(p.stat().st_size > 0 for p in (folder / "data").glob(heartbeats)) < 2:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_advice_of_a_rank_is_given_once_and_as_it_is(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("words('give another folder', 2); time.sleep(60)") == 2
    assert capfd.readouterr().err == "hasten: give another folder\n"


def test_a_rank_that_does_not_answer_is_named_with_its_host(tmp_path: Path) -> None:
    found, _ = on_ranks(waits_for_one_that_hangs, tmp_path)
    assert f"rank 1 ({socket.gethostname()}) did not answer within 1 s" in found["words"]
    assert found["code"] == LinkError.code == 7
    assert found["seconds"] < 60, "not the group's own limit of minutes"
    assert "gloo" in found["of a mesh"]


def test_one_rank_alone_has_nobody_to_name() -> None:
    with pytest.raises(RuntimeError, match="gloo is not the matter"), naming_ranks(World()):
        raise RuntimeError("gloo is not the matter")
