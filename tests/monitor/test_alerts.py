"""An alert is given once per cause, by a command that no shell sees."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.monitor.alerts import Alert, AlertLimits, Alerts, Command, checked_command
from hasten.monitor.run import Run
from watched import append, step_line, write_run


def looked(alerts: Alerts, run: Run, later: float = 0.0) -> None:
    while run.look():
        pass
    now = time.time() + later
    run.answered = now
    alerts.look(run, now)


def collected(limits: AlertLimits | None = None) -> tuple[Alerts, list[Alert]]:
    found: list[Alert] = []
    return Alerts(found.append, limits), found


def test_a_stall_is_told_once_and_again_after_it_had_gone(tmp_path: Path) -> None:
    run = Run("r", write_run(tmp_path, 5))
    alerts, found = collected(AlertLimits(stall_seconds=4000))
    looked(alerts, run)
    assert found == []
    for later in (4270, 4271, 8000):
        looked(alerts, run, later)
    assert [a.kind for a in found] == ["stall"]
    assert found[0].text == "stall: r: no step for 1 h 11 min"
    looked(alerts, run)
    looked(alerts, run, 8000)
    assert len(found) == 2


def test_a_first_step_that_does_not_come_is_a_stall(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 1)
    (folder / "metrics.jsonl").unlink()
    alerts, found = collected(AlertLimits(stall_seconds=4000))
    run = Run("r", folder)
    looked(alerts, run, 3900)
    assert found == []
    looked(alerts, run, 4270)
    assert [a.text for a in found] == ["stall: r: no step for 1 h 11 min"]


def test_slow_steps_are_no_stall(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 1)
    append(folder / "metrics.jsonl", *(step_line(i, step_seconds=60) for i in range(2, 9)))
    alerts, found = collected(AlertLimits(stall_seconds=100))
    looked(alerts, Run("r", folder), 1000)
    assert found == []


def test_a_finished_run_does_not_stall(tmp_path: Path) -> None:
    alerts, found = collected(AlertLimits(stall_seconds=1))
    looked(alerts, Run("r", write_run(tmp_path, 5, finished=True)), 10_000)
    assert found == []


def test_a_step_that_is_not_finite_is_told_if_somebody_was_looking(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 5)
    append(folder / "metrics.jsonl", step_line(6, loss=None, skipped=True))
    run = Run("r", folder)
    alerts, found = collected()
    looked(alerts, run)
    assert found == []  # it was so before
    append(folder / "metrics.jsonl", step_line(7, loss=None, skipped=True))
    looked(alerts, run)
    assert [(a.kind, a.text) for a in found] == [
        ("nan", "nan: r: step 7 or one before it wasn't finite")
    ]
    looked(alerts, run)
    append(folder / "metrics.jsonl", step_line(8, loss=None, skipped=True))
    looked(alerts, run)
    assert len(found) == 2


def test_a_line_that_lacks_its_step_is_told_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 5)
    run = Run("r", folder)
    alerts, found = collected()
    looked(alerts, run)
    append(folder / "metrics.jsonl", {"skipped": True})
    looked(alerts, run)
    assert [a.text for a in found] == ["nan: r: a step wasn't finite"]


def test_a_slow_rank_a_full_disk_and_an_end_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 5)
    (folder / "ranks").mkdir()
    for rank, seconds in enumerate((1.0, 1.0, 1.6)):
        (folder / "ranks" / f"{rank}.json").write_text(json.dumps({"own_seconds": seconds}))
    append(folder / "machine.jsonl", {"step": 5, "disk_free_bytes": 10**9})
    run = Run("r", folder)
    alerts, found = collected()
    looked(alerts, run)
    assert [a.text for a in found] == [
        "slow_rank: r: rank 2 takes 1.6 times as long as the others",
        "disk: r: 1.0 GB are free where it writes",
    ]
    write_run(folder, 5, pid=2**22 + 1)
    looked(alerts, run)
    assert found[-1].kind == "ended"


def test_the_command_gets_the_sentence_as_one_argument_and_no_shell(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code = f"import json, sys; open({str(out)!r}, 'w').write(json.dumps(sys.argv[1:]))"
    said: list[str] = []
    command = Command([sys.executable, "-c", code, "first"], said.append)
    evil = f"stall: $(touch {tmp_path}/evil); `id` | x\n--flag"
    command(Alert("r", "stall", evil))
    command.wait()
    assert json.loads(out.read_text()) == ["first", evil.replace("\n", " ")]
    assert not (tmp_path / "evil").exists()
    assert said == []


@pytest.mark.parametrize(
    "words", [["/no/such/program"], [sys.executable, "-c", "raise SystemExit(3)"]]
)
def test_a_command_that_fails_is_said_and_harms_nothing(words: list[str]) -> None:
    said: list[str] = []
    command = Command(words, said.append)
    command(Alert("r", "stall", "stall: r"))
    command.wait()
    assert len(said) == 1
    assert "was not given" in said[0]


@pytest.mark.parametrize("value", ["mail me", [], [""], [1], None, {"a": 1}, ["a\0b"], [["a"]]])
def test_a_command_that_is_no_list_of_texts_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="give the command as a list"):
        checked_command(value)
