"""The fault campaign: thousands of kills, flips and cuts, on hasten and beside it on others.

    python benchmarks/campaign/run.py --minutes 20 [--only kills ...] [--trainer hasten ...]
    python benchmarks/campaign/run.py --minutes 20 --jobs 2     two batches side by side
    python benchmarks/campaign/run.py --part 0.1                a sample: a tenth of each count
    python benchmarks/campaign/run.py --table                   what is known so far, as Markdown

It may be stopped at any time (Ctrl-C) and goes on where it was: each batch that is done is a line
in ``benchmarks/campaign/results`` (or ``--results``). Everything gets its turn, what is furthest
behind first. HF Trainer runs in this Python; Lightning where ``--peers PYTHON`` has it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from campaign.faults import FAULTS, TRAINERS, Fault  # noqa: E402
from campaign.ledger import Ledger, line_of  # noqa: E402
from campaign.table import share, table, wanted_text  # noqa: E402

RESULTS = Path(__file__).parent / "results"
BATCH_SECONDS = 1800.0  # a batch that takes longer hangs
OVER = 45.0  # seconds that a batch may be begun over the time that is left
Turn = tuple[Fault, str]


class Campaign:
    """Batches until time is up or nothing is wanted any more.

    Args:
        pythons: by trainer, the Python that has it.
        until: when no further batch is begun, by ``time.monotonic``.
        most: cases of a batch; None: as many as each fault has by itself.
        jobs: batches side by side.
        part: of each fault's full count; 1: all of it.
    """

    def __init__(
        self,
        ledger: Ledger,
        pythons: dict[str, str],
        until: float,
        most: int | None = None,
        jobs: int = 1,
        part: float = 1.0,
    ) -> None:
        self.part = part
        self.ledger, self.pythons, self.until, self.most = ledger, pythons, until, most
        self.jobs = jobs
        self.broken: set[tuple[str, str]] = set()  # not tried again in this call
        self._begun: dict[tuple[str, str], set[int]] = defaultdict(set)  # batches of this call
        self.about = versions()
        self._processes: set[subprocess.Popen[Any]] = set()
        self._stopped = False

    def run(self, turns: list[Turn]) -> int:
        """The exit code: 1 where a batch couldn't be done or a case of hasten's wasn't good."""
        running: dict[Future[None], Turn] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                while True:
                    while turn := self._next(turns, running.values()):
                        running[pool.submit(self._do, turn, self._number(turn))] = turn
                    if not running:
                        break
                    for done in wait(running, return_when=FIRST_COMPLETED).done:
                        turn = running.pop(done)
                        done.result()
                        self._tell(turn, turns)
            except BaseException:
                self._stop()
                raise
        bad = sum(
            tally.cases - tally.good
            for fault, trainer in turns
            if trainer == "hasten"
            for tally in [self.ledger.tally(trainer, fault.name)]
        )
        return 1 if bad or self.broken else 0

    def _stop(self) -> None:
        """No batch outlives this, and none of these counts."""
        self._stopped = True
        for process in tuple(self._processes):
            _end(process)

    def _next(self, turns: list[Turn], running: Collection[Turn]) -> Turn | None:
        """The one that is furthest behind and still fits, where there is room for one.

        A second batch of the same is begun beside the first where nothing else is wanted.
        """
        if len(running) == self.jobs:
            return None
        left = self.until - time.monotonic()
        beside = [list(running).count(turn) for turn in turns]
        open_ = [
            (beside[place], self._share(turn), place, turn)
            for place, turn in enumerate(turns)
            if self._share(turn, beside[place]) < self.part
            and (turn[1], turn[0].name) not in self.broken
        ]
        fitting = [entry for entry in open_ if self._batch_seconds(entry[-1]) < left + OVER]
        return min(fitting)[-1] if fitting and left > 0 else None

    def _number(self, turn: Turn) -> int:
        """The first batch that isn't done and that this call hasn't begun; a batch cut off is."""
        fault, trainer = turn
        begun = self._begun[(trainer, fault.name)]
        taken = begun | self.ledger.numbers(trainer, fault.name)
        number = next(n for n in count() if n not in taken)
        begun.add(number)
        return number

    def _share(self, turn: Turn, beside: int = 0) -> float:
        """Of what is wanted, how much is done; with ``beside`` batches under way, as if done."""
        fault, trainer = turn
        tally = self.ledger.tally(trainer, fault.name)
        done = share(fault, trainer, tally)
        under_way = done / tally.batches if tally.batches else 1.0  # unknown: one at a time
        return done + beside * under_way

    def _batch_seconds(self, turn: Turn) -> float:
        tally = self.ledger.tally(turn[1], turn[0].name)
        return tally.seconds / tally.batches if tally.batches else 0.0

    def _left_seconds(self, turn: Turn) -> float:
        """Until it is done, where a batch of it was timed."""
        done = self._share(turn)
        took = self.ledger.tally(turn[1], turn[0].name).seconds
        return took / done * (self.part - done) if 0 < done < self.part else 0.0

    def _do(self, turn: Turn, number: int) -> None:
        fault, trainer = turn
        began = time.monotonic()
        found = self._batch(turn, number)
        if self._stopped:
            return
        if "failed" in found:
            print(f"{trainer} {fault.name}: the batch could not be done: {found['failed']}")
            self.broken.add((trainer, fault.name))
            return
        seconds = time.monotonic() - began
        line = line_of(trainer, fault.name, number, seconds, found, self.about)
        self.ledger.add(line)
        if line["skipped"]:
            self.broken.add((trainer, fault.name))

    def _batch(self, turn: Turn, number: int) -> dict[str, Any]:
        """What a process of its own found, or why it found nothing."""
        fault, trainer = turn
        size = min(fault.batch[trainer], self.most or fault.batch[trainer])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        with tempfile.TemporaryDirectory(prefix="hasten-campaign-") as folder:
            out = Path(folder) / "out.json"
            script = Path(__file__).with_name("batch.py")
            words = [trainer, fault.name, str(number), str(size), str(out)]
            with (Path(folder) / "log").open("w+", errors="replace") as log:
                process = subprocess.Popen(
                    [self.pythons[trainer], "-W", "ignore", str(script), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=environment,  # for what a case starts, too: of this checkout
                )
                self._processes.add(process)
                try:
                    if not self._stopped:
                        process.wait(BATCH_SECONDS)
                except subprocess.TimeoutExpired:
                    return {"failed": f"it wasn't done after {BATCH_SECONDS:.0f} s"}
                finally:
                    _end(process)
                    self._processes.discard(process)
                if not out.exists():
                    log.seek(0)
                    last = (log.read().strip().splitlines() or ["it said nothing"])[-1]
                    return {"failed": f"exit code {process.returncode}, {last[:300]}"}
            found: dict[str, Any] = json.loads(out.read_text())
            return found

    def _tell(self, turn: Turn, turns: list[Turn]) -> None:
        fault, trainer = turn
        tally = self.ledger.tally(trainer, fault.name)
        said = f"not possible here: {tally.skipped}" if tally.skipped else ""
        done = f"{tally.amount:.0f} of {wanted_text(fault, trainer)}"
        eta = sum(self._left_seconds(each) for each in turns) / 60
        unknown = sum(not self._share(each) for each in turns)
        print(
            f"{time.strftime('%H:%M:%S')}  {TRAINERS[trainer]:<10} {fault.name:<12} "
            + (said or f"{tally.good:,} good of {tally.cases:,}; {done}")
            + f"; all done in about {eta:.0f} min"
            + (f" and {unknown} kinds not begun" if unknown else ""),
            flush=True,
        )


def _end(process: subprocess.Popen[Any]) -> None:
    """The batch and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def versions() -> dict[str, str]:
    """What the figures are of."""
    wanted = ("torch", "transformers", "safetensors")
    found = {name: importlib.metadata.version(name) for name in wanted}
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return found | ({"hasten": commit} if commit else {})


def pythons(peers: str | None) -> dict[str, str]:
    """By trainer, a Python that has it."""
    found = {"hasten": sys.executable, "transformers": sys.executable}
    if peers:
        found["lightning"] = peers
    elif importlib.util.find_spec("lightning"):
        found["lightning"] = sys.executable
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--minutes", type=float, default=60.0, help="no batch is begun after them")
    parser.add_argument("--only", action="append", choices=names, help="a fault, may be repeated")
    parser.add_argument("--trainer", action="append", choices=list(TRAINERS), help="may repeat")
    parser.add_argument("--batch", type=int, help="cases at once; fewer where a machine is busy")
    parser.add_argument("--part", type=float, default=1.0, help="of each full count, 0 to 1")
    parser.add_argument("--jobs", type=int, default=1, help="batches side by side")
    parser.add_argument("--peers", help="a Python that has Lightning")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder to go on in")
    parser.add_argument("--table", action="store_true", help="print what is known, run nothing")
    given = parser.parse_args()
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}; it is at least 1")
    if not 0 < given.part <= 1:
        parser.error(f"--part is {given.part}; it is above 0 and at most 1")
    ledger = Ledger(given.results)
    if given.table:
        print(table(ledger))
        return 0
    known = pythons(given.peers)
    turns = [
        (fault, trainer)
        for fault in FAULTS
        for trainer in fault.wanted
        if trainer in known
        and fault.name in (given.only or names)
        and trainer in (given.trainer or TRAINERS)
    ]
    if "lightning" not in known:
        print("Lightning is left out: name a Python that has it with --peers")
    until = time.monotonic() + 60 * given.minutes
    campaign = Campaign(ledger, known, until, given.batch, given.jobs, given.part)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no batch is left behind
    code = 0
    try:
        code = campaign.run(turns)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here")
    print(f"\n{table(ledger)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
