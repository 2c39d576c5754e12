"""Records how step times of the real job vary on a machine that is busy on purpose.

Copies of the baseline, each a process of its own, take turns in an order drawn anew for each round,
as the variants of an experiment do; beside them a process burns a core for some seconds, then rests
for some. What is kept is tokens per second of every step: [round][copy][step].
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hasten.machine import host
from hasten.measure.workers import Worker, WorkerPool, WorkerSpec
from verdicts.job import STEPS_OF_A_TURN, WARM_UP, resolved_recipe

BURST_SECONDS, REST_SECONDS = (0.3, 5.0), (1.0, 12.0)
TIMEOUT = 1800.0
ENVIRON = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def record(path: Path, copies: int, rounds: int, command: str) -> None:
    """Measure and write the recording; every fifty rounds what there is so far."""
    hardware = host.hardware()
    about = {
        "what": "tokens per second of single steps, [round][copy][step], in the rounds' order",
        "command": command,
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "machine": f"{hardware.usable_cores} cores {hardware.cpu}",
        "load": "a process that burns a core for "
        f"{BURST_SECONDS[0]} to {BURST_SECONDS[1]} s and rests for {REST_SECONDS[0]} to "
        f"{REST_SECONDS[1]} s, beside whatever else the machine did",
    }
    burner = multiprocessing.Process(target=_burn, args=(1,), daemon=True)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        recipe = resolved_recipe(Path(place), WARM_UP + rounds * STEPS_OF_A_TURN)
        pool = stack.enter_context(WorkerPool(Path(place)))
        spec = WorkerSpec("recipe", {"recipe": str(recipe), "plan": []}, ENVIRON)
        workers = []
        for number in range(copies):
            workers.append(pool.start(spec, f"copy-{number}"))
            workers[-1].ready()
            workers[-1].request("steps", TIMEOUT, count=WARM_UP)
        burner.start()
        stack.callback(burner.terminate)
        series: list[Any] = []
        for row in _rounds(workers, rounds):
            series.append(row)
            if len(series) % 50 == 0 or len(series) == rounds:
                print(f"round {len(series)}/{rounds}", flush=True)
                text = json.dumps({**about, "rounds": series}, separators=(",", ":"))
                path.write_text(text.replace("[[", "\n[[") + "\n")


def _rounds(workers: list[Worker], rounds: int) -> Iterator[list[Any]]:
    order = random.Random(0)
    for _ in range(rounds):
        row: list[Any] = [None] * len(workers)
        for copy in order.sample(range(len(workers)), len(workers)):
            steps = workers[copy].request("steps", TIMEOUT, count=STEPS_OF_A_TURN)["steps"]
            row[copy] = [round(step["tokens_per_second"], 1) for step in steps]
        yield row


def _burn(seed: int) -> None:
    draw = random.Random(seed)
    while True:
        until = time.monotonic() + draw.uniform(*BURST_SECONDS)
        while time.monotonic() < until:
            sum(range(10_000))
        time.sleep(draw.uniform(*REST_SECONDS))
