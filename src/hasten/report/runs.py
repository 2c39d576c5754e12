"""A finished run as one object, whoever trained it: what its files say, and nothing they don't.

Three kinds of files are read: the folder of ``hasten train`` (``summary.json``, ``metrics.jsonl``,
``recipe.yaml``), the report of an experiment (``report.json``: its baseline and its result are two
runs), and ``trainer_state.json`` of Hugging Face's Trainer or TRL.

Of the latter, tokens are known where TRL logged ``num_tokens`` (a sum of the attention mask). The
Trainer's own ``num_input_tokens_seen`` may count padding, and the file doesn't say whether it does:
it isn't taken for tokens. Speed in tokens needs both, tokens and time.

The files are other people's: every value is checked for being a finite number, a file has a limit,
and what isn't there stays None.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from hasten.errors import InputError

LARGEST_FILE = 256 << 20  # bytes: a line per step is about 500
UNCOUNTED = "tokens: num_input_tokens_seen may count padding, so it isn't taken for tokens"


@dataclass(frozen=True)
class Point:
    """The training loss of one step; ``tokens`` is the sum of all steps up to it, if known."""

    step: int
    tokens: float | None
    loss: float


@dataclass(frozen=True)
class RunFacts:
    """What is known of one run; None: its files don't say."""

    name: str
    kind: str
    steps: int | None = None
    tokens: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None  # median
    held_out_loss: float | None = None
    peak_memory_bytes: float | None = None
    curve: tuple[Point, ...] = ()
    recipe: Mapping[str, Any] | None = None
    plan: tuple[str, ...] | None = None
    hardware: Mapping[str, Any] | None = None
    versions: Mapping[str, Any] | None = None
    corpus: str | None = None
    notes: tuple[str, ...] = field(default=())


def read_runs(path: Path, read_recipe: Any = None) -> list[RunFacts]:
    """The runs that a file or folder holds: one, or an experiment's first and last arm.

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
        found = read_object(report)
        return [_hugging_face(path, found)] if "log_history" in found else _arms(path, found)
    if (path / "metrics.jsonl").is_file():
        return [_logged(path)]
    raise InputError(
        f"{path} holds no run: there is no summary.json, report.json, metrics.jsonl or "
        "trainer_state.json; give the folder of a finished run"
    )


def read_object(path: Path) -> dict[str, Any]:
    """A file of one JSON object.

    Raises:
        InputError: it can't be read, is too large, or is something else.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
        if len(raw) > LARGEST_FILE:
            raise InputError(f"{path} is larger than {LARGEST_FILE} bytes; that is not a run's")
        found = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} can't be read: {str(error)[:120]}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a report: it holds a {type(found).__name__}")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; an unfinished last line is left out.

    Raises:
        InputError: another line isn't an object.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(f"{path} is larger than {LARGEST_FILE} bytes; that is not a run's")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise InputError(f"{path}:{number} is not JSON: {str(error)[:80]}") from error
        if not isinstance(entry, dict):
            raise InputError(f"{path}:{number} is not an object of JSON")
        found.append(entry)
    return found


def number(value: object) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _trained(path: Path, summary: Mapping[str, Any], read_recipe: Any) -> RunFacts:
    lines = read_lines(path / "metrics.jsonl") if (path / "metrics.jsonl").is_file() else []
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
        held_out_loss=number(summary.get("held_out_loss")),
        peak_memory_bytes=number(summary.get("peak_memory_bytes")),
        curve=_curve(lines),
        recipe=_object(values),
        plan=None if names is None else tuple(names),
        hardware=_object(summary.get("hardware")),
        versions=_object(summary.get("versions")),
        corpus=summary["corpus_sha256"] if isinstance(summary.get("corpus_sha256"), str) else None,
    )


def _logged(path: Path) -> RunFacts:
    """A run that left its lines alone: one under way, or one of a host's callback."""
    lines = read_lines(path / "metrics.jsonl")
    tokens, seconds = ([number(e.get(k)) for e in lines] for k in ("tokens", "step_seconds"))
    known = [s for s in seconds if s]
    whole = bool(lines) and None not in tokens and len(known) == len(lines)
    total = math.fsum(t for t in tokens if t) if None not in tokens else None
    peaks = [p for e in lines if (p := number(e.get("peak_memory_bytes")))]
    return RunFacts(
        name=path.name or str(path),
        kind="metrics.jsonl",
        steps=_whole(lines[-1].get("step")) if lines else 0,
        tokens=total,
        seconds=math.fsum(known) if known else None,
        tokens_per_second=total / math.fsum(known) if whole and total is not None else None,
        step_seconds=statistics.median(known) if known else None,
        peak_memory_bytes=max(peaks, default=None),
        curve=_curve(lines),
    )


def _arms(path: Path, report: Mapping[str, Any]) -> list[RunFacts]:
    arms = report.get("arms")
    if not _list(arms) or not arms or not all(isinstance(arm, dict) for arm in arms):
        raise InputError(f"{path} is not a report: it lists no arms; see docs/report-schema.md")
    label = path.parent.name if path.is_file() else path.name
    return [_arm(label, arm, report) for arm in (arms[0], *arms[-1:][: len(arms) - 1])]


def _arm(label: str, arm: Mapping[str, Any], report: Mapping[str, Any]) -> RunFacts:
    speed, step = _object(arm.get("tokens_per_second")), _object(arm.get("step_seconds"))
    techniques, curve = arm.get("techniques"), arm.get("loss_curve")
    points = [p for p in curve if _list(p) and len(p) == 2] if _list(curve) else []
    pairs = [(number(a), number(b)) for a, b in points]
    steps = [Point(i, t, v) for i, (t, v) in enumerate(pairs, 1) if v is not None]
    return RunFacts(
        name=f"{label}: {str(arm.get('name'))[:60]}",
        kind="hasten speedup",
        steps=len(pairs) or None,
        tokens=pairs[-1][0] if pairs else None,
        tokens_per_second=number((speed or {}).get("median")),
        step_seconds=number((step or {}).get("p50")),
        held_out_loss=number(arm.get("held_out_loss")),
        peak_memory_bytes=number(arm.get("peak_memory_bytes")),
        curve=tuple(steps),
        recipe=_object(report.get("recipe")),
        plan=tuple(map(str, techniques)) if _list(techniques) else None,
        hardware=_object(report.get("hardware")),
        versions=_object(report.get("versions")),
    )


def _hugging_face(path: Path, state: Mapping[str, Any]) -> RunFacts:
    """``log_history`` has a line per logging step, and at the end one with ``train_runtime``."""
    history = state.get("log_history")
    if not _list(history):
        raise InputError(f"{path} is not a trainer_state.json: it has no log_history")
    logs = [entry for entry in history if isinstance(entry, dict)]
    last = next((e for e in reversed(logs) if number(e.get("train_runtime"))), {})
    steps, runtime = _whole(state.get("global_step")), number(last.get("train_runtime"))
    tokens = [t for e in logs if (t := number(e.get("num_tokens"))) is not None]
    held = [v for e in logs if (v := number(e.get("eval_loss"))) is not None]
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
        held_out_loss=held[-1] if held else None,
        curve=tuple(
            Point(int(step), number(e.get("num_tokens")), loss)
            for e in logs
            if (loss := number(e.get("loss"))) is not None
            and (step := number(e.get("step"))) is not None
        ),
        notes=tuple(notes),
    )


def _newest_state(folder: Path) -> Path | None:
    """The Trainer's own file: in the folder, or in its checkpoint of the most steps."""
    found = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    there = [path for path in found if path.is_file()]
    return max(there, key=_checkpoint_number, default=None)


def _checkpoint_number(path: Path) -> float:
    step = path.parent.name.rpartition("-")[2]
    return (
        int(step) if path.parent.name.startswith("checkpoint-") and step.isdecimal() else math.inf
    )


def _curve(lines: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    points, total = [], 0.0
    known = True
    for place, entry in enumerate(lines, start=1):
        tokens, loss = number(entry.get("tokens")), number(entry.get("loss"))
        known = known and tokens is not None
        total += tokens or 0.0
        if loss is not None:
            step = _whole(entry.get("step"))
            points.append(Point(step or place, total if known else None, loss))
    return tuple(points)


def _whole(value: object) -> int | None:
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def _list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _object(value: object) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None
