"""A rank of a run with compressed gradients is killed: it goes on with what ranks remembered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from material import small

STEPS = 24
PLAN: list[Any] = [
    {"quantised": {"bits": 4, "minimum": 0, "check_every": 1}},
    {"checkpoints": {"interval": 2}},
]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rank_of(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.environ().get("RANK") == str(rank):
                return child
    raise AssertionError(f"rank {rank} doesn't run")


@pytest.mark.slow
def test_a_killed_rank_costs_no_step_and_replicas_stay_alike(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    wanted = small(tmp_path, plan=PLAN, nproc=2, max_restarts=3, max_steps=STEPS, held_out=0)
    recipe.write_text(yaml.safe_dump(wanted))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "hasten", "train", str(recipe)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 120
        while len(lines_so_far(run / "metrics.jsonl")) < 6:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.02)
        rank_of(process, 1).send_signal(signal.SIGKILL)
        said, _ = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == 0, said  # checksums of all ranks were compared in each step
    trained = lines(run / "metrics.jsonl")
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    assert trained[-1]["loss"] < trained[0]["loss"]
    first = lines(run / "restarts.jsonl")[0]
    assert (first["rank"], first["code"]) == (1, -signal.SIGKILL)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["acted"]["quantised"]["acted"]


def lines_so_far(path: Path) -> list[str]:
    """Whole lines of a file that is being written."""
    return path.read_text().split("\n")[:-1] if path.exists() else []
