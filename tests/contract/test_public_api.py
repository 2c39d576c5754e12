"""What users import, type, read and store doesn't go away or change without a word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from contract import public_api

FROZEN: dict[str, Any] = json.loads(public_api.FILE.read_text())


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return public_api.surface()


def test_every_part_is_frozen(now: dict[str, Any]) -> None:
    assert set(FROZEN) == set(now)


@pytest.mark.parametrize("part", sorted(FROZEN))
def test_nothing_went_away_or_changed_and_what_is_new_is_listed(
    now: dict[str, Any], part: str
) -> None:
    wrong = list(differences(FROZEN[part], now[part], part))
    assert not wrong, "\n".join([*wrong, "see tests/contract/public_api.py"])


def test_a_change_is_seen() -> None:
    before = {"a": ["x", 1], "b": {"c": 2}}
    assert list(differences(before, {"a": ["x", 2], "d": 1}, "")) == [
        ".a was ['x', 1] and is ['x', 2]",
        ".b is gone",
        ".d is new: run tests/contract/public_api.py to list it",
    ]
    assert list(differences(["x"], ["y"], "n")) == [
        "n: x is gone",
        "n: y is new: run tests/contract/public_api.py to list it",
    ]


def differences(before: Any, now: Any, where: str) -> Iterator[str]:
    """One sentence for each key that is gone, has changed or is new."""
    new = "is new: run tests/contract/public_api.py to list it"
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before:
            if key not in now:
                yield f"{where}.{key} is gone"
            else:
                yield from differences(before[key], now[key], f"{where}.{key}")
        yield from (f"{where}.{key} {new}" for key in now if key not in before)
    elif where.count(".") == 0 and isinstance(before, list) and isinstance(now, list):
        yield from (f"{where}: {name} is gone" for name in before if name not in now)
        yield from (f"{where}: {name} {new}" for name in now if name not in before)
    elif before != now:
        yield f"{where} was {before} and is {now}"
