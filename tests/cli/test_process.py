"""The process of a command: signals, variables of its launcher, and what its terminal can show."""

from __future__ import annotations

import importlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

import warm
from hasten.__main__ import main
from hasten.machine.signals import HASTE, StopSignal, raise_in_command
from sample_data import small, small_recipe
from told import Hasten

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


def started(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hasten", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def become(*words: object, encoding: str = "utf-8") -> NoReturn:
    """From here on this process, a fork, is a command's, with the descriptors that it has."""
    warm.serve_this_fork()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        open(number, "w", encoding=encoding, closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )
    sys.argv = ["hasten", *map(str, words)]
    code: Any = 1
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def until(condition: object, seconds: float = 120) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.cold
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGINT, 130, "hasten: interrupted\n"),
        (signal.SIGTERM, 75, "hasten: ended by SIGTERM\n"),
    ],
)
def test_a_signal_while_the_command_line_is_imported_ends_it_with_a_sentence(
    tmp_path: Path, number: signal.Signals, code: int, words: str
) -> None:
    mark = tmp_path / "importing"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_TYPER, str(mark)], stderr=subprocess.PIPE, text=True
    )
    until(mark.exists)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, words)


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of a command, in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *HASTE)}
    raise_in_command(interruptible=True)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def sends(number: signal.Signals, where: str, patch: pytest.MonkeyPatch) -> None:
    """From now on the function ``where`` sends the signal before it does its work."""
    module, _, name = where.rpartition(".")
    function = getattr(importlib.import_module(module), name)

    def replaced(*words: Any, **named: Any) -> Any:
        os.kill(os.getpid(), number)
        return function(*words, **named)

    patch.setattr(where, replaced)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("hasten.recipe.schema.load_recipe", signal.SIGTERM),
        ("hasten.data.prepared.tokenize", signal.SIGTERM),
        ("hasten.training.run.prepare", signal.SIGTERM),
        ("hasten.training.run.assemble", signal.SIGINT),
        ("hasten.training.run.tell_what_trains", signal.SIGTERM),
    ],
)
def test_a_signal_before_the_first_step_says_that_nothing_was_trained(
    place: str,
    number: signal.Signals,
    tmp_path: Path,
    handlers: None,
    hasten: Hasten,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = small_recipe(tmp_path, max_steps=1)
    sends(number, place, monkeypatch)
    code, _, err = hasten("train", path)
    by_user = number == signal.SIGINT
    assert code == (130 if by_user else 75), err
    words = "hasten: interrupted" if by_user else "hasten: ended by SIGTERM"
    assert err.splitlines()[-1] == f"{words} before the first step: nothing was trained"
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_trained_model_is_saved_changes_nothing(
    number: signal.Signals,
    tmp_path: Path,
    handlers: None,
    hasten: Hasten,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = small_recipe(tmp_path, max_steps=1)
    sends(number, "hasten.training.folder.save_model", monkeypatch)
    code, _, err = hasten("train", path)
    assert code == 0, err
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert ("a second Ctrl-C ends that" in err) == (number == signal.SIGINT)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("export", "RUN", "-o", "OUT"), "hasten.release.export.load_model"),
        (("export", "RUN", "-o", "OUT"), "hasten.release.export.save_model"),
        (("export", "RUN", "-o", "OUT"), "hasten.release.export.write_card"),
        (("eval", "RUN", "-o", "OUT"), "hasten.release.evaluation.score"),
        (("chat", "RUN"), "hasten.release.trained_model.load_model"),
        (("monitor", "RUN"), "hasten.monitor.watching.check_places"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_signal_in_another_command_is_one_sentence_and_leaves_no_file(
    words: tuple[str, ...],
    place: str,
    full_run: Path,
    tmp_path: Path,
    handlers: None,
    hasten: Hasten,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = files_of(full_run)
    sends(signal.SIGTERM, place, monkeypatch)
    names = {"RUN": full_run, "OUT": tmp_path / "out"}
    code, _, err = hasten(*(names.get(word, word) for word in words))
    assert (code, err) == (75, "hasten: ended by SIGTERM\n")
    assert before.items() <= files_of(full_run).items()
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_a_scheduler_repeats_does_not_disturb_the_way_out(handlers: None) -> None:
    with pytest.raises(StopSignal, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StopSignal, match="SIGINT"):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_forked_process_ends_by_the_signal_itself(handlers: None) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


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


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_a_training_that_is_saved_and_nohup_keeps_it(
    tmp_path: Path, full_run: Path, nohup: bool
) -> None:
    path, run = tmp_path / "recipe.yaml", tmp_path / "run"
    steps, model = 15 if nohup else 5000, str(full_run / "model")
    path.write_text(yaml.safe_dump(small(tmp_path, max_steps=steps, model=model)))
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        become("train", path)
    metrics = run / "metrics.jsonl"
    until(lambda: was_read(terminal) and metrics.exists() and metrics.read_text().count("\n") >= 2)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    summary = json.loads((run / "summary.json").read_text())
    assert (code, summary["stopped"]) == ((0, "done") if nohup else (75, "left"))
    assert (run / "model" / "model.safetensors").is_file()


def was_read(terminal: int) -> bool:
    """True, after what the terminal shows was read: a full one would hold the process up."""
    while select.select([terminal], [], [], 0)[0]:
        os.read(terminal, 4096)
    return True


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
    tmp_path: Path,
    hasten: Hasten,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    sentence: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, err = hasten("train", small_recipe(tmp_path))
    assert code == 2, err
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.cold  # neither imports torch
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


def test_a_terminal_of_ascii_alone_and_a_name_that_is_not_utf_8_are_printed(
    tmp_path: Path,
) -> None:
    folder, texts = tmp_path / "r\udcff\u00fcn", [tmp_path / "out", tmp_path / "err"]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    pid = os.fork()
    if pid == 0:
        for number, text in enumerate(texts, 1):
            os.dup2(os.open(text, os.O_WRONLY | os.O_CREAT), number)
        become("report", folder, folder, encoding="ascii")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, err = (text.read_bytes() for text in texts)
    assert code == 0, err
    assert b"r[U+DCFF]\\xfcn" in out
    assert b"Traceback" not in err


def test_a_name_with_line_ends_and_orders_to_a_terminal_is_one_line(hasten: Hasten) -> None:
    code, out, err = hasten("init", "deepseek-llm-tiny", "a\n\x1b[2Jb\u202ec")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "a \\x1b[2Jb\\u202ec" in err


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
