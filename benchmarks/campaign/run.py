"""The fault campaign: thousands of kills, flips and cuts, on hasten and beside it on others.

    python benchmarks/campaign/run.py --minutes 20 [--only kills ...] [--trainer hasten ...]
    python benchmarks/campaign/run.py --minutes 20 --jobs 2     two batches side by side
    python benchmarks/campaign/run.py --part 0.1                a sample: a tenth of each count
    python benchmarks/campaign/run.py --table                   what is known so far, as Markdown

It may be stopped at any time (Ctrl-C) and goes on where it was: each batch that is done is a line
in ``benchmarks/campaign/results`` (or ``--results``). All kinds advance alike. HF Trainer runs in
this Python; Lightning where ``--peers PYTHON`` has it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from campaign.faults import FAULTS, TRAINERS, Fault  # noqa: E402
from campaign.ledger import Ledger, line_of  # noqa: E402
from campaign.table import table  # noqa: E402

RESULTS = Path(__file__).parent / "results"
BATCH_SECONDS = 1800.0  # a batch that takes longer hangs
Batch = tuple[Fault, str, int]  # of a trainer, with its number


def batches_of(kinds: Sequence[tuple[Fault, str]], part: float, ledger: Ledger) -> list[Batch]:
    """What isn't done of the batches that are wanted, in an order in which all kinds advance alike.

    A batch that was cut off left no line, so it is among them.
    """
    every: list[tuple[float, Batch]] = []
    for fault, trainer in kinds:
        done = ledger.numbers(trainer, fault.name)
        count = math.ceil(part * fault.wanted[trainer] / fault.batch[trainer])
        every += [(n / count, (fault, trainer, n)) for n in range(count) if n not in done]
    return [batch for _, batch in sorted(every, key=lambda entry: entry[0])]


class Campaign:
    """Runs batches until time is up or all are done.

    Args:
        pythons: by trainer, the Python that has it.
        until: when no further batch is begun, by ``time.monotonic``.
        jobs: batches side by side.
    """

    def __init__(
        self, ledger: Ledger, pythons: dict[str, str], until: float, jobs: int = 1
    ) -> None:
        self.ledger, self.pythons, self.until, self.jobs = ledger, pythons, until, jobs
        self.broken: set[tuple[str, str]] = set()  # not tried again in this call
        self.about = versions()
        self._processes: set[subprocess.Popen[Any]] = set()
        self._stop = threading.Event()

    def run(self, batches: Sequence[Batch]) -> int:
        """The exit code: 1 where a batch couldn't be done or a case of hasten's wasn't good."""
        with ThreadPoolExecutor(self.jobs) as pool:
            waiting = [pool.submit(self._do, batch) for batch in batches]
            try:
                for number, done in enumerate(as_completed(waiting), start=1):
                    if words := done.result():
                        now = time.strftime("%H:%M:%S")
                        print(f"{now}  {number}/{len(batches)}  {words}", flush=True)
            except BaseException:  # no batch outlives this, and none of these counts
                self._stop.set()
                for process in tuple(self._processes):
                    _end(process)
                pool.shutdown(cancel_futures=True)
                raise
        own = (self.ledger.tally("hasten", fault.name) for fault in FAULTS)
        return 1 if self.broken or any(tally.good < tally.cases for tally in own) else 0

    def _do(self, batch: Batch) -> str:
        """Runs a batch and stores its line; a line of text about it, if it was begun."""
        fault, trainer, number = batch
        kind, began = (trainer, fault.name), time.monotonic()
        if self._stop.is_set() or began > self.until or kind in self.broken:
            return ""
        found = self._batch(batch)
        if self._stop.is_set():
            return ""
        if "failed" in found:
            self.broken.add(kind)
            return f"{trainer} {fault.name}: the batch could not be done: {found['failed']}"
        line = line_of(*kind, number, time.monotonic() - began, found, self.about)
        self.ledger.add(line)
        if line["skipped"]:
            self.broken.add(kind)
            return f"{trainer} {fault.name}: not possible here: {line['skipped']}"
        return f"{trainer} {fault.name}: {line['good']:,} good of {line['cases']:,}"

    def _batch(self, batch: Batch) -> dict[str, Any]:
        """What a process of its own found, or why it found nothing."""
        fault, trainer, number = batch
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        with tempfile.TemporaryDirectory(prefix="hasten-campaign-") as folder:
            out = Path(folder) / "out.json"
            script = Path(__file__).with_name("batch.py")
            words = [trainer, fault.name, str(number), str(fault.batch[trainer]), str(out)]
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
                    if not self._stop.is_set():
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
    kinds = [
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
    campaign = Campaign(ledger, known, until, given.jobs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no batch is left behind
    code = 0
    try:
        code = campaign.run(batches_of(kinds, given.part, ledger))
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here")
    print(f"\n{table(ledger)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
