"""Rows of a test that has several parameters: few stand for all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest


def covering(*values: Collection[Any], rounds: int = 1) -> list[Any]:
    """All combinations of the values; most have the mark ``long``.

    In the other rows, a round has each value of each parameter at least once. Another round
    combines them otherwise.
    """
    sizes = [len(each) for each in values]
    chosen = {
        tuple((number + turn * place) % size for place, size in enumerate(sizes))
        for turn in range(rounds)
        for number in range(max(sizes))
    }
    rows = []
    for places in itertools.product(*map(range, sizes)):
        row = (list(each)[place] for each, place in zip(values, places, strict=True))
        rows.append(pytest.param(*row, marks=[] if places in chosen else pytest.mark.long))
    return rows
