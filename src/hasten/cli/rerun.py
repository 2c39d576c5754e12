"""``hasten speedup --rerun BUNDLE``: measures a stored experiment on today's installation.

Each variant's gain is compared with its stored gain, so that the machine's speed cancels out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.cli.arguments import text_to_stderr
from hasten.cli.output import say
from hasten.core.plan import Plan
from hasten.errors import FAILED, InputError
from hasten.formatting import aligned, span

if TYPE_CHECKING:
    from hasten.recipe.schema import Recipe
    from hasten.report.bundle import Bundle, VariantChange

MAY_CHANGE = ("dataset", "eval_data", "model", "tokenizer", "price", "data_workers", "ceiling")


def rerun(
    bundle: Path,
    overrides: Sequence[str],
    rounds: int | None,
    tolerance: float,
    output: Path,
    budget: str | None,
    as_json: bool,
) -> int:
    """Measures a stored experiment again; prints the variants that lost part of their gain.

    ``rounds`` and ``budget`` are those of the stored experiment if they are None.

    Returns:
        The exit code, 4 if a gain was lost.

    Raises:
        InputError: no such bundle, other data, or a key that may not change.
    """
    from hasten.measure.recipe_experiment import measured, prepared
    from hasten.progress import Display
    from hasten.recipe.yaml_reader import read_duration
    from hasten.report.bundle import changes, lost, measurements, read_bundle

    if not 0 <= tolerance < 1:
        raise InputError(f"--tolerance is {tolerance:g}; give a share from 0 up to 1")
    stored = read_bundle(bundle)
    recipe = _bundled_recipe(stored, overrides, bundle, output)
    plans = _plans(stored, recipe)
    from hasten.recipe.prepared_data import data_files
    from hasten.report.bundle import stamp

    now = [stamp(path) for path in data_files(recipe)]
    if len(now) < len(stored.data):
        names = ", ".join(str(s.get("path")) for s in stored.data)
        raise InputError(
            f"the experiment's data is missing ({names}): give its path with dataset=PATH"
        )
    for then, today in zip(stored.data, now, strict=False):
        if then.get("sha256") != today["sha256"]:
            raise InputError(
                f"{today['path']} is not the file of the experiment ({then.get('path')}, "
                f"{then.get('bytes')} bytes): gains on other data can't be compared"
            )
    design = stored.to_design(rounds)
    if budget is not None:
        design = replace(design, budget_seconds=read_duration(budget))
    with text_to_stderr(as_json):
        for line in differences(stored):
            say(line)
        with Display() as display:
            kinds: dict[str, Any] = dict(stored.kinds)
            subject = prepared(recipe, display, ranks=True)
            experiment = measured(subject, plans, kinds, design, True, display)
        before = {variant.name: stored.measured[variant.name] for variant in experiment.variants}
        for text in experiment.design["dropped"]:
            say(f"left out: {text}")
        gains = changes(before, measurements(experiment.variants), tolerance)
        say(table(gains))
        say(conclusion(gains, tolerance))
    if as_json:
        rows = []
        for change in gains:
            intervals = {"before": change.before, "now": change.now, "ratio": change.ratio}
            row = {key: None if i is None else i.summary() for key, i in intervals.items()}
            texts = {key: getattr(change, key) for key in ("name", "verdict", "reason")}
            rows.append(texts | row)
        say(json.dumps({"variants": rows, "lost": lost(gains)}, indent=1))
    return FAILED if lost(gains) else 0


def differences(bundle: Bundle) -> list[str]:
    """Returns the changes since the experiment: versions, and the machine."""
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


def conclusion(changes: Sequence[VariantChange], margin: float) -> str:
    """Returns a sentence on the variants that lost, or on those that remain undecided."""
    from hasten.report.bundle import lost

    if worse := lost(changes):
        return f"lost: {', '.join(worse)}"
    unknown = [c.name for c in changes if c.verdict in ("undecided", "not measured")]
    suffix = f"; undecided or not measured: {', '.join(unknown)}" if unknown else ""
    return f"nothing lost by more than {100 * margin:g}%{suffix}"


def table(changes: Sequence[VariantChange]) -> str:
    """Returns a row per variant: stored and new ratio to the baseline, and their quotient."""
    rows = [["variant", "then [95 %]", "now [95 %]", "now/then [95 %]", ""]]
    for change in changes:
        spans = (
            "-" if interval is None else span(interval.summary(), "times")
            for interval in (change.before, change.now, change.ratio)
        )
        word = f"{change.verdict}: {change.reason}" if change.reason else change.verdict
        rows.append([change.name, *spans, word])
    return aligned(rows)


def _bundled_recipe(bundle: Bundle, overrides: Sequence[str], path: Path, output: Path) -> Recipe:
    """Returns the stored recipe for a new output folder; only ``MAY_CHANGE`` may be changed."""
    from hasten.recipe.schema import recipe_from
    from hasten.recipe.yaml_reader import read_overrides

    changes = read_overrides(overrides)
    for key in changes:
        if key not in MAY_CHANGE:
            raise InputError(f"{key}: of a stored experiment only {', '.join(MAY_CHANGE)} change")
    values: dict[Any, Any] = {**bundle.recipe, **changes, "output": str(output)}
    return recipe_from(values, str(path))


def _plans(bundle: Bundle, recipe: Recipe) -> Mapping[str, Plan]:
    """Returns the stored variants' plans as this version reads them, without second baselines."""
    from hasten.recipe.build import requested_plan

    return {
        name: requested_plan(recipe.model_copy(update={"plan": list(entries)}))
        for name, entries in bundle.plans.items()
        if bundle.kinds.get(name) != "again"
    }


def _plain(setting: Any) -> Any:
    return [_plain(v) for v in setting] if isinstance(setting, tuple) else setting
