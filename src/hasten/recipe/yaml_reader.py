"""Reads YAML as plain values, without objects, anchors or repeated keys."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.constructor import BaseConstructor
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from hasten.errors import InputError
from hasten.foreign_files import read_bounded

LARGEST_FILE = 1 << 20  # bytes; far more than a recipe needs
# Control characters, Unicode line ends, marks of text direction, lone surrogates.
NOT_IN_A_LINE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]+"
)


class _Loader(yaml.SafeLoader):
    """YAML without anchors and base 60, which have no limit of cost; 1e-4 is a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        values = BaseConstructor.construct_mapping(self, node, deep=deep)  # takes no merge key <<
        if len(values) < len(node.value):
            keys = Counter(self.construct_object(key, deep=deep) for key, _ in node.value)
            raise yaml.MarkedYAMLError(
                problem=f"key {keys.most_common(1)[0][0]!r} stands twice",
                problem_mark=node.start_mark,
            )
        return values

    def construct_number(self, node: Any) -> Any:
        """Refuses YAML 1.1's base 60 (1:30): its cost grows with the square of the digits."""
        if ":" in self.construct_scalar(node):
            raise yaml.MarkedYAMLError(
                problem="a number with a colon is not allowed", problem_mark=node.start_mark
            )
        if node.tag.endswith("float"):
            return self.construct_yaml_float(node)
        # Python can't print integers of more than 4,300 digits.
        if len(node.value) <= 70 and -(2**63) <= (number := self.construct_yaml_int(node)) < 2**64:
            return number
        raise yaml.MarkedYAMLError(
            problem="an integer beyond 64 bits is not allowed", problem_mark=node.start_mark
        )


_INTEGER = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+"
    r"|[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
)
_NUMBERS = {"tag:yaml.org,2002:int": _INTEGER, "tag:yaml.org,2002:float": _FLOAT}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, list("-+0123456789."))
    _Loader.add_constructor(_tag, _Loader.construct_number)


def _problem(text: str, error: yaml.MarkedYAMLError) -> str:
    """Describes the problem, and for a syntax error what to do."""
    mark, problem = error.problem_mark, error.problem or "it can't be read"
    if not isinstance(error, ScannerError | ParserError):
        return problem
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "not YAML: the line begins with a tab; indent it with blanks"
    return f"not YAML: {problem}; check its colons, brackets and quotes"


def read_yaml(text: str, origin: str) -> Any:
    """Returns YAML as plain values.

    Raises:
        InputError: the text isn't YAML; the message has the line.
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise InputError(f"{origin}: {line}{_problem(text, error)}") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{origin}: not YAML: {str(error).splitlines()[0]}") from error


def read_yaml_file(path: Path, what: str) -> Any:
    """Returns the content of a YAML file; messages call it ``what``.

    Raises:
        InputError: no such file, one that is too large, or not YAML.
    """
    if os.path.isdir(path):  # Path.is_dir() raises for some impossible names
        raise InputError(f"{path} is a folder; give the {what}, a .yaml file")
    return read_yaml(read_bounded(path, LARGEST_FILE, what).decode("utf-8", "replace"), str(path))


def one_line(text: object) -> str:
    """Returns a text without line ends and control characters, for comments."""
    return " ".join(NOT_IN_A_LINE.sub(" ", str(text)).split())


def check_keys(text: str, keys: Sequence[str]) -> str:
    """Returns generated YAML after a check that it has exactly these keys.

    Raises:
        InputError: a text in it has added or removed a key.
    """
    parsed = read_yaml(text, "the text that was made of it") or {}
    if not isinstance(parsed, dict) or list(parsed) != list(keys):
        raise InputError("this file's texts would become other keys of the recipe; nothing written")
    return text


# First word of pydantic's error types, and a description of the expected type.
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "tuple": "a list",
    **dict.fromkeys(("dict", "model", "dataclass"), "lines of `key: value`"),
}

_NO_TYPE = "(?!(str|int|float|bool|list|dict)$)[a-z_]+"


def first_complaint(error: ValidationError) -> str:
    """Returns pydantic's first error as `key is VALUE; it must ...`, or pydantic's own text.

    The errors of a key with several possible types are joined.
    """
    complaint, *others = error.errors()
    key, written = _key_of(complaint), repr(complaint.get("input"))[:200]
    text = complaint["msg"].removeprefix("Value error, ")
    if complaint["type"] == "missing":
        lacks_a_key = isinstance(complaint["loc"][-1], str)
        return (
            f"the key {key!r} is missing" if lacks_a_key else f"{key} is {written}: too few values"
        )
    if complaint["type"] == "extra_forbidden":
        return f"unknown key {key!r}"
    if not key or complaint["type"] == "value_error":
        return f"{key}: {text} (it is {written})" if key else text
    wanted = [_wanted(each) for each in (complaint, *others) if _key_of(each) == key]
    return f"{key} is {written}; it must {' or '.join(dict.fromkeys(wanted))}"


def _key_of(complaint: Mapping[str, Any]) -> str:
    names = [part for part in complaint["loc"] if isinstance(part, str)]
    return ".".join([*names[:1], *(n for n in names[1:] if re.fullmatch(_NO_TYPE, n))])


def _wanted(complaint: Mapping[str, Any]) -> str:
    kind, _, reason = complaint["type"].partition("_")
    if kind in _TYPES and not reason.startswith("too_"):
        return f"be {_TYPES[kind]}"
    text = re.sub(r"^\w+ should ", "", complaint["msg"])
    text = text.replace("greater than or equal to", "at least")
    return text.replace("less than or equal to", "at most")


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns ``key=value`` words as a dictionary; values are read as YAML."""
    settings: dict[str, Any] = {}
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise InputError(f"can't read {word[:60]!r}: overrides are written key=value")
        settings[key.strip()] = read_yaml(text, f"override {word[:60]!r}")
    return settings


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def read_duration(text: str, name: str = "budget") -> float:
    """Parses ``90s``, ``20m``, ``1.5h``, ``1h30m``, ``7d`` or a number of seconds.

    Raises:
        InputError: any other text; ``name`` is the option's.
    """
    pieces = re.findall(r"([0-9.]+)\s*([a-z]*)\s*", text.strip().lower())
    compact = "".join(text.lower().split())
    try:
        if not pieces or "".join(number + unit for number, unit in pieces) != compact:
            raise ValueError
        seconds = sum(float(number) * _UNITS[unit] for number, unit in pieces)
    except (ValueError, KeyError) as error:
        raise InputError(f"{name}: can't read {text!r}; write 90s, 20m or 1h30m") from error
    if not (math.isfinite(seconds) and seconds > 0):
        raise InputError(f"{name}: {text!r} isn't a time; write 90s, 20m or 1h30m")
    return seconds
