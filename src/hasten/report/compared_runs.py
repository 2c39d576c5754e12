"""Runs beside each other: one table, what differs in their recipes, and why it may not be fair.

A loss is compared after equal tokens, as far as the shortest run goes; where a run doesn't say its
tokens, after equal steps. It is the mean of the training losses in the last tenth up to there,
because a single step's loss says more about its records than about the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hasten.formatting import words
from hasten.report.charts import visible
from hasten.report.runs import Point, RunFacts

STRETCH = 0.1  # of the way up to the common end: the losses that are averaged
CLOSE = 0.005  # share by which tokens may differ, a last step being more or less full
OWN = ("output", "price")  # keys that say nothing of the training
MODEL = ("model", "tokenizer", "from_scratch", "finetuning_type")
DATA = (
    *("dataset", "columns", "held_out", "max_records", "max_rejected", "cutoff_len"),
    *("too_long", "chat_template", "vocabulary"),
)
MACHINE = ("cpu", "usable_cores", "memory_limit_bytes", "accelerators", "device")
ROWS: tuple[tuple[str, str, str], ...] = (  # key, heading, unit
    ("steps", "steps", "amount"),
    ("tokens", "tokens", "amount"),
    ("tokens_per_second", "tokens/s", "amount"),
    ("step_seconds", "step time", "seconds"),
    ("loss_at_equal", "training loss", "loss"),
    ("held_out_loss", "held-out loss", "loss"),
    ("peak_memory_bytes", "peak memory", "memory"),
)


def compare_runs(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Runs as plain values: ``runs``, ``equal`` (where losses are compared), ``differs``,
    ``warnings``, ``notes``."""
    where, unit = _common_end(runs)
    rows = []
    for run in runs:
        row = {key: getattr(run, key) for key, *_ in ROWS if key != "loss_at_equal"}
        row["loss_at_equal"] = _loss_at(run.curve, where, unit)
        rows.append({"name": run.name, "kind": run.kind, **row})
    return {
        "runs": rows,
        "equal": {"unit": unit, "value": where},
        "differs": _differing(runs),
        "warnings": _warnings(runs),
        "notes": [note for run in runs for note in run.notes],
    }


def render(found: Mapping[str, Any]) -> str:
    """The comparison as text: the runs are columns, so that many keys stay readable."""
    runs = found["runs"]
    equal = found["equal"]
    head = [["", *(row["name"] for row in runs)], ["written by", *(row["kind"] for row in runs)]]
    lines = []
    for key, heading, unit in ROWS:
        if key == "loss_at_equal" and equal["value"] is not None:
            heading += f" at {equal['value']:,.0f} {equal['unit']}"
        lines.append([heading, *(words(row[key], unit) for row in runs)])
    text = _table([*head, *lines])
    if found["differs"]:
        rows = [[key, *map(_short, values)] for key, values in found["differs"].items()]
        text += "\n\ndiffers in the recipe\n" + _table(rows)
    for kind in ("warnings", "notes"):
        mark = "not fair: " if kind == "warnings" else "note: "
        text += "".join(f"\n{mark}{visible(line)}" for line in found[kind])
    return text


def _common_end(runs: Sequence[RunFacts]) -> tuple[float | None, str]:
    """The largest number of tokens, or else of steps, that every run with losses has reached."""
    curves = [run.curve for run in runs if run.curve]
    if not curves:
        return None, "tokens"
    tokens = [curve[-1].tokens for curve in curves]
    if all(value is not None for value in tokens):
        return min(value for value in tokens if value is not None), "tokens"
    return float(min(curve[-1].step for curve in curves)), "steps"


def _loss_at(curve: Sequence[Point], where: float | None, unit: str) -> float | None:
    if where is None or not curve:
        return None
    place: Callable[[Point], float] = (
        (lambda p: p.tokens or 0.0) if unit == "tokens" else (lambda p: float(p.step))
    )
    before = [point for point in curve if place(point) <= where]
    near = [point.loss for point in before if place(point) > (1 - STRETCH) * where]
    if near:
        return statistics.fmean(near)
    return before[-1].loss if before else None


def _differing(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """Keys of which two known recipes say different things, with every run's value.

    A report's arm trains under its own techniques, not the recipe's plan.
    """
    values = [None if run.recipe is None else {**run.recipe, "plan": _plan(run)} for run in runs]
    known = [recipe for recipe in values if recipe is not None]
    keys = [key for key in dict.fromkeys(k for r in known for k in r) if key not in OWN]
    found = {}
    for key in keys:
        if any(recipe.get(key) != known[0].get(key) for recipe in known):
            found[key] = ["not known" if r is None else r.get(key) for r in values]
    return found


def _plan(run: RunFacts) -> Any:
    return list(run.plan) if run.plan is not None else (run.recipe or {}).get("plan")


def _warnings(runs: Sequence[RunFacts]) -> list[str]:
    """Why a difference between these runs may not be what their plans make."""
    differs = _differing(runs)
    found = []
    for what, keys in (("model", MODEL), ("data", DATA)):
        other = [key for key in keys if key in differs]
        if other:
            found.append(f"the {what} differs ({', '.join(other)})")
    if len({run.corpus for run in runs if run.corpus is not None}) > 1:
        found.append("the embedded corpus differs")
    if "seed" in differs:
        found.append("the seeds differ: other records are held out, and losses differ by chance")
    tokens = [run.tokens for run in runs if run.tokens is not None]
    if tokens and min(tokens) < (1 - CLOSE) * max(tokens):
        span = f"{min(tokens):,.0f} to {max(tokens):,.0f}"
        found.append(f"the tokens differ ({span}): held-out losses are of different stages")
    elif not tokens or len(tokens) < len(runs):
        found.append(f"tokens are not known of {_names(runs, 'tokens')}")
    machines = [run.hardware for run in runs if run.hardware is not None]
    other = [key for key in MACHINE if len(_said(machines, key)) > 1]
    if other:
        found.append(f"the machine differs ({', '.join(other)})")
    for key, what in (("hardware", "the machine"), ("recipe", "model and data")):
        unknown = _names(runs, key)
        if unknown:
            found.append(f"{what} can't be checked: not known of {unknown}")
    versions = [run.versions for run in runs if run.versions is not None]
    other = [k for k in ("torch", "transformers", "hasten") if len(_said(versions, k)) > 1]
    if other:
        found.append(f"the versions differ ({', '.join(other)})")
    return found


def _said(found: Sequence[Mapping[str, Any]], key: str) -> set[str]:
    """What is said of a key, by those that say it: a training's summary names no device, say."""
    return {str(one[key]) for one in found if key in one}


def _names(runs: Sequence[RunFacts], key: str) -> str:
    return ", ".join(run.name for run in runs if getattr(run, key) is None)


def _short(value: Any) -> str:
    text = visible(", ".join(map(str, value)) if isinstance(value, list) else str(value))
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:37] + "..."


def _table(rows: Sequence[Sequence[str]]) -> str:
    cells = [[" ".join(visible(cell).split()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)
