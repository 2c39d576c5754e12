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

from sample_data import small

STEPS = 14
PLAN: list[Any] = [
    {"quantised": {"bits": 4, "minimum": 0, "check_every": 1}},
    {"checkpoints": {"interval": 2}},
]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rank_of(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The first whose words go where this rank's go; later ones wait to take its place."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if Path(os.readlink(f"/proc/{child.pid}/fd/1")).name == f"rank-{rank}.log":
                found.append(child)
    assert found, f"rank {rank} doesn't run"
    return min(found, key=lambda child: child.create_time())


@pytest.mark.long  # kills: test_ranks_under_faults; what was remembered: test_communication_sharded
@pytest.mark.timeout(900)  # two ranks start twice, on a busy machine
def test_a_killed_rank_costs_no_step_and_replicas_stay_alike(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    wanted = small(tmp_path, plan=PLAN, nproc=2, max_restarts=3, max_steps=STEPS, eval_data=0)
    recipe.write_text(yaml.safe_dump(wanted))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "hasten", "train", str(recipe)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for_lines(process, run / "metrics.jsonl", 1)
        victim = rank_of(process, 1)
        wait_for_lines(process, run / "metrics.jsonl", 6)
        victim.send_signal(signal.SIGKILL)
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, said  # checksums of all ranks were compared in each step
    trained = lines(run / "metrics.jsonl")
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    assert trained[-1]["loss"] < trained[0]["loss"]
    first = lines(run / "restarts.jsonl")[0]
    assert (first["rank"], first["code"]) == (1, -signal.SIGKILL)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["effective"]["quantised"]["effective"]


def wait_for_lines(process: subprocess.Popen[str], path: Path, count: int) -> None:
    end = time.monotonic() + 300
    while len(lines_so_far(path)) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.005)


def lines_so_far(path: Path) -> list[str]:
    """Whole lines of a file that is being written."""
    return path.read_text().split("\n")[:-1] if path.exists() else []
