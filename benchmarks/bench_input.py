"""What the checks of foreign input cost: tasks that read it, in two source trees by turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/bench_input.py /tmp/before/src [--rounds 10]

In each round each tree has a new process: a process that lies badly in memory can be slower by a
third for all its life. The two do each task in turns. What counts is the least processor time of
three, so that other programs disturb little. A ratio above 1 says that this tree takes longer than
the other one. It has a 95 % interval over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smoke import arguments
from turns import timed

EXAMPLES, LENGTHS, STEPS, IMPORTS = 500, 300_000, 20_000, 12
REPEATS = 3  # of a task in a turn: the shortest counts
ALLOWED = 1.03
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
        "template: qwen\ncutoff_len: 2048\nlearning_rate: 1e-4\nnum_train_epochs: 3.0\n"
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


def work() -> None:
    """The process of a tree: for each line on stdin, the processor seconds of the task it names."""
    with tempfile.TemporaryDirectory() as folder:
        work_by_name = tasks(Path(folder))
        for act in work_by_name.values():
            act()  # imports and caches
        gc.freeze()  # a collection doesn't walk through all that is imported
        for line in sys.stdin:
            print(timed(work_by_name[line.strip()], time.process_time), flush=True)


def started(tree: Path, smoke: bool) -> subprocess.Popen[str]:
    """A worker with a tree's package."""
    command = [sys.executable, str(Path(__file__).resolve()), str(tree), "--work"]
    return subprocess.Popen(
        [*command, *(["--smoke"] if smoke else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
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
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    asked = arguments(parser, rounds=2, EXAMPLES=60, LENGTHS=500, STEPS=100)
    if asked.work:
        work()
        return
    from hasten.measure.statistics import paired_ratio  # not of the tree that a worker measures

    trees = {"before": asked.before, "now": here}
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
