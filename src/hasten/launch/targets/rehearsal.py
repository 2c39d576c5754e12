"""A rehearsal: the launch's scripts, hosts, agents and ranks here, with a tiny model.

Everything runs on this machine. Each host is one of a lab. Its links are slower than
the cluster's, by the same factor as this machine is slower than the cluster's devices.
The file ``node.sh`` is the one that the cluster would run. The result shows if the job
starts, meets, trains, saves and ends. It doesn't show how fast the cluster will be.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.launch.lab import Lab, Result
from hasten.launch.targets import node
from hasten.launch.targets.job import Launch
from hasten.launch.targets.writing import write

ADDRESS = {"user": "10.77.0.N", "root": "10.77.0.N", "loopback": "127.0.0.1"}
MOST_RANKS = 32
# The name of a lab's host says nothing of its address, so the first is told that it is.
AGENT = (
    "unset HASTEN_RENDEZVOUS; export HASTEN_FIRST=$((RANK == 0)); "
    'HASTEN_ADDRESS=${2/%N/$((RANK + 1))} exec bash "$0" "$1"'
)
RANK_BYTES = 0.6e9  # torch, transformers and a tiny model


@dataclass(frozen=True)
class Rehearsed:
    """How it went: each host's end, and the summary that the run left (none: it failed)."""

    mode: str
    results: tuple[Result, ...]
    sent: tuple[int, ...]  # bytes by each host; empty on plain loopback processes
    summary: dict[str, Any] | None

    @property
    def worked(self) -> bool:
        return self.summary is not None and all(r.code == 0 for r in self.results)


def check_size(launch: Launch, free_bytes: float) -> None:
    """Raise InputError where so many ranks don't go onto this machine."""
    ranks = launch.cloud.devices
    room = int(free_bytes // RANK_BYTES)
    if ranks > min(MOST_RANKS, room):
        raise InputError(
            f"--rehearse: {ranks} ranks are too many for this machine ({min(MOST_RANKS, room)} "
            "go); rehearse with fewer --nodes or --gpus-per-node, the scripts are the same"
        )


def rehearse(
    launch: Launch,
    folder: Path,
    output: Path,
    rate: str | float | None = None,
    seconds: float = 600.0,
    tell: Callable[[str], None] = lambda text: None,
) -> Rehearsed:
    """Run it in a lab; ``launch.recipe`` is that of the tiny model, which writes to ``output``.

    Args:
        launch: as for the target ``torchrun``.
        folder: where the scripts are written; they may replace only hasten's own.
        output: the run's folder, absolute.
        rate: of each host's link, each way; None: no limit.
        seconds: the longest it may take.
    """
    alone = replace(launch, interface="", hosts=())
    write(node.files(alone), folder)
    with Lab(hosts=launch.cloud.nodes, ranks=1, rate=rate) as lab:
        limit = rate if isinstance(rate, str) else f"{(rate or 0) / 1e6:,.0f} Mbit/s"
        tell(f"lab: {lab.hosts} hosts ({lab.mode}), links {limit if rate else 'none'}")
        address = ADDRESS[lab.mode]
        head = f"{address.replace('N', '1')}:{launch.port}"
        # The lab's own ranks are the agents here: theirs isn't the place where the ranks meet.
        command = ["bash", "-c", AGENT, str(folder / "node.sh"), head, address]
        results = lab.run(command, seconds=seconds)
        loops = lab.mode == "loopback"
        sent = () if loops else tuple(lab.bytes(host)[0] for host in range(lab.hosts))
    return Rehearsed(lab.mode, tuple(results), sent, _summary(output))


def _summary(output: Path) -> dict[str, Any] | None:
    try:
        summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None
