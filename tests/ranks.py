"""Run a function of a test helper module on several ranks, each a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hasten.cluster.ranks import rank_environment

TIMEOUT_SECONDS = 240


def on_ranks(function: str, folder: Path, world: int = 2) -> list[Any]:
    """What ``module:function(world)`` returned on every rank; gloo over the loopback interface."""
    module, name = function.split(":")
    processes = []
    for rank in range(world):
        code = (
            "import json, sys, torch; torch.set_num_threads(1)\n"
            "from hasten.cluster.ranks import process_group\n"
            "from hasten.core.facts import world\n"
            f"from {module} import {name}\n"
            "with process_group(world(), 'cpu'):\n"
            f"    found = {name}(world())\n"
            f"open({str(folder / f'rank-{rank}.json')!r}, 'w').write(json.dumps(found))\n"
        )
        env = rank_environment(rank, world, folder, threads=1)
        paths = [str(Path(__file__).parent), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        errors = [p.communicate(timeout=TIMEOUT_SECONDS)[1] for p in processes]
    finally:
        for process in processes:
            process.kill()
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]
