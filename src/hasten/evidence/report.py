"""The report: one measured job as report.json, as a page that stands alone, and as a small table.

The input is plain data, described key by key in docs/report-schema.md; the shapes below are the
same description as code.

1. `_plain` makes it JSON (what isn't finite becomes null), `_read` checks it against the shapes.
2. Its rows become drawings (charts.py), and all of it becomes a page (report.html.jinja).
3. Both files are rendered before either is written, and each appears by a rename, so that no
   reader ever sees half a report.

Its texts come from models and other people's files, so none is trusted: the template escapes them
all, `visible` shows what hides, and the page forbids itself scripts and network.
"""

import json
import math
import os
import re
import statistics
from collections.abc import Callable, Mapping
from datetime import datetime
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hasten.errors import InputError
from hasten.evidence.charts import (
    NOT_MEASURED,
    Bar,
    Curve,
    Strip,
    bar_chart,
    line_chart,
    strip_chart,
    thin,
    visible,
)

_EMBEDDED = 200_000  # bytes of JSON in the page, which as a whole shall stay below 500 kB

# Shapes: float is a number or null, bool a truth value or null, dict any object; [x] is a list of
# x and [x, y] a pair; a key that ends with ? may be missing or null.
_SPAN = {"median": float, "low": float, "high": float}
_CLAIM = ("technique", "metric", "claimed", "source", "measured", "verdict")
_ARM = {
    "name": str,
    "techniques": [str],
    "tokens_per_second": _SPAN,
    "ratio": _SPAN,
    "verdict": str,
    "peak_memory_bytes?": float,
    "held_out_loss?": float,
    "held_out_curve?": [[float, float]],  # (tokens, loss)
    "loss_curve?": [[float, float]],
    "step_seconds?": {"median?": float, "p50?": float, "p99?": float},
    "rounds?": [float],
    "padding_share?": float,
    "startup_seconds?": {"imports?": float, "data?": float, "model?": float},
    "acted?": [{"technique": str, "acted": bool, "evidence": str}],
}
_REPORT = {
    "schema": int,
    "title": str,
    "created": str,
    "command": str,
    "arms": [_ARM],
    "claims?": [dict.fromkeys(_CLAIM, str)],
    "quality?": {"margin": float, "text": str, "verdict": str},
    "samples?": [{"prompt": str, "answer": str, "arm": str}],
    "hardware": dict,
    "versions": dict,
    "recipe": dict,
    "seed": int,
    "cost?": {"currency": str, "per_device_hour": float, "per_million_tokens": dict},
}
_LEAVES: dict[type, tuple[str, tuple[type, ...]]] = {  # exact types: a bool is no number here
    float: ("a number or null", (int, float, NoneType)),
    int: ("a whole number", (int,)),
    str: ("text", (str,)),
    bool: ("true, false or null", (bool, NoneType)),
    dict: ("an object", (dict,)),
    list: ("a list", (list,)),
}

_UNITS: dict[str, Callable[[float], str]] = {
    "amount": lambda v: f"{v:,.0f}" if abs(v) >= 99.95 else f"{v:.3g}",
    "times": lambda v: f"{v:.2f}×",
    "memory": lambda v: f"{v / 2**30:.1f} GiB" if v >= 2**29 else f"{v / 2**20:.0f} MiB",
    "loss": lambda v: f"{v:.4f}",
    "loss_change": lambda v: f"{v:+.4f}".replace("-", "−"),
    "seconds": lambda v: f"{v:.2f} s" if v >= 1 else f"{v * 1000:.0f} ms",
    "percent": lambda v: f"{100 * v:.1f} %",
    "change": lambda v: f"{100 * v:+.1f} %".replace("-", "−"),
    "tokens": lambda v: f"{v / 1e6:.3g} M" if v >= 1e5 else f"{v:,.0f}",
    "price": lambda v: f"{v:,.4f}",
    "short": lambda v: f"{v:.3g}",
}
_WIDTHS = (800, 340)  # pixels of a drawing for wide and for narrow screens
_CURVES = (390, 250)  # pixels, width and height


def write_report(report: Mapping[str, Any], folder: Path) -> Path:
    """Write report.json and report.html into `folder` (made if missing); the path of the page.

    Raises InputError where `report` departs from docs/report-schema.md, with no file changed, or
    where the folder can't be written.
    """
    plain, read = _plain(report, "report"), read_report(report)
    page = _page(plain, read)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "report.json", json.dumps(plain) + "\n")
        return _replace(folder / "report.html", page)
    except OSError as error:
        raise InputError(
            f"The report can't be written to {folder} ({error.strerror}): name another folder."
        ) from error


def render_markdown(report: Mapping[str, Any]) -> str:
    """The arms as a Markdown table, aligned so that it reads well in a terminal too.

    Raises InputError where `report` departs from docs/report-schema.md.
    """
    rows = [["arm", "tokens/s [95 %]", "ratio [95 %]", "peak memory", "held-out loss", "verdict"]]
    for arm in read_report(report)["arms"]:
        spans = [span(arm["tokens_per_second"], "amount"), span(arm["ratio"], "times")]
        rest = [words(arm["peak_memory_bytes"], "memory"), words(arm["held_out_loss"], "loss")]
        rows.append([_cell(arm["name"]), *spans, *rest, _cell(arm["verdict"])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(n) for cell, n in zip(row, widths, strict=True)] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in padded)


def read_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with every optional key present and every text made visible.

    What wasn't measured is None. Raises InputError, with the place, where `report` departs from
    docs/report-schema.md.
    """
    read: dict[str, Any] = _read(_plain(report, "report", visible), _REPORT, "report")
    names = [arm["name"] for arm in read["arms"]]
    if read["schema"] != 1:
        raise InputError(f"This report has schema {read['schema']}, but only 1 can be read.")
    if not names or len(set(names)) < len(names):
        raise InputError(f"A report needs at least one arm and no name twice, but has {names}.")
    try:
        moment = datetime.fromisoformat(read["created"])
    except ValueError as error:
        raise InputError(f"report.created is no ISO 8601 time: {read['created']!r}.") from error
    return read | {"created_words": f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".rstrip()}


def words(value: float | None, unit: str) -> str:
    """A number as people read it; None is said, never replaced by a number."""
    return NOT_MEASURED if value is None else _UNITS[unit](value)


def span(value: Mapping[str, float | None], unit: str) -> str:
    """A median with its interval, as in 1.62× [1.55, 1.70]; a single round has none."""
    low, high = value["low"], value["high"]
    if value["median"] is None or low is None or high is None:
        return words(value["median"], unit)
    ends = (words(end, unit).rstrip("×") for end in (low, high))
    return f"{words(value['median'], unit)} [{', '.join(ends)}]"


def outline(value: Any, indent: str = "") -> str:
    """A JSON object or list, not empty, as YAML with one line per value, to read and to copy."""
    items = value.items() if isinstance(value, dict) else [(None, item) for item in value]
    lines = []
    for key, item in items:
        head = indent + ("-" if key is None else f"{_scalar(key)}:")
        if isinstance(item, dict | list) and item:
            lines += [head, outline(item, indent + "  ")]
        else:
            lines.append(f"{head} {_scalar(item)}")
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    """One value in YAML: JSON, with the quotes left away where a word can mean nothing else."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./+-]*", value, re.ASCII):
        meant = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
        return f'"{value}"' if value.lower() in meant else value
    text = json.dumps(value, ensure_ascii=False)
    # YAML 1.1 takes 1e-05 for text; with a point it is a number everywhere.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)


def _page(plain: Mapping[str, Any], read: dict[str, Any]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"words": words, "span": span, "outline": outline}
    data, complete = _embedded(plain)
    page = environment.get_template("report.html.jinja")
    return page.render(report=read, drawings=_drawings(read["arms"]), data=data, complete=complete)


def _drawings(arms: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Every drawing by its name; those with a row per arm once wide and once narrow."""
    speeds, memories, strips = [], [], []
    most = max(arm["peak_memory_bytes"] or 0 for arm in arms)
    unit, sign = (2**30, "GiB") if most >= 2**29 else (2**20, "MiB")
    for arm in arms:
        hue = {"held": "gain", "fell short": "gain", "harmed": "harm"}.get(arm["verdict"], "other")
        name, tone, used = arm["name"], _tone(arm, arms), arm["peak_memory_bytes"]
        median, low, high = (arm["ratio"][end] for end in ("median", "low", "high"))
        speeds.append(Bar(name, span(arm["ratio"], "times"), median, low, high, hue))
        memories.append(Bar(name, _used(arm, arms[0]), used and used / unit, tone=tone))
        strips.append(Strip(name, _reach(arm["rounds"]), arm["rounds"], tone))
    tokens, ordered = _UNITS["tokens"], [arms[0], *arms[:0:-1]]

    def curves(key: str) -> list[Curve]:  # on top the baseline, then the final arm
        return [Curve(arm["name"], arm[key], _tone(arm, arms)) for arm in ordered]

    return {
        "ratio": [
            bar_chart("Speed against the baseline", speeds, w, 1, lambda v: f"{v:.3g}×")
            for w in _WIDTHS
        ],
        "memory": [
            bar_chart("Peak memory", memories, w, 0, lambda v: f"{v:g} {sign}") for w in _WIDTHS
        ],
        "rounds": [strip_chart("Speed in each round", strips, w) for w in _WIDTHS],
        "held_out": [line_chart("Held-out loss", curves("held_out_curve"), _CURVES, tokens)],
        "training": [line_chart("Training loss", curves("loss_curve"), _CURVES, tokens)],
    }


def _tone(arm: Mapping[str, Any], arms: list[dict[str, Any]]) -> str:
    return "base" if arm is arms[0] else "final" if arm is arms[-1] else "other"


def _used(arm: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """An arm's peak memory with its change from the baseline."""
    used, before = arm["peak_memory_bytes"], base["peak_memory_bytes"]
    known = arm is not base and used is not None and before
    return words(used, "memory") + (f" ({words(used / before - 1, 'change')})" if known else "")


def _reach(rounds: list[float | None]) -> str:
    """How far an arm's rounds lie from their median."""
    if not (known := [value for value in rounds if value]):
        return NOT_MEASURED
    middle = statistics.median(known)
    return " to ".join(words(end / middle - 1, "change") for end in (min(known), max(known)))


def _embedded(plain: Mapping[str, Any]) -> tuple[str, bool]:
    """The report as JSON that can't end its script element, and whether nothing was left out.

    Where the whole would make the page too heavy, curves become means; report.json keeps all.
    """
    for most in (None, 200, 50):
        arms = plain["arms"] if most is None else [_thinned(arm, most) for arm in plain["arms"]]
        text = json.dumps({**plain, "arms": arms})
        if len(text) <= _EMBEDDED:
            break
    else:
        text = json.dumps({"schema": 1, "left_out": "too large for this page: see report.json"})
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text, most is None


def _thinned(arm: Mapping[str, Any], most: int) -> dict[str, Any]:
    curves = {key: thin(arm[key], most) for key in ("loss_curve", "held_out_curve") if arm.get(key)}
    return {**arm, **curves}


def _plain(value: Any, place: str, text: Callable[[str], str] = str) -> Any:
    """The value as JSON, `text` done to every string; what isn't finite becomes null."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict | Mapping):
        items = value.items()
        return {text(str(key)): _plain(item, f"{place}.{key}", text) for key, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{i}]", text) for i, item in enumerate(value)]
    if isinstance(value, int | Integral):  # NumPy's integers too
        return int(value)
    if isinstance(value, float | Real):
        return float(value) if math.isfinite(value) else None
    raise InputError(f"{place} is a {type(value).__name__}, which JSON can't hold: give its text.")


def _read(value: Any, shape: Any, place: str) -> Any:
    """A plain value checked against its shape, with every optional key filled in."""
    if isinstance(shape, dict) and isinstance(value, dict):
        return {key.rstrip("?"): _entry(value, key, shape[key], place) for key in shape}
    if isinstance(shape, list) and isinstance(value, list) and len(shape) in (1, len(value)):
        return [_read(item, shape[0], f"{place}[{i}]") for i, item in enumerate(value)]
    if not isinstance(shape, dict | list) and type(value) in _LEAVES[shape][1]:
        return value
    kind = type(shape) if isinstance(shape, dict | list) else shape
    wanted = "a pair" if isinstance(shape, list) and len(shape) == 2 else _LEAVES[kind][0]
    raise InputError(f"{place} must be {wanted}, not {value!r:.60}: see docs/report-schema.md.")


def _entry(value: Mapping[str, Any], key: str, shape: Any, place: str) -> Any:
    name = key.rstrip("?")
    if name in value and (value[name] is not None or name == key):
        return _read(value[name], shape, f"{place}.{name}")
    if name == key:
        raise InputError(f"{place} lacks the key '{name}': see docs/report-schema.md.")
    if isinstance(shape, dict) and all(inner.endswith("?") for inner in shape):
        return _read({}, shape, place)
    return [] if isinstance(shape, list) else None


def _cell(text: str) -> str:
    """Text for a Markdown cell: on one line, and nothing in it means anything to Markdown."""
    return re.sub(r"([\\|`*<>\[\]])", r"\\\1", " ".join(text.split())) or "–"


def _replace(path: Path, text: str) -> Path:
    """Write the file beside its place, then rename it there in one act."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        return draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
