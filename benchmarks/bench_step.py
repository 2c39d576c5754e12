"""A training step of hasten's against what its users would take instead: speed, memory, loss.

    python benchmarks/bench_step.py --rounds 5 --peers PYTHON --json step.json
    python benchmarks/bench_step.py --loss --rounds 3 --peers PYTHON --json loss.json
    python benchmarks/bench_step.py --variants hasten --profile
    python benchmarks/bench_step.py --workload fixed --architecture v3 --hidden 1024 ...

Every run is a process of its own with the same weights, examples, batch of 32, AdamW, clipping,
threads, waiting and allocator; rounds go over all variants in random order. PYTHON is the
interpreter of an environment with trl, datasets and lightning; without it these variants are "not
installed".

Tokens/s are sums over the steps after the warm-up, padding not counted: steps of grouped or packed
examples differ in length, and a median over unlike steps would be nobody's speed (it has a column
of its own, as has the whole run from the model's loading on). Most variants take hasten's examples
step by step; grouping and packing choose their own, except under ``--loss``, where only packing
does. A run whose tokens or first loss differ from hasten's is reported under the table.

With ``--abreast`` the variants of a round run at once, and one of them at a time has its turn, a
step long. Ratios of variants with the same examples are then over pairs of equal steps, which a
machine whose speed changes from minute to minute disturbs little.

What torch.compile has compiled is kept from round to round, as hasten's kernels are from run to run
(in the user's cache, compiled once per machine): the compile column is the longest, that is the
first round's. Seconds to the first step count from the process's start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smoke import arguments as asked_of
from step.given import Given, Settings

WORKLOADS, ARCHITECTURES = ("ragged", "fixed", "lora"), ("llama", "qwen2", "v2_lite", "v3")
TINY = {"hidden": 64, "layers": 2, "vocabulary": 1024, "longest": 256, "examples": 256}
SWEEP_SECONDS = 10.0  # of matrix products, for the ceiling that MFU refers to


def main() -> None:
    chosen = arguments()
    if chosen.variant:
        from step.variant import run

        run(chosen.variant, chosen.folder, chosen.out, chosen.profile)
    elif chosen.sweep:
        sweep(chosen.sweep, chosen.out)
    else:
        if chosen.folder:
            chosen.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
            Bench(chosen, Path(place)).run()


class Run:
    """The process of one run of one variant, which works in turns."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out = name, out
        self.process: subprocess.Popen[bytes] | None = None
        self.error: str | None = None
        self.done = False

    def turn(self, command: list[str], env: dict[str, str], timeout: float) -> None:
        """Start or continue it, and wait until it stops itself or ends, for ``timeout`` seconds."""
        if self.process is None:
            shutil.rmtree(self.out, ignore_errors=True)
            self.out.mkdir(parents=True)
            with (self.out / "said.txt").open("w") as file:
                self.process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        else:
            self.process.send_signal(signal.SIGCONT)
        until = time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.process.pid, os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status):
                return None
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                return self._ended(self.process.returncode)
            if time.monotonic() > until:
                self.error = f"not done after {timeout} s"
                return None
            time.sleep(0.001)

    def _ended(self, code: int) -> None:
        self.done = code == 0
        if code:
            said = (self.out / "said.txt").read_text(errors="replace").strip().splitlines()[-1:]
            self.error = f"exit code {code}: {''.join(said)[:300]}"

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            self.process.wait()

    def result(self) -> dict[str, Any]:
        if self.error is not None:
            return {"error": self.error}
        found: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        return found


class Bench:
    """One invocation: prepares, runs variants in rounds, keeps what it has, prints."""

    def __init__(self, chosen: argparse.Namespace, place: Path) -> None:
        from step import machine
        from step.variant import VARIANTS

        self.chosen, self.place, self.variants = chosen, place, VARIANTS
        self.names = list(chosen.variants or VARIANTS)
        self.env = machine.environment(chosen.allocator, chosen.threads, chosen.isa)
        self.env["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")  # empty at the first round
        self.machine = machine
        self.found: dict[str, Any] = {
            "settings": asdict(settings_of(chosen)),
            "allocator": chosen.allocator,
            "threads": chosen.threads,
            "machine": machine.description(),
            "instruction_sets": machine.instruction_sets_used(self.env),
            "versions": machine.versions(chosen.peers),
            "variants": self.names,
            "not_installed": {},
            "ceiling": None,
            "runs": [],
        }

    def run(self) -> None:
        from step.prepare import prepare
        from step.where import flops_per_token

        self.keep()  # before hours are spent on figures that have no place
        (self.place / "given").mkdir()
        given = prepare(settings_of(self.chosen), self.place / "given")
        self.found["step_tokens"] = [
            sum(int(given.train.lengths[i]) for i in step) for step in given.steps
        ]
        self.found["flops_per_token"] = flops_per_token(given)
        print(describe(given), flush=True)
        for name in self.names:
            lacking = self.machine.missing(self.python(name), self.variants[name].needs)
            if lacking:
                self.found["not_installed"][name] = lacking
        if self.chosen.sweep_seconds:
            self.found["ceiling"] = self.ceiling()
        ready = [name for name in self.names if name not in self.found["not_installed"]]
        draw = random.Random(self.chosen.seed)
        for number in range(self.chosen.rounds):
            order = draw.sample(ready, len(ready))
            for names in [order] if self.chosen.abreast else [[name] for name in order]:
                self.found["runs"] += self.together(names, number)
                self.keep()
        self.keep()
        self.show(given)

    def python(self, name: str) -> str:
        """The peers' interpreter for variants that need its packages, this one for the others."""
        return self.chosen.peers if self.variants[name].needs else sys.executable

    def together(self, names: list[str], number: int) -> list[dict[str, Any]]:
        """One run of each variant; one that fails is noted, and the others go on.

        Each gets its turn until it stops itself or ends; turns go forth and back.
        """
        load = os.getloadavg()[0]
        print(f"round {number + 1}, {', '.join(names)}, load {load:.2f}", flush=True)
        runs = [Run(name, self.place / f"out-{name}") for name in names]
        try:
            while waiting := [run for run in runs if run.error is None and not run.done]:
                for run in waiting:
                    run.turn(self.command(run), self.env, self.chosen.timeout)
                runs.reverse()
        finally:
            for run in runs:
                run.kill()
        return [
            {
                "variant": run.name,
                "round": number,
                "load_before": load,
                "chose_records": self.variants[run.name].chooses(self.chosen.loss),
                **run.result(),
            }
            for run in runs
        ]

    def command(self, run: Run) -> list[str]:
        command = [self.python(run.name), __file__, "--variant", run.name, "--out", str(run.out)]
        command += ["--folder", str(self.place / "given")]
        profiled = self.chosen.profile and run.name.startswith("hasten")
        return [*command, "--profile"] if profiled else command

    def ceiling(self) -> float | None:
        """FLOP/s of the best bf16 product of a short sweep, on as many threads as the variants
        have.
        """
        out = self.place / "sweep"
        order = [sys.executable, __file__, "--sweep", str(self.chosen.sweep_seconds)]
        done = subprocess.run([*order, "--out", str(out)], env=self.env)
        return None if done.returncode else float(out.read_text())

    def keep(self) -> None:
        """Raw numbers so far; the file is whole at any time."""
        path: Path | None = self.chosen.json
        if path is not None:
            part = path.with_name(f".{path.name}.part")
            try:
                part.write_text(json.dumps(self.found, indent=1))
                part.replace(path)
            except OSError as error:
                raise SystemExit(f"--json {path}: {error.strerror or error}") from error

    def show(self, given: Given) -> None:
        from step import table

        found = self.found
        print("\n" + "\n".join(table.variants_table(found)))
        print("\n".join(table.remarks(found)))
        for run in found["runs"]:
            if run.get("profile"):
                print("\n" + "\n".join(table.profile_table(run["profile"])))
        print("\n" + "\n".join(table.circumstances(found)))


def settings_of(chosen: argparse.Namespace) -> Settings:
    sizes = dict(TINY) if chosen.smoke else {"hidden": chosen.hidden, "examples": chosen.examples}
    return Settings(
        workload=chosen.workload,
        architecture=chosen.architecture,
        steps=chosen.steps,
        warmup=min(chosen.warmup, max(chosen.steps - 1, 0)),
        cpu_time=chosen.cpu_time,
        abreast=chosen.abreast,
        matched=chosen.loss,
        seed=chosen.seed,
        **sizes,
    )


def describe(given: Given) -> str:
    import numpy as np

    lengths = given.train.lengths
    marks = "/".join(f"{n:.0f}" for n in np.percentile(lengths, (10, 50, 90, 99, 100)))
    share = float(given.train.trained.mean())
    return (
        f"{len(lengths):,} examples of {given.settings.architecture}, lengths p10/50/90/99/max "
        f"{marks}, {share:.0%} of tokens trained, {given.budget():,} tokens in the run"
    )


def sweep(seconds: float, out: Path) -> None:
    from hasten.machine.benchmark import measure

    best = measure(dtypes=("bf16",), seconds=seconds).best()
    if best is None:
        raise SystemExit("no bf16 product could be measured")
    out.write_text(str(best.best))


def arguments() -> argparse.Namespace:
    from step.machine import ISAS
    from step.variant import VARIANTS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, default="ragged")
    add("--architecture", choices=ARCHITECTURES, default="llama")
    add("--hidden", type=int, default=384, help="width of the model")
    add("--examples", type=int, default=3840, help="examples to train on, whole steps of 32")
    add("--variants", nargs="+", choices=VARIANTS, help="all of them if left out")
    add("--steps", type=int, default=60)
    add("--warmup", type=int, default=10, help="steps before the steady figures begin")
    add("--rounds", type=int, default=3)
    add("--loss", action="store_true", help="order-matched batches, for the eval loss")
    add("--profile", action="store_true", help="where hasten's time goes; slows its steps")
    add("--peers", default=sys.executable, help="Python of an environment with the peers")
    add("--allocator", choices=("glibc", "none"), default="glibc")
    cores = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    add("--threads", type=int, default=int(cores), help="of every variant; usable cores")
    add("--cpu-time", action="store_true", help="CPU seconds, for a busy machine; one thread")
    add("--abreast", action="store_true", help="variants of a round take turns, step by step")
    add("--timeout", type=float, default=3600.0, help="seconds of one run")
    add("--sweep-seconds", type=float, default=SWEEP_SECONDS, help="for MFU; 0: none")
    add("--isa", choices=sorted(ISAS), help="the most that any library may use")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="raw numbers, written after each run")
    add("--folder", type=Path, help="where to work; a temporary place if left out")
    add("--variant", help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    add("--sweep", type=float, help=argparse.SUPPRESS)
    chosen = asked_of(parser, steps=3, warmup=1, rounds=1, sweep_seconds=1.0)
    if min(chosen.steps, chosen.rounds, chosen.threads) < 1:
        parser.error("steps, rounds and threads are at least 1")
    if chosen.cpu_time and chosen.threads != 1:
        parser.error("--cpu-time counts the waiting of idle threads too: give --threads 1")
    if chosen.examples < 32 or chosen.examples % 32:
        parser.error(f"--examples {chosen.examples}: give whole steps of 32")
    if chosen.hidden < 64 or chosen.hidden % 64:
        parser.error(f"--hidden {chosen.hidden}: give a multiple of 64")
    if shutil.which(chosen.peers) is None:
        parser.error(f"--peers {chosen.peers}: no such interpreter")
    return chosen


if __name__ == "__main__":
    main()
