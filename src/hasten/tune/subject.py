"""What can be tuned, seen from the study: a space, processes to measure in, a duel, a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hasten.errors import InputError
from hasten.measure.turns import Runner
from hasten.tune.choosing import Sampler, check_sampler
from hasten.tune.proposers import Beforehand
from hasten.tune.space import Point, Space
from hasten.tune.study import OBJECTIVES, Objective


@dataclass(frozen=True)
class Wishes:
    """How to tune.

    Args:
        sampler: who proposes; auto: hasten's own order.
        objective: tokens per second; memory; money, which is time told as a price; pareto: speed
            and memory, and the front between them; time-to-loss: to a held-out loss.
        target_loss: of time-to-loss; None: nearly what the recipe as it is comes to.
        lossy: let techniques of other mathematics take part, behind the guard.
        only: slots or techniques by name that are tuned.
        trials: at most; None: as many as the budget holds.
        seed: of everything that is drawn.
        steps: of a round.
        fresh: measure anew, whatever an earlier start has left.

    Raises:
        InputError: an unknown sampler or objective, or a number that can't be.
    """

    sampler: Sampler = "auto"
    objective: Objective = "tokens"
    lossy: bool = False
    only: tuple[str, ...] = ()
    trials: int | None = None
    seed: int = 0
    steps: int = 4
    fresh: bool = False
    target_loss: float | None = None

    def __post_init__(self) -> None:
        check_sampler(self.sampler)
        if self.objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise InputError(f"objective: there is no {self.objective!r}; there are {known}")
        if self.target_loss is not None and self.objective != "time-to-loss":
            raise InputError("target_loss is of the objective time-to-loss; leave it out")
        for name, value in (("trials", self.trials), ("steps", self.steps)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be 1 at least")


class Subject(Protocol):
    """A job that is tuned."""

    space: Space
    folder: Path  # of all its studies
    title: str
    unit: str  # what its speed counts
    about: dict[str, Any]  # what similar jobs share
    together: int  # steps that no turn parts

    def key(self) -> dict[str, Any]:
        """Everything that decides its numbers."""

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        """For as long as points are measured; ``folder`` is where this study's files are."""

    def known(self, noise: float, memory: float | None) -> Beforehand:
        """What is known before the first trial, now that the start was measured."""

    def start(self, point: Point) -> Runner:
        """The process of a point."""

    def duel(
        self,
        leaders: Sequence[Point],
        seconds: float,
        step_seconds: float,
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        """The duel's rows (`search.tuner.duel.judged`): the start, again, then the leaders.

        Args:
            seconds: that there are for it.
            step_seconds: of a step of the start's.
        """

    def refusal(self, point: Point) -> str | None:
        """Why a winner can't be taken after all; None if it can."""

    def without(self, point: Point, idle: Sequence[str]) -> tuple[Point, list[str]]:
        """The point without techniques that were seen not to act, and whom it lost."""

    def text(self, point: Point, words: Sequence[str]) -> str:
        """The settings as a file of the user's, with words as comments at its head."""
