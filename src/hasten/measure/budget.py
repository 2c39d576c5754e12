"""Time budget: predicts durations, fits the rounds, and selects the variants to drop.

The estimate starts when the baseline has started and warmed up. Its own start and its
own steps predict the remaining costs. If not everything fits, this is the order in
which parts are dropped:

1. Variants that leave one technique out.
2. Second builds.
3. Variants of one technique alone, and steps of the cumulative design. Those with the
   smallest forecast are dropped first.
4. The second process of the baseline.

The baseline and the full plan stay. If two rounds of these two don't fit, the
experiment is refused.

`BudgetTracker` checks the remaining time before every further expense:

  1. After the start and warm-up of the baseline: is there time for it and the full
     plan?
  2. After the start of the full plan: which variants and builds fit? The others are
     dropped, and each is recorded.
  3. After all starts: how many rounds fit?
  4. Before every round: does one more round fit, with everything that must follow?

Results that were measured stay. Variants that start again, for a second build or after
a kill, are neither dropped nor refused. If no more round fits, the experiment ends with
the rounds that are complete. The time of an earlier start counts if its turns are
reused. Without a budget, nothing is checked.

An experiment ends at the latest after the budget and one round; that round takes at
most a quarter of the budget. With partial results (``Design.partial``), nothing is
refused and one round is enough. Each variant is then checked before it starts.

With ``Design.every_variant``, nothing is dropped either. All variants start with the
shortest warm-up. The duration of those steps decides the use of the remaining budget:

  1. If neither two rounds of the first two variants nor the shortest round of all
     variants fits, nothing is measured. This check happens after two starts.
  2. If there is time for the longest warm-up and a round after it, all variants do the
     longest warm-up.
  3. If three rounds of full turns fit, turns have all their steps; else they have one
     step.
  4. Rounds continue while one more fits. The first round always runs, up to the grace
     time.

If memory doesn't hold all variants together, they run in cohorts, one after the other.
The first cohort has its share of the time and decides the number of rounds of all
cohorts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from hasten.errors import InputError
from hasten.measure.ablation import Design, Kind
from hasten.measure.record import ExperimentRecord
from hasten.measure.rounds import Rounds
from hasten.measure.schedule import VariantProcess

FEWEST_ROUNDS = 2  # one says nothing of its own error
WORTH_ROUNDS = 5  # fewer leave an interval too wide for most effects: rather fewer variants
WORTH_IN_PART = 3  # rounds with which a variant is worth its place where partial results count
GRACE = 0.25  # of a budget: a round that has begun may go on for so long
STAYS: Kind = "all"  # a kind that is never dropped


@dataclass(frozen=True)
class Costs:
    """Seconds that a variant takes: to start and warm up, for a look, at the end; and for a turn.

    ``turns`` are those of the variants that have run. Others lie between them: of a cumulative the
    first and the last row have run first.
    """

    start: float
    turns: tuple[float, ...]
    look: float
    finish: float

    def of(self, variants: int, rounds: int, looks: int, to_start: int, builds: int = 1) -> float:
        """Seconds for the remaining experiment.

        Each build after the first starts all variants again.
        """
        again = (builds - 1) * variants * self.start
        work = variants * (builds * looks * self.look + self.finish)
        unknown = variants - len(self.turns)
        if unknown <= 0:
            round_seconds = variants * statistics.fmean(self.turns)
        else:
            between = math.exp(statistics.fmean(math.log(max(turn, 1e-9)) for turn in self.turns))
            round_seconds = math.fsum(self.turns) + unknown * between
        return to_start * self.start + again + work + rounds * round_seconds


@dataclass(frozen=True)
class BudgetPlan:
    """The variants, rounds and builds that a budget allows."""

    names: tuple[str, ...]
    rounds: int
    builds: int
    dropped: tuple[tuple[str, tuple[str, ...]], ...]  # a sentence, and the variants it is about


def rounded_up(seconds: float) -> str:
    """Formats a required time: ``42 s``, ``4 min``, ``2 h 10 min``; always rounded up."""
    if seconds <= 90:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def fit_to_budget(
    names: Sequence[str],
    kinds: Mapping[str, Kind],
    expected: Mapping[str, float],
    builds: int,
    most_rounds: int,
    rest_of: Callable[[Sequence[str], int, int], float],
    available_seconds: float,
    worth: int = WORTH_ROUNDS,
) -> BudgetPlan:
    """The variants, builds and rounds that fit into the seconds that are left.

    Args:
        names: all variants.
        kinds: what each is.
        expected: the gain that is forecast for a variant; a missing one counts as none.
        builds, most_rounds: as the user wished.
        rest_of: seconds for (variants, builds, rounds).
        available_seconds: seconds there are.
        worth: with fewer rounds than these, rather fewer variants.
    """
    enough = min(worth, most_rounds)
    retained = list(names)
    dropped: list[tuple[str, tuple[str, ...]]] = []
    left_out = [name for name in names if kinds.get(name) == "leave-one-out"]
    others = [name for name in names[1:-1] if kinds.get(name) in ("single", "cumulative", "other")]
    others.sort(key=lambda name: expected.get(name, 0.0))
    again = [name for name in names if kinds.get(name) == "again"]
    for what in (*left_out, None, *others, *again):  # None: the second builds
        if rest_of(retained, builds, max(enough, builds)) <= available_seconds:
            break
        if what is None:
            if builds > 1:
                builds = 1
                dropped.append(("second builds: no time for them", ()))
            continue
        retained.remove(what)
        dropped.append((f"{what}: no time for it", (what,)))
    rounds = most_rounds
    while rounds > FEWEST_ROUNDS and rest_of(retained, builds, rounds) > available_seconds:
        rounds -= 1
    return BudgetPlan(tuple(retained), rounds, builds, tuple(dropped))


class BudgetTracker:
    """Decides about further expenses of an experiment from the time that remains.

    Args:
        design: settings, with or without a budget.
        kinds: the kind of each variant.
        expected: predicted gains.
        record: supplies the time, and stores the variants that were dropped.
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
        self.dropped: set[str] = {name for e in earlier for name in e["variants"]}
        self.builds: int = min([design.builds, *(e["builds"] for e in earlier if "builds" in e)])
        self.over = False  # nothing more fits
        self.every_variant = design.every_variant and design.budget_seconds is not None
        shortened = [e["length"] for e in record.events if e["event"] == "turns"]
        self.steps: int = shortened[-1] if shortened else design.steps  # of a turn
        self._until = design.budget_seconds or math.inf  # of a first cohort among several
        self._cohort_began, self._cohorts, self._is_first = 0.0, 1, True
        self._hopeless = False
        self.fresh = design.grouping == "fresh"  # every turn pays for a start
        self._round_seconds = 0.0  # of the last round's forecast
        self._fewest, self._worth = FEWEST_ROUNDS, WORTH_ROUNDS
        if design.partial:
            self._fewest, self._worth = 1, WORTH_IN_PART

    def seconds_left(self) -> float:
        """Seconds until the experiment must end, grace time included."""
        budget = self._design.budget_seconds
        if budget is None:
            return math.inf
        grace = GRACE * budget
        more = grace if self.every_variant else min(self._round_seconds, grace)
        return budget + more - self._record.spent

    def begin_cohort(self) -> None:
        """Before the first variant of a cohort starts."""
        self._cohort_began, self._is_first = self._record.spent, not self._measured()

    def allows(self, name: str, variants: Sequence[VariantProcess]) -> bool:
        """Returns True if there is time to start one more variant; else drops it.

        The first two variants always start: without them there is nothing to compare.
        """
        budget = self._design.budget_seconds
        if budget is None or not self._design.partial or self.every_variant or len(variants) < 2:
            return True
        rounds = min(self._worth, self._design.rounds)
        needed_seconds = self._costs(variants).of(len(variants) + 1, rounds, looks=1, to_start=1)
        if self._record.spent + needed_seconds <= budget or name in self._measured():
            return True
        self._drop(name)
        return False

    def look(self, waiting: Sequence[str], variants: Sequence[VariantProcess]) -> None:
        """After a variant of those that wait has started.

        Raises:
            InputError: nothing is measured yet, and there isn't time for two rounds of the first
                two of them.
        """
        budget = self._design.budget_seconds
        if budget is None or not 1 <= len(variants) <= 2 or len(waiting) < 2:
            return
        costs = self._costs(variants)
        self._round_seconds = costs.of(variants=2, rounds=1, looks=1, to_start=0)
        if self.every_variant:
            if len(variants) == 2 and self._is_first:
                self._refuse_hopeless(len(waiting), replace(costs, finish=0.0))
            return
        least = costs.of(variants=2, rounds=FEWEST_ROUNDS, looks=1, to_start=2 - len(variants))
        end = self._record.spent + least
        if self._measured():
            self.over = self.over or end > budget
        elif not self._design.partial and end > budget:
            raise InputError(
                f"budget: {rounded_up(budget)} is too short: two rounds of the baseline and one "
                f"more variant take about {rounded_up(end)} on this job and machine"
            )
        if len(variants) == 2 and not self.over:
            self._choose(waiting, len(variants), costs)

    def _refuse_hopeless(self, variants: int, costs: Costs) -> None:
        """End where two rounds of two variants don't fit, nor the shortest round of all of them."""
        two = costs.of(variants=2, rounds=FEWEST_ROUNDS, looks=1, to_start=0)
        short = replace(costs, turns=tuple(turn / self.steps for turn in costs.turns))
        every = short.of(variants, rounds=1, looks=0, to_start=variants - 2)
        budget = self._design.budget_seconds or 0.0
        if self._record.spent + two > budget and every > self.seconds_left():
            took = rounded_up(two)
            text = f"two rounds of the baseline and the whole plan take about {took} more"
            self._record.append("dropped", text=text, variants=[])
            self.over = self._hopeless = True

    def warmup(self, waiting: Sequence[str], variants: Sequence[VariantProcess]) -> int:
        """Steps to which all of these are warmed up together, beyond those that each needed."""
        budget = self._design.budget_seconds
        if budget is None or not self.every_variant or not variants or not self._is_first:
            return 0
        self._cohorts = math.ceil(max(len(waiting) - 1, 1) / max(len(variants) - 1, 1))
        self._until = self._cohort_began + (budget - self._cohort_began) / self._cohorts
        more = self._design.most_warmup - self._design.warmup
        needed_seconds = self._costs(variants, steps=1).of(
            len(variants), more + WORTH_IN_PART, looks=1, to_start=0
        )
        return self._design.most_warmup if self._record.spent + needed_seconds <= self._until else 0

    def plan_rounds(self, waiting: Sequence[str], variants: Sequence[VariantProcess]) -> None:
        """After all have started that are to be alive together: how many rounds there will be."""
        if self.every_variant:
            if variants and self._is_first:
                costs = self._costs(variants)
                three_rounds = costs.of(len(variants), WORTH_IN_PART, looks=1, to_start=0)
                if self._record.spent + three_rounds > self._until:
                    self.steps = 1  # turns of one step, for all cohorts
                    self._record.append("turns", length=1)
            return
        names = [name for name in waiting if name not in self.dropped]
        if self._design.budget_seconds is None or not variants or len(names) < 2:
            return
        rounds = self._choose(names, len(variants), self._costs(variants))
        if self._design.eliminate:
            return  # rounds get cheaper as variants leave
        is_recorded = any(e["event"] == "rounds" for e in self._record.events)
        if not is_recorded and rounds < self._design.rounds:
            self._record.append("rounds", rounds=rounds)

    def out(self, variants: Sequence[VariantProcess], done: int) -> bool:
        """Returns True if there is no time for one more round after the ``done`` rounds.

        Two rounds always run, because one round contains no estimate of its own error. With
        partial results it is one round.
        """
        budget = self._design.budget_seconds
        if budget is None or not variants:
            return self.over
        costs = self._costs(variants)
        if self.every_variant and done < FEWEST_ROUNDS:  # what techniques did is worth less
            costs = replace(costs, finish=0.0)
        round_seconds = costs.of(len(variants), rounds=1, looks=1, to_start=0)
        self._round_seconds = round_seconds
        if done < self._fewest and self.seconds_left() > 0:
            return self.over
        if self.every_variant and not self._is_first:  # as many rounds as the first cohort has
            self.over = self.over or round_seconds > self.seconds_left()
            return self.over
        if self._record.spent + round_seconds <= min(budget, self._until):
            return self.over
        if self._cohorts > 1:
            self._record.append("rounds", rounds=done)
        else:
            self.over = True
        return True

    def close(self, base: str, lacking: Sequence[str]) -> None:
        """Note what there was no time for, and how many rounds and builds there are.

        Raises:
            InputError: the budget was over before the first round.
        """
        if not self._design.partial and not self._measured():
            raise InputError(
                f"budget: {rounded_up(self._design.budget_seconds or 0.0)} is too short: it "
                "was over before the first round. The variants take so long to start on this job "
                "and machine; give twice as much"
            )
        turned = {e["variant"] for e in self._record.events if e["event"] == "turn"}
        if self.every_variant:
            self._explain(base, lacking, turned)
            lacking = []
        if self._design.partial:
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
            self._record.append("dropped", text=text, variants=[], builds=max(builds, 1))

    def _explain(self, base: str, lacking: Sequence[str], turned: Set[str]) -> None:
        """Why rows have no figures: they stay, and the rounds of the others are complete."""
        if turned - {base}:
            for name in lacking:
                if name not in turned:
                    why = "there was no time for a round of it"
                    self._record.append("failed", variant=name, cohort=0, why=why)
        elif not self._hopeless:
            end = rounded_up((1 + GRACE) * (self._design.budget_seconds or 0.0))
            text = f"not a single round of all variants ended within {end}"
            self._record.append("dropped", text=text, variants=[])

    def _drop(self, name: str) -> None:
        self._record.append("dropped", text=f"{name}: no time for it", variants=[name])
        self.dropped.add(name)

    def _choose(self, names: Sequence[str], started: int, costs: Costs) -> int:
        """Drop what doesn't fit and has no rounds yet; the number of rounds that do."""
        measured = self._measured()
        if measured >= set(names):
            return self._design.rounds
        kinds = {**self._kinds, **dict.fromkeys(measured, STAYS)}
        ordered = [names[0], *names[2:], names[1]]  # the result started second
        available_seconds = (self._design.budget_seconds or 0.0) - self._record.spent

        def rest_of(retained: Sequence[str], builds: int, rounds: int) -> float:
            to_start = max(len(retained) - started, 0)
            return costs.of(len(retained), rounds, self._design.evaluations, to_start, builds)

        choice = fit_to_budget(
            ordered,
            kinds,
            self._expected,
            self.builds,
            self._design.rounds,
            rest_of,
            available_seconds,
            self._worth,
        )
        for text, variants in choice.dropped:
            more = {} if variants else {"builds": 1}
            self._record.append("dropped", text=text, variants=list(variants), **more)
        self.builds = choice.builds
        self.dropped |= {name for _, variants in choice.dropped for name in variants}
        return choice.rounds

    def _measured(self) -> set[str]:
        rounds = Rounds(self._record.events, "", self._design)  # which is the baseline is no matter
        names = {name for members in rounds.members.values() for name in members}
        return {name for name in names if rounds.complete(name)}

    def _costs(self, variants: Sequence[VariantProcess], steps: int | None = None) -> Costs:
        """Costs by the measurements of these variants.

        ``steps``: steps of a turn, if they differ from those of the rounds.
        """
        paces = [
            variant.pace if self.every_variant else variant.step_seconds for variant in variants
        ]
        turns = tuple((steps or self.steps) * pace for pace in paces)
        step = statistics.fmean(paces)
        look = statistics.fmean(variant.evaluation_seconds for variant in variants)
        if self.every_variant and not look and self._design.evaluations:
            look = step  # none was taken yet
        start = statistics.fmean(variant.start_seconds for variant in variants)
        if self.every_variant:  # the first one waited for imports, which the others share
            start = min(variant.ready_seconds for variant in variants) + self._design.warmup * step
        # At its end a variant that is looked at writes samples, and runs a step to say where it
        # goes.
        finish = look + step if self._design.evaluations else 0.0
        if self.fresh:
            return Costs(0.0, tuple(start + turn for turn in turns), look, finish)
        return Costs(start, turns, look, finish)
