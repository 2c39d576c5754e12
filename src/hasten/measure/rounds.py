"""Reads variants from an experiment's record: valid rounds, missing rounds, results.

A **cohort** is a set of variants in fresh processes that take turns. A round is
identified by its cohort and its number. It is complete when every variant of the cohort
has had its turn, except for those that failed. A round counts unless other programs
used more of the machine than the design allows. If too few rounds were calm, those with
the least background load are added. They are selected by the load, never by the speed.

The steps of a round differ: one has long examples, the next has short ones. All
variants take the same steps. A variant's turn is therefore compared step by step with
the others, see ``rates``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence, Set
from typing import Any

from hasten.core.plan import Plan
from hasten.measure.ablation import Design, Kind, Variant
from hasten.measure.record import Event
from hasten.measure.schedule import peak_of
from hasten.measure.significance import with_process_variance
from hasten.measure.statistics import Interval, paired_ratio

Key = tuple[int, int]  # cohort, round


class Rounds:
    """The rounds in a record.

    Args:
        events: the events of one record.
        base: the baseline's name.
        design: the requested design; ``rounds`` events change the number of rounds.
    """

    def __init__(self, events: Sequence[Event], base: str, design: Design) -> None:
        self.events, self.base = events, base
        round_counts = [e["rounds"] for e in events if e["event"] == "rounds"]
        self.wanted: int = round_counts[-1] if round_counts else design.rounds
        self.most = self.wanted * (1 if design.foreign_load is None else 2)
        self.limit = math.inf if design.foreign_load is None else design.foreign_load
        self.failed = {e["variant"]: e["why"] for e in events if e["event"] == "failed"}
        self.members = {e["cohort"]: e["members"] for e in events if e["event"] == "cohort"}
        self.ended = {e["cohort"] for e in events if e["event"] == "cohort_done"}
        self.turns: dict[Key, dict[str, Event]] = {}
        for e in events:
            if e["event"] == "turn":
                self.turns.setdefault((e["cohort"], e["round"]), {})[e["variant"]] = e
        self._rates: dict[Key, dict[str, float]] = {}
        warm: dict[tuple[int, str], int] = {}
        for e in events:
            if e["event"] == "warmup":
                at = (e["cohort"], e["variant"])
                warm[at] = warm.get(at, 0) + len(e["steps"])
        self.warmup = max(warm.values(), default=0)  # steps before the first round of a cohort
        self.eliminated = {
            e["variant"]: (e["cohort"], e["round"]) for e in events if e["event"] == "eliminated"
        }
        self._dropped = {n for e in events if e["event"] == "dropped" for n in e["variants"]}
        self._failed_in = {e["variant"]: e["cohort"] for e in events if e["event"] == "failed"}

    def load(self, key: Key) -> float:
        """The heaviest background load of a round's turns."""
        return max(float(turn["background_load"]) for turn in self.turns[key].values())

    def rate(self, key: Key, variant: str) -> float:
        """Speed of a variant's turn in a round, in tokens per second."""
        if key not in self._rates:
            self._rates[key] = rates(self.turns[key])
        return self._rates[key][variant]

    def ratio(self, variant: str) -> Interval | None:
        """A variant's speed over the baseline's in the rounds that they share; None without any."""
        keys = [key for key in self.counting(variant) if self.base in self.turns[key]]
        if not keys:
            return None
        return paired_ratio(
            [self.rate(key, self.base) for key in keys], [self.rate(key, variant) for key in keys]
        )

    def complete(self, variant: str) -> list[Key]:
        """A variant's complete rounds, in order: no variant's turn is missing in them."""
        return [
            key
            for key, turns in self.turns.items()
            if variant in turns
            and all(
                name in turns
                or name in self._dropped
                or self._failed_in.get(name, math.inf) <= key[0]
                or self.eliminated.get(name, key) < key
                for name in self.members[key[0]]
            )
        ]

    def counting(self, variant: str) -> list[Key]:
        """The rounds from which a variant's numbers are taken."""
        keys = self.complete(variant)
        if variant == self.base:  # its rounds in other groups belong to those groups' variants
            # The first measured variant: in its cohorts, the baseline's own rounds are counted.
            names = [n for members in self.members.values() for n in members if n != self.base]
            first = next((n for n in names if self.complete(n)), None)
            keys = [key for key in keys if first is None or first in self.members[key[0]]]
        calm = [key for key in keys if self.load(key) <= self.limit]
        busy = sorted((k for k in keys if self.load(k) > self.limit), key=self.load)
        return sorted((calm + busy)[: self.wanted])

    def missing(self, variant: str, share: float = 1.0) -> int:
        """Rounds that a variant still needs for a share of those wanted."""
        if variant in self.failed or variant in self.eliminated:
            return 0
        keys = self.complete(variant)
        calm = sum(self.load(key) <= self.limit for key in keys)
        lacking = math.ceil(self.wanted * share) - calm
        return max(0, min(lacking, math.ceil(self.most * share) - len(keys)))

    def redone(self) -> int:
        """Rounds beyond those wanted, done because others had disturbed as many."""
        names = {name for members in self.members.values() for name in members} - {self.base}
        return max(0, *(len(self.complete(n)) - self.wanted for n in names or {self.base}), 0)

    def seconds(self) -> float | None:
        """Seconds of a round of all variants, by the median turn of each; None without turns."""
        durations: dict[str, list[float]] = {}
        for turns in self.turns.values():
            for name, turn in turns.items():
                steps = math.fsum(step["step_seconds"] for step in turn["steps"])
                durations.setdefault(name, []).append(turn.get("seconds", steps))
        total = math.fsum(map(statistics.median, durations.values()))
        return round(total, 3) if durations else None

    def cohorts_of(self, variant: str) -> int:
        """Cohorts that a variant has taken part in to their end."""
        return sum(variant in self.members[cohort] for cohort in self.ended)


def variants_of(
    events: Sequence[Event], plans: Mapping[str, Plan], kinds: Mapping[str, Kind], design: Design
) -> list[Variant]:
    """The variants as the record shows them, in the order of ``plans``; the first is the
    baseline.
    """
    base = next(iter(plans))
    rounds = Rounds(events, base, design)
    dropped = {name for e in events if e["event"] == "dropped" for name in e["variants"]}
    names = [name for name in plans if name not in dropped]
    variants = [_variant(Variant(n, plans[n], kind=kinds.get(n, "other")), rounds) for n in names]
    above = variants[0]
    for variant in variants:
        if variant.kind in ("cumulative", "all"):  # its name lists the dropped ones it includes
            new = [t.name() for t in variant.plan if t not in above.plan.techniques]
            if variant.name.startswith("+ ") and len(new) > 1:
                variant.name = f"+ {' + '.join(new)}"
            above = variant
    return with_process_variance(variants)


def _variant(variant: Variant, rounds: Rounds) -> Variant:
    variant_events = [e for e in rounds.events if e.get("variant") == variant.name]
    keys = rounds.counting(variant.name)
    turns = [rounds.turns[key][variant.name] for key in keys]
    variant.rounds = [rounds.rate(key, variant.name) for key in keys]
    if all(rounds.base in rounds.turns[key] for key in keys):
        variant.baseline_rounds = [rounds.rate(key, rounds.base) for key in keys]
    variant.steps = [step for turn in turns for step in turn["steps"]]
    variant.foreign_load = [turn["background_load"] for turn in turns]
    joules: list[Any] = [
        turn.get("joules") for turn in turns
    ]  # of the device, where the others sleep
    tokens = sum(step["tokens"] for step in variant.steps)
    if tokens and None not in joules:
        variant.joules_per_token = sum(joules) / tokens
    order = sorted({key[0] for key in keys})  # a cohort is a fresh build
    variant.builds = [order.index(key[0]) for key in keys]
    variant.failed = rounds.failed.get(variant.name)
    _curves(variant, variant_events, rounds.ended)
    pieces = [e for e in variant_events if e["event"] == "warmup"]
    pieces = [e for e in pieces if e["cohort"] == pieces[0]["cohort"]]  # of its first cohort
    if pieces:  # several if other variants needed more steps
        variant.warmup = {
            "steps": sum(len(e["steps"]) for e in pieces),
            "seconds": sum(e["seconds"] for e in pieces),
            "compile_seconds": sum(e["compile_seconds"] for e in pieces),
        }
    for e in variant_events:
        if e["event"] == "start" and not variant.startup_seconds:
            variant.startup_seconds = e["startup_seconds"]
        elif e["event"] == "finish":
            variant.effective, variant.samples = e["effective"], e["samples"]
            variant.ledger = e.get("ledger")
        elif e["event"] == "unfinished":
            variant.unfinished = e["why"]
    return variant


def _curves(variant: Variant, variant_events: Sequence[Event], ended: Set[int]) -> None:
    """Losses of one cohort: in each the variant began again from its seed.

    It is the one that trained longest, of those that came to their end, with a last look at the
    eval loss: one that was killed stopped at another point in every variant.
    """
    cohorts: dict[int, list[Event]] = {}
    for e in variant_events:
        if "cohort" in e:
            cohorts.setdefault(e["cohort"], []).append(e)
    if not cohorts:
        return
    ended_cohorts = {number: events for number, events in cohorts.items() if number in ended}

    def tokens(events: Sequence[Event]) -> int:
        return sum(step["tokens"] for e in events for step in e.get("steps", ()))

    longest = max((ended_cohorts or cohorts).values(), key=tokens)  # the first of equals
    before = 0
    for e in longest:
        for step in e.get("steps", ()):
            before += step["tokens"]
            if step["loss"] is not None:
                variant.losses.append((before, step["loss"]))
        if e["event"] == "evaluate" and e["eval_loss"] is not None:
            variant.eval_data.append((e["tokens"], e["eval_loss"]))
            variant.metrics = e.get("metrics", {}) if e["tokens"] else {}
            variant.eval_pairs = e.get("pairs", 0)
    finish_events = [e for e in variant_events if e["event"] == "finish"]  # a loop's
    variant.peak_memory_bytes = peak_of(
        [*finish_events, *(step for e in variant_events for step in e.get("steps", ()))]
    )


def rates(turns: Mapping[str, Event]) -> dict[str, float]:
    """Speed of each variant in one round, in tokens per second of a middling step.

    This is one pass of median polish over the logarithms of the steps' rates (Tukey,
    Exploratory Data Analysis, 1977, chapter 11). A step's level is the median over the
    variants. A variant's distance from it is the median over the steps. Between two
    variants this is the median of the ratios of equal steps. One disturbed step therefore
    doesn't count, nor does the difference between steps. A variant with other token counts
    in some step has the median of its own steps.

    A turn of ranks with local steps has its own total seconds. Most of its steps have no
    communication cost and one has a high cost, which a median would ignore. Its distance is
    therefore that of the full turn.
    """
    steps = {name: turn["steps"] for name, turn in turns.items()}
    step_rates = {n: [float(s["tokens_per_second"]) for s in each] for n, each in steps.items()}
    work = {name: tuple(step["tokens"] for step in each) for name, each in steps.items()}
    commonest = statistics.mode(work.values())
    alike = [n for n, tokens in work.items() if tokens == commonest and min(step_rates[n]) > 0]
    even = [name for name in alike if "seconds" not in turns[name]]
    logs = [[math.log(rate) for rate in step_rates[name]] for name in even or alike]
    levels = [statistics.median(column) for column in zip(*logs, strict=True)]
    middle = statistics.median(levels) if levels else 0.0
    worth = {name: float(statistics.median(each)) for name, each in step_rates.items()}
    for name, turn in turns.items():
        if "seconds" in turn:
            worth[name] = sum(work[name]) / turn["seconds"]
    for name in alike:
        pairs = zip(step_rates[name], levels, strict=True)
        above = statistics.median(math.log(rate) - level for rate, level in pairs)
        if "seconds" in turns[name]:
            usual = sum(n / math.exp(level) for n, level in zip(commonest, levels, strict=True))
            above = math.log(usual / turns[name]["seconds"])
        worth[name] = math.exp(middle + above)
    return worth
