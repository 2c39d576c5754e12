"""A study: proposed points take turns with the best point so far, then the best few with the start.

  1. The start takes turns with a second copy of itself. Their difference is the noise.
  2. Trials: a few proposed points at a time take turns with the best point so far. The
     start may be slow, so turns of the best point cost less time.
  3. Final comparison: the best few take turns with the start and its second copy. Only
     these rounds count, because the best of many trials is partly best by chance.

Every trial is appended to a record, from which a killed study resumes. Earlier trials are
reported to the proposer again, and none is measured twice.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from hasten.errors import InputError
from hasten.measure.ablation import AGAIN, BASELINE, Design, Variant
from hasten.measure.budget import rounded_up
from hasten.measure.record import ExperimentRecord
from hasten.measure.search import Proposal
from hasten.measure.workers import WorkerError
from hasten.tune.samplers import Proposer, State, TriedPoint
from hasten.tune.space import Point, Space, changes_text

Objective = Literal["tokens", "memory"]
TRIAL = Design(
    rounds=3, warmup=2, longest_warmup=8, evaluations=0, foreign_load=0.35, eliminate=True
)
FINAL = Design(rounds=20, warmup=2, longest_warmup=8, evaluations=1, noise=True, foreign_load=0.35)
NOISE_ROUNDS = 4  # rounds of the start and its copy
LEAST_NOISE = 0.005  # lower bound of the noise, as a logarithm of speed
SHORT, LONG = 1.0, 2.5  # seconds of a turn; shorter and longer turns get more or fewer steps
MOST_TIMES, FEWEST_STEPS = 4, 2  # largest factor for short turns, fewest steps of long turns
TOGETHER = 3  # points of a comparison of trials
LEADERS = 4  # points of the final comparison
FINAL_HOPE = 0.3  # largest distance of a leader from the best point, as a logarithm of speed
NOISE_SHARE, FINAL_SHARE = 0.5, 0.42  # largest shares of the budget for steps 1 and 3
FINAL_STARTS = 1.1  # least time of the final comparison, as a multiple of that of step 1
FINISH = 0.9  # share of the remaining time after which the final comparison starts no round
SLOW = 6.0  # multiple of the usual seconds after which a comparison of trials is stopped
TIME_USED = "the budget's time for trials was used"


class Study:
    """The rules of a study for `hasten.measure.search.search`, and its results.

    Args:
        space: the choices.
        make_proposer: returns the proposer, from the noise and the peak of the start.
        record: earlier results, and the file for new ones.
        objective: the value to optimise.
        steps: steps of a turn; more if they are short, fewer if they are long.
        together: fewest steps of a turn, because ranks may communicate once in so many steps.
        seed: seed of the order of turns.
        budget_seconds: time for all, the final comparison included.
        most: maximum number of trials.
        ``tell``: receives progress messages, and the used share of the budget.
        on_trial: called after every trial.
        began: start of the budget, on the clock; default: now.
        clock: returns the time, in seconds.
    """

    def __init__(
        self,
        space: Space,
        make_proposer: Callable[[float, float | None], Proposer],
        record: ExperimentRecord,
        *,
        objective: Objective = "tokens",
        steps: int = 4,
        together: int = 1,
        seed: int = 0,
        budget_seconds: float,
        most: int | None = None,
        tell: Callable[[str, float], None] = lambda text, share: None,
        on_trial: Callable[[Study], None] = lambda study: None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.space, self.objective, self.budget_seconds = space, objective, budget_seconds
        self._make_proposer, self._record, self._most = make_proposer, record, most
        self._steps, self._together, self._seed = steps, together, seed
        self._tell, self._on_trial, self._clock = tell, on_trial, clock
        self._began = clock() if began is None else began
        self.start: dict[str, Any] = {}  # noise, rate, memory and seconds of the start
        self.rows: list[dict[str, Any]] = []  # trials as in the record
        self.tried: list[TriedPoint] = []
        self.choices: dict[str, Point] = {}  # points of the final comparison, by variant
        self.final: list[Variant] = []  # results of the final comparison
        self.ended = ""
        self._phase: Literal["start", "trials", "final"] = "start"
        # The point that trials are compared with, and its speed over the start's, as a logarithm.
        self._reference, self._level = space.start, 0.0
        self._points: dict[str, Point] = {}  # points of the last proposal
        self._seconds: list[float] = []  # seconds of each comparison of trials
        self._proposed_at = self._began
        record.append("run")

    @property
    def remaining_seconds(self) -> float:
        """Remaining seconds of the budget."""
        return self._began + self.budget_seconds - self._clock()

    def leaders(self, count: int = LEADERS) -> list[Point]:
        """Returns the best points that beat the start and are close enough to the best one."""
        better = [(t.score, t.point) for t in self.tried if t.score and t.score > 0]
        better.sort(key=lambda pair: -pair[0])
        return [point for score, point in better if score > better[0][0] - FINAL_HOPE][:count]

    def propose(self) -> Proposal[Point] | None:
        """Returns the next comparison; None at the end."""
        self._proposed_at = self._clock()
        if self._phase == "start" and not self._resumed():
            self._points = {AGAIN: self.space.start}
            seconds = self.remaining_seconds - (1 - NOISE_SHARE) * self.budget_seconds
            design = replace(TRIAL, rounds=NOISE_ROUNDS)
            return self._proposal("the job against itself", design, seconds)
        if self._phase == "start":
            self._phase, memory = "trials", self.start["memory"]
            self._proposer = self._make_proposer(self.start["noise"], memory)
            self._proposer.tell(TriedPoint(self.space.start, "ok", 0.0, memory))
            for event in self._record.events:
                if event["event"] == "trial":
                    self._take({k: v for k, v in event.items() if k not in ("event", "at")})
        if self._phase == "trials":
            if points := self._next_points():
                self._points = {f"point {n}": p for n, p in enumerate(points, start=1)}
                changes = "; ".join(changes_text(self.space.changes(p)) for p in points)
                numbers = f"trials {len(self.rows) + 1} to {len(self.rows) + len(points)}"
                patience = max(SLOW * (self._usual_seconds or self.start["seconds"]), 60.0)
                seconds = min(self.remaining_seconds - self._reserve, patience)
                return self._proposal(f"{numbers}: {changes}", TRIAL, seconds)
            self._check_trials()
            self._phase = "final"
            self._reference = self.space.start
            self.choices = {f"choice {n}": p for n, p in enumerate(self.leaders(), start=1)}
            if self.choices:
                # If the budget is short, variants at the front are left out, never the last one.
                choices = dict(reversed(self.choices.items()))
                self._points = {AGAIN: self.space.start, **choices}
                text = f"final comparison of {len(choices)} with the start"
                return self._proposal(text, FINAL, FINISH * self.remaining_seconds)
        return None

    def decide(self, variants: Sequence[Variant]) -> None:
        """Receives the results of the last comparison."""
        reference, by_name = variants[0], {v.name: v for v in variants[1:]}
        if self._phase == "start":
            self._take_start(reference, by_name.get(AGAIN))
        elif self._phase == "final":
            self.final = list(variants)
        elif reference.failed is not None or not reference.rounds:
            if reference.failed is not None and self._reference == self.space.start:
                raise InputError(f"tune: the job as it is failed: {reference.failed}")
            self._reference, self._level = self.space.start, 0.0
        else:
            self._seconds.append(self._clock() - self._proposed_at)
            for name, point in self._points.items():
                if name in by_name and (by_name[name].rounds or by_name[name].failed):
                    row = self._row(point, by_name[name])
                    self._record.append("trial", **row)
                    self._take(row)
                    self._on_trial(self)
            best = max(self.tried, key=lambda t: t.score or -math.inf, default=None)
            if self.objective == "tokens" and best is not None and (best.score or 0.0) > 0:
                self._reference, self._level = best.point, best.score or 0.0

    def _proposal(self, text: str, design: Design, seconds: float) -> Proposal[Point]:
        self._tell(text, min(1 - self.remaining_seconds / self.budget_seconds, 1.0))
        steps, seed = self._turn_steps(), self._seed + len(self.rows)
        design = replace(design, steps=steps, seed=seed, budget_seconds=max(seconds, 1.0))
        return Proposal({BASELINE: self._reference, **self._points}, design)

    def _turn_steps(self) -> int:
        one = self.start.get("step_seconds")
        if not one:
            return self._steps
        times = min(max(math.ceil(SHORT / (self._steps * one)), 1), MOST_TIMES)
        return int(times * min(self._steps, max(FEWEST_STEPS, self._together, round(LONG / one))))

    # The start

    def _resumed(self) -> bool:
        starts = [e for e in self._record.events if e["event"] == "start of the study"]
        if starts:
            self.start = starts[-1]["start"]
        return bool(self.start)

    def _take_start(self, start: Variant, again: Variant | None) -> None:
        for variant, which in ((start, "the job"), (again, "a second copy of the job")):
            if variant is not None and (why := _failure(variant)) is not None:
                raise InputError(f"tune: {which} fails as it is, before any change: {why}")
        logs = [] if again is None else _logs(again)
        if not logs:
            raise InputError(
                f"budget: {rounded_up(self.budget_seconds)} is too short: the job alone hasn't "
                "started and warmed up by then; give several times as much"
            )
        noise = math.sqrt(statistics.fmean(x * x for x in logs))
        seconds = [float(step["step_seconds"]) for step in start.steps]
        self.start = {
            "noise": round(max(noise, LEAST_NOISE), 5),
            "rate": statistics.median(start.rounds),
            "memory": start.peak_memory_bytes,
            "step_seconds": statistics.median(seconds),
            "seconds": self._clock() - self._proposed_at,
        }
        self._record.append("start of the study", start=self.start)

    # The trials

    @property
    def _usual_seconds(self) -> float:
        """Returns the median seconds of a comparison of trials; 0 before the first one."""
        return statistics.median(self._seconds or [0.0])

    @property
    def _reserve(self) -> float:
        """Returns the seconds reserved for the final comparison.

        They are halved as long as nothing is better than the start.
        """
        least = FINAL_STARTS * float(self.start["seconds"])
        seconds = max(FINAL_SHARE * self.budget_seconds, least)
        return seconds if self.leaders(1) else seconds / 2

    def _next_points(self) -> list[Point]:
        done = len(self.rows)
        count = TOGETHER if self._most is None else min(TOGETHER, self._most - done)
        if count <= 0:
            self.ended = f"{done} trials were done"
            return []
        if self.remaining_seconds - self._usual_seconds <= self._reserve:
            self.ended = TIME_USED
            return []
        points = [p for p in (self._proposer.ask() for _ in range(count)) if p is not None]
        if not points:
            self.ended = "every permitted point was tried"
        return points

    def _check_trials(self) -> None:
        if not self.rows and self.ended == TIME_USED:
            used = self.budget_seconds - self.remaining_seconds + self.start["seconds"]
            least = rounded_up(used / (1 - FINAL_SHARE))
            raise InputError(
                f"budget: {rounded_up(self.budget_seconds)} is too short: the noise, the first "
                f"trials and a final comparison take at least {least} on this job and machine"
            )
        if not self.rows:
            raise InputError("tune: there is nothing to try: every other setting is refused")
        if all(row["state"] != "ok" for row in self.rows):
            raise InputError(
                f"tune: all {len(self.rows)} trials failed, the last with: "
                f"{self.rows[-1]['why']}; the job stays as it is"
            )

    def _row(self, point: Point, variant: Variant) -> dict[str, Any]:
        """Returns a trial's row for the record and the JSON."""
        why = _failure(variant)
        state: State = "ok"
        if why is not None:
            state = "out of memory" if WorkerError(why).out_of_memory else "failed"
        logs = [self._level + log for log in _logs(variant)] if why is None else []
        return {
            "settings": self.space.settings(point),
            "changes": self.space.changes(point),
            "state": state,
            "log_rate": round(statistics.median(logs), 5) if logs else None,
            "rounds": [round(math.exp(log), 4) for log in logs],
            "rate": statistics.median(variant.rounds) if logs else None,
            "memory": variant.peak_memory_bytes,
            "foreign_load": round(max(variant.foreign_load, default=0.0), 3),
            "why": why,
        }

    def _take(self, row: dict[str, Any]) -> None:
        try:
            point = self.space.point(row["settings"])
        except InputError:
            return  # the record was edited
        score, memory = row["log_rate"] if row["state"] == "ok" else None, self.start["memory"]
        if score is not None and self.objective == "memory":
            score = math.log(memory / row["memory"]) if memory and row["memory"] else 0.0
        self.rows.append(row)
        self.tried.append(TriedPoint(point, row["state"], score, row["memory"]))
        self._proposer.tell(self.tried[-1])


def _failure(variant: Variant) -> str | None:
    """Returns why a variant has no valid figures; None if it has."""
    if variant.failed is None and not all(math.isfinite(loss) for _, loss in variant.losses):
        return "its loss is not a finite number"
    return variant.failed


def _logs(variant: Variant) -> list[float]:
    """Returns the logarithms of a variant's speed relative to the reference, by round."""
    pairs = zip(variant.rounds, variant.baseline_rounds, strict=False)
    return [math.log(speed / reference) for speed, reference in pairs]
