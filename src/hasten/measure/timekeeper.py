"""The timekeeper of an experiment with a budget: asks what is left before every further expense.

  1. the baseline has started and warmed up: is there time for it and the whole plan at all?
  2. the whole plan has started, too: which arms and builds fit? the rest is dropped, with a word
  3. all have started: how many rounds fit?
  4. before every round: does one more fit, with what must follow?

What was measured stays: arms that start again, for a second build or after a kill, are neither
dropped nor refused; where no more fits, the experiment ends with the rounds there are. Time that an
earlier start took for turns that are kept counts. Without a budget it keeps quiet.

With a deadline nothing is refused: one round is enough, arms are asked about before they start, and
an answer that hasn't come at the deadline is waited for no longer (``arm_process``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from hasten.measure.ablation import Design, Kind
from hasten.measure.arm_process import ArmProcess
from hasten.measure.budget import FEWEST_ROUNDS, WORTH_ROUNDS, Costs, choose, require
from hasten.measure.record import ExperimentRecord
from hasten.measure.rounds import Rounds

FINISH_SECONDS = 2.0  # beside a look and a turn: samples are written, memory is counted
WORTH_BEFORE_DEADLINE = 3  # rounds with which an arm is worth its place if there is a deadline
STAYS: Kind = "all"  # a kind that is never dropped


class Timekeeper:
    """What an experiment can still afford.

    Args:
        design: with the budget, or without one.
        kinds: what each arm is.
        expected: gains that are forecast.
        record: tells the time, and is told what was dropped.
    """

    def __init__(
        self,
        design: Design,
        kinds: Mapping[str, Kind],
        expected: Mapping[str, float],
        record: ExperimentRecord,
    ) -> None:
        self._design, self._kinds = design, kinds
        self._expected, self._record = expected, record
        earlier = [e for e in record.events if e["event"] == "dropped"]
        self.dropped: set[str] = {name for e in earlier for name in e["arms"]}
        self.builds: int = min([design.builds, *(e["builds"] for e in earlier if "builds" in e)])
        self.over = False  # nothing more fits
        self.fresh = design.grouping == "fresh"  # every turn pays for a start
        self._fewest = FEWEST_ROUNDS if design.deadline_seconds is None else 1

    def left(self) -> float:
        """Seconds until nobody waits for an answer any longer."""
        deadline = self._design.deadline_seconds
        return math.inf if deadline is None else deadline - self._record.spent

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self.left() <= 0

    def allows(self, name: str, arms: Sequence[ArmProcess]) -> bool:
        """Whether there is time to start one more arm before the deadline; else it is dropped.

        The first two are started in any case: without them there is nothing to compare.
        """
        budget = self._design.budget_seconds
        if budget is None or self._design.deadline_seconds is None or len(arms) < 2:
            return True
        rounds = min(WORTH_BEFORE_DEADLINE, self._design.rounds)
        rest = self._costs(arms).of(len(arms) + 1, rounds, looks=1, to_start=1)
        if self._record.spent + rest <= budget or name in self._measured():
            return True
        self._drop(name)
        return False

    def look(self, waiting: Sequence[str], arms: Sequence[ArmProcess]) -> None:
        """After an arm of those that wait has started.

        Raises:
            InputError: nothing is measured yet, and there isn't time for two rounds of the first
                two of them.
        """
        budget = self._design.budget_seconds
        if budget is None or not 1 <= len(arms) <= 2 or len(waiting) < 2:
            return
        costs = self._costs(arms)
        least = costs.of(arms=2, rounds=FEWEST_ROUNDS, looks=1, to_start=2 - len(arms))
        if self._measured():
            self.over = self.over or self._record.spent + least > budget
        elif self._design.deadline_seconds is None:
            require(budget, self._record.spent, least)
        if len(arms) == 2 and not self.over:
            self._choose(waiting, len(arms), costs)

    def settle(self, waiting: Sequence[str], arms: Sequence[ArmProcess]) -> None:
        """After all have started that are to be alive together: how many rounds there will be."""
        names = [name for name in waiting if name not in self.dropped]
        if self._design.budget_seconds is None or not arms or len(names) < 2:
            return
        rounds = self._choose(names, len(arms), self._costs(arms))
        told = [e["rounds"] for e in self._record.events if e["event"] == "rounds"]
        if not told and rounds < self._design.rounds:
            self._record.append("rounds", rounds=rounds)

    def out(self, arms: Sequence[ArmProcess], done: int) -> bool:
        """Whether there is no time for one more round after those that are done.

        Two rounds are done whatever they take: one says nothing of its own error. With a deadline
        it is one.
        """
        budget = self._design.budget_seconds
        if budget is None or not arms or (done < self._fewest and not self.late):
            return self.over
        rest = self._costs(arms).of(len(arms), rounds=1, looks=1, to_start=0)
        self.over = self.over or self._record.spent + rest > budget
        return self.over

    def close(self, base: str, lacking: Sequence[str]) -> None:
        """Note what there was no time for, and how many rounds and builds there are."""
        turned = {e["arm"] for e in self._record.events if e["event"] == "turn"}
        if self._design.deadline_seconds is not None:
            lacking = [name for name in lacking if name != base]  # the report needs one
        for name in lacking:
            if name not in turned:  # its absence leaves the others' last round whole
                self._drop(name)
        for name in lacking:
            if name in turned - self._measured():
                self._drop(name)
        measured = self._measured()
        rounds = Rounds(self._record.events, base, self._design)
        others = measured - {base} or measured
        counted = max((len(rounds.counting(name)) for name in others), default=0)
        self._record.append("rounds", rounds=counted)
        builds = max((rounds.cohorts_of(name) for name in others), default=0)
        if max(builds, 1) < self.builds:
            text = "further builds: no time for them"
            self._record.append("dropped", text=text, arms=[], builds=max(builds, 1))

    def _drop(self, name: str) -> None:
        self._record.append("dropped", text=f"{name}: no time for it", arms=[name])
        self.dropped.add(name)

    def _choose(self, names: Sequence[str], started: int, costs: Costs) -> int:
        """Drop what doesn't fit and has no rounds yet; the number of rounds that do."""
        measured = self._measured()
        if measured >= set(names):
            return self._design.rounds
        kinds = {**self._kinds, **dict.fromkeys(measured, STAYS)}
        ordered = [names[0], *names[2:], names[1]]  # the result started second
        left = (self._design.budget_seconds or 0.0) - self._record.spent

        def rest_of(kept: Sequence[str], builds: int, rounds: int) -> float:
            to_start = max(len(kept) - started, 0)
            return costs.of(len(kept), rounds, self._design.evaluations, to_start, builds)

        choice = choose(
            ordered,
            kinds,
            self._expected,
            self.builds,
            self._design.rounds,
            rest_of,
            left,
            WORTH_ROUNDS if self._design.deadline_seconds is None else WORTH_BEFORE_DEADLINE,
        )
        for text, arms in choice.dropped:
            more = {} if arms else {"builds": 1}
            self._record.append("dropped", text=text, arms=list(arms), **more)
        self.builds = choice.builds
        self.dropped |= {name for _, arms in choice.dropped for name in arms}
        return choice.rounds

    def _measured(self) -> set[str]:
        """The arms that have complete rounds."""
        rounds = Rounds(self._record.events, "", self._design)  # which is the baseline is no matter
        names = {name for members in rounds.members.values() for name in members}
        return {name for name in names if rounds.complete(name)}

    def _costs(self, arms: Sequence[ArmProcess]) -> Costs:
        """Of one arm on the average, as these have shown."""
        turn = self._design.steps * statistics.fmean(arm.step_seconds for arm in arms)
        look = max(arm.evaluation_seconds for arm in arms)
        start = statistics.fmean(arm.start_seconds for arm in arms)
        finish = look + turn + FINISH_SECONDS
        if self.fresh:
            return Costs(0.0, start + turn, look, finish)
        return Costs(start, turn, look, finish)
