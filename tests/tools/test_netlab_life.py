"""A lab ends with everything in it, however its owner ends; and the commands that make one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hasten.errors import InputError
from labs import TOOLS, lab_with_links
from netlab import Lab, network
from netlab import lab as own
from netlab.__main__ import app
from netlab.network import SEGMENT, bits_per_second, burst_bytes

modes = pytest.mark.parametrize("mode", ["user", "root", "loopback"])
# A rank that has a child of its own, neither of which ends by itself or when asked to.
STUBBORN = (
    "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "subprocess.Popen(['sleep', sys.argv[1]], start_new_session=True); print('up', flush=True); "
    "time.sleep(300)"
)


@pytest.fixture(autouse=True)
def own_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    room = tmp_path / "room"
    room.mkdir(mode=0o700)
    monkeypatch.setattr(own, "room", lambda: room)
    monkeypatch.setattr(own, "SECONDS_TO_END", 60.0)  # a busy machine's watchdog is slow
    return room


def lab_in(mode: str) -> Lab:
    try:
        with Lab(2, 1, mode=mode):  # type: ignore[arg-type]
            pass
    except InputError as error:
        pytest.skip(str(error))
    return Lab(2, 1, mode=mode)  # type: ignore[arg-type]


def running_with(mark: str) -> list[int]:
    """Processes that have ``mark`` among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def gone(mark: str) -> bool:
    return until(lambda: not running_with(mark))


def until(true: Callable[[], bool]) -> bool:
    """Wait for it, a minute at most; whether it came."""
    end = time.monotonic() + 60
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def wait_for(mark: str, count: int) -> None:
    end = time.monotonic() + 60
    while len(running_with(mark)) < count:
        assert time.monotonic() < end
        time.sleep(0.02)


@modes
def test_an_exception_leaves_no_process_and_no_folder(mode: str, own_room: Path) -> None:
    mark = f"301.{os.getpid()}"

    def interrupted() -> None:
        with lab_in(mode) as lab:
            lab.begin([sys.executable, "-c", STUBBORN, mark])
            wait_for(mark, 4)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        interrupted()
    assert gone(mark)
    assert list(own_room.iterdir()) == []


@modes
def test_killing_the_owner_leaves_no_process_and_no_folder(mode: str, own_room: Path) -> None:
    lab_in(mode)
    mark = f"302.{os.getpid()}"
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(TOOLS)!r})\n"
        "from netlab import Lab, lab as own\n"
        f"own.room = lambda: Path({str(own_room)!r})\n"
        f"lab = Lab(2, 1, mode={mode!r}).start()\n"
        f"lab.ask('start', command=[sys.executable, '-c', {STUBBORN!r}, {mark!r}], inherited={{}}, "
        "env={}, cwd='/', limit=300, grace=1)\n"
        "time.sleep(300)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(mark, 4)
    finally:
        owner.kill()
        owner.wait()
    assert gone(mark)
    assert until(lambda: not list(own_room.iterdir()))


def test_killing_the_guard_ends_all_in_the_lab(own_room: Path) -> None:
    mark = f"303.{os.getpid()}"
    lab = lab_with_links().start()
    lab.begin([sys.executable, "-c", STUBBORN, mark])
    wait_for(mark, 4)
    assert lab._watchdog is not None
    lab._watchdog.kill()
    assert gone(mark)
    with pytest.raises(InputError, match="has ended"):
        lab.bytes(0)
    lab.close()


def test_ranks_know_their_place_and_share_the_cores() -> None:
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    with Lab(2, 2, mode="loopback", cores=8) as lab:
        results = lab.run(["sh", "-c", "echo " + " ".join(f"${n}" for n in (*names, "MINE"))])
        again = lab.run(["true"], env={"MINE": "1"})
    assert [r.output.split() for r in results] == [
        [str(r), str(r % 2), str(r // 2), "4", "2", "2"] for r in range(4)
    ]
    assert [(r.rank, r.host, r.code) for r in again] == [(0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 1, 0)]


def test_a_failing_rank_ends_the_others_and_a_hanging_one_is_ended_in_time() -> None:
    with Lab(2, 1, mode="loopback") as lab:
        failed = lab.run(["sh", "-c", "test $RANK = 0 && sleep 60; exit 7"], grace=0.2)
        assert failed[1].code == 7
        assert failed[0].code == -signal.SIGTERM
        assert failed[0].reason == "ended 0.2 s after rank 1 failed"
        hung = lab.run(["sleep", "60"], seconds=0.3)
        assert {r.reason for r in hung} == {"not done within 0.3 s"}
        missing = lab.run(["no-such-command"])
        assert [r.code for r in missing] == [None, None]
        assert "no-such-command can't be started" in missing[0].reason


def test_a_keeper_that_ends_before_it_has_answered_is_one_sentence(tmp_path: Path) -> None:
    lab = Lab(2, 1, mode="loopback")
    lab.name, lab._folder = "0" * 8, tmp_path
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.bind(str(tmp_path / "socket"))
        keeper.listen()

        def hear() -> None:
            talk = keeper.accept()[0]
            talk.recv(1000)
            talk.close()

        threading.Thread(target=hear, daemon=True).start()
        with pytest.raises(InputError, match="the lab 00000000 doesn't answer, it has ended"):
            lab.bytes(0)


def test_a_tool_that_hangs_is_given_up_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "TOOL_SECONDS", 0.1)
    with pytest.raises(OSError, match=r"sleep 60 did not end within 0\.1 s"):
        network._run(["sleep", "60"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hosts": 0}, "0 hosts"),
        ({"hosts": 9, "ranks": 9}, "at most 64"),
        ({"rate": "fast"}, "'fast' is no rate"),
        ({"rate": "1bit"}, "is no rate"),
        ({"rate": 5.0}, "5 bit/s can't be made"),
        ({"delay_ms": -1}, "delay_ms=-1"),
        ({"loss": 1.0}, "share below 1"),
        ({"mtu": 100}, "mtu=100"),
        ({"mode": "cloud"}, "mode='cloud'"),
    ],
)
def test_impossible_labs_are_refused_in_a_sentence(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Lab(**settings)  # type: ignore[arg-type]


@given(st.integers(8, 400_000_000))
def test_a_rate_reads_the_same_in_words_and_in_numbers(kbit: int) -> None:
    assert bits_per_second(f"{kbit}kbit") == bits_per_second(float(kbit * 1000)) == kbit * 1000
    # A bucket smaller than a segment would let none pass; one of a second would be no limit.
    burst = burst_bytes(kbit * 1000)
    assert SEGMENT <= burst <= max(SEGMENT, kbit * 1000 / 8 / 100)


# The commands of tools/netlab.


def netlab(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_check_says_of_each_kind_whether_it_works_or_what_is_missing() -> None:
    found = json.loads(netlab("check", "--json"))
    assert [f["mode"] for f in found] == ["user", "user", "root", "root", "loopback"]
    assert all(f["works"] != bool(f["reason"]) for f in found)
    assert found[-1]["works"]


@pytest.mark.cold  # other variables would have a server of their own
def test_check_names_the_missing_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lab_with_links()
    monkeypatch.setenv("PATH", str(tmp_path))
    words = netlab("check")
    assert words.count("not here: the command ip is missing: install iproute2") == 4


def test_run_makes_a_lab_for_one_command_and_names_the_rank_that_failed(own_room: Path) -> None:
    words = netlab("run", "--mode", "loopback", "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert words == "rank 0 of 2\n"
    script = "test $RANK = 0 || { echo no disk; exit 5; }"
    words = netlab("run", "--mode", "loopback", "--", "sh", "-c", script, code=5)
    assert words == "rank 1 on host 1 ended with 5: no disk\n"
    assert list(own_room.iterdir()) == []


def test_a_mode_that_is_none_is_one_sentence() -> None:
    with pytest.raises(InputError, match="--mode cloud"):
        netlab("run", "--mode", "cloud", "--", "true")
