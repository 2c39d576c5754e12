"""What the checks of foreign input cost: tasks that read it, in two source trees by turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/bench_input.py /tmp/before/src [--rounds 10]
    python benchmarks/bench_input.py /tmp/before/src --instructions import

In each round each tree has a new process: a process that lies badly in memory can be slower by a
third for all its life. The two do each task in turns. What counts is the least processor time of
three, so that other programs disturb little. A ratio above 1 says that this tree takes longer than
the other one. It has a 95 % interval over rounds.

``--instructions`` counts the instructions of a task with valgrind's cachegrind, in one thread: the
difference between a process that does the task COUNTED[1] times and one that does it COUNTED[0]
times. Other programs change nothing in it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smoke import arguments
from turns import timed

EXAMPLES, LENGTHS, STEPS, IMPORTS = 500, 300_000, 20_000, 12
REPEATS = 3  # of a task in a turn: the shortest counts
COUNTED = (2, 12)  # times of a task whose instructions are counted
ALLOWED = 1.03
VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
TASKS = ("tokenising", "packing", "monitor", "import")


def tasks(folder: Path) -> dict[str, Callable[[], Any]]:
    """Name -> task, of the tree that is imported; each does all its work again."""
    import numpy as np

    from hasten.monitor.run import Run
    from hasten.parts.data.packing import pack_lengths
    from hasten.recipe.importers import read
    from hasten.recipe.prepared_data import prepare_data
    from hasten.recipe.schema import Recipe

    data, config, run = folder / "data.jsonl", folder / "sft.yaml", folder / "run"
    rows = ({"question": f"{n} + {n}?", "answer": f"It is {2 * n}. " * 9} for n in range(EXAMPLES))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.write_text(
        "model_name_or_path: a\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: d\n"
        "template: qwen\nlearning_rate: 1e-4\nnum_train_epochs: 3.0\n"
        "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nbf16: true\n"
    )
    run.mkdir()
    line = {"loss": 2.5, "learning_rate": 1e-4, "tokens": 4096, "step_seconds": 0.5}
    steps = (json.dumps({"step": n, **line}) + "\n" for n in range(1, STEPS + 1))
    (run / "metrics.jsonl").write_text("".join(steps))
    lengths = np.random.default_rng(0).integers(8, 2048, LENGTHS)
    recipe = Recipe(
        model="deepseek-llm-tiny",
        dataset=str(data),
        max_steps=1,
        global_batch_size=8,
        vocabulary=400,
        data_workers=1,
    )
    prepared = folder / "prepared"

    def tokenising() -> None:
        shutil.rmtree(prepared, ignore_errors=True)
        prepare_data(recipe, prepared)

    def monitor() -> None:
        followed = Run("run", run)
        while followed.look():
            pass

    work = (
        tokenising,
        lambda: pack_lengths(lengths, 4096),
        monitor,
        lambda: [read(config).to_yaml(config.name) for _ in range(IMPORTS)],
    )
    return dict(zip(TASKS, work, strict=True))


def work(only: Sequence[str]) -> None:
    """The process of a tree: for each line on stdin, the processor seconds of the task it names."""
    with tempfile.TemporaryDirectory() as folder:
        work_by_name = tasks(Path(folder))
        for name in only:
            work_by_name[name]()  # imports and caches
        gc.freeze()  # a collection doesn't walk through all that is imported
        for line in sys.stdin:
            print(timed(work_by_name[line.strip()], time.process_time), flush=True)


def instructions(tree: Path, task: str, smoke: bool) -> float:
    """What one call of a task takes."""
    command = [*VALGRIND, sys.executable, *work_of(tree, smoke), "--only", task]
    counts = []
    for times in COUNTED:
        done = subprocess.run(
            command,
            input=f"{task}\n" * times,
            capture_output=True,
            text=True,
            check=True,
            env={**environment_of(tree), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        found = re.search(r"I +refs: +([\d,]+)", done.stderr)
        assert found is not None, done.stderr
        counts.append(int(found[1].replace(",", "")))
    return (counts[1] - counts[0]) / (COUNTED[1] - COUNTED[0])


def work_of(tree: Path, smoke: bool) -> list[str]:
    return [str(Path(__file__).resolve()), str(tree), "--work", *(["--smoke"] if smoke else [])]


def environment_of(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def started(tree: Path, smoke: bool) -> subprocess.Popen[str]:
    """A worker with a tree's package."""
    return subprocess.Popen(
        [sys.executable, *work_of(tree, smoke)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of(tree),
    )


def seconds_of(worker: subprocess.Popen[str], task: str) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{task}\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def one_round(trees: dict[str, Path], smoke: bool, first: str) -> dict[str, dict[str, float]]:
    """Tree -> task -> the least seconds, of new processes that do each task in turns."""
    with contextlib.ExitStack() as processes:
        workers = {name: processes.enter_context(started(t, smoke)) for name, t in trees.items()}
        least: dict[str, dict[str, float]] = {name: {} for name in trees}
        for task in TASKS:
            for name in sorted(trees, key=lambda name: name != first) * REPEATS:
                taken = seconds_of(workers[name], task)
                least[name][task] = min(taken, least[name].get(task, math.inf))
        for worker in workers.values():
            assert worker.stdin is not None
            worker.stdin.close()
        return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    here = Path(__file__).resolve().parents[1] / "src"
    parser.add_argument(
        "before", type=Path, nargs="?", default=here, help="folder src of the other tree"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--instructions", choices=TASKS, nargs="+", default=[], metavar="TASK")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=TASKS, help=argparse.SUPPRESS)
    asked = arguments(parser, rounds=2, EXAMPLES=60, LENGTHS=500, STEPS=100)
    if asked.work:
        work(asked.only)
        return
    trees = {"before": asked.before, "now": here}
    for task in asked.instructions:
        theirs, ours = (instructions(tree, task, asked.smoke) for tree in trees.values())
        print(f"{task}: {ours / theirs:.3f} times the instructions ({ours:,.0f} / {theirs:,.0f})")
    if asked.instructions:
        return
    from hasten.measure.statistics import paired_ratio  # not of the tree that a worker measures

    rounds = [one_round(trees, asked.smoke, [*trees][number % 2]) for number in range(asked.rounds)]
    print("| task | processor time, now / before | within 3 % |")
    print("|---|---|---|")
    for task in TASKS:
        before, now = ([found[name][task] for found in rounds] for name in trees)
        ratio = paired_ratio(before, now)
        verdict = "yes" if ratio.high <= ALLOWED else "no" if ratio.low > ALLOWED else "undecided"
        print(f"| {task} | {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] | {verdict} |")


if __name__ == "__main__":
    main()
