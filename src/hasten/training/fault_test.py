"""``hasten check --faults``: kills, damages, resumes and compares the recipe's job.

    undisturbed: some steps with a checkpoint every second one
    kills: the same, killed at random moments and started again until it is done
    a flipped bit: one bit in the newest checkpoint; the one before has to be used
    a full disk: no file may grow to the size of a checkpoint; training has to continue

After every fault, the losses and the saved model have to be those of the undisturbed
run, bit for bit. All of it happens in ``output/faults``, which is removed if every
check passes.
"""

from __future__ import annotations

import json
import os
import random
import resource
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.core.plan import name_of
from hasten.errors import FAILED, InputError
from hasten.machine import environment
from hasten.machine.locks import only_run_in
from hasten.parts.checkpoint import checkpoints
from hasten.recipe.prepare import check_folder
from hasten.recipe.schema import Recipe, load_recipe

STEPS, EVERY, KILLS = 8, 2, 3
PLAIN: dict[str, Any] = dict.fromkeys(("max_restarts", "eval_every", "patience"), 0)
PLAIN |= {
    "max_steps": STEPS,
    "live_tuning": False,
}  # this check depends on time
PLAIN |= dict.fromkeys(("epochs", "max_tokens", "leave_file", "leave_command"))
PATIENCE_SECONDS = 1800.0  # for one start of the job


class CheckFailedError(Exception):
    """A check that failed, in one sentence."""


@dataclass(frozen=True)
class UndisturbedRun:
    """Results of the undisturbed run."""

    losses: list[float]
    model: dict[str, bytes]
    step_seconds: float


def check_faults(path: Path, overrides: Sequence[str], seed: int | None = None) -> int:
    """Runs the checks and prints a line for each; the exit code is 4 if one failed."""
    recipe = load_recipe(path, overrides)
    output, failed = Path(recipe.output), 0
    folder = output / "faults"
    seed = int(time.time()) if seed is None else seed
    check_folder(output)
    with only_run_in(output):  # another self-test would remove this one's folder
        if folder.exists() and not (folder / "by-hasten").is_file():
            raise InputError(f"output: {folder} is not of an earlier self-test; move it away")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "by-hasten").touch()
        about = f"{STEPS} steps of {path}, a checkpoint every {EVERY}; kills by seed {seed}"
        print(about, flush=True)
        for name, check in SelfTest(recipe, folder, random.Random(seed)).checks():
            began = time.monotonic()
            try:
                message, good = check(), True
            except CheckFailedError as error:
                message, good = str(error), False
            failed += not good
            took = time.monotonic() - began
            print(f"{'ok  ' if good else 'FAIL'} {name:<12} {message} ({took:.0f} s)", flush=True)
            if not good and name == "undisturbed":
                break
        if failed:
            print(f"the files of the checks are in {folder}")
            return FAILED
        shutil.rmtree(folder)
    return 0


class SelfTest:
    """Checks the job of one recipe.

    Args:
        recipe: of the user.
        folder: a folder of the test's own.
        draw: decides the moments of the kills and the bit that is flipped.
    """

    def __init__(self, recipe: Recipe, folder: Path, draw: random.Random) -> None:
        self._recipe, self._place, self._draw = recipe, folder, draw
        self._truth: UndisturbedRun | None = None

    def checks(self) -> list[tuple[str, Callable[[], str]]]:
        checks = [("undisturbed", self.undisturbed), ("kills", self.kills), ("bit flip", self.flip)]
        return [*checks, ("full disk", self.full_disk)] if sys.platform != "win32" else checks

    def undisturbed(self) -> str:
        """Trains the reference run."""
        output = self._folder("undisturbed")
        self._train(output)
        lines = _lines(output)
        if len(lines) != STEPS:
            raise CheckFailedError(
                f"the job ended after {len(lines)} of {STEPS} steps: it is too short"
            )
        seconds = statistics.median(line["step_seconds"] for line in lines)
        self._truth = UndisturbedRun([line["loss"] for line in lines], _model(output), seconds)
        first, *_, last = self._truth.losses
        return f"{STEPS} steps, {seconds:.2f} s each, loss {first:.3f} to {last:.3f}"

    def kills(self) -> str:
        """Sends SIGKILL to all ranks at once, at moments without any preparation."""
        output, moments = self._folder("killed"), sorted(self._draw.sample(range(1, STEPS), KILLS))
        died = [self._killed_at(output, step) for step in moments]
        self._train(output)
        self._compare(output)
        return f"killed after steps {', '.join(map(str, died))}, resumed, same bits at the end"

    def flip(self) -> str:
        """Flips one bit of the newest checkpoint; its hash has to show it."""
        output = self._place / "killed"
        checkpoint_paths = checkpoints(output / "checkpoints")
        if len(checkpoint_paths) < 2:
            raise CheckFailedError(
                f"there are {len(checkpoint_paths)} checkpoints and two are needed"
            )
        files = sorted(
            p for p in checkpoint_paths[-1].rglob("*") if p.is_file() and p.stat().st_size
        )
        file = self._draw.choices(files, [p.stat().st_size for p in files])[0]
        where = self._draw.randrange(file.stat().st_size)
        with file.open("r+b") as opened:
            opened.seek(where)
            byte = opened.read(1)[0]
            opened.seek(where)
            opened.write(bytes([byte ^ (1 << self._draw.randrange(8))]))
        shutil.rmtree(output / "model", ignore_errors=True)
        shutil.rmtree(output / "adapter", ignore_errors=True)
        log_text = self._train(output)
        self._compare(output)
        if f"resuming from {checkpoint_paths[-1]}" in log_text:
            raise CheckFailedError(
                f"{checkpoint_paths[-1].name} was used although byte {where} of it had changed"
            )
        damaged = f"{checkpoint_paths[-1].name}/{file.name}"
        return f"{damaged}, byte {where}: the one before was used, same bits"

    def full_disk(self) -> str:
        """Simulates a full disk by a limit on file size: the model fits, a checkpoint doesn't."""
        before = self._place / "undisturbed"
        least = _largest(*_model_files(before), before / "data")
        most = _largest(*checkpoints(before / "checkpoints"))
        if most <= 1.1 * least:
            return f"not tested: a checkpoint ({most:,} bytes) is as small as what must be written"
        output = self._folder("full")
        log_text = self._train(output, limit=(least + most) // 2)
        self._compare(output)
        if checkpoints(output / "checkpoints"):
            raise CheckFailedError("a checkpoint was committed that can't have been written")
        if "training continues" not in log_text:
            raise CheckFailedError("no message reported the checkpoints that couldn't be written")
        return "no checkpoint could be written: training continued with a message, same bits"

    # One start of the job

    def _folder(self, name: str) -> Path:
        """Returns the folder of a run, with the prepared data of the first run."""
        output = self._place / name
        output.mkdir()
        for data in (self._place / "undisturbed" / "data", Path(self._recipe.output) / "data"):
            if data.is_dir():
                shutil.copytree(data, output / "data")
                break
        plan = [entry for entry in self._recipe.plan if name_of(entry) != "checkpoints"]
        plan.append({"checkpoints": {"interval": EVERY}})
        changes = {"output": str(output), "plan": plan, "resume": "auto"}
        recipe = self._recipe.model_copy(update=PLAIN | changes)
        (self._place / f"{name}.yaml").write_text(recipe.to_yaml())
        return output

    def _start(self, output: Path, limit: int | None = None) -> subprocess.Popen[bytes]:
        program = ["hasten"] if limit is None else [__name__, str(limit)]
        command = [sys.executable, "-m", *program, "train", str(output.with_suffix(".yaml"))]
        with output.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment.child_environment({}),
            )

    def _train(self, output: Path, limit: int | None = None) -> str:
        """Trains to the end; returns the output."""
        log = output.with_suffix(".log")
        before = log.stat().st_size if log.exists() else 0
        process = self._start(output, limit)
        try:
            code = process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise CheckFailedError(f"it wasn't done after {PATIENCE_SECONDS:.0f} s") from error
        finally:
            _kill(process)
        log_text = log.read_bytes()[before:].decode(errors="replace")
        if code:
            last = (log_text.strip().splitlines() or ["it said nothing"])[-1]
            raise CheckFailedError(f"training ended with exit code {code}: {last}")
        return log_text

    def _killed_at(self, output: Path, step: int) -> int:
        """Starts a run and kills it shortly after a number of steps; returns the steps it wrote."""
        began, deadline = time.time(), time.monotonic() + PATIENCE_SECONDS
        process = self._start(output)
        try:
            while _last_step(output, began) < step:
                if process.poll() is not None:
                    raise CheckFailedError(
                        f"it ended by itself with exit code {process.returncode}"
                    )
                if time.monotonic() > deadline:
                    raise CheckFailedError(f"no step {step} after {PATIENCE_SECONDS:.0f} s")
                time.sleep(0.01)
            truth = self._truth
            time.sleep(self._draw.uniform(0, truth.step_seconds if truth else 0.1))
        finally:
            _kill(process)
        return _last_step(output, began)

    def _compare(self, output: Path) -> None:
        """Compares every loss of every start, and the saved model, with the undisturbed run."""
        assert self._truth is not None  # first check, which all others need
        recorded_steps: set[int] = set()
        for folder in (*output.glob("previous/*"), output):
            for line in _lines(folder):
                recorded_steps.add(line["step"])
                if line["loss"] != self._truth.losses[line["step"] - 1]:
                    raise CheckFailedError(
                        f"the loss of step {line['step']} differs{self._repeats()}"
                    )
        if recorded_steps != set(range(1, STEPS + 1)):
            raise CheckFailedError(
                f"{STEPS - len(recorded_steps)} of {STEPS} steps were never done"
            )
        model = _model(output)
        wrong = [name for name, content in self._truth.model.items() if model.get(name) != content]
        if wrong:
            raise CheckFailedError(f"the saved model differs in {wrong[0]}{self._repeats()}")

    def _repeats(self) -> str:
        """Returns "" if the job itself gives the same bits twice, otherwise a sentence.

        It is called only if bits differ.
        """
        output = self._folder("again")
        self._train(output)
        same = [line["loss"] for line in _lines(output)] == (self._truth and self._truth.losses)
        shutil.rmtree(output)
        return "" if same else "; but two undisturbed runs of this job differ as well"


def _lines(output: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of steps."""
    file = output / "metrics.jsonl"
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _last_step(output: Path, since: float) -> int:
    """Returns the last step written since a moment; 0 before the first."""
    file = output / "metrics.jsonl"
    try:
        if file.stat().st_mtime < since:
            return 0  # written by an earlier start
        return max((line["step"] for line in _lines(output)), default=0)
    except FileNotFoundError:  # the folder moves when a run begins
        return 0


def _largest(*places: Path) -> int:
    """Returns the size of the largest file in these folders."""
    files = [p for path in places for p in (path, *path.rglob("*")) if p.is_file()]
    return max((p.stat().st_size for p in files), default=0)


def _model_files(output: Path) -> list[Path]:
    return [p for kind in ("model", "adapter") for p in (output / kind).glob("*.safetensors")]


def _model(output: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in _model_files(output)}
    if not files:
        raise CheckFailedError("no model was saved")
    return files


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills all ranks, which share a process session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ``python -m hasten.training.fault_test BYTES COMMAND ...`` runs ``hasten COMMAND ...`` with a
# limit on the size of its files, as on a full disk. A write beyond it fails with EFBIG
# (setrlimit(2), RLIMIT_FSIZE): Python ignores the signal.
if __name__ == "__main__":
    size = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    sys.argv = ["hasten", *sys.argv[2:]]
    runpy.run_module("hasten", run_name="__main__")
