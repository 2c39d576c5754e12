"""One job of `hasten.measure.loops` in its process: ``python -m ... JOB PATHS IN OUT SETTINGS``.

JOB is ``module:function`` or ``script.py:function``, PATHS the caller's ``sys.path`` as JSON, IN
and OUT are pipes with one JSON object per line, SETTINGS the factory's arguments as JSON. The job
is built once; then it answers orders, stopped in between:

    {"do": "steps", "count": 4}  ->  {"steps": [[items, seconds, loss or null], ...]}
    {"do": "finish"}             ->  {"peak_memory_bytes": ...} and the process ends
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from hasten.machine import host

SCRIPT = "__hasten_loop__"  # a script's name here, so that it isn't __main__ a second time


def main(target: str, paths: str, orders: int, answers: int, settings: str = "{}") -> int:
    """Build the job, then do as told until the orders end."""
    sys.path[:] = json.loads(paths)
    with os.fdopen(orders, "r") as inbox, os.fdopen(answers, "w", buffering=1) as outbox:
        try:
            began = time.perf_counter()
            step = build(target, json.loads(settings))
            _say(outbox, {"seconds": time.perf_counter() - began})
            for line in inbox:
                order = json.loads(line)
                if order["do"] == "finish":
                    _say(outbox, {"peak_memory_bytes": _peak()})
                    break
                _say(outbox, {"steps": [timed(step) for _ in range(order["count"])]})
        except Exception as error:  # the caller reports it
            _say(outbox, {"failed": f"{type(error).__name__}: {error}"})
            return 1
    return 0


def build(target: str, settings: Mapping[str, Any] | None = None) -> Callable[[], Any]:
    """Load the factory and call it, with these arguments."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(place))  # a script's neighbours, as Python has it
        spec = importlib.util.spec_from_file_location(SCRIPT, place)
        if spec is None or spec.loader is None:
            raise ValueError(f"{place} can't be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[SCRIPT] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ValueError(f"{place} has no function {name}")
    step = factory(**(settings or {}))
    if not callable(step):
        raise ValueError(f"{name}() returned a {type(step).__name__}; it must return a function")
    made: Callable[[], Any] = step
    return made


def timed(step: Callable[[], Any]) -> tuple[float, float, float | None]:
    """One step: items, seconds, loss. The device has finished before the clock is read."""
    began = time.perf_counter()
    found = step()
    _wait_for_device()
    seconds = time.perf_counter() - began
    items, loss = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    try:
        count = float(items)
        value = None if loss is None else float(loss)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a step returned {found!r:.80}; it must return how many tokens or items it did, or "
            "(how many, loss)"
        ) from error
    if not (math.isfinite(count) and count > 0):
        raise ValueError(f"a step did {count} items; a speed needs a positive number")
    return count, seconds, value if value is not None and math.isfinite(value) else None


def _wait_for_device() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _peak() -> int:

    return host.memory_peak(host.default_device())


def _say(outbox: Any, answer: dict[str, Any]) -> None:
    outbox.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    from hasten.machine.processes import end_with_parent

    end_with_parent()
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:]))
