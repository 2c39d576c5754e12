"""One run, asked to leave again and again, each time gone on with: nothing is lost.

    python tests/faults/signal_storm.py FOLDER TIMES SEED

Each life of the run is forked from this process, which has torch loaded. It is sent SIGTERM,
SIGUSR1 or SIGINT at a random moment, schedulers' signals several times, as they do. What it prints
is JSON: for each life its signal, exit code, seconds to leave, steps done and steps saved.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import torch
import torch._dynamo  # an optimizer does so: here once, and not in each life
import transformers.models.llama.modeling_llama  # noqa: F401

from hasten.core.loop import HASTE, EvaluationSchedule, defer_signals, fit
from hasten.core.setup import Session
from hasten.techniques.checkpoint import Checkpoints
from hasten.training.folder import LineFile
from tiny import examples, language_job, session_of, tiny_model

gc.freeze()  # what is loaded: lives look for garbage in what is their own
CODES = {"done": 0, "interrupted": 130, "left": 75}
NEVER = 1_000_000  # steps: no checkpoint but the one on leaving


def live(folder: Path, steps: int, pause: float) -> int:
    """Resume, train, leave; the exit code."""
    torch.set_num_threads(1)
    live: list[Session] = []
    with defer_signals(lambda: next(iter(live), None)):
        job = language_job(tiny_model, data=examples(64), steps=steps, batch=8)
        session = session_of(job, Checkpoints(interval=NEVER), folder=folder / "checkpoints")
        session.setup.checkpoint.resume(session)
        live.append(session)
        lines = LineFile(folder / "metrics.jsonl")

        def note(metrics: Any) -> None:
            lines.add({"step": metrics.step, "loss": metrics.loss})
            time.sleep(pause)

        outcome = fit(session, EvaluationSchedule(on_step=note))
        time.sleep(pause)  # a model is saved now: more signals come
    return CODES[outcome.stopped]


def fork(folder: Path, steps: int, pause: float) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        for number in HASTE:  # once the run is over, signals that still come would end it
            signal.signal(number, lambda *_: None)
        try:
            code = live(folder, steps, pause)
        finally:
            os._exit(code)
    return pid


def lines_in(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def storm(folder: Path, times: int, seed: int) -> list[dict[str, Any]]:
    """What became of each life."""
    draw, found = random.Random(seed), []
    for _ in range(times):
        before = lines_in(folder)
        pid = fork(folder, NEVER, pause=0.01)
        while lines_in(folder) < before + 2:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        number = draw.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
        began, status, sent = time.monotonic(), 0, 0
        while True:
            if sent < (1 if number == signal.SIGINT else 20):
                os.kill(pid, number)
                sent += 1
            time.sleep(0.001)
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                break
        saved = sorted(p.name for p in (folder / "checkpoints").glob("step-*"))
        found.append(
            {
                "signal": number.name,
                "code": os.waitstatus_to_exitcode(status),
                "seconds": time.monotonic() - began,
                "steps": lines_in(folder),
                "saved": int(saved[-1].removeprefix("step-")) if saved else 0,
            }
        )
    return found


if __name__ == "__main__":
    place, times, seed = sys.argv[1:]
    lives = storm(Path(place), int(times), int(seed))
    reference = Path(place) / "reference"
    reference.mkdir()
    code = os.waitstatus_to_exitcode(os.waitpid(fork(reference, lives[-1]["steps"], 0.0), 0)[1])
    print(json.dumps({"lives": lives, "reference": code}), flush=True)
    os._exit(0)  # taking apart what was loaded would take seconds
