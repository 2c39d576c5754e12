"""The process that traces: requests as JSON on its input, traces as JSON on its output.

    python -m hasten.measure.gpu_simulation.worker < requests.json > traces.json

    {"device": "h100", "recipes": [{...}, ...]}  ->  [{"ranks": [...]} or {"refused": "..."}, ...]

It imports once, with the simulated devices in place, and forks for every rank of every recipe:
the ranks of one run side by side, the recipes one after another.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.machine.files import write_atomic
from hasten.measure.gpu_simulation.roofline import SimulatedDevice, simulated_device
from hasten.measure.gpu_simulation.simulated_device import simulate_devices

RANK_SECONDS = 900.0  # then a rank hangs


def main() -> None:
    """Answer the requests on standard input."""
    asked = json.load(sys.stdin)
    # Libraries may print; the answer has the output for itself.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        device = simulated_device(asked["device"])
        most = max(int(recipe.get("nproc") or 1) for recipe in asked["recipes"])
        simulate_devices(device, most)
        answers = [answer(device, recipe, bool(asked.get("whole"))) for recipe in asked["recipes"]]
    except InputError as error:
        answers = [{"refused": str(error)}] * len(asked["recipes"])
    json.dump(answers, output)
    output.flush()
    os._exit(0)  # the simulated device's threads don't end by themselves


def answer(device: SimulatedDevice, values: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    """The traces of a recipe's ranks, or why there are none."""
    from hasten.measure.gpu_simulation.rank import preload

    count = int(values.get("nproc") or 1)
    try:
        preload(values)
    except InputError as error:
        return {"refused": str(error)}
    with tempfile.TemporaryDirectory(prefix="hasten-paper-") as folder:
        place = Path(folder)
        numbers = [_forked(device, values, whole, rank, count, place) for rank in range(count)]
        try:
            _wait(numbers, place)
        finally:
            for number in numbers:
                _end(number)
        found = [_read(place / f"{rank}.json", rank) for rank in range(count)]
    wrong = [one for one in found if "counts" not in one]
    # A rank that was ended for another's failure has nothing to say.
    return min(wrong, key=lambda one: "ended" in one, default={"ranks": found})


def _forked(
    device: SimulatedDevice,
    values: Mapping[str, Any],
    whole: bool,
    rank: int,
    count: int,
    place: Path,
) -> int:
    """The number of a process that is the rank and leaves its trace in the folder."""
    number = os.fork()
    if number:
        return number
    found: dict[str, Any]
    try:
        from hasten.measure.gpu_simulation.rank import trace_rank

        found = trace_rank(device, values, whole, rank, count, place)
    except InputError as error:
        found = {"refused": str(error)}
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        found = {"failed": f"{type(error).__name__}: {lines[0][:300]}"}
    write_atomic(place / f"{rank}.json", json.dumps(found), durable=False)
    sys.stderr.flush()
    os._exit(0)


def _wait(numbers: list[int], place: Path) -> None:
    """Until all have ended, one of them without a trace, or the time is up."""
    until = time.monotonic() + RANK_SECONDS
    waiting = set(numbers)
    while waiting and time.monotonic() < until:
        ended = {n for n in waiting if os.waitpid(n, os.WNOHANG)[0]}
        waiting -= ended
        # The others would wait for messages of a rank that failed.
        if ended and any("counts" not in json.loads(f.read_text()) for f in place.glob("*.json")):
            return
        time.sleep(0.01)


def _end(number: int) -> None:
    try:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
    except (ProcessLookupError, ChildProcessError):  # it has ended
        return


def _read(path: Path, rank: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {"failed": f"rank {rank} hung, or ended without a trace", "ended": True}
    return found


if __name__ == "__main__":
    main()
