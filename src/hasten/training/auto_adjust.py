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
from hasten.core.setup import Session
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
# or undecided after `MOST_TRIES` tries. All ranks draw alike and use the same results, so they take
# the same decisions.

BLOCK = 3  # steps of a block, without those that still have the old value
FIRST_STEPS = 3  # steps before the first try, because the first steps prepare memory and kernels
VERDICT_TRIES = (4, 8, 16)  # numbers of tries after which a value is judged
MOST_TRIES = VERDICT_TRIES[-1]
HOPELESS = (2, math.log(0.9))  # (tries, log ratio): dropped if so many tries are all below it
PRIOR_SPREAD = 0.05  # standard deviation of the assumed gain before any try, as a log ratio
Note = Callable[[dict[str, Any]], None]


@dataclass
class Candidate:
    """A value that may be better than the current one, and the results of its tries."""

    setting: LiveSetting
    value: Any
    ratios: list[float] = field(default_factory=list)  # log ratios to the current value

    def sample_gain(self, draw: random.Random) -> float:
        """Draws a possible gain from its estimated distribution."""
        if len(self.ratios) < 2:
            return draw.gauss(statistics.fmean(self.ratios or [0.0]), PRIOR_SPREAD)
        return draw.gauss(*mean_and_error(self.ratios))

    def ratio(self, doubt: float) -> Interval:
        """Returns its tokens/s relative to the current value, with the interval of the tries."""
        speeds = [math.exp(log) for log in self.ratios]
        return paired_ratio([1.0] * len(speeds), speeds, confidence=1 - doubt)

    def verdict(self, doubt: float) -> Effect | None:
        """Returns the report's word for the result; None while more tries may show a gain."""
        count, bound = HOPELESS
        hopeless = len(self.ratios) >= count and max(self.ratios) < bound
        if len(self.ratios) not in VERDICT_TRIES and not hopeless:
            return None
        ratio = self.ratio(doubt / len(VERDICT_TRIES))
        word = verdict(ratio, LEAST_FLOOR)
        over = hopeless or len(self.ratios) >= MOST_TRIES or ratio.high < 1 + LEAST_FLOOR
        return word if over or word != "undecided" else None


@dataclass
class _SettingTrial:
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
        self._kept_values: dict[str, Any] = {}  # values outside a try
        self._candidates: list[Candidate] | None = None  # None: not read yet
        self._trial: _SettingTrial | None = None
        self._seen = 0

    @property
    def at_rest(self) -> bool:
        """Returns True if nothing more can be tried."""
        return self._candidates is not None and not self._candidates

    @property
    def changed(self) -> dict[str, Any]:
        """Returns the kept values that differ from the plan, by the setting's name."""
        standing = self._kept_values.items()
        return {name: value for name, value in standing if value != self._plan.get(name, value)}

    def state_dict(self) -> dict[str, Any]:
        return {"standing": dict(self._kept_values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Starts with the values that an earlier part of the run kept; tries start again."""
        if self._candidates is None:
            self._kept_values = dict(state["standing"])

    def after_step(self, metrics: StepMetrics) -> None:
        """Counts a step, and sets the value for the next one."""
        self._seen += 1
        if self._seen < FIRST_STEPS or self.at_rest:
            return
        now = self._trial
        if now is None:
            # The neighbours of every setting's value; a resumed run's kept value counts.
            candidates: list[Candidate] = []
            for technique in self._session.setup.plan:
                for setting in technique.live_settings(self._session):
                    self._plan[setting.name] = setting.now()
                    if self._kept_values.get(setting.name) not in setting.values:
                        self._kept_values[setting.name] = setting.now()
                    setting.set(self._kept_values[setting.name])
                    index = setting.values.index(setting.now())
                    candidates += _at(setting, index - 1) + _at(setting, index + 1)
            self._candidates = candidates
            self._begin(metrics.step)
        elif now.waiting:
            now.waiting -= 1
        elif not metrics.skipped:
            now.steps += 1
            now.tokens += metrics.tokens
            now.seconds += metrics.step_seconds
            if now.steps == BLOCK:
                self._end_block(now, metrics.step)

    def _begin(self, step: int, waiting: int = 0) -> None:
        """Draws the next try, or reports that there is none."""
        if not self._candidates:
            self._trial = None
            why = "nothing is left to try"
            if not self._plan:
                why = "no technique of this plan has a setting that may change while it trains"
            self._note({"step": step, "setting": None, "why": why})
            return
        chosen = max(self._candidates, key=lambda c: c.sample_gain(self._draw))
        order = [True, False] if self._draw.random() < 0.5 else [False, True]
        self._trial = _SettingTrial(chosen, order)
        self._begin_block(self._trial, waiting)

    def _begin_block(self, now: _SettingTrial, waiting: int = 0) -> None:
        """Sets the value of the next block; steps that still have the old one don't count."""
        setting = now.candidate.setting
        value = now.candidate.value if now.order[0] else self._kept_values[setting.name]
        now.steps = now.tokens = 0
        now.seconds, now.waiting = 0.0, max(waiting, self._set_value(setting, value))

    def _set_value(self, setting: LiveSetting, value: Any) -> int:
        """Sets a value; returns the number of steps to leave out, over all ranks."""
        if setting.now() == value:
            return 0
        delay = setting.delay()
        setting.set(value)
        slowest = most_on_a_rank(self._session.setup, delay)
        return slowest + 1  # the first step with a new value includes the cost of the change

    def _end_block(self, now: _SettingTrial, step: int) -> None:
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
        setting = now.candidate.setting
        self._begin(step, self._set_value(setting, self._kept_values[setting.name]))

    def _judge(self, candidate: Candidate, step: int) -> None:
        """Keeps the candidate, drops it, or leaves it for another try."""
        assert self._candidates is not None
        why = candidate.verdict(DOUBT / len(self._candidates))
        if why is None:
            return
        setting, before = candidate.setting, self._kept_values[candidate.setting.name]
        self._candidates.remove(candidate)
        if why == "helped":
            self._kept_values[setting.name] = candidate.value
            self._candidates = [c for c in self._candidates if c.setting is not setting]
            index = setting.values.index(candidate.value)  # next value in the direction that helped
            self._candidates += _at(setting, 2 * index - setting.values.index(before))
        ratio = candidate.ratio(DOUBT)
        self._note(
            {
                "step": step,
                "setting": setting.name,
                "from": before,
                "to": candidate.value,
                "kept": why == "helped",
                "why": why,
                "ratio": {"mean": ratio.estimate, "low": ratio.low, "high": ratio.high},
                "tries": len(candidate.ratios),
            }
        )


def _at(setting: LiveSetting, index: int) -> list[Candidate]:
    return [Candidate(setting, setting.values[index])] if 0 <= index < len(setting.values) else []


def sentence(line: dict[str, Any]) -> str:
    """Returns a decision as a sentence."""
    if line["setting"] is None:
        return f"step {line['step']}: live_tuning: {line['why']}"
    ratio = line["ratio"]
    span = f"{ratio['mean']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    did = "is kept" if line["kept"] else f"is taken back ({line['why']})"
    return (
        f"step {line['step']}: {line['setting']} {line['to']} in place of {line['from']} {did}: "
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
