"""A run's folder has one run at a time, whoever else is killed, looks, or begins in that moment."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hasten.errors import InputError
from hasten.machine.locks import RUN_LOCK, if_free, one_writer, only_run_in

FORKS_AND_DIES = """
import os, signal, sys, time
from pathlib import Path
from hasten.machine.locks import only_run_in
with only_run_in(Path(sys.argv[1])):
    child = os.fork()
    if not child:
        time.sleep(60)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_second_run_is_told_who_has_the_folder(tmp_path: Path) -> None:
    with only_run_in(tmp_path):
        said = rf"output: {tmp_path} is in use by process {os.getpid()} \(since .*, on .+\).*; wait"
        with pytest.raises(InputError, match=said), only_run_in(tmp_path):
            pytest.fail("two have it")
    assert not (tmp_path / RUN_LOCK).exists()
    with only_run_in(tmp_path):  # one after the other, in one process
        pass


def test_of_many_that_begin_at_once_one_wins(tmp_path: Path) -> None:
    count, found, done = 6, list[str](), threading.Barrier(6)

    def begin() -> None:
        done.wait()
        try:
            with only_run_in(tmp_path):
                found.append("won")
                done.wait(30)
        except InputError:
            found.append("refused")
            done.wait(30)

    threads = [threading.Thread(target=begin) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["refused"] * (count - 1) + ["won"]


def test_ranks_of_one_start_share_the_folder_and_those_of_another_are_refused(
    tmp_path: Path,
) -> None:
    with only_run_in(tmp_path, "first", leads=False):  # before its leader
        assert not (tmp_path / RUN_LOCK).exists()
    with only_run_in(tmp_path, "first"):
        with only_run_in(tmp_path, "first", leads=False):
            pass
        refused = pytest.raises(InputError, match="in use by another run")
        with refused, only_run_in(tmp_path, "second", leads=False):
            pass


def test_a_killed_run_blocks_nobody_and_neither_does_a_process_that_it_forked(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", FORKS_AND_DIES, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.wait(60)
    try:
        assert json.loads((tmp_path / RUN_LOCK).read_text())["pid"] == process.pid
        with only_run_in(tmp_path):
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, 9)


def test_a_link_in_the_lock_s_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / RUN_LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"run\.lock can't be locked"), only_run_in(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_without_locks_in_the_file_system_everybody_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with only_run_in(tmp_path), only_run_in(tmp_path), one_writer(tmp_path / "lock"):
        pass
    with if_free(tmp_path / "other") as free:
        assert not free
    assert not list(tmp_path.iterdir())
