"""Run a function of a test helper module on several ranks, each a process of its own.

Ranks are forked from a server that has torch, Transformers and hasten loaded but has computed
nothing: importing takes seconds of a core, for each rank of each test, and forking hundredths.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hasten.cluster.ranks import process_group, rank_environment
from hasten.core.facts import world as world_now

TIMEOUT_SECONDS = 600
LEAVING_SECONDS = 30
LOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "hasten.core.session",
    "hasten.core.setup",
    "hasten.techniques",
)
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(list(LOADED))


def on_ranks(function: str, folder: Path, world: int = 2) -> list[Any]:
    """What ``module:function(world)`` returned on every rank; gloo over the loopback interface."""
    ranks = [
        _server.Process(
            target=_rank, args=(function, folder, rank, rank_environment(rank, world, folder, 1))
        )
        for rank in range(world)
    ]
    try:
        for rank in ranks:
            rank.start()  # the first one waits until the server has loaded all
        end = time.monotonic() + TIMEOUT_SECONDS
        for rank in ranks:
            rank.join(max(0.0, end - time.monotonic()))
        codes = [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert codes == [0] * world, f"{codes}: " + "\n".join(
        path.read_text()
        for path in (_errors(folder, rank) for rank in range(world))
        if path.exists()
    )
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]


def _rank(function: str, folder: Path, rank: int, environment: Mapping[str, str]) -> None:
    """The life of one rank: what it found is a file in the folder, its words another."""
    gc.freeze()  # what the server has loaded: a rank looks for garbage in what is its own
    os.environ.clear()
    os.environ.update(environment)
    with _errors(folder, rank).open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    module, name = function.split(":")
    job = getattr(importlib.import_module(module), name)
    with process_group(world_now(), "cpu"):
        (folder / f"rank-{rank}.json").write_text(json.dumps(job(world_now())))
        _wait_for_all(folder, world_now().size)


def _wait_for_all(folder: Path, world: int) -> None:
    """Until every rank has done its job: who leaves first may take a message to another along."""
    end = time.monotonic() + LEAVING_SECONDS
    while time.monotonic() < end:
        if all((folder / f"rank-{rank}.json").exists() for rank in range(world)):
            return
        time.sleep(0.002)


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.err"
