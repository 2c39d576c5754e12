"""Proposers that know nothing beforehand: an order by chance, and a bandit for each dimension."""

from __future__ import annotations

import math
import random

from hasten.tune.proposers import Tried
from hasten.tune.space import Point, Space


class Shuffled:
    """Every point once, in an order drawn by the seed."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        self._points = [p for p in space.points(seed) if p != space.start]
        random.Random(seed).shuffle(self._points)
        self._done: set[Point] = set()

    def ask(self) -> Point | None:
        return next((p for p in self._points if p not in self._done), None)

    def tell(self, tried: Tried) -> None:
        self._done.add(tried.point)


class Bandit:
    """Each dimension a bandit of its own: values are drawn by Thompson's rule.

    Thompson (1933): a value is chosen as often as it is believed to be the best. What is
    believed of a value is the mean of its points' results, the more vague the fewer these are.
    """

    WIDTH = 0.15  # of a value that was never tried, as a logarithm

    def __init__(self, space: Space, seed: int = 0) -> None:
        self._space, self._draw = space, random.Random(seed)
        self._results: dict[tuple[int, int], list[float]] = {}
        self._done: set[Point] = {space.start}
        self._rest = Shuffled(space, seed)
        self._worst = 0.0

    def ask(self) -> Point | None:
        for _ in range(200):
            point = self._space.canonical(
                tuple(self._pull(i, len(d.values)) for i, d in enumerate(self._space.dimensions))
            )
            if point not in self._done and self._space.refuse(point) is None:
                return point
        return self._rest.ask()

    def tell(self, tried: Tried) -> None:
        self._done.add(tried.point)
        self._rest.tell(tried)
        self._worst = min(self._worst, tried.value or 0.0)
        value = tried.value if tried.value is not None else self._worst - 0.1
        for place in enumerate(tried.point):
            self._results.setdefault(place, []).append(value)

    def _pull(self, dimension: int, values: int) -> int:
        def drawn(value: int) -> float:
            seen = self._results.get((dimension, value), [])
            mean = sum(seen) / (len(seen) + 1)  # a result of 0, the start's, stands beside them
            return self._draw.gauss(mean, self.WIDTH / math.sqrt(1 + len(seen)))

        return max(range(values), key=drawn)
