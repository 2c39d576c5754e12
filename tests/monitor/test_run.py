"""A run's standing is what its files say, while they grow, break and vanish."""

from __future__ import annotations

import http.client
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hasten.monitor import run as module
from hasten.monitor.events import of_plan, short
from hasten.monitor.run import Run
from watched import TOKEN, append, get, serving, step_line, write_run


def read(run: Run, now: float | None = None) -> dict[str, Any]:
    while run.look():
        pass
    with run.lock:
        return run.standing(now)


def test_a_running_run_has_rates_cost_and_eta(tmp_path: Path) -> None:
    found = read(Run("r", write_run(tmp_path, 20)))
    assert found["status"] == "running"
    assert (found["step"], found["total_steps"], found["tokens"]) == (20, 40, 20_000)
    assert found["loss"] == pytest.approx(5 / 1.4)
    assert found["eval_loss"] == 4.5
    assert found["eta_seconds"] == 3360  # as the run itself predicted: its terminal has it, too
    assert found["cost"] == pytest.approx(3.6 * 20 * 0.5 / 3600)
    assert found["data_stall_share"] == pytest.approx(0.1)
    assert found["step_spread"] == 0


@pytest.mark.parametrize("name", ["report.html", "summary.json", "metrics.jsonl"])
def test_a_link_that_leads_out_of_a_run_is_not_shown(tmp_path: Path, name: str) -> None:
    folder, outside = write_run(tmp_path / "runs" / "r", 5), tmp_path / "outside"
    shown = {"report.html": "a page", "summary.json": '{"stopped": "elsewhere"}'}
    outside.write_text(shown.get(name, json.dumps(step_line(900)) + "\n"))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    run = Run("r", folder)
    standing = read(run)
    assert run.report == b""
    assert run.summary == {}
    assert standing["step"] in (None, 5)
    with serving([tmp_path / "runs"], live=False) as server:
        assert get(server.port, "/report?run=r")[0] == 404
    (folder / name).unlink()
    (folder / "report.html").write_text("its own page")
    read(run)
    assert run.report == b"its own page"


def test_the_band_is_that_of_the_recent_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 1)
    rates = [1.0] * 300 + list(range(1, 201))
    append(
        folder / "metrics.jsonl",
        *(step_line(i + 2, tokens_per_second=r) for i, r in enumerate(rates)),
    )
    found = read(Run("r", folder))
    assert found["tokens_per_second_median"] == 100.5
    assert (found["tokens_per_second_low"], found["tokens_per_second_high"]) == (21, 181)


def test_new_lines_arrive_with_the_next_look(tmp_path: Path) -> None:
    run = Run("r", write_run(tmp_path, 5))
    read(run)
    version = run.version
    read(run)
    assert run.version == version
    append(tmp_path / "metrics.jsonl", step_line(6))
    assert read(run)["step"] == 6
    assert run.version > version


def test_a_finished_run_says_so_and_has_no_eta(tmp_path: Path) -> None:
    found = read(Run("r", write_run(tmp_path, 5, finished=True)))
    assert (found["status"], found["eta_seconds"], found["tokens"]) == ("done", None, 5000)


def test_a_run_whose_process_is_gone_has_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 5, pid=2**22 + 1)  # above the largest of Linux
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    found = read(Run("r", folder))
    assert found["status"] == "ended"
    assert "left no summary.json" in found["words"]
    assert "cut off" in found["words"]
    assert found["eta_seconds"] is None
    assert found["step"] == 5


def test_a_process_that_only_has_its_number_is_not_the_runs(tmp_path: Path) -> None:
    assert read(Run("r", write_run(tmp_path, began=1.0)))["status"] == "ended"


@pytest.mark.skipif(platform.system() != "Linux", reason="zombies as Linux has them")
def test_a_killed_process_that_nobody_waited_for_has_ended(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run = Run("r", write_run(tmp_path, pid=process.pid))
    assert read(run)["status"] == "running"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it's over and still listed
    found = read(run)
    process.communicate()
    assert found["status"] == "ended"


def test_a_run_of_another_machine_is_silent_when_no_step_comes(tmp_path: Path) -> None:
    run = Run("r", write_run(tmp_path, 5, host=f"not-{platform.node()}"))
    assert read(run)["status"] == "running"
    run.answered += 3600
    found = read_again(run, time.time() + 3600)
    assert (found["status"], found["words"]) == ("silent", "no step for 1 h 00 min")


def read_again(run: Run, now: float) -> dict[str, Any]:
    with run.lock:
        return run.standing(now)


def test_a_restart_that_takes_lines_out_is_followed(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 20)
    run = Run("r", folder)
    read(run)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / ".metrics.jsonl").write_text("".join(lines[:8]))
    (folder / ".metrics.jsonl").replace(folder / "metrics.jsonl")
    cause = {"attempt": 1, "rank": 3, "cause": "it was ended by SIGKILL", "step": 20}
    append(folder / "restarts.jsonl", cause)
    found = read(run)
    assert (found["step"], found["tokens"], len(run.steps)) == (8, 8000, 8)
    [event] = run.events.newest()
    assert event["text"] == "attempt 1 failed, rank 3: it was ended by SIGKILL"


CAUSES: tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str], ...] = (
    ({"data_seconds": 0.3}, {}, {}, "waiting for data takes 60% of a step, 10% before"),
    ({"exposed_comm_seconds": 0.2}, {}, {}, "waiting for other ranks takes 40% of a step, 0% "),
    ({}, {"foreign_load": 0.5}, {}, "other programs use 50% of the processor"),
    ({}, {"disk_wait_share": 0.3}, {}, "the processor waits for the disk 30% of the time"),
    ({}, {}, {"0": 0.1, "1": 0.3}, "rank 1 takes 3.00 times as long as others"),
    ({}, {"foreign_load": 0.05}, {"0": 0.1, "1": 0.1}, "the run's files show no cause"),
)


@pytest.mark.parametrize(("step", "machine", "ranks", "cause"), CAUSES)
def test_a_run_that_slows_down_has_a_reason(
    tmp_path: Path,
    step: dict[str, Any],
    machine: dict[str, Any],
    ranks: dict[str, float],
    cause: str,
) -> None:
    folder, usual = write_run(tmp_path, 1), {"exposed_comm_seconds": 0.0}
    append(folder / "metrics.jsonl", *(step_line(s, **usual) for s in range(2, 81)))
    lines = [step_line(s, tokens_per_second=1000.0, **(usual | step)) for s in range(81, 101)]
    append(folder / "metrics.jsonl", *lines)
    append(folder / "machine.jsonl", {"step": 100, **machine})
    (folder / "ranks").mkdir()
    for rank, seconds in ranks.items():
        (folder / "ranks" / f"{rank}.json").write_text(json.dumps({"own_seconds": seconds}))
    slow = read(Run("r", folder))["slow"]
    assert slow is not None
    assert slow.startswith("50% fewer tokens/s than usual: ")
    assert cause in slow


def test_a_run_at_its_usual_rate_a_new_and_a_finished_one_have_no_reason(tmp_path: Path) -> None:
    assert read(Run("r", write_run(tmp_path / "usual", 100)))["slow"] is None
    slower = [step_line(s, tokens_per_second=1000.0) for s in range(21, 41)]
    append(write_run(tmp_path / "new", 20) / "metrics.jsonl", *slower)
    assert read(Run("r", tmp_path / "new"))["slow"] is None
    append(write_run(tmp_path / "over", 80, finished=True) / "metrics.jsonl", *slower)
    assert read(Run("r", tmp_path / "over"))["slow"] is None


def test_a_skipped_step_is_an_event_and_a_gap(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 3)
    append(folder / "metrics.jsonl", step_line(4, loss=None, skipped=True))
    run = Run("r", folder)
    found = read(run)
    assert (found["loss"], found["skipped_steps"]) == (None, 1)
    assert run.steps.since(0, 0)["columns"]["loss"][0][-1] is None
    assert [event["kind"] for event in run.events.newest()] == ["skipped"]


def test_events_of_all_kinds_come_newest_first(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 3)
    append(folder / "spikes.jsonl", {"step": 7, "limit": 3.25, "did": "went back"})
    append(folder / "quarantined.jsonl", {"step": 9, "rank": 1, "examples": [4, 5]})
    run = Run("r", folder)
    read(run)
    assert [(e["kind"], e["text"]) for e in run.events.newest()] == [
        ("quarantined", "rank 1: not finite, 2 examples written down"),
        ("spike", "loss above 3.25: went back"),
    ]


def test_a_vanished_folder_keeps_what_was_seen_and_returns(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 5)
    run = Run("r", folder)
    read(run)
    folder.rename(tmp_path / "away")
    found = read(run)
    assert (found["status"], found["step"]) == ("unreadable", 5)
    assert "No such file" in found["words"]
    (tmp_path / "away").rename(folder)
    append(folder / "metrics.jsonl", step_line(6))
    found = read(run)
    assert (found["status"], found["step"]) == ("running", 6)


def test_a_folder_that_does_not_answer_is_said(tmp_path: Path) -> None:
    run = Run("r", write_run(tmp_path, 5))
    read(run)
    found = read_again(run, time.time() + 60)
    assert "hasn't answered for 1 min" in found["words"]


def test_other_switches_than_the_run_before_are_an_event(tmp_path: Path) -> None:
    write_run(tmp_path / "previous" / "2", plan=[{"technique": "packed"}, {"technique": "half"}])
    write_run(tmp_path / "previous" / "1", plan=[{"technique": "old"}])
    now = [{"technique": "packed", "pad": 8}, {"technique": "topk", "ratio": 0.05}]
    run = Run("r", write_run(tmp_path, plan=now))
    read(run)
    [event] = run.events.newest()
    assert event["text"].endswith('+ topk, - half, packed: {} -> {"pad": 8}')
    assert of_plan(now, list(now)) is None


@pytest.mark.parametrize("name", ["run.json", "summary.json", "ranks/0.json"])
@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"pid"', b"\xff", b"7", b'{"pid": "x", "began": [], "stopped": {}}']
)
def test_broken_small_files_are_no_reason_to_fail(tmp_path: Path, name: str, data: bytes) -> None:
    folder = write_run(tmp_path, 5)
    (folder / "ranks").mkdir()
    (folder / name).write_bytes(data)
    assert read(Run("r", folder))["step"] == 5


def test_texts_of_a_run_are_cut_few_and_without_control_characters(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 5)
    for step in range(100):
        line = {"step": step, "prompt": {"a": [1]}, "answer": "\x1b[2J\ta\n\ud800" + "x" * 10**5}
        append(folder / "samples.jsonl", line)
    run = Run("r", folder)
    read(run)
    assert [sample["step"] for sample in run.samples] == list(range(76, 100))
    for sample in run.samples:
        assert sample["prompt"] == '{"a": [1]}'
        assert sample["answer"].startswith(" [2J\ta\n xxx")
        assert len(sample["answer"]) == 2000


def test_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 20_000)
    run = Run("r", folder)
    assert read(run)["step"] == 20_000
    assert len(run.steps) <= 2048
    assert len(json.dumps(run.steps.since(0, 0))) < 1_000_000
    assert os.path.getsize(folder / "metrics.jsonl") > 4_000_000


def test_texts_are_one_line_and_not_too_long() -> None:
    assert short("a\x1b[31m\nb" * 1000).startswith("a [31m b")
    assert len(short("x" * 10_000)) <= 300


HUGE = 10**400
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("metrics.jsonl", {"step": 1, "step_seconds": 1e308, "tokens": 1e308, "data_seconds": 1e308}),
    ("metrics.jsonl", {"step": 1e308, "step_seconds": 5e-324, "data_seconds": 1e308}),
    ("metrics.jsonl", {"step": HUGE, "loss": HUGE, "tokens": HUGE, "step_seconds": HUGE}),
    ("metrics.jsonl", {"step": -1e308, "step_seconds": -1e308, "skipped": {"a": [HUGE]}}),
    ("evaluations.jsonl", {"step": 1e308, "eval_loss": 1e308}),
    ("metrics.jsonl", {"step": "many", "loss": [], "step_seconds": "x", "skipped": "yes"}),
    ("samples.jsonl", {"step": {}, "answer": 1}),
    ("restarts.jsonl", {"step": None, "attempt": []}),
    ("quarantined.jsonl", {"step": "many", "examples": "x"}),
    ("machine.jsonl", {"step": HUGE, "device_utilisation": 1e308}),
    ("spikes.jsonl", {"step": 1e308, "limit": HUGE, "did": "\ud800"}),
    ("run.json", {"total_steps": 1e308, "price_per_hour": 1e308, "currency": "\ud800"}),
    ("run.json", {"total_steps": HUGE, "pid": HUGE, "began": 1e308, "host": platform.node()}),
    ("run.json", {"plan": [{"technique": "a", "b": HUGE}], "world_size": 1e308, "hardware": []}),
    ("summary.json", {"stopped": [], "cost": {"total": HUGE}, "step_parts": {"a": 1e308}}),
    ("ranks/1.json", {"own_seconds": -1.0}),
    ("ranks/1.json", {"own_seconds": 5e-324}),
]


@pytest.mark.parametrize(("name", "content"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_run_has_finite_numbers_and_takes_no_other_run_along(
    tmp_path: Path, name: str, content: dict[str, Any]
) -> None:
    write_run(tmp_path / "good", 20)
    bad = write_run(tmp_path / "bad", 20, finished=name == "summary.json")
    (bad / "ranks").mkdir()
    for rank in (0, 2):
        (bad / "ranks" / f"{rank}.json").write_text(json.dumps({"own_seconds": 1.0}))
    lines = 3 if name.endswith("l") else 1
    with (bad / name).open("a" if lines > 1 else "w") as file:
        file.write((json.dumps(content) + "\n") * lines)
    with serving([tmp_path], live=False) as server:
        status, _, body = get(server.port, "/metrics")
        assert (status, b'hasten_step{run="good"} 20.0' in body) == (200, True)
        assert b"inf" not in body
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"})
        data = connection.getresponse().readline()
        connection.close()
    runs = json.loads(data.removeprefix(b"data: "), parse_constant=pytest.fail)["runs"]
    assert {run["name"]: run["standing"]["step"] for run in runs}["good"] == 20
    assert len(runs) == 2


def test_the_states_of_all_runs_arrive_before_any_curve(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, 2_000)
    with serving([tmp_path], live=False) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        lines = [answer.readline() for _ in range(6)]
        connection.close()
    states, *curves = [json.loads(line.removeprefix(b"data: "))["runs"] for line in lines[::2]]
    assert {run["name"]: run["standing"]["step"] for run in states} == {"one": 2000, "two": 2000}
    assert not any("steps" in run for run in states)
    assert len(lines[0]) < 10_000 < len(lines[2])
    assert [(run["name"], len(run["steps"]["x"])) for [run] in curves] == [
        ("one", 2000),
        ("two", 2000),
    ]


def test_a_run_whose_numbers_raise_is_unreadable_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [Run(name, write_run(tmp_path / name, 20)) for name in ("bad", "good")]
    numbers = module.run_numbers

    def failing(run: Run, now: float) -> dict[str, Any]:
        return {"x": 1 / 0} if run is runs[0] else numbers(run, now)

    monkeypatch.setattr(module, "run_numbers", failing)
    for run in runs:
        run.look()
    bad, good = (run.standing() for run in runs)
    assert (bad["status"], good["step"]) == ("unreadable", 20)
    assert bad["words"] == "its files hold numbers that can't be shown: division by zero"
    assert bad.keys() == good.keys()


def test_a_pipe_in_the_place_of_an_earlier_run_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 20)
    (folder / "previous" / "1").mkdir(parents=True)
    os.mkfifo(folder / "previous" / "1" / "run.json")
    run = Run("run", folder)
    run.look()
    assert run.standing()["step"] == 20
