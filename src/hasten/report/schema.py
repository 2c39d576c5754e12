"""The report's shapes, key by key as in docs/reference/metrics.md, and a checking reader.

- float: A number or null.
- bool: A truth value or null.
- object: A number, text, truth value or null.
- dict: Any object.
- [x]: A list of x; [x, y] is a pair.

A key that ends with ? may be missing or null. New keys are optional, so older reports
can still be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from numbers import Integral, Real
from types import NoneType
from typing import Any

from hasten.errors import InputError
from hasten.report.svg import visible

SCHEMA = 2

STEP_TERMS = (
    *("data", "copy", "forward", "backward"),
    *("communication", "optimizer", "checkpoint", "idle"),
)
MEMORY_TERMS = ("weights", "gradients", "optimizer", "activations", "logits", "other")

SPAN = {"median": float, "low": float, "high": float}
_CLAIM = ("technique", "metric", "claimed", "source", "measured", "verdict")
LEDGER = {
    "step?": {f"{term}?": float for term in STEP_TERMS},  # seconds per step
    "memory?": {f"{term}?": float for term in MEMORY_TERMS},  # bytes
    "stability?": dict.fromkeys(("relative_spread?", "p50?", "p99?", "stalls?"), float),
    "utilisation?": float,
    "parallel_efficiency?": float,
}
VARIANT = {
    "name": str,
    "kind?": str,
    "techniques": [str],
    "tokens_per_second": SPAN,
    "ratio": SPAN,
    "against?": str,
    "effect?": SPAN,
    "verdict": str,
    "quality?": str,
    "p_value?": float,
    "corrected?": bool,
    "rounds_needed?": object,
    "rebuilt?": {"ratio?": SPAN, "text?": str},
    "process_variance?": {"error": float, "freedom": float, "builds": float},
    "peak_memory_bytes?": float,
    "eval_loss?": float,
    "metrics?": dict,  # the job's own, by name
    "eval_curve?": [[float, float]],  # (tokens, loss)
    "loss_curve?": [[float, float]],
    "step_seconds?": {"median?": float, "p50?": float, "p99?": float},
    "rounds?": [float],
    "beside?": [float],
    "foreign_load?": [float],
    "throughput_spread?": float,
    "padding_share?": float,
    "mfu?": float,
    "ledger?": LEDGER,
    "startup_seconds?": {"imports?": float, "data?": float, "model?": float},
    "warmup?": {"steps?": float, "seconds?": float, "compile_seconds?": float},
    "effective?": [{"technique": str, "effective": bool, "evidence": str}],
}
_DESIGN = {
    **dict.fromkeys(("rounds?", "steps?", "warmup?", "seed?", "builds?", "seconds?"), float),
    "budget_seconds?": float,
    "round_seconds?": float,
    "grouping?": str,
    "dropped?": [str],
    "resumed?": bool,
    "redone_rounds?": float,
    "ranks?": float,
    "epoch_tokens?": float,
    "epoch_examples?": float,
}
_INVARIANCE = {"what": str, "verdict": str, "measured?": object, "tolerance?": object, "text?": str}
_VERIFICATION = {
    "technique": str,
    "fidelity?": str,
    "test?": str,
    "verdict": str,
    "measured?": object,
    "allowed?": object,
    "seeds?": object,
    "text?": str,
}
_COST = {
    "currency?": str,
    "per_device_hour?": float,
    "per_million_tokens?": dict,
    "energy?": {"kwh_per_million_tokens?": dict, "source?": str},
    "experiment?": {"seconds?": float, "money?": float},
    "payback?": {"text?": str, "hours?": float},
}
REPORT: dict[str, Any] = {
    "schema": int,
    "title": str,
    "created": str,
    "command": str,
    "variants": [VARIANT],
    "fastest?": str,
    "design?": _DESIGN,
    "noise?": {"ratio?": SPAN, "floor?": float, "text?": str},
    "interaction?": {"ratio?": SPAN, "text?": str},
    "claims?": [dict.fromkeys(_CLAIM, str)],
    "quality?": {"margin": float, "text": str, "verdict": str},
    "invariance?": [_INVARIANCE],
    "verification?": [_VERIFICATION],
    "predicted?": {
        "text?": str,
        "rows?": [
            {
                "name": str,
                "unit": str,
                "predicted": float,
                "measured?": float,
                "within?": bool,
            }
        ],
    },
    "samples?": [{"prompt": str, "answer": str, "variant": str}],
    "hardware": dict,
    "versions": dict,
    "recipe": dict,
    "seed": int,
    "cost?": _COST,
    "mfu?": str,
}


# The report's reader: checks plain data against the shapes and fills in optional keys.
#
# `as_json` makes a value JSON (non-finite numbers become null). `read_report` checks it and fills
# in missing keys, so the page and the table never test for a key.

_LARGEST = 10**300  # a larger whole number can't become a float
_LEAVES: dict[type, tuple[str, tuple[type, ...]]] = {  # exact types: a bool is no number here
    float: ("a number or null", (int, float, NoneType)),
    int: ("a whole number", (int,)),
    str: ("text", (str,)),
    bool: ("true, false or null", (bool, NoneType)),
    object: ("a number, text, true, false or null", (int, float, str, bool, NoneType)),
    dict: ("an object", (dict,)),
    list: ("a list", (list,)),
}


def read_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report with every optional key present and every text made visible.

    What wasn't measured is None. Raises InputError, with the place, where `report` departs from
    docs/reference/metrics.md.
    """
    read: dict[str, Any] = _read(as_json(report, "report", visible), REPORT, "report")
    names = [variant["name"] for variant in read["variants"]]
    if read["schema"] != SCHEMA:
        raise InputError(f"This report has schema {read['schema']}, but only {SCHEMA} can be read.")
    if not names or len(set(names)) < len(names):
        raise InputError(f"A report needs at least one variant and no name twice, but has {names}.")
    try:
        moment = datetime.fromisoformat(read["created"])
    except ValueError as error:
        raise InputError(f"report.created is no ISO 8601 time: {read['created']!r}.") from error
    return read | {"created_words": f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".rstrip()}


def as_json(value: Any, location: str, text: Callable[[str], str] = str) -> Any:
    """Returns the value as JSON with `text` applied to every string; non-finite becomes null."""
    try:
        return _plain(value, location, text)
    except RecursionError as error:
        raise InputError(f"{location} is nested too deeply to be written: flatten it.") from error


def _plain(value: Any, location: str, text: Callable[[str], str]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict | Mapping):
        items = value.items()
        return {text(str(key)): _plain(item, f"{location}.{key}", text) for key, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{location}[{i}]", text) for i, item in enumerate(value)]
    if isinstance(value, int | Integral):  # also NumPy's integers
        return int(value) if -_LARGEST < int(value) < _LARGEST else None
    if isinstance(value, float | Real):
        return float(value) if math.isfinite(value) else None
    raise InputError(
        f"{location} is a {type(value).__name__}, which JSON can't hold: give its text."
    )


def _read(value: Any, shape: Any, location: str) -> Any:
    """Returns a plain value checked against its shape, with every optional key filled in."""
    if isinstance(shape, dict) and isinstance(value, dict):
        return {key.rstrip("?"): _entry(value, key, shape[key], location) for key in shape}
    if isinstance(shape, list) and isinstance(value, list) and len(shape) in (1, len(value)):
        return [_read(item, shape[0], f"{location}[{i}]") for i, item in enumerate(value)]
    if not isinstance(shape, dict | list) and type(value) in _LEAVES[shape][1]:
        return value
    kind = type(shape) if isinstance(shape, dict | list) else shape
    wanted = "a pair" if isinstance(shape, list) and len(shape) == 2 else _LEAVES[kind][0]
    raise InputError(
        f"{location} must be {wanted}, not {value!r:.60}: see docs/reference/metrics.md."
    )


def _entry(value: Mapping[str, Any], key: str, shape: Any, location: str) -> Any:
    name = key.rstrip("?")
    if name in value and (value[name] is not None or name == key):
        return _read(value[name], shape, f"{location}.{name}")
    if name == key:
        raise InputError(f"{location} lacks the key '{name}': see docs/reference/metrics.md.")
    if isinstance(shape, dict) and all(inner.endswith("?") for inner in shape):
        return _read({}, shape, location)
    return [] if isinstance(shape, list) else None
