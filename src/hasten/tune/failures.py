"""What is learnt from a point that failed: which of its choices may be to blame.

A failure is no speed, so it says nothing of the forecast; but the next points should do without its
cause. Suspect is each choice that the start hasn't, and each pair of them. Who worked in another
point is cleared, and where the message names a technique, its own choice is among the culprits
(group testing, Dorfman 1943, with one culprit a failure). A point's chance to fail is the share of
suspicion that its choices carry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.tune.space import Point, Space

Array = NDArray[np.float64]
KNOB = 0.3  # suspicion of a knob's value, where a technique itself has 1
PAIR = 0.5  # of two together, as a share of the product of theirs


def blamed(why: str | None, settings: Mapping[str, Any]) -> str | None:
    """The choice that a message names at its beginning: ``plan: NAME: ...`` or ``NAME: ...``."""
    named = re.match(r"(?:plan: )?(\w+):", why or "")
    return named[1] if named and named[1] in settings.values() else None


class Failures:
    """Suspects of all failures in a space, and who was cleared."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._places = {d.name: i for i, d in enumerate(space.dimensions)}
        self._worked: list[Point] = [space.start]
        self._failed: list[tuple[Point, str | None]] = []
        self._suspicion: list[tuple[Point, list[int], Array]] = []

    def worked(self, point: Point) -> None:
        self._worked.append(point)
        self._weigh()

    def failed(self, point: Point, name: str | None) -> None:
        """``name``: of the choice that is to blame, alone or beside another; None: nobody knows."""
        self._failed.append((point, name))
        self._weigh()

    def chances(self, points: Sequence[Point]) -> Array:
        """Of each point to fail."""
        fine = np.ones(len(points))
        for point, changed, weights in self._suspicion:
            total = weights.sum()
            if total > 0:
                shared = self._shared(points, point, changed)
                fine *= 1 - np.einsum("ni,ij,nj->n", shared, weights, shared) / total
        return 1 - fine

    def _weigh(self) -> None:
        """Suspicion of each choice (the diagonal) and each pair, for every failure."""
        self._suspicion = []
        for point, name in self._failed:
            changed = [
                i
                for i, on in enumerate(self._space.active(point))
                if on and point[i] != self._space.start[i]
            ]
            own = np.array([KNOB if self._space.dimensions[i].needs else 1.0 for i in changed])
            weights = np.triu(PAIR * np.outer(own, own), 1) + np.diag(own)
            if name is not None:
                accused = np.array([self._value(point, i) == name for i in changed])
                weights *= accused[:, None] | accused[None, :]
            for shared in self._shared(self._worked, point, changed):
                weights *= 1 - np.outer(shared, shared)
            self._suspicion.append((point, changed, weights))

    def _value(self, point: Point, place: int) -> Any:
        return self._space.dimensions[place].values[point[place]]

    def _shared(self, points: Sequence[Point], point: Point, changed: Sequence[int]) -> Array:
        """Which of a point's changed choices other points have, too: (points, changed)."""
        indices = np.asarray(points)
        same: dict[int, Any] = {}
        for i, d in enumerate(self._space.dimensions):
            same[i] = indices[:, i] == point[i]
            if d.needs is not None:  # it matters under the same choice alone
                same[i] = same[i] & same[self._places[d.needs[0]]]
        columns = [same[i] for i in changed]
        return np.stack(columns, axis=1).astype(float) if columns else np.zeros((len(points), 0))
