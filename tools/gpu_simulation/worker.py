"""The process that traces: JSON requests on its input, JSON traces on its output.

    python tools/gpu_simulation/worker.py < requests.json > traces.json

    {"device": "h100", "recipes": [{...}, ...]}
        -> [{"ranks": [...]} or {"refused": "..."}, ...]

It imports once, with the simulated devices active, and forks for every rank of every
recipe. The ranks of one recipe run in parallel, the recipes one after another.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_simulation.roofline import SimulatedDevice, simulated_device
from gpu_simulation.simulated_device import simulate_devices
from hasten.errors import InputError
from hasten.machine.files import write_atomic

RANK_SECONDS = 900.0  # then a rank hangs


def main() -> None:
    """Answer the requests on standard input."""
    request = json.load(sys.stdin)
    # Libraries may print; the answer has the output for itself.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        device = simulated_device(request["device"])
        most = max(int(recipe.get("nproc") or 1) for recipe in request["recipes"])
        simulate_devices(device, most)
        answers = [
            answer(device, recipe, bool(request.get("whole"))) for recipe in request["recipes"]
        ]
    except InputError as error:
        answers = [{"refused": str(error)}] * len(request["recipes"])
    json.dump(answers, output)
    output.flush()
    os._exit(0)  # the simulated device's threads don't end by themselves


def answer(device: SimulatedDevice, values: Mapping[str, Any], full_model: bool) -> dict[str, Any]:
    """The traces of a recipe's ranks, or why there are none."""
    from gpu_simulation.rank import preload

    count = int(values.get("nproc") or 1)
    try:
        preload(values)
    except InputError as error:
        return {"refused": str(error)}
    with tempfile.TemporaryDirectory(prefix="hasten-paper-") as folder:
        directory = Path(folder)
        numbers = [
            _forked(device, values, full_model, rank, count, directory) for rank in range(count)
        ]
        try:
            _wait(numbers, directory)
        finally:
            for number in numbers:
                _end(number)
        traces = [_read(directory / f"{rank}.json", rank) for rank in range(count)]
    wrong = [one for one in traces if "counts" not in one]
    # A rank that was ended for another's failure has nothing to say.
    return min(wrong, key=lambda one: "ended" in one, default={"ranks": traces})


def _forked(
    device: SimulatedDevice,
    values: Mapping[str, Any],
    full_model: bool,
    rank: int,
    count: int,
    directory: Path,
) -> int:
    """The number of a process that is the rank and leaves its trace in the folder."""
    number = os.fork()
    if number:
        return number
    trace: dict[str, Any]
    try:
        from gpu_simulation.rank import trace_rank

        trace = trace_rank(device, values, full_model, rank, count, directory)
    except InputError as error:
        trace = {"refused": str(error)}
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        trace = {"failed": f"{type(error).__name__}: {lines[0][:300]}"}
    write_atomic(directory / f"{rank}.json", json.dumps(trace), durable=False)
    sys.stderr.flush()
    os._exit(0)


def _wait(numbers: list[int], directory: Path) -> None:
    """Until all have ended, one of them without a trace, or the time is up."""
    until = time.monotonic() + RANK_SECONDS
    waiting = set(numbers)
    while waiting and time.monotonic() < until:
        ended = {n for n in waiting if os.waitpid(n, os.WNOHANG)[0]}
        waiting -= ended
        # The others would wait for messages of a rank that failed.
        if ended and any(
            "counts" not in json.loads(f.read_text()) for f in directory.glob("*.json")
        ):
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
        trace: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {"failed": f"rank {rank} hung, or ended without a trace", "ended": True}
    return trace


if __name__ == "__main__":
    main()
