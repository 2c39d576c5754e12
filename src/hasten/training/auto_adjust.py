"""``live_tuning: true``: safe settings tried while the run trains, and a line for each."""

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

# Switches of a running session, tried in turns: what pays is kept, what doesn't is taken back.
#
# A try is two blocks of steps, one with the value that stands and one with another, in an order
# drawn anew; its result is the log ratio of their tokens per second, the mean over ranks. Which
# value is tried next is drawn by Thompson's rule (Thompson, On the likelihood that one unknown
# probability exceeds another, Biometrika 25, 1933): from what is believed of each one's gain, the
# largest. A value is kept when the report's rule says that it helped, and its neighbour is tried
# next; it is dropped when no gain beyond the noise floor can be expected, or when `MOST` tries have
# told nothing. All ranks draw alike and see the same results, so they take the same decisions.

BLOCK = 3  # steps of a block, beside those that still have the old value
BEFORE = 3  # steps before anything is tried: the first ones prepare much
LOOKS = (4, 8, 16)  # tries after which a value is judged
MOST = LOOKS[-1]
HOPELESS = (2, math.log(0.9))  # so many tries, all of them below this: no more of it
BELIEF = 0.05  # how far a gain may be from none before anything is known, as a log ratio
Note = Callable[[dict[str, Any]], None]


@dataclass
class Candidate:
    """A value that may be better than the current one, and the results of its tries."""

    switch: LiveSetting
    value: Any
    ratios: list[float] = field(default_factory=list)  # logarithms, against the standing value

    def drawn(self, draw: random.Random) -> float:
        """A gain as it may be, from what is believed of it."""
        if len(self.ratios) < 2:
            return draw.gauss(statistics.fmean(self.ratios or [0.0]), BELIEF)
        return draw.gauss(*mean_and_error(self.ratios))

    def ratio(self, doubt: float) -> Interval:
        """Returns its tokens/s over those of the current value, with the interval of the tries."""
        speeds = [math.exp(log) for log in self.ratios]
        return paired_ratio([1.0] * len(speeds), speeds, confidence=1 - doubt)

    def verdict(self, doubt: float) -> Effect | None:
        """The report's word for it; None while more tries may show that it helps."""
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
    """One comparison under way: the blocks that are left, and the rates of those that are done."""

    candidate: Candidate
    order: list[bool]  # of each block that is left: whether it has the candidate's value
    waiting: int = 0  # steps to leave out
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rates: dict[bool, float] = field(default_factory=dict)


class LiveTuning:
    """Tries the switches of a session's techniques; call ``after_step`` on every rank.

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
        self._plan: dict[str, Any] = {}  # values as the plan has them, by the switch's name
        self._standing: dict[str, Any] = {}  # as they are outside a try
        self._candidates: list[Candidate] | None = None  # None: not asked for yet
        self._try: _Try | None = None
        self._seen = 0

    @property
    def at_rest(self) -> bool:
        """Returns True if nothing more can be tried."""
        return self._candidates is not None and not self._candidates

    @property
    def changed(self) -> dict[str, Any]:
        """Values that were kept and aren't the plan's, by the switch's name."""
        standing = self._standing.items()
        return {name: value for name, value in standing if value != self._plan.get(name, value)}

    def state_dict(self) -> dict[str, Any]:
        return {"standing": dict(self._standing)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin with the values that an earlier part of the run had kept; tries begin afresh."""
        if self._candidates is None:
            self._standing = dict(state["standing"])

    def after_step(self, metrics: StepMetrics) -> None:
        """Count a step, and set what the next one shall have."""
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
        """The neighbours of every switch's value; of a resumed run, of the value it had kept."""
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
        """Set the value of the block that comes next; steps that can't have it yet don't count."""
        switch = now.candidate.switch
        value = now.candidate.value if now.order[0] else self._standing[switch.name]
        now.steps = now.tokens = 0
        now.seconds, now.waiting = 0.0, max(waiting, self._give(switch, value))

    def _give(self, switch: LiveSetting, value: Any) -> int:
        """Set a value; how many steps are to be left out then, on the rank that needs most."""
        if switch.now() == value:
            return 0
        delay = switch.delay()
        switch.set(value)
        slowest = most_on_a_rank(self._session.setup, delay)
        return slowest + 1  # the first step with it pays for the change

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
        """Keep the candidate, drop it, or leave it for another try."""
        assert self._candidates is not None
        why = candidate.verdict(DOUBT / len(self._candidates))
        if why is None:
            return
        switch, before = candidate.switch, self._standing[candidate.switch.name]
        self._candidates.remove(candidate)
        if why == "helped":
            self._standing[switch.name] = candidate.value
            self._candidates = [c for c in self._candidates if c.switch is not switch]
            index = switch.values.index(candidate.value)  # further on in the direction that paid
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
    """A decision for people."""
    if line["switch"] is None:
        return f"step {line['step']}: live_tuning: {line['why']}"
    ratio = line["ratio"]
    span = f"{ratio['mean']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    did = "is kept" if line["kept"] else f"is taken back ({line['why']})"
    return (
        f"step {line['step']}: {line['switch']} {line['to']} in place of {line['from']} {did}: "
        f"{span} tokens/s in {line['tries']} tries"
    )


# What a run calls.

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
    """Settings that were changed while training, by ``technique.setting``."""
    tuner = session.setup.live_tuner
    return tuner.changed if isinstance(tuner, LiveTuning) else {}
