"""``hasten report``: the results of runs and experiments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hasten.cli.arguments import AsJson
from hasten.cli.output import say
from hasten.errors import InputError
from hasten.formatting import size


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="folders of runs, a report.json, or another trainer's trainer_state.json",
            metavar="RUN...",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Show a run's results, or compare several runs."""
    from hasten.planner.inputs import predicted_lines, predicted_section
    from hasten.report.page import render_markdown, write_report
    from hasten.report.runs import compare_runs, read_object, read_runs, render, section, studies_of

    studies = studies_of(paths[0]) if len(paths) == 1 else {}
    if studies and not _trained(paths[0]):
        say(json.dumps({"studies": studies}, indent=1) if as_json else section(studies).strip())
        return
    if len(paths) > 1 or _is_other(paths[0]):
        comparison = compare_runs([run for path in paths for run in read_runs(path, _recipe)])
        say(json.dumps(comparison, indent=1) if as_json else render(comparison))
        return
    run = paths[0]
    experiment = run if run.suffix == ".json" else run / "report.json"
    if experiment.is_file():
        shown = read_object(experiment)
        prediction = predicted_section(experiment.parent)
        shown = shown | ({} if prediction is None else {"predicted": prediction})
        # Only report.json may replace the folder's page.
        is_usual = experiment.name == "report.json"
        page = write_report(shown, experiment.parent if is_usual else experiment.with_suffix(""))
        say(json.dumps(shown, indent=1) if as_json else render_markdown(shown))
        if not as_json:
            say(f"report: {page}")
            _tell(studies)
        return
    values = read_object(run / "summary.json")
    if as_json:
        say(json.dumps({**values, "studies": studies} if studies else values, indent=1))
    else:
        _summary(values)
        say(predicted_lines(run))
        _tell(studies)


def _is_other(path: Path) -> bool:
    """Returns True if the only run has neither a report's page nor a summary of hasten."""
    from hasten.report.runs import read_object

    if path.suffix == ".json":
        return path.name == "trainer_state.json" or "variants" not in read_object(path)
    return not _trained(path)


def _trained(path: Path) -> bool:
    return any((path / name).is_file() for name in ("report.json", "summary.json"))


def _tell(studies: Mapping[str, Mapping[str, Any]]) -> None:
    from hasten.report.runs import section

    if studies:
        say(section(studies))


def _recipe(path: Path) -> dict[str, Any] | None:
    """Returns a stored recipe as plain values, unchecked: another version may have written it."""
    from hasten.recipe.yaml_reader import read_yaml_file

    recipe = read_yaml_file(path, "recipe")
    return recipe if isinstance(recipe, dict) else None


def _summary(summary: dict[str, Any]) -> None:
    from hasten.report.card import time_and_speed

    try:
        rows = [
            ("steps", f"{summary['steps']:,} ({summary['stopped']})"),
            ("tokens", f"{summary['tokens']:,}, of them trained {summary['trained_tokens']:,}"),
            ("time", time_and_speed(summary)),
            ("MFU", _number(summary.get("mfu"), "{:.1%}")),
            ("median step", f"{summary['step_seconds_median']:.3f} s"),
            ("peak memory", size(summary["peak_memory_bytes"])),
            ("eval loss", _number(summary["eval_loss"], "{:.4f}")),
            ("ranks", str(summary["world_size"])),
            ("saved", summary["saved"] or "the weights couldn't be saved"),
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"summary.json lacks or garbles {error}; was it edited?") from error
    for name, figure in rows:
        say(f"{name:<14} {figure}")


def _number(figure: float | None, form: str) -> str:
    return "not measured" if figure is None else form.format(figure)
