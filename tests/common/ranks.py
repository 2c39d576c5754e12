"""Run a function of a test file on several ranks, each a process of its own.

``python ranks.py MODULE:FUNCTION FOLDER`` is one rank; its place stands in its variables.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hasten.launch.ranks import process_group, rank_environment
from hasten.machine.environment import world as world_now

TIMEOUT_SECONDS = 600
LEAVING_SECONDS = 30
TESTS = Path(__file__).parents[1]


def on_ranks(job: Callable[..., Any], folder: Path, world: int = 2) -> list[Any]:
    """What ``job(world)`` returned on every rank; gloo over the loopback interface."""
    file = Path(job.__code__.co_filename).relative_to(TESTS).with_suffix("")
    module = ".".join(part for part in file.parts if part != "common")
    command = [sys.executable, __file__, f"{module}:{job.__name__}", str(folder)]
    with contextlib.ExitStack() as open_files:
        ranks = []
        try:
            for rank in range(world):
                errors = open_files.enter_context(_errors(folder, rank).open("w"))
                environment = rank_environment(rank, world, folder, 1)
                ranks.append(subprocess.Popen(command, env=environment, stderr=errors))
            end = time.monotonic() + TIMEOUT_SECONDS
            for process in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
            codes = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    assert codes == [0] * world, f"{codes}: " + "\n".join(
        _errors(folder, rank).read_text() for rank in range(world)
    )
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]


def once_on_ranks(job: Callable[..., Any], world: int = 2) -> Any:
    """A fixture of a test file: what ``job(world)`` returned on every rank."""

    @pytest.fixture(scope="module")
    def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
        return on_ranks(job, tmp_path_factory.mktemp("ranks"), world)

    return found


def by_torchrun(script: str | Path, folder: Path) -> str:
    """Runs a script on two ranks that torchrun starts; what went wrong, or nothing."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "--standalone", str(script), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return done.stderr if done.returncode else ""


def main(function: str, folder: Path) -> None:
    """The life of one rank: what its job returned is a file in the folder."""
    gc.freeze()  # modules: a rank looks for garbage in what is its own
    sys.path.insert(1, str(TESTS))
    module, name = function.split(":")
    job = getattr(importlib.import_module(module), name)
    here = world_now()
    with process_group(here, "cpu"):
        (folder / f"rank-{here.rank}.json").write_text(json.dumps(job(here)))
        _wait_for_all(folder, here.size)


def _wait_for_all(folder: Path, world: int) -> None:
    """Until every rank has done its job: who leaves first may take a message to another along."""
    end = time.monotonic() + LEAVING_SECONDS
    while time.monotonic() < end:
        if all((folder / f"rank-{rank}.json").exists() for rank in range(world)):
            return
        time.sleep(0.002)


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.err"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
