"""Reads finished runs of hasten and other trainers, and compares several of them.

Three kinds of files are read:

- the folder of ``hasten train`` (``summary.json``, ``metrics.jsonl``, ``recipe.yaml``)
- the report of an experiment (``report.json``: its baseline and its result are two
  runs)
- ``trainer_state.json`` of Hugging Face's Trainer or TRL.

In the last, tokens are known if TRL logged ``num_tokens`` (a sum of the attention
mask). The Trainer's own ``num_input_tokens_seen`` may count padding, and the file
doesn't show if it does. It is therefore not used for tokens. Speed in tokens needs
both, tokens and time.

The files may be from other people. Every number is checked to be finite, a file has a
size limit, and missing values stay None.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from hasten.errors import InputError
from hasten.foreign_files import json_lines, read_json_object
from hasten.formatting import aligned, number, number_text, numbers_of
from hasten.report.svg import visible

LARGEST_FILE = 256 << 20  # bytes
UNCOUNTED = "tokens: num_input_tokens_seen may count padding, so it isn't taken for tokens"


# A row for each step: its number, all tokens up to it (NaN: unknown), its loss.
Curve = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RunFacts:
    """The facts about one run; None: missing in its files."""

    name: str
    kind: str
    steps: int | None = None
    tokens: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None  # median
    eval_loss: float | None = None
    peak_memory_bytes: float | None = None
    curve: Curve = field(default_factory=lambda: _curve(()))
    recipe: Mapping[str, Any] | None = None
    plan: tuple[str, ...] | None = None
    hardware: Mapping[str, Any] | None = None
    versions: Mapping[str, Any] | None = None
    corpus: str | None = None
    notes: tuple[str, ...] = field(default=())


def read_runs(path: Path, read_recipe: Any = None) -> list[RunFacts]:
    """Returns the runs in a file or folder: one, or an experiment's first and last variant.

    Args:
        path: a folder, a report.json, or a trainer_state.json.
        read_recipe: reads a recipe.yaml to plain values; without it recipes aren't compared.

    Raises:
        InputError: nothing there can be read as a run.
    """
    state = path if path.name == "trainer_state.json" else _newest_state(path)
    report = path if path.is_file() and path.suffix == ".json" else path / "report.json"
    if state is not None and state.is_file():
        return [_hugging_face(path, read_object(state))]
    if (path / "summary.json").is_file():
        return [_trained(path, read_object(path / "summary.json"), read_recipe)]
    if report.is_file():
        contents = read_object(report)
        return (
            [_hugging_face(path, contents)]
            if "log_history" in contents
            else _variants(path, contents)
        )
    if (path / "metrics.jsonl").is_file():
        return [_logged(path)]
    raise InputError(
        f"{path} holds no run: there is no summary.json, report.json, metrics.jsonl or "
        "trainer_state.json; give the folder of a finished run"
    )


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file.

    Raises:
        InputError: it can't be read, is too large, or is something else.
    """
    return read_json_object(path, "report", LARGEST_FILE)


def _curve(points: Iterable[tuple[float, float | None, float]]) -> Curve:
    rows = array("d")
    for step, tokens, loss in points:
        rows.extend((step, math.nan if tokens is None else tokens, loss))
    return np.array(rows).reshape(-1, 3)


@dataclass
class _Log:
    """Sums over the lines of a metrics.jsonl, which are read one by one and not stored."""

    path: Path
    lines: int = 0
    last_step: int | None = None
    tokens: float | None = 0.0  # None: a line has none
    seconds: array[float] = field(default_factory=lambda: array("d"))
    peak_memory_bytes: float | None = None

    def points(self) -> Iterator[tuple[float, float | None, float]]:
        """Reads the lines; returns the points of the training loss.

        Raises:
            InputError: the file can't be read or is too large, or a line isn't an object.
        """
        for entry in json_lines(self.path, "run's log"):
            self.lines += 1
            self.last_step = _whole(entry.get("step"))
            tokens, loss = number(entry.get("tokens")), number(entry.get("loss"))
            if tokens is None or self.tokens is None:
                self.tokens = None
            else:
                self.tokens += tokens
            if seconds := number(entry.get("step_seconds")):
                self.seconds.append(seconds)
            if peak := number(entry.get("peak_memory_bytes")):
                self.peak_memory_bytes = max(peak, self.peak_memory_bytes or 0.0)
            if loss is not None:
                yield self.last_step or self.lines, number(self.tokens), loss


def _trained(path: Path, summary: Mapping[str, Any], read_recipe: Any) -> RunFacts:
    metrics = path / "metrics.jsonl"
    recipe = path / "recipe.yaml"
    values = read_recipe(recipe) if read_recipe and recipe.is_file() else None
    plan = summary.get("plan")
    names = [str(t.get("technique")) for t in plan if isinstance(t, dict)] if _list(plan) else None
    return RunFacts(
        name=path.name or str(path),
        kind="hasten train",
        steps=_whole(summary.get("steps")),
        tokens=number(summary.get("tokens")),
        seconds=number(summary.get("seconds")),
        tokens_per_second=number(summary.get("tokens_per_second")),
        step_seconds=number(summary.get("step_seconds_median")),
        eval_loss=number(summary.get("eval_loss")),
        peak_memory_bytes=number(summary.get("peak_memory_bytes")),
        curve=_curve(_Log(metrics).points() if metrics.is_file() else ()),
        recipe=_object(values),
        plan=None if names is None else tuple(names),
        hardware=_object(summary.get("hardware")),
        versions=_object(summary.get("versions")),
        corpus=summary["corpus_sha256"] if isinstance(summary.get("corpus_sha256"), str) else None,
    )


def _logged(path: Path) -> RunFacts:
    """Returns a run with lines only: one in progress, or one of another trainer's callback."""
    log = _Log(path / "metrics.jsonl")
    curve = _curve(log.points())
    total, seconds = number(log.tokens), number(sum(log.seconds)) if log.seconds else None
    every = bool(log.lines) and len(log.seconds) == log.lines
    return RunFacts(
        name=path.name or str(path),
        kind="metrics.jsonl",
        steps=log.last_step if log.lines else 0,
        tokens=total,
        seconds=seconds,
        tokens_per_second=total / seconds if every and total is not None and seconds else None,
        step_seconds=number(statistics.median(log.seconds)) if log.seconds else None,
        peak_memory_bytes=log.peak_memory_bytes,
        curve=curve,
    )


def _variants(path: Path, report: Mapping[str, Any]) -> list[RunFacts]:
    variants = report.get("variants")
    if not _list(variants) or not variants or not all(isinstance(v, dict) for v in variants):
        raise InputError(f"{path} is not a report: it lists no variants")
    label = path.parent.name if path.is_file() else path.name
    shown = variants[:1] if len(variants) == 1 else [variants[0], variants[-1]]
    return [_variant(label, variant, report) for variant in shown]


def _variant(label: str, variant: Mapping[str, Any], report: Mapping[str, Any]) -> RunFacts:
    speed, step = _object(variant.get("tokens_per_second")), _object(variant.get("step_seconds"))
    techniques, curve = variant.get("techniques"), variant.get("loss_curve")
    points = [p for p in curve if _list(p) and len(p) == 2] if _list(curve) else []
    pairs = [(number(a), number(b)) for a, b in points]
    return RunFacts(
        name=f"{label}: {str(variant.get('name'))[:60]}",
        kind="hasten speedup",
        steps=len(pairs) or None,
        tokens=pairs[-1][0] if pairs else None,
        tokens_per_second=number((speed or {}).get("median")),
        step_seconds=number((step or {}).get("p50")),
        eval_loss=number(variant.get("eval_loss")),
        peak_memory_bytes=number(variant.get("peak_memory_bytes")),
        curve=_curve((i, t, v) for i, (t, v) in enumerate(pairs, 1) if v is not None),
        recipe=_object(report.get("recipe")),
        plan=tuple(map(str, techniques)) if _list(techniques) else None,
        hardware=_object(report.get("hardware")),
        versions=_object(report.get("versions")),
    )


def _hugging_face(path: Path, state: Mapping[str, Any]) -> RunFacts:
    """Reads ``log_history``: a line per logging step, and at the end one with ``train_runtime``."""
    history = state.get("log_history")
    if not _list(history):
        raise InputError(f"{path} is not a trainer_state.json: it has no log_history")
    logs = [entry for entry in history if isinstance(entry, dict)]
    last = next((e for e in reversed(logs) if number(e.get("train_runtime"))), {})
    steps, runtime = _whole(state.get("global_step")), number(last.get("train_runtime"))
    tokens, eval_losses = numbers_of(logs, "num_tokens"), numbers_of(logs, "eval_loss")
    total = tokens[-1] if tokens else None
    padded = not tokens and number(state.get("num_input_tokens_seen"))
    notes = [f"{path.name}: {UNCOUNTED}"] if padded else []
    if runtime:
        notes.append(f"{path.name}: times are the whole run's, evaluations and saving included")
    return RunFacts(
        name=(path.parent.name if path.is_file() else path.name) or str(path),
        kind="trainer_state.json",
        steps=steps,
        tokens=total,
        seconds=runtime,
        tokens_per_second=total / runtime if total and runtime else None,
        step_seconds=runtime / steps if runtime and steps else None,
        eval_loss=eval_losses[-1] if eval_losses else None,
        curve=_curve(
            (int(step), number(e.get("num_tokens")), loss)
            for e in logs
            if (loss := number(e.get("loss"))) is not None
            and (step := number(e.get("step"))) is not None
        ),
        notes=tuple(notes),
    )


def _newest_state(folder: Path) -> Path | None:
    """Returns the Trainer's own file, from the folder or from its latest checkpoint."""
    candidates = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]

    def steps(path: Path) -> float:
        step = path.parent.name.removeprefix("checkpoint-")
        return int(step) if path.parent != folder and step.isdecimal() else math.inf

    return max((path for path in candidates if path.is_file()), key=steps, default=None)


def _whole(value: object) -> int | None:
    parsed = number(value)
    return int(parsed) if parsed is not None and parsed == int(parsed) else None


def _list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _object(value: object) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


# Comparison of runs: one table, differences of their recipes, and reasons why it may be unfair.
#
# Losses are compared after equal tokens, up to the end of the shortest run; if a run has no tokens,
# after equal steps. The loss is the mean of the training losses in the last tenth before, because a
# single step's loss depends more on its examples than on the model.

STRETCH = 0.1  # share of the steps up to the common end with averaged losses
CLOSE = 0.005  # share by which tokens may differ, because a last step may be smaller
OWN = ("output", "price")  # keys that don't affect the training
MODEL = ("model", "tokenizer", "from_scratch", "finetuning_type")
DATA = (
    *("dataset", "columns", "eval_data", "max_examples", "max_rejected", "cutoff_len"),
    *("too_long", "chat_template", "vocabulary"),
)
MACHINE = ("cpu", "usable_cores", "memory_limit_bytes", "accelerators", "device")
ROWS: tuple[tuple[str, str, str], ...] = (  # key, heading, unit
    ("steps", "steps", "amount"),
    ("tokens", "tokens", "amount"),
    ("tokens_per_second", "tokens/s", "amount"),
    ("step_seconds", "step time", "seconds"),
    ("loss_at_equal", "training loss", "loss"),
    ("eval_loss", "eval loss", "loss"),
    ("peak_memory_bytes", "peak memory", "memory"),
)


def compare_runs(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Returns plain values: ``runs``, ``equal``, ``differs``, ``warnings``, ``notes``."""
    where, unit = None, "tokens"
    if ends := [run.curve[-1] for run in runs if len(run.curve)]:
        step, tokens, _ = np.min(ends, axis=0)  # NaN if one of them is
        unit = "steps" if np.isnan(tokens) else "tokens"
        where = float(step if unit == "steps" else tokens)
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


def render(comparison: Mapping[str, Any]) -> str:
    """Returns the comparison as text: the runs are columns, so that many keys stay readable."""
    runs = comparison["runs"]
    equal = comparison["equal"]
    head = [["", *(row["name"] for row in runs)], ["written by", *(row["kind"] for row in runs)]]
    lines = []
    for key, heading, unit in ROWS:
        if key == "loss_at_equal" and equal["value"] is not None:
            heading += f" at {equal['value']:,.0f} {equal['unit']}"
        lines.append([heading, *(number_text(row[key], unit) for row in runs)])
    text = _table([*head, *lines])
    if comparison["differs"]:
        rows = [[key, *map(_short, values)] for key, values in comparison["differs"].items()]
        text += "\n\ndiffers in the recipe\n" + _table(rows)
    for kind in ("warnings", "notes"):
        mark = "not fair: " if kind == "warnings" else "note: "
        text += "".join(f"\n{mark}{visible(line)}" for line in comparison[kind])
    return text


def _loss_at(curve: Curve, where: float | None, unit: str) -> float | None:
    if where is None or not len(curve):
        return None
    steps, tokens, losses = curve.T
    places = np.nan_to_num(tokens) if unit == "tokens" else steps
    before = places <= where
    near = before & (places > (1 - STRETCH) * where)
    if near.any():
        with np.errstate(over="ignore"):
            return number(float(losses[near].mean()))
    return float(losses[before][-1]) if before.any() else None


def _differing(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """Returns keys with different values in two known recipes, with every run's value.

    A report's variant trains with its own techniques, not the recipe's plan.
    """
    values = [
        {**run.recipe, "plan": [*run.plan]} if run.recipe and run.plan is not None else run.recipe
        for run in runs
    ]
    recipes = [recipe for recipe in values if recipe is not None]
    keys = [key for key in dict.fromkeys(k for r in recipes for k in r) if key not in OWN]
    differences = {}
    for key in keys:
        if any(recipe.get(key) != recipes[0].get(key) for recipe in recipes):
            differences[key] = ["not known" if r is None else r.get(key) for r in values]
    return differences


def _warnings(runs: Sequence[RunFacts]) -> list[str]:  # noqa: C901  # a clause for each difference
    """Returns reasons why a difference between these runs may not come from their plans."""
    differs = _differing(runs)
    reasons = []
    for what, keys in (("model", MODEL), ("data", DATA)):
        other = [key for key in keys if key in differs]
        if other:
            reasons.append(f"the {what} differs ({', '.join(other)})")
    if len({run.corpus for run in runs if run.corpus is not None}) > 1:
        reasons.append("the embedded corpus differs")
    if "seed" in differs:
        reasons.append("the seeds differ: other examples are held out, and losses differ by chance")
    tokens = [run.tokens for run in runs if run.tokens is not None]
    if tokens and min(tokens) < (1 - CLOSE) * max(tokens):
        span = f"{min(tokens):,.0f} to {max(tokens):,.0f}"
        reasons.append(f"the tokens differ ({span}): eval losses are of different stages")
    elif not tokens or len(tokens) < len(runs):
        reasons.append(f"tokens are not known of {_names(runs, 'tokens')}")
    machines = [run.hardware for run in runs if run.hardware is not None]
    other = [key for key in MACHINE if _differs(machines, key)]
    if other:
        reasons.append(f"the machine differs ({', '.join(other)})")
    for key, what in (("hardware", "the machine"), ("recipe", "model and data")):
        unknown = _names(runs, key)
        if unknown:
            reasons.append(f"{what} can't be checked: not known of {unknown}")
    versions = [run.versions for run in runs if run.versions is not None]
    other = [key for key in ("torch", "transformers", "hasten") if _differs(versions, key)]
    if other:
        reasons.append(f"the versions differ ({', '.join(other)})")
    return reasons


def _differs(mappings: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Compares entries that have the key; a training's summary contains no device."""
    return len({str(one[key]) for one in mappings if key in one}) > 1


def _names(runs: Sequence[RunFacts], key: str) -> str:
    return ", ".join(run.name for run in runs if getattr(run, key) is None)


def _short(value: Any) -> str:
    text = visible(", ".join(map(str, value)) if isinstance(value, list) else str(value))
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:37] + "..."


def _table(rows: Sequence[Sequence[str]]) -> str:
    cells = [[" ".join(visible(cell).split()) for cell in row] for row in rows]
    return aligned(cells)


# Results of ``hasten tune`` for a run's recipe, as a section of ``hasten report``

SHOWN = 3  # studies, the newest first; trials of each, the best first


def studies_of(run: Path) -> dict[str, dict[str, Any]]:
    """Returns finished studies by folder, newest first; unreadable ones have an error instead."""
    studies: dict[str, dict[str, Any]] = {}
    paths = [(p.stat().st_mtime, p) for p in (run / "studies").glob("*/study.json")]
    for _, path in sorted(paths, reverse=True):
        try:
            studies[str(path.parent)] = read_object(path)
        except InputError as error:
            studies[str(path.parent)] = {"said": str(error)}
    return studies


def section(studies: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the newest studies, a few lines each; empty without any."""
    lines = []
    for folder, study in list(studies.items())[:SHOWN]:
        lines += ["", f"study: {study.get('said', 'not said')}"]
        try:
            lines += _best(study)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            lines.append(f"  its trials can't be read ({type(error).__name__}: {error})")
        lines.append(f"  all trials: {Path(folder) / 'study.json'}")
    if len(studies) > SHOWN:
        lines.append(f"{len(studies) - SHOWN} older studies next to it")
    return "\n".join(lines)


def _best(study: Mapping[str, Any]) -> list[str]:
    trials = [t for t in study.get("trials", ()) if t["log_rate"] is not None]
    lines = []
    for trial in sorted(trials, key=lambda t: -float(t["log_rate"]))[:SHOWN]:
        changed = ", ".join(f"{k}={v}" for k, v in trial["changes"].items()) or "as the recipe"
        lines.append(f"  {math.exp(trial['log_rate']):.3f}× in its trial  {changed}")
    return lines
