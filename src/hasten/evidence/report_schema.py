"""The report's schema: what a report must hold, as shapes, and the reader that enforces them.

docs/report-schema.md says the same key by key. `as_json` makes a value JSON (what isn't finite
becomes null), and `read_report` checks it against the shapes and fills in every optional key, so
that the page and the table never ask whether a key is there.
"""

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from numbers import Integral, Real
from types import NoneType
from typing import Any

from hasten.errors import InputError
from hasten.evidence.charts import visible

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
    "mfu?": float,
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
    "mfu?": str,
}
_LEAVES: dict[type, tuple[str, tuple[type, ...]]] = {  # exact types: a bool is no number here
    float: ("a number or null", (int, float, NoneType)),
    int: ("a whole number", (int,)),
    str: ("text", (str,)),
    bool: ("true, false or null", (bool, NoneType)),
    dict: ("an object", (dict,)),
    list: ("a list", (list,)),
}


def read_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with every optional key present and every text made visible.

    What wasn't measured is None. Raises InputError, with the place, where `report` departs from
    docs/report-schema.md.
    """
    read: dict[str, Any] = _read(as_json(report, "report", visible), _REPORT, "report")
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


def as_json(value: Any, place: str, text: Callable[[str], str] = str) -> Any:
    """The value as JSON, `text` done to every string; what isn't finite becomes null."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict | Mapping):
        items = value.items()
        return {text(str(key)): as_json(item, f"{place}.{key}", text) for key, item in items}
    if isinstance(value, list | tuple):
        return [as_json(item, f"{place}[{i}]", text) for i, item in enumerate(value)]
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
