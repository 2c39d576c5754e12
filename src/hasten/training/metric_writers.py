"""Writes a run's numbers for other tools: TensorBoard, Weights & Biases, MLflow.

They are written during the run. Everything but W&B's own debug log stays in the run's
folder. TensorBoard has an event file there. W&B is set to offline (``wandb sync``
uploads later, if the user wants that). MLflow gets a database of its own. Each takes
the same names: ``train/loss`` of metrics.jsonl, ``eval/eval_loss`` of
evaluations.jsonl. Errors of these tools never end a training: after an error, a tool
isn't used any more.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hasten.formatting import number

WAITING = 10_000  # lines that may wait
CLOSE_SECONDS = 60.0
BESIDE = frozenset({"step", "epoch"})  # keys of the horizontal axis, not written as values


class MetricWriter(Protocol):
    """Receives numbers by tag."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes an event file in ``RUN/tensorboard``; after a crash all earlier steps are there."""

    def __init__(self, folder: Path, start: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes an offline run in ``RUN/wandb``."""

    def __init__(self, folder: Path, start: Mapping[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            silent=True,
            x_disable_stats=True,  # hasten's monitor measures the machine
        )
        self._run = wandb.init(
            dir=str(folder),
            mode="offline",
            project="hasten",
            name=folder.name,
            config=dict(start),
            settings=settings,
        )
        for kind in ("train/*", "eval/*"):  # otherwise W&B counts calls, which include evaluations
            self._run.define_metric(kind, step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Writes a run in the database ``RUN/mlflow/mlflow.db``; MLflow 3.17 refuses its file store."""

    def __init__(self, folder: Path, start: Mapping[str, Any]) -> None:
        # From 3.2 on MLflow sends usage data to its makers (its page "Usage Tracking").
        with contextlib.suppress(ImportError):  # an older version has no telemetry
            from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY
            from mlflow.telemetry import set_telemetry_client

            MLFLOW_DISABLE_TELEMETRY.set(True)
            set_telemetry_client()  # reads the variable again, and stops a running client
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        directory = folder.resolve() / "mlflow"
        directory.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(f"sqlite:///{directory / 'mlflow.db'}")
        existing = self._client.get_experiment_by_name("hasten")
        experiment = (
            existing.experiment_id
            if existing
            else self._client.create_experiment("hasten", (directory / "artifacts").as_uri())
        )
        self._id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        for name, value in start.items():
            self._client.log_param(self._id, name, str(value)[:500])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._id)


MAKERS: Mapping[str, Callable[[Path, Mapping[str, Any]], MetricWriter]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


class Writers:
    """Runs all writers of a run in a separate thread, because MLflow takes 50 ms for a line.

    If one fails, its name is printed once and it is left out from then on. If lines arrive
    faster than they can be written, they are dropped. Their number is printed at the end.
    """

    def __init__(self, names: Sequence[str], folder: Path, start: Mapping[str, Any]) -> None:
        self._names, self._folder, self._start = list(names), folder, start
        self._open: dict[str, MetricWriter] = {}
        self._waiting: queue.Queue[tuple[str, Mapping[str, Any]] | None] = queue.Queue(WAITING)
        self._dropped = 0
        self._thread: threading.Thread | None = None
        if self._names:
            self._thread = threading.Thread(target=self._work, daemon=True, name="writers")
            self._thread.start()

    def put(self, kind: str, line: Mapping[str, Any]) -> None:
        """Queues a step's line (``train``) or an evaluation's (``eval``)."""
        if self._thread is None:
            return
        try:
            self._waiting.put_nowait((kind, line))
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Writes the waiting lines and ends; waits a minute for a tool that hangs."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _warn(f"{', '.join(self._names)} did not end after {CLOSE_SECONDS:.0f} s")
        if self._dropped:
            _warn(f"{self._dropped} lines came faster than they could be written")
        self._thread = None

    def _work(self) -> None:
        for name in self._names:
            self._verified(name, partial(self._make, name))
        while (item := self._waiting.get()) is not None:
            self._write(*item)
        for name, writer in list(self._open.items()):
            self._verified(name, writer.close)

    def _make(self, name: str) -> None:
        self._open[name] = MAKERS[name](self._folder, self._start)

    def _write(self, kind: str, line: Mapping[str, Any]) -> None:
        values = {
            f"{kind}/{name}": numeric
            for name, value in line.items()
            # Truth values become 1 or 0.
            if name not in BESIDE
            and (numeric := number(int(value) if isinstance(value, bool) else value)) is not None
        }
        step = int(number(line.get("step")) or 0)
        for name, writer in list(self._open.items()):
            self._verified(name, partial(writer.write, step, values))

    def _verified(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # foreign code, in the middle of a training
            self._open.pop(name, None)
            lines = str(error).strip().splitlines() or [type(error).__name__]
            _warn(f"{name} failed and is left out: {lines[0]}")


def _warn(text: str) -> None:
    print(f"warning: log_to: {text}", file=sys.stderr)
