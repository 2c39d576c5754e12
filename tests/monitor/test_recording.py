"""What a run leaves for those who watch it, and that watching never ends a training."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.machine.gpu import GpuReading
from hasten.monitor.run import Run
from hasten.recipe.prepare import check_writers
from hasten.training import metric_writers, recording
from hasten.training.metric_writers import Writers
from hasten.training.recording import Recording, of_gpus, sample


@dataclass
class Metrics:
    step: int
    loss: float | None = 1.5

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": 0, "loss": self.loss, "skipped": False, "name": "x"}


def test_the_monitor_reads_what_a_run_records(tmp_path: Path) -> None:
    start = {"total_steps": 50, "plan": [], "price_per_hour": 1.0, "currency": "EUR"}
    with Recording(tmp_path, start, every=0.02) as found:
        found.step(Metrics(7))
        deadline, written = time.monotonic() + 60, tmp_path / "machine.jsonl"
        while not written.exists() or not written.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run = Run("r", tmp_path)
        run.look()
    assert run.start["total_steps"] == 50
    assert run.start["pid"] == os.getpid()
    with run.lock:
        standing = run.standing()
    assert standing["status"] == "starting"
    assert standing["disk_free_bytes"] > 0
    assert 0 <= standing["device_utilisation"] <= 1


def test_each_rank_tells_its_own_work_and_the_first_alone_the_rest(tmp_path: Path) -> None:
    steps: list[dict[str, float]] = []
    with Recording(tmp_path, {}, rank=1, ranks=2, parts=steps, every=0.0) as found:
        steps.append({"data": 0.1, "copy": 0.2, "forward": 0.3, "backward": 9.0})
        found.step(Metrics(3))
    assert not (tmp_path / "run.json").exists()
    line = json.loads((tmp_path / "ranks" / "1.json").read_text())
    assert line["own_seconds"] == pytest.approx(0.6)
    assert line["step"] == 3


def test_a_single_rank_tells_nothing_of_ranks(tmp_path: Path) -> None:
    with Recording(tmp_path, {}, parts=[{"data": 1.0}], every=0.0) as found:
        found.step(Metrics(3))
    assert not (tmp_path / "ranks").exists()


def test_a_disk_that_fails_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with Recording(tmp_path, {}, ranks=2, parts=[{"data": 1.0}], every=0.0) as found:
        monkeypatch.setattr(recording, "write_atomic", fails)
        monkeypatch.setattr(recording, "sample", fails)
        found.step(Metrics(1))
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with Recording(tmp_path / "file", {}) as found:  # no folder at all
        found.step(Metrics(1))


def test_several_gpus_are_read_as_one() -> None:
    readings = [GpuReading(0.5, 10, 60.0, 300.0), GpuReading(1.0, 30, 80.0, None)]
    assert of_gpus(readings) == {
        "device_utilisation": 0.75,
        "device_temperature": 80.0,
        "device_power_watts": 300.0,
        "device_memory_bytes": 40,
    }
    assert set(of_gpus([GpuReading(None, None, None, None)]).values()) == {None}


def test_without_gpus_the_processor_is_the_device(tmp_path: Path) -> None:
    found = sample(tmp_path)
    assert found["device_utilisation"] == found["host_utilisation"]
    assert found["device_power_watts"] is None


class Notes:
    """A writer that remembers, or fails."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.lines, self.closed = fails, [], False

    def write(self, step: int, values: Any) -> None:
        if self.fails == "write":
            raise RuntimeError("boom\nmore")
        self.lines.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_writers_get_numbers_by_name_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    monkeypatch.setattr(metric_writers, "MAKERS", {"tensorboard": lambda folder, start: notes})
    with Recording(tmp_path, {}, log_to=["tensorboard"]) as found:
        found.step(Metrics(7))
        found.step(Metrics(8, None))
        found.evaluation(Metrics(8, 2.0))
    assert notes.lines == [
        (7, {"train/loss": 1.5, "train/skipped": 0.0}),
        (8, {"train/skipped": 0.0}),
        (8, {"eval/loss": 2.0, "eval/skipped": 0.0}),
    ]
    assert notes.closed


def test_a_writer_that_fails_is_named_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(folder: Path, start: Any) -> Notes:
        raise ValueError("no network")

    notes = Notes()
    made = {
        "wandb": never,
        "mlflow": lambda f, s: Notes("write"),
        "tensorboard": lambda f, s: notes,
    }
    monkeypatch.setattr(metric_writers, "MAKERS", made)
    found = Writers(["wandb", "mlflow", "tensorboard"], tmp_path, {})
    for step in range(3):
        found.put("train", {"step": step, "loss": 1.0})
    found.close()
    assert len(notes.lines) == 3
    assert capsys.readouterr().err.splitlines() == [
        "warning: log_to: wandb failed and is left out: no network",
        "warning: log_to: mlflow failed and is left out: boom",
    ]


def test_lines_that_come_too_fast_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, gate = threading.Event(), threading.Event()

    class Slow(Notes):
        def write(self, step: int, values: Any) -> None:
            begun.set()
            gate.wait(60)
            super().write(step, values)

    slow = Slow()
    monkeypatch.setattr(metric_writers, "WAITING", 2)
    monkeypatch.setattr(metric_writers, "MAKERS", {"mlflow": lambda folder, start: slow})
    found = Writers(["mlflow"], tmp_path, {})
    found.put("train", {"step": 0, "loss": 1.0})
    assert begun.wait(60)  # the first is taken, two may wait
    for step in range(1, 6):
        found.put("train", {"step": step, "loss": 1.0})
    gate.set()
    found.close()
    assert [step for step, _ in slow.lines] == [0, 1, 2]
    assert "3 lines came faster" in capsys.readouterr().err


def test_a_writer_whose_package_is_missing_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(InputError, match=rf"{name}, which isn't .* pip install '{name}>="):
            check_writers([name])


@pytest.mark.parametrize(
    ("name", "files"),
    [("wandb", "wandb/offline-run-*/*.wandb"), ("mlflow", "mlflow/mlflow.db")],
)
def test_other_tools_keep_their_files_in_the_runs_folder(
    tmp_path: Path, name: str, files: str
) -> None:
    pytest.importorskip(name)
    found = Writers([name], tmp_path / "run", {"model": "m", "plan": []})
    found.put("train", {"step": 3, "loss": 1.25})
    found.put("eval", {"step": 3, "eval_loss": 1.5})
    found.close()
    assert list((tmp_path / "run").glob(files))
