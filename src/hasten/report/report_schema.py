"""The report's reader: it checks plain data against the shapes and fills in every optional key.

report_shapes.py holds the shapes, docs/report-schema.md says them key by key. `as_json` makes a
value JSON (what isn't finite becomes null), and `read_report` checks it and fills it in, so that
the page and the table never ask whether a key is there.
"""

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from numbers import Integral, Real
from types import NoneType
from typing import Any

from hasten.errors import InputError
from hasten.report.charts_svg import visible
from hasten.report.report_shapes import REPORT

_LARGEST = 10**300  # beyond, a whole number is no float any more
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
    """The report with every optional key present and every text made visible.

    What wasn't measured is None. Raises InputError, with the place, where `report` departs from
    docs/report-schema.md.
    """
    read: dict[str, Any] = _read(as_json(report, "report", visible), REPORT, "report")
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
    try:
        return _plain(value, place, text)
    except RecursionError as error:
        raise InputError(f"{place} is nested too deeply to be written: flatten it.") from error


def _plain(value: Any, place: str, text: Callable[[str], str]) -> Any:
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
        return int(value) if -_LARGEST < int(value) < _LARGEST else None
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
