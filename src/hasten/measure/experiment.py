"""Compares variants on one machine: build, warm up, then take turns, round by round.

  1. Every variant's process starts, builds, and warms up, one at a time, and only as
     many as memory holds. Before the first round, all do as many steps as the variant
     that needs the longest warm-up.
  2. A round gives each variant some steps (`hasten.measure.schedule`).
  3. Step k has the same examples in every variant. A round's ratio therefore compares
     equal work, at most minutes apart. A machine that slows down slows all variants of
     the round.
  4. At equal tokens every variant measures its eval loss. At the end it reports the
     effects of its techniques and writes samples.

Before every decision, the record is read to find the finished and the missing rounds. A
start after a kill, a second build and a round that other programs disturbed are
therefore the same case. Rounds are missing, and the variants without them get fresh
processes, which are a **cohort**. If a variant fails, the reason is recorded, its
process is ended, and the others continue. A variant that fails only at the very end, in
4, keeps its measured numbers.

A variant that waits for its turn sleeps, but keeps its memory. Therefore the next one
starts only if it fits, judged by the measured memory of those before it. Those that
don't fit are in a later cohort, with a freshly started baseline. If not even the
baseline and one variant fit, every turn has a process of its own.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hasten.core.plan import Plan
from hasten.machine import processes
from hasten.machine.processes import LoadMeter
from hasten.measure.ablation import Design, Kind, Variant
from hasten.measure.budget import Budget
from hasten.measure.energy import EnergyMeter
from hasten.measure.record import Event, ExperimentRecord, seconds_of
from hasten.measure.rounds import Rounds, variants_of
from hasten.measure.schedule import OutOfTimeError, VariantProcess, in_slices, run_round
from hasten.measure.workers import WorkerError, WorkerPool, WorkerSpec

SHARE = 0.92  # of the memory that is available: caches of the system want some, too
GROUP = 3  # variants beside the baseline, where groups were asked for
RACED_ROUNDS = 3  # of a comparison before a variant can be dropped: fewer don't show their error
ALIKE = 0.01  # an interval of this half-width around 1 is an answer, too
Tell = Callable[[str, float], None]  # what happens now, and which share of the work is done


@dataclass(frozen=True)
class ExperimentContext:
    """The environment of an experiment: everything except its plans.

    Args:
        pool: starts the workers.
        spec: the worker of a variant; its job allows ``design.steps_in_all`` steps.
        memory: bytes that the variants may use together.
        cores: cores that they share.
        joules: a counter of the training device's energy; it returns None if none can be
            read.
        patience: the longest wait for one reply; None: derived from measured steps.
        clock: returns the time, in seconds.
        load: makes a meter of the load by other programs, for a number of cores.
    """

    pool: WorkerPool
    spec: Callable[[str], WorkerSpec]
    memory: int
    cores: int
    joules: Callable[[], float | None] = lambda: None
    patience: float | None = None
    clock: Callable[[], float] = time.monotonic
    load: Callable[[int], LoadMeter] = LoadMeter


class Experiment:
    """The state of a running experiment."""

    def __init__(
        self,
        context: ExperimentContext,
        plans: Mapping[str, Plan],
        kinds: Mapping[str, Kind],
        design: Design,
        tell: Tell,
        expected: Mapping[str, float],
        record: ExperimentRecord,
    ) -> None:
        self.context, self.plans, self.design = context, plans, design
        self.record, self._tell = record, tell
        self.base, self.result = next(iter(plans)), list(plans)[-1]
        self.peaks: dict[str, int] = {}
        self.alive: dict[str, VariantProcess] = {}
        self.time = Budget(design, kinds, expected, record)
        self.fresh = design.grouping == "fresh"
        self._read = 0  # events of the record that `_all_rounds` has

    def run(self) -> None:
        """Measure until no variant lacks a round."""
        self.record.append("run")
        while not self.time.over and (waiting := self._waiting()):
            if self.fresh:
                self._fresh_round(waiting)
            else:
                self._cohort(waiting)
        if not self.time.over and not self.design.eliminate:
            # Variants that were killed before they could finish, though their rounds are complete.
            # Their new processes train no longer than a warm-up.
            rounds, ends = self._rounds(), ("finish", "unfinished", "failed")
            done = {e["variant"] for e in self.record.events if e["event"] in ends}
            for name in [n for n in self.plans if n not in done and rounds.complete(n)]:
                self.alive = {}
                with contextlib.ExitStack() as stack:
                    cohort = self._next_cohort()
                    self._start(name, cohort, stack, evaluate_first=False, at_the_end=True)
                    self._finish(name)
        if self.time.over:
            self.time.close(self.base, self._waiting())
        self.record.append("done")

    # What the record says

    def _rounds(self) -> Rounds:
        """The rounds in the record, cached because each turn reads them many times.

        They are read again after new events.
        """
        if self._read < len(self.record.events):
            self._all_rounds = Rounds(self.record.events, self.base, self.design)
            self._read = len(self.record.events)
        return self._all_rounds

    def _waiting(self) -> list[str]:
        """Variants that lack rounds, the baseline first and the result next."""
        rounds = self._rounds()
        lack = [n for n in self.plans if n not in self.time.dropped and rounds.missing(n)]
        others = [name for name in lack if name != self.base]
        if others and self.base not in rounds.failed:
            lack = [self.base, *others]
        first = [name for name in (self.base, self.result) if name in lack]
        return [*first, *self.time.in_order([name for name in lack if name not in first])]

    def _lacking(self, names: Sequence[str]) -> int:
        """Rounds that this cohort still has to do: its share, where there are several builds."""
        rounds = self._rounds()
        others = [n for n in names if n != self.base and n not in rounds.failed]
        variants = others or [n for n in names if n not in rounds.failed]
        share = [min(1.0, (rounds.cohorts_of(n) + 1) / self.time.builds) for n in variants]
        return max((rounds.missing(n, s) for n, s in zip(variants, share, strict=True)), default=0)

    def _next_cohort(self) -> int:
        return 1 + max((e["cohort"] for e in self.record.events if "cohort" in e), default=0)

    # A cohort

    def _cohort(self, waiting: Sequence[str]) -> None:
        number = self._next_cohort()
        with contextlib.ExitStack() as stack:
            self.alive = {}
            names = self._start_all(waiting, number, stack)
            if self.fresh:
                return  # two variants at a time are too many: nothing of this cohort counts
            if not self.time.over:
                self._warm_up_and_take_turns(waiting, names, number)
            for name in [name for name in self.plans if name in self.alive]:
                if self._rounds().complete(name):  # known even if no further build has its time
                    self._finish(name)
            if self.time.seconds_left() <= 0:
                for variant in self.alive.values():
                    variant.worker.close(kill=True)  # nobody waits until they have left

    def _warm_up_and_take_turns(
        self, waiting: Sequence[str], names: Sequence[str], number: int
    ) -> None:
        """All do as many steps as the longest warm-up, then turns as long as there is time."""
        if self.time.is_limited:
            most = self.time.longest_warmup(list(self.alive.values()))
            for name in names:
                self._attempt(name, lambda variant: variant.warm_up(self.design.warmup, most))
        warm = [len(variant.warm) for variant in self.alive.values()]
        settled = max(self._rounds().warmup, *warm, 0)
        for name in names:
            self._attempt(name, lambda variant: variant.warm_up(settled))
        self.time.plan_rounds(waiting, list(self.alive.values()))
        if self.time.out(list(self.alive.values())):
            return
        self.record.append("cohort", cohort=number, members=names)
        self._take_turns(names, number)
        self.record.append("cohort_done", cohort=number)

    def _start_all(
        self, waiting: Sequence[str], number: int, stack: contextlib.ExitStack
    ) -> list[str]:
        """Starts as many variants as memory holds; returns the names of those that started.

        The first process may be slower for its whole lifetime. Therefore every second cohort
        starts from the other end, if memory is known to hold all of them.
        """
        names: list[str] = []
        fits = partial(may_join, self.peaks, self.context.memory, self.design)
        all_fit = all(  # those that have been alive before
            name in self.peaks and fits(waiting[:i], name) for i, name in enumerate(waiting)
        )
        for name in reversed(waiting) if number % 2 == 0 and all_fit else waiting:
            if name in self.time.dropped or not self.time.allows(name, list(self.alive.values())):
                continue
            alive = list(self.alive)
            if not fits(alive, name):
                if len(alive) < 2 and self.design.grouping == "auto":
                    self.fresh = self.time.fresh = True
                    return names
                continue
            names.append(name)
            self._start(name, number, stack)
            if self.time.over:
                break
        return [name for name in waiting if name in names]

    def _start(
        self,
        name: str,
        number: int,
        stack: contextlib.ExitStack,
        evaluate_first: bool = True,
        at_the_end: bool = False,
    ) -> None:
        self._say(f"starting {name}")
        name_of_log = f"variant-{list(self.plans).index(name)}"
        worker = self.context.pool.start(self.context.spec(name), name_of_log)
        stack.callback(worker.close)
        note = partial(self.record.append, cohort=number, variant=name)
        self.alive[name] = VariantProcess(
            worker, self.time.seconds_left, note, self.context.patience, self.context.clock
        )
        least = self.design.warmup
        most, look = self.design.longest_warmup, evaluate_first and self.design.evaluations > 0
        if self.time.is_limited:
            most, look = 0, False  # there may be no time for more
        self._attempt(name, lambda variant: variant.begin(least, most, look=look), at_the_end)
        if name in self.alive and (peak := self.alive[name].peak):
            self.peaks[name] = peak

    def _take_turns(self, names: Sequence[str], number: int) -> None:
        draw = random.Random(self.design.seed * 1_000_003 + number)
        planned = self._lacking(names)
        looks, count = self.design.looks(planned) if planned else set(), 0
        done = len(self._rounds().complete(names[-1]))
        load = self.context.load(self.context.cores)
        while self._lacking(names) and not self.time.out(list(self.alive.values())):
            count, done = count + 1, done + 1
            self._round(names, count, draw, load, self._round_words(done, names[-1]))
            for name in names if count in looks else ():
                self._attempt(name, lambda variant: variant.evaluate())
            if not self.alive:
                return
            if self.design.eliminate and done >= RACED_ROUNDS:
                rounds = self._rounds()
                for name in names:  # the significantly slower ones leave
                    ratio = rounds.ratio(name) if name in self.alive else None
                    if name != self.base and ratio is not None and ratio.high < 1:
                        self.record.append("eliminated", variant=name, cohort=number, round=count)
                        self.alive.pop(name).worker.close()
                names = [name for name in names if name in self.alive]
                ratios = [self._rounds().ratio(name) for name in names if name != self.base]
                # Further rounds change nothing if every variant is faster than the first, or its
                # interval is narrow enough to count as equal.
                if all(r and (r.low > 1 or r.high / r.low < 1 + 2 * ALIKE) for r in ratios):
                    self.record.append("rounds", rounds=done)
        ended_early = self.time.over or count < planned
        if ended_early and count and looks and count not in looks:
            for name in names:
                self._attempt(name, lambda variant: variant.evaluate())

    def _round(
        self,
        names: Sequence[str],
        number: int,
        draw: random.Random,
        load: LoadMeter,
        shown: str,
    ) -> None:
        """The turns of these variants, each noted as soon as it has ended."""
        variants = {name: self.alive[name] for name in names if name in self.alive}
        if self.design.slices and in_slices(variants.values(), self.context.joules):
            self._say(shown)
        turns = run_round(
            variants,
            self.time.steps,
            draw,
            load,
            slices=self.design.slices,
            joules=self.context.joules,
            before=lambda name: self._say(f"{shown}: {name}"),
        )
        for name, outcome in turns:
            if isinstance(outcome, WorkerError):
                self._failed(name, outcome)
            else:
                self.alive[name].note("turn", round=number, **outcome.to_dict())

    def _fresh_round(self, waiting: Sequence[str]) -> None:
        """A round in which every variant is started for its turn and ended after it."""
        number, events = self._next_cohort(), self.record.events
        names = list(waiting)
        self.record.append("cohort", cohort=number, members=names, fresh=True)
        done = len(self._rounds().complete(names[-1]))
        shown = self._round_words(done + 1, names[-1])
        draw = random.Random(self.design.seed * 1_000_003 + number)
        variants: list[VariantProcess] = []
        for name in draw.sample(names, len(names)):
            self.alive = {}
            if name in self.time.dropped or self.time.seconds_left() <= 0:
                continue
            with contextlib.ExitStack() as stack:
                looks = [e for e in events if e["event"] == "evaluate" and e["variant"] == name]
                unseen = self.design.evaluations > 0 and not any(e["tokens"] for e in looks)
                self._start(name, number, stack, evaluate_first=unseen)
                self._attempt(name, lambda variant: variant.warm_up(self.design.most_warmup))
                variants += self.alive.values()
                self._round([name], 1, draw, self.context.load(self.context.cores), shown)
                if unseen:
                    self._attempt(name, lambda variant: variant.evaluate())
                self._finish(name)
        self.time.out(variants)

    def _finish(self, name: str) -> None:
        done = any(e["event"] == "finish" and e["variant"] == name for e in self.record.events)
        if done or self.design.eliminate:
            return
        self._say(f"finishing {name}")
        self._attempt(name, lambda variant: variant.finish(self.design.samples), at_the_end=True)

    def _attempt(
        self, name: str, act: Callable[[VariantProcess], None], at_the_end: bool = False
    ) -> None:
        """Runs one action of a variant; an error is recorded and ends that variant.

        The process of a failed variant is ended at once: if it hangs it would slow the others,
        and they need its memory. A failed variant receives no more actions. A variant that
        misses the deadline hasn't failed: its complete rounds count.
        """
        if (variant := self.alive.get(name)) is None:
            return
        try:
            act(variant)
        except WorkerError as error:
            self._failed(name, error, at_the_end)

    def _failed(self, name: str, error: WorkerError, at_the_end: bool = False) -> None:
        variant = self.alive.pop(name)
        if isinstance(error, OutOfTimeError):
            self.time.over = True
        else:
            variant.note("unfinished" if at_the_end else "failed", why=str(error))
        variant.worker.close(kill=True)

    def _round_words(self, number: int, name: str) -> str:
        return f"round {number}/{self._in_all(name)}"

    def _in_all(self, name: str) -> int:
        """Rounds a variant will have had, those included that are done again."""
        rounds = self._rounds()
        return len(rounds.complete(name)) + rounds.missing(name)

    def _say(self, text: str) -> None:
        """Progress in steps, of those that are planned, or in time, of that which there is."""
        design, events = self.design, self.record.events
        done = sum(len(e.get("steps", ())) for e in events)
        variants = len(self.plans) - len(self.time.dropped)
        rounds = max(map(self._in_all, self.plans), default=0)  # of those that haven't failed
        warmup = max(design.warmup, self._rounds().warmup)  # it goes on until steps take alike
        every = warmup * self.time.builds + rounds * design.steps
        share = done / max(variants * every, 1)
        if design.budget_seconds is not None:
            share = max(share, self.record.spent / design.budget_seconds)
        self._tell(text, min(1.0, share))


@dataclass(frozen=True)
class Measured:
    """An experiment's variants, and how it was run: ``report.design``."""

    variants: list[Variant]
    design: dict[str, Any]


def experiment_context(
    pool: WorkerPool,
    spec: Callable[[str], WorkerSpec],
    ranks: int = 1,
    meter: EnergyMeter | None = None,
) -> ExperimentContext:
    """The environment on this machine: cores, and free memory or the accelerator's.

    Variants report the memory of the rank that uses most. Ranks share a processor's memory.
    Each has an accelerator of its own, and the smallest one counts.
    """
    from hasten.machine import host  # loads torch, which a comparison of loops may do without

    hardware = host.hardware()
    memory = processes.available_bytes(hardware.memory_limit_bytes) // ranks
    if not pool.on_cpu:
        memory = min((gpu.memory_bytes for gpu in hardware.accelerators), default=memory)
    joules = (lambda: None) if meter is None else meter.read
    return ExperimentContext(pool, spec, memory, hardware.usable_cores, joules)


def measure_variants(
    context: ExperimentContext,
    plans: Mapping[str, Plan],
    design: Design,
    tell: Tell = lambda text, share: None,
    *,
    kinds: Mapping[str, Kind] | None = None,
    expected: Mapping[str, float] | None = None,
    record: ExperimentRecord | None = None,
) -> Measured:
    """Measures every plan on the recipe's job; returns variants in the order of ``plans``.

    Args:
        context: the recipe and the machine.
        plans: variants by name; the first is the baseline, the last the result.
        design: settings of the experiment.
        ``tell``: receives progress messages.
        kinds: the kind of each variant.
        expected: predicted gains, for a budget that has to leave variants out.
        record: events of an earlier start; results in it aren't measured again.

    Raises:
        InputError: the budget is too small.
    """
    record = record or ExperimentRecord()
    variant_kinds = dict(kinds or {})
    if not record.done:
        Experiment(context, plans, variant_kinds, design, tell, expected or {}, record).run()
    description = design_words(record.events, next(iter(plans)), design)
    return Measured(variants_of(record.events, plans, variant_kinds, design), description)


def design_words(events: Sequence[Event], base: str, design: Design) -> dict[str, Any]:
    """``report.design``: how the experiment was run, what was left out, what was done again."""
    rounds = Rounds(events, base, design)
    dropped = [e for e in events if e["event"] == "dropped"]
    return {
        "rounds": rounds.wanted,
        "steps": next((e["length"] for e in events if e["event"] == "turns"), design.steps),
        "warmup": design.warmup if design.budget_seconds is None else rounds.warmup,
        "seed": design.seed,
        "builds": min([design.builds, *(e["builds"] for e in dropped if "builds" in e)]),
        "seconds": round(seconds_of(events), 1),
        "round_seconds": rounds.seconds(),
        "budget_seconds": design.budget_seconds,
        "grouping": grouping_words(events),
        "dropped": [e["text"] for e in dropped],
        "resumed": sum(e["event"] == "run" for e in events) > 1,
        "redone_rounds": rounds.redone(),
    }


def may_join(
    peaks: Mapping[str, int], memory: int, design: Design, alive: Sequence[str], name: str
) -> bool:
    """Returns True if a variant may start next to those alive, by grouping and memory.

    A variant without a measured peak counts with the largest measured peak.
    """
    if design.grouping == "together" or not alive:
        return True
    unknown = max(peaks.values(), default=0)
    fits = sum(peaks.get(n, unknown) for n in (*alive, name)) <= SHARE * memory
    if design.grouping == "groups":  # the baseline and one more always start
        return len(alive) == 1 or (len(alive) <= GROUP and fits)
    return fits


def grouping_words(events: Sequence[Event]) -> str:
    """Which variants were alive together, for the report."""
    cohorts = [e for e in events if e["event"] == "cohort"]
    if any(e.get("fresh") for e in cohorts):
        return (
            "a fresh process for every turn: two variants didn't fit into memory, or it was asked "
            "for"
        )
    groups = dict.fromkeys(tuple(e["members"]) for e in cohorts)
    if len(groups) <= 1:
        count = len(next(iter(groups), ()))
        return f"all {count} variants alive together"
    return "groups that share the baseline: " + "; ".join(", ".join(g) for g in groups)
