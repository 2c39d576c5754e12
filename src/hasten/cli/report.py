"""``hasten report`` and ``hasten regress``: results printed, or measured again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasten.cli.arguments import Overrides
from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.formatting import aligned, duration, size, span
from hasten.measure.statistics import Interval

if TYPE_CHECKING:
    from hasten.recipe.schema import Recipe
    from hasten.report.bundle import ArmChange, Bundle


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="folders of runs, a report.json, or another trainer's trainer_state.json",
            metavar="RUN...",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show a run's results, or compare several; of one experiment, write report.html anew."""
    from hasten.planner.inputs import predicted_lines, predicted_section
    from hasten.report.page import render_markdown, write_report
    from hasten.report.runs import compare_runs, read_object, read_runs, render, section, studies_of

    studies = studies_of(paths[0]) if len(paths) == 1 else {}
    if studies and not _trained(paths[0]):
        print(json.dumps({"studies": studies}, indent=1) if as_json else section(studies).strip())
        return
    if len(paths) > 1 or _is_other(paths[0]):
        comparison = compare_runs([run for path in paths for run in read_runs(path, _recipe)])
        print(json.dumps(comparison, indent=1) if as_json else render(comparison))
        return
    run = paths[0]
    experiment = run if run.suffix == ".json" else run / "report.json"
    if experiment.is_file():
        shown = read_object(experiment)
        prediction = predicted_section(experiment.parent)
        shown = shown | ({} if prediction is None else {"predicted": prediction})
        page = write_report(shown, _folder_of(experiment))
        print(json.dumps(shown, indent=1) if as_json else render_markdown(shown))
        if not as_json:
            print(f"report: {page}")
            _tell(studies)
        return
    values = read_object(run / "summary.json")
    if as_json:
        print(json.dumps({**values, "studies": studies} if studies else values, indent=1))
    else:
        _summary(values)
        print(predicted_lines(run))
        _tell(studies)


def _folder_of(experiment: Path) -> Path:
    """Where its page goes: beside it, but one of another name may not replace report.json there."""
    named = experiment.name == "report.json"
    return experiment.parent if named else experiment.with_suffix("")


def _is_other(path: Path) -> bool:
    """Whether the only run given has neither a report's page nor a summary of hasten's own."""
    from hasten.report.runs import read_object

    if path.suffix == ".json":
        return path.name == "trainer_state.json" or "variants" not in read_object(path)
    return not _trained(path)


def _trained(path: Path) -> bool:
    return any((path / name).is_file() for name in ("report.json", "summary.json"))


def _tell(studies: Mapping[str, Mapping[str, Any]]) -> None:
    from hasten.report.runs import section

    if studies:
        print(section(studies))


def _recipe(path: Path) -> dict[str, Any] | None:
    """A resolved recipe as plain values; of another version's too, so keys aren't checked."""
    from hasten.recipe.yaml_reader import read_yaml_file

    recipe = read_yaml_file(path, "recipe")
    return recipe if isinstance(recipe, dict) else None


def _summary(summary: dict[str, Any]) -> None:
    try:
        rows = [
            ("steps", f"{summary['steps']:,} ({summary['stopped']})"),
            ("tokens", f"{summary['tokens']:,}, of them trained {summary['trained_tokens']:,}"),
            ("time", duration(summary["seconds"])),
            ("tokens/s", _number(summary["tokens_per_second"], "{:,.0f}")),
            ("MFU", _number(summary.get("mfu"), "{:.1%}")),
            ("median step", f"{summary['step_seconds_median']:.3f} s"),
            ("peak memory", size(summary["peak_memory_bytes"])),
            ("eval loss", _number(summary["eval_loss"], "{:.4f}")),
            ("ranks", str(summary["world_size"])),
            ("saved", summary["saved"] or "the weights couldn't be saved"),
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"summary.json lacks or garbles {error}; was it edited?") from error
    for name, value in rows:
        print(f"{name:<14} {value}")


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)


# ``hasten regress``: a stored experiment done again on today's installation, gain against gain.

LOST = 4  # the exit code
MAY_CHANGE = ("dataset", "eval_data", "model", "tokenizer", "price", "data_workers", "ceiling")


def regress(
    bundle: Annotated[
        Path, typer.Argument(help="a folder of speedup --bundle, or of an experiment")
    ],
    overrides: Overrides = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="turns of each variant; as many as then if left out")
    ] = None,
    margin: Annotated[
        float, typer.Option(help="share of a gain that may go without being called lost")
    ] = 0.02,
    output: Annotated[Path, typer.Option(help="folder of the new experiment")] = Path(
        "runs/regress"
    ),
    budget: Annotated[
        str | None, typer.Option(help="time for all of it: 20m, 1h30m; else as then")
    ] = None,
) -> int:
    """Do an experiment again on today's installation and say which switch gains less."""
    from hasten.measure.recipe_experiment import measured, prepared
    from hasten.progress import Display
    from hasten.recipe.yaml_reader import read_duration
    from hasten.report.bundle import changes, lost, measurements, read_bundle

    if not 0 <= margin < 1:
        raise InputError(f"--margin is {margin:g}; give a share from 0 up to 1")
    stored = read_bundle(bundle)
    recipe = _bundled_recipe(stored, overrides or [], bundle, output)
    plans = _plans(stored, recipe)
    check_data(stored, recipe)
    design = stored.to_design(rounds)
    if budget is not None:
        design = replace(design, budget_seconds=read_duration(budget))
    for line in differences(stored):
        print(line)
    with Display() as display:
        kinds: dict[str, Any] = dict(stored.kinds)
        experiment = measured(
            prepared(recipe, display, ranks=True), plans, kinds, design, True, display
        )
    before = {variant.name: stored.measured[variant.name] for variant in experiment.variants}
    for text in experiment.design["dropped"]:
        print(f"left out: {text}")
    result = changes(before, measurements(experiment.variants), margin)
    print(table(result))
    worse = lost(result)
    print(conclusion(result, margin))
    return LOST if worse else 0


def check_data(bundle: Bundle, recipe: Recipe) -> None:
    """The data must be that of then, wherever it lies now.

    Raises:
        InputError: a file is missing, or is another one.
    """
    from hasten.recipe.prepared_data import data_files
    from hasten.report.bundle import stamp

    now = [stamp(path) for path in data_files(recipe)]
    if len(now) < len(bundle.data):
        names = ", ".join(str(s.get("path")) for s in bundle.data)
        raise InputError(
            f"the experiment's data is not here ({names}): name it, as in dataset=PATH"
        )
    for then, today in zip(bundle.data, now, strict=False):
        if then.get("sha256") != today["sha256"]:
            raise InputError(
                f"{today['path']} is not the file of the experiment ({then.get('path')}, "
                f"{then.get('bytes')} bytes): gains on other data can't be compared"
            )


def differences(bundle: Bundle) -> list[str]:
    """What is new since then: versions, and the machine, which matters more."""
    from hasten.machine import host
    from hasten.report.runs import MACHINE

    versions = host.versions()
    moved = [
        f"{name} {bundle.versions.get(name)} -> {versions.get(name)}"
        for name in sorted({*bundle.versions, *versions})
        if bundle.versions.get(name) != versions.get(name)
    ]
    lines = [f"since then: {', '.join(moved)}" if moved else "since then: the same versions"]
    machine = asdict(host.hardware())
    other = [k for k in MACHINE if k in machine and _plain(machine[k]) != bundle.hardware.get(k)]
    if other:
        lines.append(f"another machine ({', '.join(other)}): a gain may differ for that alone")
    return lines


def conclusion(changes: Sequence[ArmChange], margin: float) -> str:
    """Who lost; where nobody did, whether that is shown of all."""
    from hasten.report.bundle import lost

    if worse := lost(changes):
        return f"lost: {', '.join(worse)}"
    unknown = [c.name for c in changes if c.verdict in ("undecided", "not measured")]
    suffix = f"; not known of {', '.join(unknown)}" if unknown else ""
    return f"nothing lost by more than {100 * margin:g}%{suffix}"


def table(changes: Sequence[ArmChange]) -> str:
    """A row per variant: its ratio to the baseline then and now, and now over then."""
    rows = [["variant", "then [95 %]", "now [95 %]", "now/then [95 %]", ""]]
    for change in changes:
        spans = (_span(i) for i in (change.before, change.now, change.ratio))
        word = f"{change.verdict}: {change.reason}" if change.reason else change.verdict
        rows.append([change.name, *spans, word])
    return aligned(rows)


def _bundled_recipe(bundle: Bundle, overrides: Sequence[str], path: Path, output: Path) -> Recipe:
    """The stored recipe, in a folder of its own; only where things lie may be changed."""
    from hasten.recipe.schema import recipe_from
    from hasten.recipe.yaml_reader import read_overrides

    changes = read_overrides(overrides)
    for key in changes:
        if key not in MAY_CHANGE:
            raise InputError(f"{key}: of a stored experiment only {', '.join(MAY_CHANGE)} change")
    values: dict[Any, Any] = {**bundle.recipe, **changes, "output": str(output)}
    return recipe_from(values, str(path))


def _plans(bundle: Bundle, recipe: Recipe) -> Mapping[str, Plan]:
    """The stored variants' plans as this version knows them, less the second baseline: no
    switch.
    """
    from hasten.recipe.build import requested_plan

    return {
        name: requested_plan(recipe.model_copy(update={"plan": list(entries)}))
        for name, entries in bundle.plans.items()
        if bundle.kinds.get(name) != "again"
    }


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _span(interval: Interval | None) -> str:
    return "-" if interval is None else span(interval.summary(), "times")
