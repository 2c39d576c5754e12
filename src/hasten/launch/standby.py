"""Spares: processes that have imported everything and wait, one for each rank, to take its place.

    started once the ranks train -> imports -> waits at its standard input
    a line of JSON: the rank's variables and arguments -> it is that rank
    end of input: its supervisor has gone, and so does it

To start a rank anew is mostly to import libraries, seconds. A spare was never forked from a process
that has threads or a device open, so that it is safe with any library; it costs the memory of the
imports once more. It is used only where a rank's variables are those it was started with: some
count for a process from its very start.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hasten.machine.processes import ATTEMPT, FOLDER

CHANGING = {FOLDER, ATTEMPT, "HASTEN_RENDEZVOUS"}  # told with the line that wakes it


class Spares:
    """A spare for each rank, started when asked for."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._waiting: dict[int, tuple[subprocess.Popen[bytes], dict[str, str]]] = {}

    def prepare(self, rank: int, variables: Mapping[str, str], log: Path | None) -> None:
        """Start one for a rank, unless one waits; what it says goes where the rank's words go."""
        waiting = self._waiting.get(rank)
        if waiting is not None and waiting[0].poll() is None:
            return
        with contextlib.ExitStack() as stack:
            out = None if log is None else stack.enter_context(log.open("ab"))
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                env=dict(variables),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                start_new_session=True,
            )
        self._waiting[rank] = process, _lasting(variables)

    def take(
        self, rank: int, variables: Mapping[str, str], arguments: Sequence[str]
    ) -> subprocess.Popen[bytes] | None:
        """The rank, out of its spare; None where there is none that fits."""
        process, before = self._waiting.pop(rank, (None, {}))
        if process is None:
            return None
        if process.poll() is not None or before != _lasting(variables):
            _end(process)
            return None
        assert process.stdin is not None  # it was started with a pipe
        told = {name: variables[name] for name in CHANGING if name in variables}
        line = json.dumps({"variables": told, "arguments": list(arguments)}) + "\n"
        try:
            process.stdin.write(line.encode())
            process.stdin.close()
        except OSError:
            _end(process)
            return None
        return process

    def end(self) -> None:
        """None waits any more."""
        for process, _ in self._waiting.values():
            _end(process)
        self._waiting.clear()


def _lasting(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in CHANGING}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
