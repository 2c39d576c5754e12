"""Folders of runs that nobody trained, for the tests of whoever watches runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hasten.monitor.server import MonitorServer
from hasten.monitor.watching import RunsReader

TOKEN = "a-token-of-the-tests-0123456789"


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "step": step,
        "loss": 5.0 / (1 + step / 50),
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "tokens": 1000,
        "step_seconds": 0.5,
        "tokens_per_second": 2000.0,
        "padding_share": 0.1,
        "peak_memory_bytes": 10**9,
        "mfu": 0.4,
        "skipped": False,
        "expert_load_ratio": 1.25,
        "data_seconds": 0.05,
        "eta_seconds": 3360.0,
        **changes,
    }


def append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_run(folder: Path, steps: int = 20, finished: bool = False, **start: Any) -> Path:
    """A run of so many steps; one that isn't finished has this process as its own."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "host": platform.node(),
        "pid": os.getpid(),
        "began": time.time(),
        "total_steps": 2 * steps,
        "world_size": 2,
        "plan": [{"technique": "packed"}],
        "hardware": "a machine",
        "currency": "EUR",
        "price_per_hour": 3.6,
        **start,
    }
    (folder / "run.json").write_text(json.dumps(told))
    lines = (json.dumps(step_line(step)) + "\n" for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(lines))
    append(folder / "evaluations.jsonl", {"step": steps, "tokens": 1, "eval_loss": 4.5})
    if finished:
        summary = {"stopped": "done", "tokens": 1000 * steps, "steps": steps}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@contextlib.contextmanager
def serving(places: Sequence[Path], live: bool = True) -> Iterator[MonitorServer]:
    """A monitor of the places; without ``live`` they are read once and no file is opened later."""
    watching = RunsReader(places)
    server = MonitorServer(watching, "127.0.0.1", 0, TOKEN)
    if not live:
        watching.read_all()
    thread = threading.Thread(target=server.run, daemon=True)
    with watching if live else contextlib.nullcontext():
        thread.start()
        try:
            _until_it_answers(server.port)
            yield server
        finally:
            server.stop()
    thread.join(timeout=60)


def _until_it_answers(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            assert get(port, "/metrics")[0] == 200
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def get(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Ask with the token, unless the headers say otherwise; headers come back in lower case."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        sent = {
            "Authorization": f"Bearer {TOKEN}",
            **{k.capitalize(): v for k, v in headers.items()},
        }
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, answer.read()
    finally:
        connection.close()
