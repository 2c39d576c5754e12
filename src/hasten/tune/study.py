"""A study: proposes and measures points until the budget or the points are used up.

Every result is appended to a record, and a killed study resumes from it. Earlier trials
are reported to the proposer again, and nothing is measured twice. The last part of the
budget is reserved. The first part of it is for a final, in which the best few take
turns. It is needed because the best of many trials is in part process variance. The
second part is for the final comparison, in which they are measured again next to the
start. That comparison has the final's order, as far as the time allows.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hasten.errors import InputError
from hasten.measure.budget import rounded_up
from hasten.measure.elimination import ordered
from hasten.measure.record import ExperimentRecord
from hasten.measure.schedule import OutOfTimeError
from hasten.tune.bench import Measurement, ReferencePair
from hasten.tune.samplers import OF_MEDIAN, Proposer, TriedPoint
from hasten.tune.space import Point, Space, changes_text

Objective = Literal["tokens", "memory"]
LEADERS = 3  # that go into the final comparison


@dataclass
class Study:
    """Results in the order of the trials; ``rows`` have the form of the record."""

    space: Space
    objective: Objective
    noise: float
    rate: float
    memory: float | None
    tried: list[TriedPoint] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    final: dict[Point, tuple[float, ...]] = field(default_factory=dict)
    step_seconds: float = 0.0  # of the start
    expected: Callable[[Point], float] = lambda point: 0.0  # of a point's value, beforehand
    ended: str = ""
    next: list[Point] = field(default_factory=list)  # what a larger budget would try

    def leaders(self, count: int = LEADERS) -> list[Point]:
        """The best points that are better than the start by what was measured, best first.

        Those of the final come first, in its order.
        """
        places = ordered(self.final, self.expected)
        better = [t for t in self.tried if t.value and t.value > 0 and t.point != self.space.start]
        ranked = [t.point for t in sorted(better, key=lambda t: -(t.value or 0.0))]
        return [*places, *(point for point in ranked if point not in places)][:count]


Tell = Callable[[str, float], None]
NOISE_SHARE = 0.08  # of the budget, if the noise has been seen twice by then
DUEL_SHARE = 0.22  # of the budget, at least
FINAL_SHARE = 0.2  # the same
FINALISTS = 4
# starts of a process that a final comparison needs at least, its first rounds included
DUEL_STARTS = 3.5
FINAL_HOPE = 0.3  # below the best, as a logarithm: no finalist, whose turns would be long
FINAL_PASSES = 4  # fewer decide nothing
FEWEST = 5  # trials before a study may end early
LEAST_TRIALS = 2  # for which a small budget leaves out the final, and shortens the final comparison
NEXT = 2  # points that are named where the budget ended the trials
TIME_USED = "the budget's time for trials was used"
HOPE = 0.005  # expected gain of the best untried point, below which a study ends
PATIENT = 6.0  # times the usual trial: what a compiled graph may take, and a hanging process not
SLACK = 1.15  # of a trial's expected time
GONE = 0.1  # of the budget before the start (data, other measurements), from which it is told


class Search:
    """A running study.

    Args:
        space: the choices.
        proposer: makes the proposer of points.
        bench: measures points.
        record: earlier results, and the file for new ones.
        objective: the value to optimise.
        budget_seconds: time for all, the final comparison included.
        most: maximum number of trials.
        ``tell``: receives progress messages, and the used share of the budget.
        on_trial: called after every trial.
        began: start of the budget, on the clock; default: now.
        room: bytes that processes of the final may use together.
        clock: returns the time, in seconds.
    """

    def __init__(
        self,
        space: Space,
        proposer: Callable[[float, float | None], Proposer],
        bench: ReferencePair,
        record: ExperimentRecord,
        *,
        objective: Objective = "tokens",
        budget_seconds: float,
        most: int | None = None,
        tell: Tell = lambda text, share: None,
        on_trial: Callable[[Study], None] = lambda study: None,
        began: float | None = None,
        room: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._space, self._propose, self._bench, self._record = space, proposer, bench, record
        self._objective, self._most, self._found = objective, most, on_trial
        self._budget = budget_seconds
        self._clock = clock
        self._started = clock()
        self._began = self._started if began is None else began
        self._say, self._room = tell, room
        self._trial_seconds: list[float] = []

    def run(self) -> Study:
        """Search until the end.

        Raises:
            InputError: the budget is too short, or the job fails before any change.
        """
        self._record.append("run")
        try:
            self._tell("starting the job as it is")
            self._bench.open(self._end)
            self._afford(2 * self._bench.start_seconds)
            noise = self._noise()
        except OutOfTimeError:
            raise InputError(
                f"budget: {rounded_up(self._budget)} is too short: the job alone hasn't started "
                "and warmed up by then; give several times as much"
            ) from None
        bench = self._bench
        study = Study(self._space, self._objective, noise, bench.rate, bench.memory)
        study.step_seconds = bench.step_seconds
        proposer = self._propose(OF_MEDIAN * noise, bench.memory)
        proposer.tell(TriedPoint(self._space.start, "ok", 0.0, bench.memory))
        study.expected = proposer.expected
        for event in self._record.events:
            if event["event"] == "trial":
                row = {k: v for k, v in event.items() if k not in ("event", "at")}
                self._take(study, proposer, row)
        study.ended = self._trials(study, proposer)
        if study.ended == TIME_USED:
            study.next = proposer.promising(NEXT)
        if not study.rows:
            self._afford(0.0)  # the machine has slowed down since: say what it takes now
            raise InputError("tune: there is nothing to try: every other setting is refused")
        if study.rows and all(row["state"] != "ok" for row in study.rows):
            raise InputError(
                f"tune: all {len(study.rows)} trials failed, the last with: "
                f"{study.rows[-1]['why']}; the job stays as it is"
            )
        if self._final_seconds:
            self._final(study, self._finalists(study, proposer))
        return study

    def _finalists(self, study: Study, proposer: Proposer) -> list[Point]:
        """The best few that memory holds together, judged by all trials.

        The value of a single point is in part process variance, most of all after one round.
        """
        better = study.leaders(len(study.rows))
        values = dict(zip(better, proposer.believed(better) if better else (), strict=True))
        needs = {t.point: t.memory or 0.0 for t in study.tried}
        best, room, points = sorted(better, key=lambda p: -values[p]), self._room(), []
        for point in best[:FINALISTS]:
            if needs[point] <= room and values[point] > values[best[0]] - FINAL_HOPE:
                room -= needs[point]
                points.append(point)
        return points

    def _final(self, study: Study, points: list[Point]) -> None:
        """Finds the best of these points by turns side by side; only for speed."""
        if len(points) < 2:
            return
        self._tell(f"the best {len(points)} side by side")
        values = {t.point: t.value for t in study.tried if t.value is not None}
        finalists = {point: values[point] for point in points}
        log_ratios = self._bench.side_by_side(finalists, self._end - self.reserve)
        study.final = {p: logs for p, logs in log_ratios.items() if len(logs) >= FINAL_PASSES}
        rows = [
            {"settings": self._space.settings(p), "logs": logs} for p, logs in log_ratios.items()
        ]
        self._record.append("final", variants=rows)

    @property
    def remaining_seconds(self) -> float:
        """Seconds of the budget that are left."""
        return self._end - self._clock()

    @property
    def reserve(self) -> float:
        """Seconds that are kept for the final comparison."""
        return max(DUEL_SHARE * self._budget, DUEL_STARTS * self._bench.start_seconds)

    def _kept(self, study: Study) -> float:
        """Seconds that the next trial reserves for the steps after the trials.

        While nothing is better than the start, later steps may not be needed. Then half of the
        final comparison's part is reserved, in case the last trial is the first better one.
        """
        least = DUEL_STARTS * self._bench.start_seconds
        if len(study.rows) < LEAST_TRIALS:
            return least
        better = len(study.leaders(2))
        if not better:
            return max(least, self.reserve / 2)
        return self.reserve + (self._final_seconds if better > 1 else 0.0)

    @property
    def _final_seconds(self) -> float:
        return FINAL_SHARE * self._budget if self._objective == "tokens" else 0.0

    @property
    def _end(self) -> float:
        return self._began + self._budget

    def _noise(self) -> float:
        recorded = [e["noise"] for e in self._record.events if e["event"] == "noise"]
        if recorded:
            return float(recorded[-1])
        self._tell("measuring the noise: the job against itself")
        noise = self._bench.noise(self._end, self._clock() + NOISE_SHARE * self._budget)
        self._record.append(
            "noise", noise=round(noise, 5), rate=self._bench.rate, memory=self._bench.memory
        )
        return noise

    def _afford(self, more: float) -> None:
        """Refuse a budget that doesn't hold what is still to come, one trial and the final
        comparison.
        """
        before = self._started - self._began
        least = (self._clock() - self._started) + more + self._trial_time + self.reserve
        if before + least > self._budget:
            gone = f", and {rounded_up(before)} of it went by before the first start"
            raise InputError(
                f"budget: {rounded_up(self._budget)} is too short: the noise, one trial and a "
                f"final comparison "
                f"take about {rounded_up(least / (1 - DUEL_SHARE))} on this job and machine"
                f"{gone if before > GONE * self._budget else ''}"
            )

    @property
    def _trial_time(self) -> float:
        return SLACK * statistics.median(self._trial_seconds or [self._bench.start_seconds])

    def _trials(self, study: Study, proposer: Proposer) -> str:
        """Try until something ends it; what did."""
        while True:
            done, reserved_seconds = len(study.rows), self._kept(study)
            if self._most is not None and done >= self._most:
                return f"{done} trials were done"
            if self.remaining_seconds - self._trial_time < reserved_seconds:
                return TIME_USED
            if done >= FEWEST and proposer.promise() < HOPE:
                return f"no untried point is expected to gain more than {100 * HOPE:g} %"
            point = proposer.ask()
            if point is None:
                return "every point that may be tried was tried"
            changed = changes_text(self._space.changes(point))
            self._tell(f"trial {done + 1}: {changed or 'the start again'}")
            best = max(
                (r["log_rate"] for r in study.rows if r["log_rate"] is not None), default=0.0
            )
            trial_start = self._clock()
            end, patience = (
                self._end - reserved_seconds,
                trial_start + max(PATIENT * self._trial_time, 60.0),
            )
            try:
                measurement = self._bench.measure(point, min(end, patience), best)
            except OutOfTimeError:
                if end <= patience:
                    return TIME_USED
                spent = self._clock() - trial_start
                measurement = Measurement("failed", seconds=spent, why="given up: far too slow")
            else:
                self._trial_seconds.append(measurement.seconds)
            row = _row(self._space, point, measurement)
            self._record.append("trial", **row)
            self._take(study, proposer, row)
            self._found(study)

    def _take(self, study: Study, proposer: Proposer, row: dict[str, Any]) -> None:
        try:
            point = self._space.point(row["settings"])
        except InputError:
            return  # somebody has edited the record
        value = row["log_rate"] if row["state"] == "ok" else None
        if value is not None and self._objective == "memory":
            has_memory = study.memory and row["memory"]
            value = math.log(study.memory / row["memory"]) if has_memory else 0.0
        rounds = tuple(math.log(ratio) for ratio in row["rounds"] if ratio > 0)
        study.rows.append(row)
        study.tried.append(TriedPoint(point, row["state"], value, row["memory"], rounds))
        proposer.tell(study.tried[-1])

    def _tell(self, text: str) -> None:
        used = (self._clock() - self._began) / self._budget
        self._say(text, min(used, 1.0))


def _row(space: Space, point: Point, measurement: Measurement) -> dict[str, Any]:
    """A trial as the record and the JSON have it."""
    return {
        "settings": space.settings(point),
        "changes": space.changes(point),
        "state": measurement.state,
        "log_rate": None if measurement.value is None else round(measurement.value, 5),
        "rounds": [round(math.exp(x), 4) for x in measurement.logs],
        "rate": measurement.rate,
        "memory": measurement.memory,
        "seconds": round(measurement.seconds, 2),
        "foreign_load": round(measurement.load, 3),
        "why": measurement.why,
    }
