"""Two ranks on two hosts of a lab under one supervisor, while the link between them is cut.

    python tests/faults/link_soak.py FOLDER CUT_SECONDS LINK_SECONDS RESTARTS

``CUT_SECONDS`` may be inf. What it prints is JSON: the exit code, and the seconds from the cut to
the end. Where the link heals, the same run without a lab is in FOLDER/reference. Ranks are forked
from this process, as in ``rank_soak``, and step into their host's namespaces before they meet.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hasten.machine import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import rank_soak
from rank_soak import HOLD, Forked, hold

from hasten.launch.supervisor import RankTimeouts, SupervisedRanks, Supervision, supervise
from hasten.machine.processes import ATTEMPT, exit_with_parent
from labs import enter, places
from netlab import Lab
from netlab.network import NIC, address

STEPS, BEFORE, MOST = 20, 4, 12  # of the run, and before the cut, for which ranks wait
HANG_SECONDS = 30.0  # longer than a cut that is waited for
PORT = 29700  # another for each attempt, as a supervisor's meeting place is
PLACE = "HASTEN_RENDEZVOUS"  # a file that both hosts see, which machines don't have


class Cutter(threading.Thread):
    """Cuts the second host's link after some steps, and heals it."""

    def __init__(self, lab: Lab, folder: Path, seconds: float) -> None:
        super().__init__(daemon=True)
        self.lab, self.lines, self.seconds = lab, folder / "metrics.jsonl", seconds
        self.folder, self.began = folder, math.nan
        hold(folder, MOST)

    def run(self) -> None:
        while not self.lines.exists() or self.lines.read_bytes().count(b"\n") < BEFORE:
            time.sleep(0.005)
        self.lab.cut(1)
        self.began = time.monotonic()
        (self.folder / HOLD).unlink()
        if math.isfinite(self.seconds):
            time.sleep(self.seconds)
            self.lab.heal(1)


def soak(folder: Path, cut: float, link_seconds: float, restarts: int) -> dict[str, Any]:
    """Train while the link is cut; what happened."""
    limit = datetime.timedelta(seconds=link_seconds)
    with Lab(2, 1, rate="1gbit") as lab:
        hosts = places(lab)

        def launch(rank: int, variables: Mapping[str, str], arguments: Sequence[str]) -> Forked:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    enter(hosts[rank])
                    environment.take_over(over_network(variables))
                    os.environ.pop(PLACE, None)
                    exit_with_parent()
                    rank_soak.train(folder, STEPS, timeout=limit)
                    code = 0
                finally:
                    os._exit(code)
            return Forked(pid)

        cutter = Cutter(lab, folder, cut)
        cutter.start()
        ranks = SupervisedRanks(lambda count, trained: [], lambda rank, count: {}, 2, 2, launch)
        supervision = Supervision(restarts, RankTimeouts(HANG_SECONDS, 60.0))
        code = supervise(ranks, supervision, folder / "data", folder / "restarts.jsonl")
        return {"code": code, "seconds": time.monotonic() - cutter.began}


def over_network(variables: Mapping[str, str]) -> dict[str, str]:
    """A rank's variables as a launcher of several machines would give them."""
    port = PORT + int(variables[ATTEMPT])
    meeting = {"MASTER_ADDR": address(0), "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": NIC}
    return {name: value for name, value in variables.items() if name != PLACE} | meeting


if __name__ == "__main__":
    place, cut, link, restarts = sys.argv[1:]
    found = soak(Path(place), float(cut), float(link), int(restarts))
    print(json.dumps(found), flush=True)
    if math.isfinite(float(cut)):
        (Path(place) / "reference").mkdir()
        rank_soak.undisturbed(Path(place) / "reference", STEPS)
    os._exit(0)  # taking apart what was loaded would take seconds
