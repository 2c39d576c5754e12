"""Arms against each other on one machine: built once each, then taking turns, round by round.

  1. every arm's process starts, builds, and warms up; one at a time
  2. a round gives each arm one turn of some steps, in an order drawn anew; all others sleep
  3. in every arm step k sees the same records, so a round's ratio compares equal work minutes apart
     at most, and a machine that slows down slows all arms of the round
  4. at equal tokens every arm is asked for its held-out loss; at the end, for what its techniques
     did and what its model writes

An arm that fails is reported with its reason and its process is ended, and the others go on. One
that fails only at the very end, in 4, has been measured all the same: it keeps its numbers.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.evidence.trial import Trial, TrialFailedError

Tell = Callable[[str, float], None]  # what happens now, and which share of the work is done


@dataclass(frozen=True)
class Design:
    """How an experiment is run; every arm does ``warmup + rounds * steps`` steps."""

    rounds: int = 8
    steps: int = 4
    warmup: int = 2
    evaluations: int = 3
    seed: int = 0

    @property
    def steps_in_all(self) -> int:
        return self.warmup + self.rounds * self.steps

    @property
    def evaluated_rounds(self) -> set[int]:
        """After which rounds the held-out loss is taken: evenly spread, the last included."""
        looks = self.evaluations
        return {round(self.rounds * look / looks) for look in range(1, looks + 1)}


@dataclass
class Arm:
    """What was measured of one plan."""

    name: str
    plan: Plan
    rounds: list[float] = field(default_factory=list)  # tokens per second, median of the turn
    steps: list[dict[str, Any]] = field(default_factory=list)  # measured steps, warm-up left out
    losses: list[tuple[int, float]] = field(default_factory=list)  # (tokens, loss), all steps
    held_out: list[tuple[int, float]] = field(default_factory=list)
    startup_seconds: dict[str, float] = field(default_factory=dict)
    acted: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)
    peak_memory_bytes: int | None = None
    failed: str | None = None  # why there is no result
    unfinished: str | None = None  # why what its techniques did, and its samples, aren't known


def compare(
    recipe: Path,
    plans: Mapping[str, Plan],
    environ: Callable[[Plan], Mapping[str, str]],
    folder: Path,
    design: Design,
    tell: Tell = lambda text, share: None,
) -> list[Arm]:
    """Measure every plan on the recipe's job; arms in the order of ``plans``.

    Args:
        recipe: a resolved recipe that allows ``design.steps_in_all`` steps.
        plans: arms by name.
        environ: variables that an arm's process needs.
        folder: for the processes' logs.
    """
    arms = [Arm(name, plan) for name, plan in plans.items()]
    work = _Work(tell, len(arms), design)
    order = random.Random(design.seed)
    with contextlib.ExitStack() as stack:
        trials: dict[str, Trial] = {}
        for number, arm in enumerate(arms):
            work.say(f"starting {arm.name}")
            log = folder / f"arm-{number}.log"
            trials[arm.name] = stack.enter_context(Trial(recipe, arm.plan, environ(arm.plan), log))
            _attempt(arm, lambda arm, trial: _begin(arm, trial, design), trials)
            work.done(design.warmup)
        for number in range(1, design.rounds + 1):
            for arm in order.sample(arms, len(arms)):
                work.say(f"round {number}/{design.rounds}: {arm.name}")
                _attempt(arm, lambda arm, trial, n=number: _round(arm, trial, n, design), trials)
                work.done(design.steps)
        for arm in arms:
            work.say(f"finishing {arm.name}")
            _attempt(arm, _finish, trials, at_the_end=True)
    return arms


def _attempt(
    arm: Arm, act: Callable[..., None], trials: Mapping[str, Trial], at_the_end: bool = False
) -> None:
    """What goes wrong in one arm is noted there; an arm that has failed gets no more orders.

    Its process is ended at once: one that hangs would slow the others, and its memory is theirs.
    """
    if arm.failed is not None:
        return
    try:
        act(arm, trials[arm.name])
    except TrialFailedError as error:
        if at_the_end:
            arm.unfinished = str(error)
        else:
            arm.failed = str(error)
        trials[arm.name].end()


def _begin(arm: Arm, trial: Trial, design: Design) -> None:
    arm.startup_seconds = trial.answer()["startup_seconds"]
    _evaluate(arm, trial)
    if design.warmup:
        _turn(arm, trial, design.warmup, measured=False)


def _round(arm: Arm, trial: Trial, number: int, design: Design) -> None:
    _turn(arm, trial, design.steps, measured=True)
    if number in design.evaluated_rounds:
        _evaluate(arm, trial)


def _finish(arm: Arm, trial: Trial) -> None:
    last = trial.ask("finish")
    arm.acted, arm.samples = last["acted"], last["samples"]


def _turn(arm: Arm, trial: Trial, count: int, measured: bool) -> None:
    steps = trial.ask("steps", count=count)["steps"]
    before = arm.losses[-1][0] if arm.losses else 0
    for step in steps:
        before += step["tokens"]
        arm.losses.append((before, step["loss"]))
    arm.peak_memory_bytes = max(s["peak_memory_bytes"] for s in steps)
    if measured:
        arm.steps += steps
        arm.rounds.append(statistics.median(s["tokens_per_second"] for s in steps))


def _evaluate(arm: Arm, trial: Trial) -> None:
    found = trial.ask("evaluate")
    if found["held_out_loss"] is not None:
        arm.held_out.append((found["tokens"], found["held_out_loss"]))


class _Work:
    """Share of the experiment that is done, counted in steps."""

    def __init__(self, tell: Tell, arms: int, design: Design) -> None:
        self._tell, self._all = tell, arms * design.steps_in_all
        self._done = 0
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        self._tell(text, self._done / self._all)

    def done(self, steps: int) -> None:
        self._done += steps
