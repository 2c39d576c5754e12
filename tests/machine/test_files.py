"""One run a folder, one measurement a machine, and results that are kept for a user."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hasten.errors import InputError
from hasten.machine import cache
from hasten.machine.cache import key_of, source_digest
from hasten.machine.locks import RUN_LOCK, if_free, one_measurement, one_writer, only_run_in

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


@pytest.mark.parametrize("kind", ["hard link", "link"])
def test_a_file_under_another_name_is_no_lock_and_keeps_its_content(
    tmp_path: Path, kind: str
) -> None:
    target, lock = tmp_path / "thesis.txt", tmp_path / "run" / RUN_LOCK
    target.write_text("years of work")
    lock.parent.mkdir()
    if kind == "link":
        lock.symlink_to(target)
    else:
        lock.hardlink_to(target)
    refused = pytest.raises(InputError, match=f"{RUN_LOCK} can't be locked: .*; remove it")
    with refused, only_run_in(lock.parent):
        pass
    assert target.read_text() == "years of work"
    lock.unlink()
    with only_run_in(lock.parent):
        assert lock.is_file()


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


HOLDS = """
import sys
from hasten.machine.locks import one_measurement
with one_measurement(print):
    print("has it", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Another process that measures until it is told to end."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDS], text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has it\n"
        yield process
        process.kill()


def test_a_second_measurement_waits_and_says_for_whom(other: subprocess.Popen[str]) -> None:
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        assert other.stdin is not None
        threading.Timer(0.3, other.stdin.close).start()

    with one_measurement(tell):
        assert other.wait(10) == 0
    assert len(said) == 1
    assert f"waiting for process {other.pid} (since " in said[0]


def test_it_waits_no_longer_than_its_budget(other: subprocess.Popen[str]) -> None:
    with (
        pytest.raises(InputError, match=f"budget: waiting for process {other.pid} .* took all"),
        one_measurement(lambda text: None, 0.3),
    ):
        pytest.fail("two have it")


def test_the_death_of_the_other_ends_the_waiting(other: subprocess.Popen[str]) -> None:
    with one_measurement(lambda text: other.kill()):
        assert other.wait(10)


def test_one_process_may_nest_measurements_and_others_wait_for_the_outer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (lock,) = [tmp_path / f"hasten-{os.getuid()}" / "measuring.lock"]
    with one_measurement(pytest.fail):
        with one_measurement(pytest.fail):
            pass
        assert lock.exists()
    assert not lock.exists()


def test_without_a_folder_for_the_lock_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with one_measurement(pytest.fail):
        pass


def test_a_key_stands_for_all_its_parts_in_any_order() -> None:
    one = key_of({"a": 1, "b": {"c": 2.5, "d": None}})
    assert one == key_of({"b": {"d": None, "c": 2.5}, "a": 1})
    assert one != key_of({"a": 1, "b": {"c": 2.5, "d": 0}})


def test_a_changed_source_is_another_program(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = source_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("not a source")
    assert source_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert source_digest(tmp_path) != before
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.cpp").write_text("")
    assert source_digest(tmp_path) != before


def test_some_sources_alone_decide_a_digest_of_theirs(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("")
    before = source_digest(tmp_path, "a*", "none/**/*")
    (tmp_path / "b.py").write_text("x = 2")
    assert source_digest(tmp_path, "a*", "none/**/*") == before
    (tmp_path / "a.py").write_text("x = 2")
    assert source_digest(tmp_path, "a*", "none/**/*") != before


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = cache.path_of(tmp_path / "new", {"gpu": "one"}, "times-")
    assert path.name.startswith("times-")
    assert path != cache.path_of(tmp_path / "new", {"gpu": "two"}, "times-")
    assert cache.read(path, list, "it is made again") is None
    for content in ([1, 2], [3]):
        cache.write(path, content)
        assert cache.read(path, list, "it is made again") == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "1", "[" * 100_000])
def test_a_damaged_file_is_named_once_and_counts_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert cache.read(path, lambda found: found["key"], "it is made again") is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{path} can't be read (")
    assert said.endswith("): it is made again")


@pytest.mark.parametrize("whose", ["others may write", "folder", "another user", "link"])
def test_a_result_that_others_may_have_written_is_named_and_made_again(
    tmp_path: Path, whose: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept" / "result.json"
    before = os.umask(0)
    try:
        cache.write(path, [1])
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in (path.parent, path)] == [0o700, 0o600]
    assert cache.read(path, list, "it is made again") == [1]
    if whose == "others may write":
        path.chmod(0o620)
    elif whose == "folder":
        path.parent.chmod(0o777)
    elif whose == "link":
        path.symlink_to(path.rename(tmp_path / "elsewhere.json"))
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    with caplog.at_level(logging.WARNING):
        assert cache.read(path, list, "it is made again") is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(str(path))
    assert whose == "link" or "belongs to another user or may be written by others" in said
    assert said.endswith("it is made again")


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "within" / "kept.json"
    cache.write(path, [1])
    assert cache.read(path, list, "it is made again") is None
