"""Time budget: an experiment stops when it is used up, and reports what is known.

`Budget` checks the remaining time before every further expense, by the measured seconds
of what has run:

  1. Variants start in the order of their forecasts. The baseline and the full plan always
     start; another one starts if two short rounds of all of them fit then. Otherwise it
     is left out. Variants start with the shortest warm-up, which continues if there is time.
  2. Turns have all their steps if three rounds of them fit, else one step. If memory doesn't
     hold all variants together, or there are several builds, each cohort has its share of
     the time. Builds that have no three rounds are left out.
  3. Rounds continue while one more fits, with the work that must follow it. The first round
     always runs. An experiment ends at the latest after the budget and one round, which
     takes at most a quarter of the budget.

The time of an earlier start counts if its turns are reused. Without a budget, nothing is
checked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from hasten.measure.ablation import Design, Kind
from hasten.measure.record import ExperimentRecord
from hasten.measure.rounds import Rounds
from hasten.measure.schedule import VariantProcess

FEWEST_ROUNDS, WORTH_ROUNDS = 2, 3  # one says nothing of its own error; two say little
GRACE = 0.25  # of a budget: work that has begun may take so much longer


def rounded_up(seconds: float) -> str:
    """Formats a required time: ``42 s``, ``4 min``, ``2 h 10 min``; always rounded up."""
    if seconds <= 90:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class Budget:
    """The time of an experiment.

    Args:
        design: settings, with or without a budget.
        kinds: the kind of each variant.
        expected: predicted gains.
        record: supplies the time, and stores the variants that were left out.
    """

    def __init__(
        self,
        design: Design,
        kinds: Mapping[str, Kind],
        expected: Mapping[str, float],
        record: ExperimentRecord,
    ) -> None:
        self._design, self._kinds, self._expected = design, kinds, expected
        self._record, self._budget = record, design.budget_seconds
        earlier = [e for e in record.events if e["event"] == "dropped"]
        self.dropped: set[str] = {name for e in earlier for name in e["variants"]}
        self.builds: int = min([design.builds, *(e["builds"] for e in earlier if "builds" in e)])
        shortened = [e["length"] for e in record.events if e["event"] == "turns"]
        self.steps: int = shortened[-1] if shortened else design.steps  # of a turn
        self.over = False  # nothing more fits
        self._round_seconds = math.inf  # of the last round's forecast
        self.fresh = design.grouping == "fresh"  # every turn pays for a start

    @property
    def is_limited(self) -> bool:
        """Returns True if there is a budget."""
        return self._budget is not None

    def in_order(self, names: Sequence[str]) -> list[str]:
        """The variants in the order of their start: the most useful first."""
        if self._budget is None:
            return list(names)

        def rank(name: str) -> tuple[bool, float]:
            kind = self._kinds.get(name)
            gain = math.inf if kind == "again" else self._expected.get(name, 0.0)
            return kind == "leave-one-out", -gain

        return sorted(names, key=rank)

    def seconds_left(self) -> float:
        """Seconds until the experiment must end, grace time included."""
        if self._budget is None:
            return math.inf
        return self._budget + min(self._round_seconds, GRACE * self._budget) - self._record.spent

    def allows(self, name: str, variants: Sequence[VariantProcess]) -> bool:
        """Returns True if there is time to start one more variant; else leaves it out."""
        if self._budget is None or len(variants) < 2 or name in self._measured():
            return True
        rounds, count = min(FEWEST_ROUNDS, self._design.rounds), len(variants) + 1
        needed = self._start(variants) + self._work(variants, count, rounds, steps=1)
        if self._record.spent + needed <= self._budget:
            return True
        self._drop(name)
        return False

    def longest_warmup(self, variants: Sequence[VariantProcess]) -> int:
        """Steps that a warm-up may have."""
        if self._budget is None or not variants:
            return self._design.longest_warmup
        rounds = self._design.most_warmup - self._design.warmup + WORTH_ROUNDS
        needed = self._work(variants, len(variants), rounds, steps=1)
        return self._design.longest_warmup if self._record.spent + needed <= self._budget else 0

    def plan_rounds(self, waiting: Sequence[str], variants: Sequence[VariantProcess]) -> None:
        """After the first cohort has warmed up: the steps of a turn, the builds and the rounds."""
        if self._budget is None or not variants or self._measured():
            return
        others = len(set(waiting) - self.dropped) - 1
        groups = math.ceil(max(others, 1) / max(len(variants) - 1, 1))
        rounds = self._rounds_that_fit(groups, variants)
        if rounds < WORTH_ROUNDS * self.builds and self.builds > 1:
            self._drop_builds(1)
            rounds = self._rounds_that_fit(groups, variants)
        if rounds < WORTH_ROUNDS and self.steps > 1:
            self.steps = 1
            self._record.append("turns", length=1)
            rounds = self._rounds_that_fit(groups, variants)
        if rounds < self._design.rounds and not self._design.eliminate:
            self._record.append("rounds", rounds=max(rounds, 1))

    def out(self, variants: Sequence[VariantProcess]) -> bool:
        """Returns True if there is no time for one more round, or none was done in time."""
        if self._budget is not None and variants:
            self._round_seconds = self._work(variants, len(variants), 1, self.steps)
            end = self._record.spent + self._round_seconds
            is_late = end > self._budget if self._measured() else self.seconds_left() <= 0
            self.over = self.over or is_late
        return self.over

    def close(self, base: str, lacking: Sequence[str]) -> None:
        """Notes what there was no time for, and how many rounds and builds there are."""
        measured = self._measured()
        turned = {e["variant"] for e in self._record.events if e["event"] == "turn"}
        # The absence of those without a turn completes the others' last round.
        for names in (set(lacking) - turned, set(lacking) & turned):
            measured = self._measured()
            for name in [n for n in lacking if n in names - measured - {base}]:
                self._drop(name)
        rounds = Rounds(self._record.events, base, self._design)
        others = self._measured() - {base} or self._measured()
        counted = max((len(rounds.counting(name)) for name in others), default=0)
        self._record.append("rounds", rounds=counted)
        builds = max((rounds.cohorts_of(name) for name in others), default=0)
        if max(builds, 1) < self.builds:
            self._drop_builds(max(builds, 1))

    def _drop(self, name: str) -> None:
        self._record.append("dropped", text=f"{name}: no time for it", variants=[name])
        self.dropped.add(name)

    def _drop_builds(self, builds: int) -> None:
        text = "further builds: no time for them"
        self._record.append("dropped", text=text, variants=[], builds=builds)
        self.builds = builds

    def _measured(self) -> set[str]:
        rounds = Rounds(self._record.events, "", self._design)  # which is the baseline is no matter
        names = {name for members in rounds.members.values() for name in members}
        return {name for name in names if rounds.complete(name)}

    def _rounds_that_fit(self, groups: int, variants: Sequence[VariantProcess]) -> int:
        """Rounds of each variant, if ``groups`` like this one run one after the other."""
        count = len(variants)
        once = self._work(variants, count, 0, self.steps)
        one = self._work(variants, count, 1, self.steps) - once
        cohorts = groups * self.builds
        again = (cohorts - 1) * count * self._start(variants)
        seconds = (self._budget or 0.0) - self._record.spent - again - cohorts * once
        return max(0, min(self._design.rounds, int(seconds / (groups * one))))

    def _start(self, variants: Sequence[VariantProcess]) -> float:
        """Seconds of a start; the first one waited for imports, which the others share."""
        warmup = self._design.warmup * statistics.median(v.pace for v in variants)
        return min(variant.ready_seconds for variant in variants) + warmup

    def _work(
        self, variants: Sequence[VariantProcess], count: int, rounds: int, steps: int
    ) -> float:
        """Seconds of rounds of so many variants, and of what follows them.

        What follows is a look at the eval loss, and its end: samples, and a step that shows what
        its techniques do. Variants that haven't run lie between those that have.
        """
        paces = [variant.pace for variant in variants]
        between = math.exp(statistics.fmean(map(math.log, paces)))
        step = (math.fsum(paces) + (count - len(paces)) * between) / count
        look = max(*(variant.evaluation_seconds for variant in variants), step)
        after = look + step if self._design.evaluations else 0.0
        turn = steps * step + (self._start(variants) if self.fresh else 0.0)
        return count * (rounds * turn + after)
