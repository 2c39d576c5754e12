"""A process that waits to become a rank: ``python -m hasten.cli.standby_rank``.

A supervisor starts it. It imports what a rank imports and reads one line from its standard input
(:mod:`hasten.launch.supervisor`).
"""

from __future__ import annotations

import json
import os
import sys

from hasten.machine import environment
from hasten.machine.processes import exit_with_parent


def main() -> None:
    """Wait, then be ``hasten ARGUMENTS``."""
    exit_with_parent()
    import hasten.cli.train  # noqa: F401  # torch, Transformers and all that a run needs
    from hasten.cli.main import run

    line = sys.stdin.readline()
    if not line:
        return  # the supervisor has ended, and needs none
    request = json.loads(line)
    environment.take_over(request["variables"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["hasten", *request["arguments"]]
    run()


if __name__ == "__main__":
    main()
