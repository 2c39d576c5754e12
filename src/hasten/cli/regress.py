"""``hasten regress``: a stored experiment done again on today's installation, gain against gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hasten.cli.display import Display
from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.formatting import span
from hasten.machine import host
from hasten.measure.experiment import measured, prepared
from hasten.measure.statistics import Interval
from hasten.recipe.build import requested_plan
from hasten.recipe.prepared_data import data_files
from hasten.recipe.schema import Recipe, recipe_from
from hasten.recipe.yaml_reader import read_overrides
from hasten.report.bundle import Bundle, Change, changes, lost, measurements, read_bundle, stamp
from hasten.report.runs import MACHINE

LOST = 4  # the exit code
MAY_CHANGE = ("dataset", "held_out", "model", "tokenizer", "price", "data_workers", "ceiling")


def regress(
    path: Path, overrides: Sequence[str], rounds: int | None, margin: float, output: Path
) -> int:
    """Measure again, print what became of each arm; the exit code."""
    if not 0 <= margin < 1:
        raise InputError(f"--margin is {margin:g}; give a share from 0 up to 1")
    bundle = read_bundle(path)
    recipe = _recipe(bundle, overrides, path, output)
    plans = _plans(bundle, recipe)
    check_data(bundle, recipe)
    design = bundle.to_design(rounds)
    for line in differences(bundle):
        print(line)
    with Display() as display:
        kinds: dict[str, Any] = dict(bundle.kinds)
        found = measured(prepared(recipe, display, ranks=True), plans, kinds, design, True, display)
    before = {name: bundle.measured[name] for name in plans}
    result = changes(before, measurements(found.arms), margin)
    print(table(result))
    worse = lost(result)
    print(conclusion(result, margin))
    return LOST if worse else 0


def check_data(bundle: Bundle, recipe: Recipe) -> None:
    """The data must be that of then, wherever it lies now.

    Raises:
        InputError: a file is missing, or is another one.
    """
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
    here = host.versions()
    moved = [
        f"{name} {bundle.versions.get(name)} -> {here.get(name)}"
        for name in sorted({*bundle.versions, *here})
        if bundle.versions.get(name) != here.get(name)
    ]
    lines = [f"since then: {', '.join(moved)}" if moved else "since then: the same versions"]
    machine = asdict(host.hardware())
    other = [k for k in MACHINE if k in machine and _plain(machine[k]) != bundle.hardware.get(k)]
    if other:
        lines.append(f"another machine ({', '.join(other)}): a gain may differ for that alone")
    return lines


def conclusion(found: Sequence[Change], margin: float) -> str:
    """Who lost; where nobody did, whether that is shown of all."""
    if worse := lost(found):
        return f"lost: {', '.join(worse)}"
    unknown = [c.name for c in found if c.verdict in ("inconclusive", "not measured")]
    rest = f"; not known of {', '.join(unknown)}" if unknown else ""
    return f"nothing lost by more than {100 * margin:g}%{rest}"


def table(found: Sequence[Change]) -> str:
    """A row per arm: its ratio to the baseline then and now, and now over then."""
    rows = [["arm", "then [95 %]", "now [95 %]", "now/then [95 %]", ""]]
    for change in found:
        spans = (_span(i) for i in (change.before, change.now, change.ratio))
        word = f"{change.verdict}: {change.reason}" if change.reason else change.verdict
        rows.append([change.name, *spans, word])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in lines)


def _recipe(bundle: Bundle, overrides: Sequence[str], path: Path, output: Path) -> Recipe:
    """The stored recipe, in a folder of its own; only where things lie may be changed."""
    given = read_overrides(overrides)
    for key in given:
        if key not in MAY_CHANGE:
            raise InputError(f"{key}: of a stored experiment only {', '.join(MAY_CHANGE)} change")
    values: dict[Any, Any] = {**bundle.recipe, **given, "output": str(output)}
    return recipe_from(values, str(path))


def _plans(bundle: Bundle, recipe: Recipe) -> Mapping[str, Plan]:
    """The stored arms' plans as this version knows them, less the second baseline: no switch."""
    return {
        name: requested_plan(recipe.model_copy(update={"plan": list(entries)}))
        for name, entries in bundle.plans.items()
        if bundle.kinds.get(name) != "again"
    }


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _span(interval: Interval | None) -> str:
    return "-" if interval is None else span(interval.summary(), "times")
