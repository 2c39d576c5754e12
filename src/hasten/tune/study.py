"""A study: proposed points take turns with the best point so far, then the best few.

  1. The start takes turns with a second copy of itself. Their difference is the noise.
  2. A few proposed points at a time take turns with the best point so far. Points that
     are compared with a fast one don't wait for the slow turns of the start.
  3. In the final, the best few take turns among themselves, and significantly slower ones
     leave. The best of many trials is in part process variance.

The last part of the budget is kept for the final comparison with the start
(`hasten.tune.api`). Every trial is appended to a record, and a killed study resumes from
it. Earlier trials are reported to the proposer again, and none is measured twice.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from hasten.errors import InputError
from hasten.measure.ablation import Design, Variant
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
NOISE_ROUNDS, FINAL_ROUNDS = 4, 40
LEAST_NOISE = 0.005
SHORT, LONG = 1.0, 2.5  # seconds of a turn: at least, and beyond which it has fewer steps
MOST_TIMES, FEWEST_STEPS = 4, 2  # as many steps for short ones, and how few for long ones
TOGETHER = 3  # points of a comparison
FINALISTS, LEADERS = 4, 3  # of the final, and of the final comparison
FINAL_HOPE = 0.3  # below the best, as a logarithm: no finalist, whose turns would be long
NOISE_SHARE, FINAL_SHARE, COMPARISON_SHARE = 0.5, 0.2, 0.22  # of the budget, at most
COMPARISON_STARTS = 3.5  # starts of a process that a final comparison takes at least
SLOW = 6.0  # times the usual comparison: longer ones are given up
REFERENCE = "reference"
TIME_USED = "the budget's time for trials was used"


class Study:
    """The rules of a study for `hasten.measure.search.search`, and its results.

    Args:
        space: the choices.
        make_proposer: returns the proposer, from the noise and the peak of the start.
        record: earlier results, and the file for new ones.
        objective: the value to optimise.
        steps: steps of a turn; more if they are short, fewer if they are long.
        together: number of steps that a turn never splits, because ranks may communicate
            only once in so many steps.
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
        self.rows: list[dict[str, Any]] = []  # of the trials, as the record has them
        self.tried: list[TriedPoint] = []
        self.final: dict[Point, list[float]] = {}
        self.ended = ""
        self._phase: Literal["start", "trials", "final", "end"] = "start"
        self._reference, self._level = space.start, 0.0  # and its logarithm over the start
        self._points: dict[str, Point] = {}  # of the last proposal
        self._seconds: list[float] = []  # of each comparison of trials
        self._asked_at = self._began
        record.append("run")

    @property
    def remaining_seconds(self) -> float:
        """Seconds of the budget that are left."""
        return self._began + self.budget_seconds - self._clock()

    def leaders(self, count: int = LEADERS) -> list[Point]:
        """The best points that are better than the start, best first, finalists before others."""
        final = sorted(self.final, key=lambda p: (len(self.final[p]), _mean(self.final[p])))
        better = [t for t in self.tried if t.value and t.value > 0]
        ranked = [t.point for t in sorted(better, key=lambda t: -(t.value or 0.0))]
        return list(dict.fromkeys([*reversed(final), *ranked]))[:count]

    def propose(self) -> Proposal[Point] | None:
        """The next comparison."""
        self._asked_at = self._clock()
        if self._phase == "start" and not self._resumed():
            self._points = {"start again": self.space.start}
            seconds = self.remaining_seconds - (1 - NOISE_SHARE) * self.budget_seconds
            return self._proposal("the job against itself", NOISE_ROUNDS, seconds)
        if self._phase == "start":
            self._begin_trials()
        if self._phase == "trials":
            if points := self._next_points():
                self._points = {f"point {n}": p for n, p in enumerate(points, start=1)}
                changes = "; ".join(changes_text(self.space.changes(p)) for p in points)
                numbers = f"trials {len(self.rows) + 1} to {len(self.rows) + len(points)}"
                usual = self._usual_seconds or self.start["seconds"]
                patience = max(SLOW * usual, 60.0)
                seconds = min(self.remaining_seconds - self._reserve, patience)
                return self._proposal(f"{numbers}: {changes}", TRIAL.rounds, seconds)
            self._phase = "final"
            self._check_trials()
            leaders = self.leaders(FINALISTS)
            values = {t.point: t.value or 0.0 for t in self.tried}
            best = [p for p in leaders if values[p] > values[leaders[0]] - FINAL_HOPE]
            if self.objective == "tokens" and len(best) > 1:
                self._reference, self._level = best[0], values[best[0]]
                self._points = {f"point {n}": p for n, p in enumerate(best[1:], start=1)}
                seconds = self.remaining_seconds - self._comparison_seconds
                return self._proposal(f"the best {len(best)}", FINAL_ROUNDS, seconds)
        return None

    def decide(self, variants: Sequence[Variant]) -> None:
        """Receives the results of the last comparison."""
        reference, by_name = variants[0], {v.name: v for v in variants[1:]}
        if self._phase == "start":
            self._take_start(reference, by_name.get("start again"))
        elif self._phase == "trials":
            if reference.failed is not None or not reference.rounds:
                if reference.failed is not None and self._reference == self.space.start:
                    raise InputError(f"tune: the job as it is failed: {reference.failed}")
                self._reference, self._level = self.space.start, 0.0
                return
            self._seconds.append(self._clock() - self._asked_at)
            for name, point in self._points.items():
                if name in by_name and (by_name[name].rounds or by_name[name].failed):
                    row = self._row(point, by_name[name])
                    self._record.append("trial", **row)
                    self._take(row)
                    self._on_trial(self)
            best = max(self.tried, key=lambda t: t.value or -math.inf, default=None)
            if self.objective == "tokens" and best is not None and (best.value or 0.0) > 0:
                self._reference, self._level = best.point, best.value or 0.0
        else:
            self._phase = "end"
            logs = {p: _logs(by_name[n]) for n, p in self._points.items() if n in by_name}
            self.final = {p: [self._level + x for x in each] for p, each in logs.items() if each}
            self.final[self._reference] = [self._level] * len(reference.rounds)
            rows = [{"settings": self.space.settings(p), "logs": x} for p, x in self.final.items()]
            self._record.append("final", variants=rows)

    def _proposal(self, text: str, rounds: int, seconds: float) -> Proposal[Point]:
        self._tell(text, min(1 - self.remaining_seconds / self.budget_seconds, 1.0))
        variants = {REFERENCE: self._reference, **self._points}
        design = replace(
            TRIAL,
            rounds=rounds,
            steps=self._turn_steps(),
            seed=self._seed + len(self.rows),
            budget_seconds=max(seconds, 1.0),
        )
        return Proposal(variants, design)

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
            "seconds": self._clock() - self._asked_at,
        }
        self._record.append("start of the study", start=self.start)

    def _begin_trials(self) -> None:
        self._phase = "trials"
        memory = self.start["memory"]
        self._proposer = self._make_proposer(self.start["noise"], memory)
        self._proposer.tell(TriedPoint(self.space.start, "ok", 0.0, memory))
        for event in self._record.events:
            if event["event"] == "trial":
                self._take({k: v for k, v in event.items() if k not in ("event", "at")})

    # The trials

    @property
    def _usual_seconds(self) -> float:
        """Seconds of a comparison of trials; 0 before the first one."""
        return statistics.median(self._seconds or [0.0])

    @property
    def _comparison_seconds(self) -> float:
        """Seconds that are kept for the final comparison."""
        least = COMPARISON_STARTS * float(self.start["seconds"]) / 4
        return max(COMPARISON_SHARE * self.budget_seconds, least)

    @property
    def _reserve(self) -> float:
        """Seconds that the next trials leave for the final and the final comparison.

        Half of the final comparison's, as long as nothing is better than the start.
        """
        better = len(self.leaders(2))
        final = FINAL_SHARE * self.budget_seconds if self.objective == "tokens" else 0.0
        return self._comparison_seconds * (1 if better else 0.5) + (final if better > 1 else 0.0)

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
            self.ended = "every point that may be tried was tried"
        return points

    def _check_trials(self) -> None:
        if not self.rows and self.ended == TIME_USED:
            used = self.budget_seconds - self.remaining_seconds + self.start["seconds"]
            least = rounded_up(used / (1 - COMPARISON_SHARE))
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
        """A trial as the record and the JSON have it."""
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
        value, memory = row["log_rate"] if row["state"] == "ok" else None, self.start["memory"]
        if value is not None and self.objective == "memory":
            value = math.log(memory / row["memory"]) if memory and row["memory"] else 0.0
        self.rows.append(row)
        self.tried.append(TriedPoint(point, row["state"], value, row["memory"]))
        self._proposer.tell(self.tried[-1])


def _failure(variant: Variant) -> str | None:
    """Why a variant's figures don't count."""
    if variant.failed is None and not all(math.isfinite(loss) for _, loss in variant.losses):
        return "its loss is not a finite number"
    return variant.failed


def _logs(variant: Variant) -> list[float]:
    """Logarithms of a variant's speed over the reference's, by round."""
    pairs = zip(variant.rounds, variant.baseline_rounds, strict=False)
    return [math.log(own / other) for own, other in pairs]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)
