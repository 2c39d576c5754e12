"""Two ranks that train a tiny model under the supervisor while somebody kills and stops them.

    python tests/faults/rank_soak.py FOLDER KILLS STOPS SEED [FLIPS]

Ranks are forked from this process, which has torch loaded and has computed nothing: an attempt
begins in tens of milliseconds. A flip damages the newest checkpoint and then kills a rank. What it
prints is JSON: the exit code, and for each fault the seconds from it to the next step. The same run
without faults is in FOLDER/reference. Ranks wait for who disturbs them, so that no machine is too
busy for a fault to come in time.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil

from hasten.machine import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  # what ranks need is loaded once

from fault_kit import damage
from hasten.core.job import GlobalBatch
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.launch.ranks import TIMEOUT, naming_ranks, process_group
from hasten.launch.supervisor import RankTimeouts, SupervisedRanks, Supervision, supervise
from hasten.machine.processes import (
    Heartbeat,
    attempt_folder,
    attempt_number,
    exit_with_parent,
    reporting_errors,
)
from hasten.parts.checkpoint import STATE, checkpoints
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.ddp import DDP
from hasten.training.folder import LineFile, keep_lines_until
from tiny import examples, language_job, session_of, tiny_model

gc.freeze()  # what is loaded: ranks look for garbage in what is their own
HANG_SECONDS = 1.0
MORE = 6  # steps between two faults, so that each attempt saves something
SPARE = 3  # steps in which a fault comes
KILL, STOP, FLIP = "SIGKILL", "SIGSTOP", "flip"
TWO = DDP()
HOLD = "hold"  # a file that says after which step ranks wait


@dataclass
class Forked:
    """A forked process with what a supervisor asks of one."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        while self._reap(0) is None:
            pass
        assert self.code is not None
        return self.code

    def _reap(self, how: int) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def session_in(
    folder: Path,
    steps: int,
    pause: float,
    architecture: str = "llama",
    layout: Technique = TWO,
) -> Session:
    """The job that is trained; each example takes ``pause`` seconds more to lay out."""
    job = language_job(lambda: tiny_model(architecture), data=examples(32), steps=steps, batch=8)
    plain = job.collate

    def slow(batch: Sequence[Any]) -> Any:
        time.sleep(pause)
        return plain(batch)

    job = replace(job, collate=slow)
    assert job.batch == GlobalBatch(examples=8)
    world = environment.world()
    plan = [Checkpoints(interval=3), *([layout] if world.size > 1 else [])]
    place = folder / "checkpoints"
    return session_of(job, *plan, architecture=architecture, folder=place, world=world)


def train(
    folder: Path, steps: int, pause: float = 0.01, timeout: datetime.timedelta = TIMEOUT
) -> None:
    """A rank's life: meet the others, resume, train, a line and a heartbeat for each step."""
    torch.set_num_threads(1)
    world = environment.world()
    with (
        reporting_errors(),
        process_group(world, "cpu", timeout),
        reporting_errors(),
        naming_ranks(world),
    ):
        _train(folder, steps, pause, world.rank)


def _train(folder: Path, steps: int, pause: float, rank: int) -> None:
    session = session_in(folder, steps, pause)
    session.setup.checkpoint.resume(session)
    heartbeat, lines = Heartbeat(attempt_folder(), rank), None
    heartbeat.beat(session.progress.step)
    if rank == 0:
        if attempt_number() > 1:
            keep_lines_until(folder, session.progress.step)
        lines = LineFile(folder / "metrics.jsonl")
    for metrics in training(session):
        if lines is not None:
            lines.add({"step": metrics.step, "loss": metrics.loss})
        heartbeat.beat(metrics.step)
        while held(folder, metrics.step):
            time.sleep(0.002)
    heartbeat.beat(session.progress.step, over=True)
    if dist.is_initialized():
        dist.barrier()


def hold(folder: Path, step: int) -> None:
    """Ranks wait after this step; a later call, or the file's end, lets them go on."""
    part = folder / f"{HOLD}.part"
    part.write_text(str(step))
    part.replace(folder / HOLD)


def held(folder: Path, step: int) -> bool:
    try:
        return step >= int((folder / HOLD).read_text())
    except OSError:
        return False


class Killer(threading.Thread):
    """Kills or stops a rank at random, again and again, each time after some steps."""

    def __init__(self, folder: Path, faults: Sequence[str], seed: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.faults, self.draw = folder, faults, random.Random(seed)
        self.running: dict[int, Forked] = {}
        self.recoveries: list[tuple[str, float]] = []
        self.stopped = False  # whether a rank that runs is
        if faults:
            hold(folder, MORE + SPARE)

    def run(self) -> None:
        for fault in self.faults:
            step = self._step()
            self._until(step + MORE, SPARE)
            time.sleep(self.draw.uniform(0, 0.1))
            victim = self.running[self.draw.randrange(len(self.running))]
            begun, before = time.monotonic(), dict(self.running)
            if fault == FLIP:
                self._flip()
            if fault == STOP:
                self._stop(victim)
            else:
                os.kill(victim.pid, signal.SIGKILL)
            while any(self.running.get(r) is p for r, p in before.items()):
                time.sleep(0.002)  # until all ranks are others
            self._until(0, 2)
            self.recoveries.append((fault, time.monotonic() - begun))
        if self.faults:
            (self.folder / HOLD).unlink()

    def _stop(self, victim: Forked) -> None:
        os.kill(victim.pid, signal.SIGSTOP)
        while psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.002)
        self.stopped = True

    def _flip(self) -> None:
        """One bit of the newest checkpoint, unless it is taken away meanwhile."""
        with contextlib.suppress(OSError, IndexError):
            damage(checkpoints(self.folder / "checkpoints")[-1] / STATE, "flip", self.draw)

    def _until(self, step: int, spare: int) -> None:
        """Until the ranks that run now have done a step beyond ``step``; a few more they may."""
        size = self._size()
        hold(self.folder, max(self._step(), step) + spare)
        while self._size() == size or self._step() <= step:
            time.sleep(0.002)

    def _size(self) -> tuple[float, int]:
        try:
            found = (self.folder / "metrics.jsonl").stat()
        except OSError:
            return 0.0, 0
        return found.st_mtime, found.st_size

    def _step(self) -> int:
        try:
            text = (self.folder / "metrics.jsonl").read_text()
        except OSError:
            return 0
        whole = [line for line in text.split("\n")[:-1] if line]
        return json.loads(whole[-1])["step"] if whole else 0


class Patience:
    """Limits of a supervisor that waits long for busy ranks, and not for a stopped one."""

    start = 60.0

    def __init__(self, killer: Killer, hang: float) -> None:
        self.killer, self.stopped_hang = killer, hang

    @property
    def hang(self) -> float:
        return self.stopped_hang if self.killer.stopped else 60.0


def soak(
    folder: Path,
    faults: Sequence[str],
    seed: int,
    steps: int,
    pause: float = 0.01,
) -> dict[str, Any]:
    """Train under faults; what happened."""
    killer = Killer(folder, faults, seed)

    def launch(rank: int, variables: Mapping[str, str], arguments: Sequence[str]) -> Forked:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                environment.take_over(variables)
                exit_with_parent()
                train(folder, steps, pause)
                code = 0
            finally:
                os._exit(code)
        killer.stopped = False
        killer.running[rank] = Forked(pid)
        return killer.running[rank]

    killer.start()
    ranks = SupervisedRanks(lambda count, trained: [], lambda rank, count: {}, 2, 2, launch)
    limits = cast(RankTimeouts, Patience(killer, HANG_SECONDS))
    supervision = Supervision(len(faults) + 9, limits)
    code = supervise(ranks, supervision, folder / "data", folder / "restarts.jsonl")
    return {"code": code, "recoveries": killer.recoveries, "steps": steps}


def undisturbed(folder: Path, steps: int) -> None:
    """The same run without faults, and without haste."""
    soak(folder, [], 0, steps, pause=0.0)


if __name__ == "__main__":
    place, kills, stops, seed, flips = (*sys.argv[1:], "0")[:5]
    planned = [KILL] * int(kills) + [STOP] * int(stops) + [FLIP] * int(flips)
    random.Random(int(seed)).shuffle(planned)
    length = (len(planned) + 1) * (MORE + SPARE + 4)
    (Path(place) / "reference").mkdir()
    print(json.dumps(soak(Path(place), planned, int(seed), length)), flush=True)
    undisturbed(Path(place) / "reference", length)
    os._exit(0)  # taking apart what was loaded would take seconds
