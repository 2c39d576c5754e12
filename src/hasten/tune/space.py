"""A space is what a tuner may choose: dimensions with a few values each, and what isn't allowed.

A point is a tuple of indices, one per dimension. A dimension may matter only under another's value
(the bucket of a graph only where graphs are compiled): elsewhere its index is 0, so that equal
settings are equal points and none is measured twice. ``refuse`` says why a point can't be.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.core.plan import did_you_mean
from hasten.errors import InputError

Point = tuple[int, ...]
SMALL = 20_000  # points that are looked at one by one; of larger spaces, a sample


@dataclass(frozen=True)
class Dimension:
    """One decision.

    Args:
        name: in messages and records.
        values: what may be chosen; the first stands where the dimension doesn't matter.
        ordered: neighbours in ``values`` are alike (a size, a rate).
        needs: name and value of the dimension under which this one matters.
    """

    name: str
    values: tuple[Any, ...]
    ordered: bool = False
    needs: tuple[str, Any] | None = None


@dataclass(frozen=True)
class Space:
    """Dimensions, the point to start from, and what is not allowed.

    Raises:
        InputError: no dimension, one without a value, two of one name, or an unknown ``needs``.
    """

    dimensions: tuple[Dimension, ...]
    start: Point
    refuse: Callable[[Point], str | None] = field(default=lambda point: None, compare=False)

    def __post_init__(self) -> None:
        names = [d.name for d in self.dimensions]
        if not names:
            raise InputError("tune: there is nothing to choose: no knob applies to this job")
        if len(set(names)) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise InputError(f"tune: {twice} is listed twice")
        for number, d in enumerate(self.dimensions):
            if not d.values:
                raise InputError(f"tune: {d.name} has no values; list some")
            if d.needs is not None and d.needs[0] not in names[:number]:
                raise InputError(f"tune: {d.name} depends on {d.needs[0]}, which isn't before it")
        object.__setattr__(self, "start", self.canonical(self.start))

    @property
    def size(self) -> int:
        """Points, those included that are equal or refused."""
        return math.prod(len(d.values) for d in self.dimensions)

    def active(self, point: Point) -> tuple[bool, ...]:
        """Which dimensions matter at a point."""
        places = {d.name: i for i, d in enumerate(self.dimensions)}
        found: list[bool] = []
        for d in self.dimensions:
            if d.needs is None:
                found.append(True)
                continue
            above = places[d.needs[0]]
            value = self.dimensions[above].values[point[above]]
            found.append(found[above] and value == d.needs[1])
        return tuple(found)

    def canonical(self, point: Point) -> Point:
        """The same settings with index 0 wherever a dimension doesn't matter."""
        return tuple(i if on else 0 for i, on in zip(point, self.active(point), strict=True))

    def settings(self, point: Point) -> dict[str, Any]:
        """The values that matter, by name."""
        pairs = zip(self.dimensions, point, self.active(point), strict=True)
        return {d.name: d.values[i] for d, i, on in pairs if on}

    def point(self, settings: Mapping[str, Any]) -> Point:
        """The point with these settings; what isn't named is as at the start.

        Raises:
            InputError: a name or value that the space doesn't have.
        """
        names = [d.name for d in self.dimensions]
        for name in settings:
            if name not in names:
                raise InputError(f"tune: nothing is called {name!r}{did_you_mean(name, names)}")
        found = []
        for d, first in zip(self.dimensions, self.start, strict=True):
            if d.name in settings and settings[d.name] not in d.values:
                raise InputError(f"tune: {d.name} can't be {settings[d.name]!r} here")
            found.append(d.values.index(settings[d.name]) if d.name in settings else first)
        return self.canonical(tuple(found))

    def changes(self, point: Point) -> dict[str, Any]:
        """What differs from the start, by name: value."""
        first, here = self.settings(self.start), self.settings(point)
        return {n: v for n, v in here.items() if n not in first or first[n] != v}

    def neighbours(self, point: Point) -> list[Point]:
        """Points that differ in one dimension."""
        found: dict[Point, None] = {}
        active = self.active(point)
        for place, (d, here, on) in enumerate(zip(self.dimensions, point, active, strict=True)):
            for i in range(len(d.values)) if on else ():
                near = self.canonical((*point[:place], i, *point[place + 1 :]))
                if i != here and near != point and self.refuse(near) is None:
                    found[near] = None
        return list(found)

    def apart(self, one: Point, other: Point) -> int:
        """In how many choices two points differ; the knobs of another technique aren't counted."""
        both = zip(self.active(one), self.active(other), strict=True)
        same = zip(one, other, both, strict=True)
        return sum(a != b for a, b, (mine, theirs) in same if mine and theirs)

    def summit(self, worth: Callable[[Point], float], seed: int = 0) -> Point:
        """The point of most worth among `points`, then the way up from neighbour to neighbour."""
        best = max(self.points(seed), key=worth)
        while (near := max(self.neighbours(best), key=worth, default=best)) != best:
            if worth(near) <= worth(best):
                break
            best = near
        return best

    def points(self, seed: int = 0) -> list[Point]:
        """All legal points once; of a large space, a sample and the neighbours of the start."""
        found: dict[Point, None] = {self.start: None}
        source = self._all() if self.size <= SMALL else self._some(random.Random(seed))
        for raw in source:
            point = self.canonical(raw)
            if point not in found and self.refuse(point) is None:
                found[point] = None
        return list(found)

    def _all(self) -> Iterator[Point]:
        return itertools.product(*(range(len(d.values)) for d in self.dimensions))

    def _some(self, draw: random.Random) -> Iterator[Point]:
        yield from self.neighbours(self.start)
        for _ in range(SMALL // 4):
            yield tuple(draw.randrange(len(d.values)) for d in self.dimensions)


def of_values(knobs: Mapping[str, Any], start: Mapping[str, Any] | None = None) -> Space:
    """A space of plain lists, ``{"batch": [8, 16, 32], "compile": [False, True]}``.

    Numbers in rising order count as ordered. It starts at the first values, or at ``start``.

    Raises:
        InputError: something isn't a list of different values.
    """
    dimensions = []
    for name, values in knobs.items():
        if not isinstance(values, list | tuple) or not values:
            raise InputError(f"space: {name} must be a list of values, such as [8, 16, 32]")
        if any(values.count(v) > 1 for v in values):
            raise InputError(f"space: {name} lists a value twice")
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        rising = numbers and list(values) == sorted(values)
        dimensions.append(Dimension(name, tuple(values), ordered=rising and len(values) > 2))
    space = Space(tuple(dimensions), (0,) * len(dimensions))
    return Space(space.dimensions, space.point(start)) if start else space
