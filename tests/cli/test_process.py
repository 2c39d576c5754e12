"""The process of a command: signals, variables of its launcher, and what its terminal can show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sample_data import small

Hasten = Callable[..., tuple[int, str, str]]
# Imports typer as slowly as a cold disk would.
SLOW_TYPER = """\
import pathlib, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            pathlib.Path(sys.argv[-1]).touch()
            time.sleep(60)
sys.meta_path.insert(0, Slow())
sys.argv = ["hasten", "env", sys.argv[-1]]
from hasten.__main__ import main
main()
"""


def started(path: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hasten", "train", str(path), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def until(condition: object, seconds: float = 120) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.cold
def test_an_interrupt_while_the_command_line_is_imported_ends_it_without_a_traceback(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "importing"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_TYPER, str(mark)], stderr=subprocess.PIPE, text=True
    )
    until(mark.exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert err == ""


def test_an_interrupt_at_any_place_of_a_command_is_said_in_one_line(
    tmp_path: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupts(places: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hasten.monitor.watching.check_places", interrupts)
    assert hasten("monitor", tmp_path) == (130, "", "hasten: interrupted\n")


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_repeated_sigterm_changes_nothing_until_the_process_has_ended(
    tmp_path: Path, nproc: int
) -> None:
    path, metrics = tmp_path / "recipe.yaml", tmp_path / "run" / "metrics.jsonl"
    path.write_text(yaml.safe_dump(small(tmp_path, max_steps=5000, nproc=nproc)))
    process = started(path)
    try:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
        end = time.monotonic() + 100
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.005)
        process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 75
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped"] == "left"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"HASTEN_ATTEMPT": "x"}, "HASTEN_ATTEMPT is 'x', expected a whole number above 0"),
        ({"HASTEN_ATTEMPT": "0"}, "HASTEN_ATTEMPT is '0', expected a whole number above 0"),
        ({"HASTEN_SUPERVISOR": "x"}, "HASTEN_SUPERVISOR is 'x', expected a whole number above 0"),
        ({"HASTEN_ATTEMPT_FOLDER": "nowhere"}, "HASTEN_ATTEMPT_FOLDER is 'nowhere', which is no"),
        (
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999999", "RANK": "0", "WORLD_SIZE": "2"},
            "MASTER_PORT is 99999999; it must be from 1 to 65535",
        ),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'; it must be a number"),
    ],
    ids=str,
)
def test_a_wrong_variable_is_a_sentence_and_exit_code_2(
    tmp_path: Path, variables: dict[str, str], sentence: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small(tmp_path)))
    _, err = (process := started(path, **variables)).communicate(timeout=120)
    assert process.returncode == 2, err
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--version"], ["--help"]], ids=str)
def test_an_output_without_room_is_a_sentence(words: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hasten", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    sentence = "the output can't be written: No space left on device; name another place"
    assert (done.returncode, done.stderr) == (1, f"hasten: {sentence}\n")


@pytest.mark.slow
def test_a_terminal_of_ascii_alone_and_a_name_that_is_not_utf_8_are_printed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "r\udcff\u00fcn"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    done = subprocess.run(
        [sys.executable, "-m", "hasten", "report", str(folder), str(folder)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"r[U+DCFF]\\xfcn" in done.stdout
    assert b"Traceback" not in done.stderr


def test_half_a_surrogate_pair_in_a_run_s_files_is_printed_and_written(
    tmp_path: Path, hasten: Hasten
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        summary = {"steps": 3, "plan": [{"technique": f"{name}\ud800"}], "corpus_sha256": "\ud800"}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
        (tmp_path / name / "recipe.yaml").write_text('model: "a\\uD800"\n')
    page = tmp_path / "page.html"
    for words in ((), ("--json", tmp_path / "found.json"), ("--html", page)):
        code, out, err = hasten("report", tmp_path / "one", tmp_path / "two", *words)
        assert "Traceback" not in err
        assert code in (0, 2), (out, err)
