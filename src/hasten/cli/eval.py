"""``hasten eval``: a run's model before and after training, with intervals."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.cli.arguments import AsJson, writable
from hasten.cli.chat import Run, Weights
from hasten.cli.output import say
from hasten.formatting import aligned
from hasten.machine.files import write_result

if TYPE_CHECKING:
    from hasten.release.evaluation import MetricChange, TaskMetric
    from hasten.release.trained_model import LoadedModel


def eval_(
    run: Run,
    tasks: Annotated[
        list[Path] | None,
        typer.Option(
            help="a file of prompts and answers, or an lm-eval task (.yaml); repeatable "
            "[default: the recipe's eval data]"
        ),
    ] = None,
    compare: Annotated[
        str, typer.Option(help="model to compare with: base, another run, a model, or none")
    ] = "base",
    weights: Weights = "",
    limit: Annotated[int | None, typer.Option(min=1, help="first examples of each task")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where results go: a JSON file")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's model before and after training."""
    from hasten.machine.cache import HOME, at_home
    from hasten.release import evaluation
    from hasten.release.trained_model import load_other, load_run, recipe_of

    writable("--output", output)
    files = tasks or []
    harness = [evaluation.read_task(f) for f in files if f.suffix in (".yaml", ".yml")]
    if harness:
        evaluation.check_harness()
    trained = load_run(run, weights)
    sets = {
        str(file): evaluation.file_examples(trained, file)
        for file in files
        if file.suffix not in (".yaml", ".yml")
    }
    cutoff = math.inf
    if not files:
        sets["eval data"] = evaluation.eval_examples(run, lambda text: None)
        cutoff = recipe_of(run).cutoff_len

    def scores(model: LoadedModel) -> list[TaskMetric]:
        metrics: list[TaskMetric] = []
        for name, examples in sets.items():
            metrics += evaluation.score(model, name, examples[:limit], cutoff)
        if harness:
            metrics += evaluation.score_tasks(model, harness, limit, at_home(HOME) / "datasets")
        return metrics

    after = scores(trained)
    del trained  # one model at a time
    before = [] if compare == "none" else scores(load_other(compare, run, weights))
    rows = evaluation.compare(before, after)
    text = json.dumps(
        {"run": str(run), "compare": compare, "metrics": [*map(asdict, rows)]}, indent=1
    )
    say(text if as_json else _table(rows))
    if output is not None:
        write_result(output, text + "\n")


def _table(rows: list[MetricChange]) -> str:
    def number(metric: float | None) -> str:
        return "–" if metric is None else f"{metric:.4f}"

    def interval(row: MetricChange) -> str:
        return "" if row.low is None else f" [{row.low:+.4f}, {row.high:+.4f}]"

    head = ("task", "metric", "examples", "before", "after", "difference [95 %]", "verdict")
    lines = [
        (
            row.task,
            row.metric,
            f"{row.examples:,}",
            number(row.before),
            number(row.after),
            "–" if row.difference is None else f"{row.difference:+.4f}" + interval(row),
            row.verdict or "–",
        )
        for row in rows
    ]
    return aligned([head, *lines])
