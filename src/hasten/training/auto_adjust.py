"""``live_tuning: true``: tries safe settings while the run trains and records each decision."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hasten.core.health import append_line
from hasten.core.session import Session
from hasten.core.slot import Slot
from hasten.core.step import most_on_a_rank
from hasten.core.technique import LiveSetting
from hasten.core.timing import StepMetrics
from hasten.errors import InputError
from hasten.measure.significance import LEAST_FLOOR
from hasten.measure.statistics import (
    DOUBT,
    Effect,
    Interval,
    mean_and_error,
    paired_ratio,
    verdict,
)
from hasten.recipe.schema import Recipe
from hasten.training.folder import ADJUSTMENTS

# Tries the live settings of a session in turn. A faster value is kept, a slower one is reverted.
#
# A try compares the current value with another one, each in a block of steps, in random order. Its
# result is the log ratio of their tokens per second, averaged over ranks. Thompson sampling draws
# the next value to try from the estimated gains (Thompson, On the likelihood that one unknown
# probability exceeds another, Biometrika 25, 1933). A value is kept if the report's rule calls it
# "helped"; its neighbour is tried next. It is dropped if no gain above the noise floor is possible,
# or undecided after `MOST` tries. All ranks draw alike and use the same results, so they take the
# same decisions.

BLOCK = 3  # steps of a block, without those that still have the old value
BEFORE = 3  # steps before the first try, because the first steps prepare memory and kernels
LOOKS = (4, 8, 16)  # numbers of tries after which a value is judged
MOST = LOOKS[-1]
HOPELESS = (2, math.log(0.9))  # (tries, log ratio): dropped if so many tries are all below it
BELIEF = 0.05  # standard deviation of the assumed gain before any try, as a log ratio
Note = Callable[[dict[str, Any]], None]


@dataclass
class Candidate:
    """A value that may be better than the current one, and the results of its tries."""

    switch: LiveSetting
    value: Any
    ratios: list[float] = field(default_factory=list)  # log ratios to the current value

    def drawn(self, draw: random.Random) -> float:
        """Draws a possible gain from its estimated distribution."""
        if len(self.ratios) < 2:
            return draw.gauss(statistics.fmean(self.ratios or [0.0]), BELIEF)
        return draw.gauss(*mean_and_error(self.ratios))

    def ratio(self, doubt: float) -> Interval:
        """Returns its tokens/s relative to the current value, with the interval of the tries."""
        speeds = [math.exp(log) for log in self.ratios]
        return paired_ratio([1.0] * len(speeds), speeds, confidence=1 - doubt)

    def verdict(self, doubt: float) -> Effect | None:
        """Returns the report's word for the result; None while more tries may show a gain."""
        count, bound = HOPELESS
        hopeless = len(self.ratios) >= count and max(self.ratios) < bound
        if len(self.ratios) not in LOOKS and not hopeless:
            return None
        ratio = self.ratio(doubt / len(LOOKS))
        word = verdict(ratio, LEAST_FLOOR)
        over = hopeless or len(self.ratios) >= MOST or ratio.high < 1 + LEAST_FLOOR
        return word if over or word != "undecided" else None


@dataclass
class _Try:
    """A running comparison: remaining blocks, and the rates of completed blocks."""

    candidate: Candidate
    order: list[bool]  # for each remaining block: True if it has the candidate's value
    waiting: int = 0  # number of steps to leave out
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rates: dict[bool, float] = field(default_factory=dict)


class LiveTuning:
    """Tries the live settings of a session's techniques; call ``after_step`` on every rank.

    Args:
        session: the run.
        seed: of the draws; the same on all ranks.
        note: called with a dictionary for every decision, for the log.

    Raises:
        InputError: the run's ranks have diverged, or its blocks are compiled for the
            current values.
    """

    def __init__(self, session: Session, seed: int, note: Note) -> None:
        if session.setup.rank_sync.diverged:
            raise InputError(
                "live_tuning: ranks of this plan train apart and can't agree on a setting between "
                "two steps; leave live_tuning out, or the technique that lets them"
            )
        if Slot.COMPILE in session.setup.plan:
            raise InputError(
                "live_tuning: another setting would be compiled again, which costs more than it "
                "shows; leave live_tuning out, or compiled"
            )
        self._session, self._note = session, note
        self._draw = random.Random(seed)
        self._plan: dict[str, Any] = {}  # the plan's values, by the setting's name
        self._standing: dict[str, Any] = {}  # values outside a try
        self._candidates: list[Candidate] | None = None  # None: not read yet
        self._try: _Try | None = None
        self._seen = 0

    @property
    def at_rest(self) -> bool:
        """Returns True if nothing more can be tried."""
        return self._candidates is not None and not self._candidates

    @property
    def changed(self) -> dict[str, Any]:
        """Returns the kept values that differ from the plan, by the setting's name."""
        standing = self._standing.items()
        return {name: value for name, value in standing if value != self._plan.get(name, value)}

    def state_dict(self) -> dict[str, Any]:
        return {"standing": dict(self._standing)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Starts with the values that an earlier part of the run kept; tries start again."""
        if self._candidates is None:
            self._standing = dict(state["standing"])

    def after_step(self, metrics: StepMetrics) -> None:
        """Counts a step, and sets the value for the next one."""
        self._seen += 1
        if self._seen < BEFORE or self.at_rest:
            return
        now = self._try
        if now is None:
            self._candidates = self._offered()
            self._begin(metrics.step)
        elif now.waiting:
            now.waiting -= 1
        elif not metrics.skipped:
            now.steps += 1
            now.tokens += metrics.tokens
            now.seconds += metrics.step_seconds
            if now.steps == BLOCK:
                self._end_block(now, metrics.step)

    def _offered(self) -> list[Candidate]:
        """Returns the neighbours of every setting's value; a resumed run's kept value counts."""
        candidates: list[Candidate] = []
        for technique in self._session.setup.plan:
            for switch in technique.live_settings(self._session):
                self._plan[switch.name] = switch.now()
                if self._standing.get(switch.name) not in switch.values:
                    self._standing[switch.name] = switch.now()
                switch.set(self._standing[switch.name])
                index = switch.values.index(switch.now())
                candidates += _at(switch, index - 1) + _at(switch, index + 1)
        return candidates

    def _begin(self, step: int, waiting: int = 0) -> None:
        """Draws the next try, or reports that there is none."""
        if not self._candidates:
            self._try = None
            why = "nothing is left to try"
            if not self._plan:
                why = "no technique of this plan has a setting that may change while it trains"
            self._note({"step": step, "switch": None, "why": why})
            return
        chosen = max(self._candidates, key=lambda c: c.drawn(self._draw))
        order = [True, False] if self._draw.random() < 0.5 else [False, True]
        self._try = _Try(chosen, order)
        self._begin_block(self._try, waiting)

    def _begin_block(self, now: _Try, waiting: int = 0) -> None:
        """Sets the value of the next block; steps that still have the old one don't count."""
        switch = now.candidate.switch
        value = now.candidate.value if now.order[0] else self._standing[switch.name]
        now.steps = now.tokens = 0
        now.seconds, now.waiting = 0.0, max(waiting, self._give(switch, value))

    def _give(self, switch: LiveSetting, value: Any) -> int:
        """Sets a value; returns the number of steps to leave out, over all ranks."""
        if switch.now() == value:
            return 0
        delay = switch.delay()
        switch.set(value)
        slowest = most_on_a_rank(self._session.setup, delay)
        return slowest + 1  # the first step with a new value includes the cost of the change

    def _end_block(self, now: _Try, step: int) -> None:
        now.rates[now.order.pop(0)] = now.tokens / now.seconds
        if now.order:
            self._begin_block(now)
            return
        log_ratio = torch.tensor(
            [math.log(now.rates[True] / now.rates[False])], dtype=torch.float64
        )
        total = self._session.setup.rank_sync.sum(log_ratio).item()
        now.candidate.ratios.append(total / self._session.setup.context.world.size)
        self._judge(now.candidate, step)
        switch = now.candidate.switch
        self._begin(step, self._give(switch, self._standing[switch.name]))

    def _judge(self, candidate: Candidate, step: int) -> None:
        """Keeps the candidate, drops it, or leaves it for another try."""
        assert self._candidates is not None
        why = candidate.verdict(DOUBT / len(self._candidates))
        if why is None:
            return
        switch, before = candidate.switch, self._standing[candidate.switch.name]
        self._candidates.remove(candidate)
        if why == "helped":
            self._standing[switch.name] = candidate.value
            self._candidates = [c for c in self._candidates if c.switch is not switch]
            index = switch.values.index(candidate.value)  # next value in the direction that helped
            self._candidates += _at(switch, 2 * index - switch.values.index(before))
        ratio = candidate.ratio(DOUBT)
        self._note(
            {
                "step": step,
                "switch": switch.name,
                "from": before,
                "to": candidate.value,
                "kept": why == "helped",
                "why": why,
                "ratio": {"mean": ratio.estimate, "low": ratio.low, "high": ratio.high},
                "tries": len(candidate.ratios),
            }
        )


def _at(switch: LiveSetting, index: int) -> list[Candidate]:
    return [Candidate(switch, switch.values[index])] if 0 <= index < len(switch.values) else []


def sentence(line: dict[str, Any]) -> str:
    """Returns a decision as a sentence."""
    if line["switch"] is None:
        return f"step {line['step']}: live_tuning: {line['why']}"
    ratio = line["ratio"]
    span = f"{ratio['mean']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    did = "is kept" if line["kept"] else f"is taken back ({line['why']})"
    return (
        f"step {line['step']}: {line['switch']} {line['to']} in place of {line['from']} {did}: "
        f"{span} tokens/s in {line['tries']} tries"
    )


# Functions for a run

Tell = Callable[[str], None]


def adjust(session: Session, recipe: Recipe, output: Path, tell: Tell) -> None:
    """Enables live tuning if the recipe requires it; every rank, before it resumes.

    Raises:
        InputError: settings of this plan can't change while it trains.
    """
    if not recipe.live_tuning:
        return
    main = session.setup.context.world.is_main

    def note(line: dict[str, Any]) -> None:
        if main:
            append_line(output / ADJUSTMENTS, line)
            tell(sentence(line))

    session.setup.live_tuner = LiveTuning(session, recipe.seed, note)


def adjusted(session: Session) -> dict[str, Any]:
    """Returns the settings that were changed while training, by ``technique.setting``."""
    tuner = session.setup.live_tuner
    return tuner.changed if isinstance(tuner, LiveTuning) else {}
