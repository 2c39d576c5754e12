"""One measurement at a time on a machine: the second waits, says for whom, and not for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hasten.errors import InputError
from hasten.machine.locks import one_measurement

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
