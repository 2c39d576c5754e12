"""Ranks of which one is killed at a random moment, again and again: nothing that was saved is lost.

    python tests/faults/rank_kills.py FOLDER KILLS SEED [LAYOUT]

A life trains a tiny model on 2 or 4 ranks, forked from this process. The victim and the delay
within its moment are drawn. Moments take turns in an order that is drawn: ``start`` (groups of
ranks are formed and the model is built), ``load`` (the ranks resume), ``step``, ``save`` (a thread
writes the rank's part, or waits for others' parts) and ``rename``. The disk waits briefly before
and after each call, so that kills come between the calls, too. No process ends the other ranks:
they have to notice it themselves.

What it prints is JSON: for each kill the moment, the rank, the seconds until all other ranks had
ended, the step of the newest complete checkpoint before it, and the step from which the next life
that got so far resumed. ``same``: the last life's losses, and those that were kept of the lives
before it, are those of a run that wasn't disturbed.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import torch
import transformers.models.deepseek_v3.modeling_deepseek_v3  # noqa: F401
from rank_soak import Forked, session_in  # loads what ranks need

from fault_kit import CountedDisk
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.launch.ranks import naming_ranks, process_group, rank_environment
from hasten.machine import environment
from hasten.machine.environment import World
from hasten.machine.processes import end_with_parent
from hasten.parts.checkpoint import checkpoints
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.training.folder import LineFile, keep_lines_until

LAYOUTS: dict[str, tuple[int, str, Technique]] = {
    "fsdp2 2": (2, "llama", FSDP2()),
    "tp 2": (2, "llama", TensorParallel()),
    "pp 2": (2, "llama", Pipeline()),
    "ep 2": (2, "deepseek_v3", ExpertParallel()),
    "fsdp2 4": (4, "llama", FSDP2()),
    "shard 2 x tp 2": (4, "llama", Hybrid(shard=2, tp=2)),
    "pp 2 x shard 2": (4, "llama", Hybrid(pp=2, shard=2)),
    "shard 4 x ep 2": (4, "deepseek_v3", Hybrid(shard=4, ep=2)),
}
NOTHING, START, LOAD, STEP, SAVE, RENAME = range(6)
MOMENTS = {"start": START, "load": LOAD, "step": STEP, "save": SAVE, "rename": RENAME}
FEW = 6  # steps of the last life
MANY = 10_000
BRIEF, AT_RENAME = 0.004, 0.03  # seconds that the disk waits before and after a call
LONGEST = 300.0  # seconds that a life may take until its moment, and ranks until they have ended


class Board:
    """What each rank does just now, in memory that all of them share."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, 2 * ranks)

    def put(self, rank: int, moment: int, writer: bool = False) -> None:
        self._memory[2 * rank + writer] = moment

    def moment(self, rank: int) -> int:
        """Returns that of the writer, if it is at work."""
        return self._memory[2 * rank + 1] or self._memory[2 * rank]


class MarkingDisk(CountedDisk):
    """Shows on the board what it does, and takes a little time for it."""

    def __init__(self, board: Board, rank: int) -> None:
        super().__init__()
        self.board, self.rank = board, rank

    def at(self, name: str) -> None:
        renames = name in ("rename", "renamed")
        self.board.put(self.rank, RENAME if renames else SAVE, writer=True)
        time.sleep(AT_RENAME if renames else BRIEF)


def train(folder: Path, steps: int, layout: str, world: World, board: Board | None) -> None:
    """A rank's life: meet the others, resume, train; the first one writes a line for each step."""
    torch.set_num_threads(1)
    with process_group(world, "cpu"), naming_ranks(world):
        if board is not None:
            board.put(world.rank, START)
        _train(folder, steps, layout, world, board)


def _train(folder: Path, steps: int, layout: str, world: World, board: Board | None) -> None:
    _, architecture, technique = LAYOUTS[layout]
    session = session_in(folder, steps, 0.0, architecture, technique)
    kept: Any = session.setup.checkpoint
    if board is not None:
        kept.keeper.saver.local.disk = MarkingDisk(board, world.rank)
        write = kept.keeper.saver._write

        def marked(*given: Any) -> None:
            board.put(world.rank, SAVE, writer=True)
            try:
                write(*given)
            finally:
                board.put(world.rank, NOTHING, writer=True)

        kept.keeper.saver._write = marked
        board.put(world.rank, LOAD)
    kept.resume(session)
    told = None
    if world.is_main:
        keep_lines_until(folder, session.progress.step)
        LineFile(folder / "lives.jsonl").add({"resumed": session.progress.step})
        told = LineFile(folder / "metrics.jsonl")
    if board is not None:
        board.put(world.rank, STEP)
    for metrics in training(session):
        if told is not None:
            told.add({"step": metrics.step, "loss": metrics.loss})


def start(
    folder: Path, steps: int, layout: str, board: Board | None, meeting: Path
) -> list[Forked]:
    ranks = LAYOUTS[layout][0]
    meeting.mkdir(parents=True)
    started = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                end_with_parent()
                with (meeting / f"log-{rank}").open("w") as log:
                    os.dup2(log.fileno(), 2)
                environment.take_over(rank_environment(rank, ranks, meeting, 1))
                train(folder, steps, layout, World(rank, rank, ranks), board)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        started.append(Forked(pid))
    return started


@dataclass
class Kill:
    """One kill, and what came of it.

    Args:
        wanted: the moment that was waited for.
        moment: what the rank did when it was killed.
        waited: seconds from the kill until all other ranks had ended by themselves.
        saved: step of the newest checkpoint that was complete before it.
        lives: lives that have resumed so far.
    """

    wanted: str
    moment: str
    rank: int
    waited: float
    saved: int
    lives: int


def killed_life(folder: Path, layout: str, wanted: str, draw: random.Random, meeting: Path) -> Kill:
    """Starts the ranks, and kills one of them at this moment."""
    board = Board(LAYOUTS[layout][0])
    rank = draw.randrange(LAYOUTS[layout][0])
    ranks = start(folder, MANY, layout, board, meeting)
    try:
        until(lambda: board.moment(rank) >= min(MOMENTS[wanted], STEP), meeting)
        if MOMENTS[wanted] >= STEP:  # those before come once
            time.sleep(draw.uniform(0.0, 0.5))
            until(lambda: board.moment(rank) == MOMENTS[wanted], meeting)
        time.sleep(draw.uniform(0.0, {"start": 0.3, "rename": 2 * AT_RENAME}.get(wanted, 0.05)))
        saved, moment = newest(folder), board.moment(rank)
        ranks[rank].kill()
        began = time.monotonic()
        ranks[rank].wait()
        until(lambda: all(one.poll() is not None for one in ranks), meeting)
        waited = time.monotonic() - began
    except SystemExit as error:
        states = [(board.moment(number), one.poll()) for number, one in enumerate(ranks)]
        raise SystemExit(f"{error}; {layout}, {wanted} of rank {rank}: {states}") from None
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    names = {number: name for name, number in MOMENTS.items()}
    return Kill(wanted, names[moment], rank, waited, saved, len(lines(folder, "lives")))


def newest(folder: Path) -> int:
    """Returns the step of the newest complete checkpoint; 0 without one."""
    found = [path.name for path in checkpoints(folder / "checkpoints")]
    return int(found[-1].removeprefix("step-")) if found else 0


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(done: Any, meeting: Path) -> None:
    end = time.monotonic() + LONGEST
    while not done():
        if time.monotonic() > end:
            logs = [path.read_text() for path in sorted(meeting.glob("log-*"))]
            raise SystemExit(f"{meeting.name}: not within {LONGEST:.0f} s: {logs}")
        time.sleep(0.0005)


def whole_life(folder: Path, layout: str, steps: int, meeting: Path) -> None:
    """Starts the ranks, which train until they have done so many steps."""
    ranks = start(folder, steps, layout, None, meeting)
    codes = [one.wait() for one in ranks]
    if any(codes):
        raise SystemExit("\n".join(p.read_text() for p in sorted(meeting.glob("log-*"))))


def is_fork_server(process: psutil.Process) -> bool:
    """Whether tests fork their processes from this one, which stays."""
    return process.ppid() == os.getpid() and "warm.py" in " ".join(process.cmdline())


def run(folder: Path, layout: str, kills: int, draw: random.Random) -> dict[str, Any]:
    """A run under kills, and the same run without them."""
    (folder / "reference").mkdir(parents=True)
    found, moments = list[Kill](), list(MOMENTS)
    for number in range(kills):
        if number % len(moments) == 0:
            draw.shuffle(moments)
        wanted, meeting = moments[number % len(moments)], folder / f"meeting-{number}"
        found.append(killed_life(folder, layout, wanted, draw, meeting))
    steps = FEW + newest(folder)
    whole_life(folder, layout, steps, folder / "meeting-last")
    whole_life(folder / "reference", layout, steps, folder / "meeting-reference")
    if left_over := [
        child for child in psutil.Process().children(True) if not is_fork_server(child)
    ]:
        raise SystemExit(f"processes are left over: {left_over}")
    lives = [life["resumed"] for life in lines(folder, "lives")]
    told = [{**asdict(kill), "resumed": lives[kill.lives]} for kill in found]
    same = lines(folder, "metrics") == lines(folder / "reference", "metrics")
    damaged = [path.name for path in (folder / "checkpoints").glob(".damaged*")]
    same = same and len(lines(folder, "metrics")) == steps
    return {"layout": layout, "kills": told, "same": same, "damaged": damaged}


if __name__ == "__main__":
    place, kills, seed, *chosen = sys.argv[1:]
    draw = random.Random(int(seed))
    layout = chosen[0] if chosen else draw.choice(list(LAYOUTS))
    print(json.dumps(run(Path(place), layout, int(kills), draw)), flush=True)
    os._exit(0)  # taking apart what was loaded would take seconds
