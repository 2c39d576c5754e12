"""Arms against each other on one machine: built, warmed up, then taking turns, round by round.

  1. every arm's process starts, builds, and warms up; one at a time, and only as many as memory
     holds (``grouping``); all do as many steps before the first round as the slowest to settle
  2. a round gives each arm one turn of some steps, in an order drawn anew; all others sleep
  3. in every arm step k sees the same records, so a round's ratio compares equal work minutes apart
     at most, and a machine that slows down slows all arms of the round
  4. at equal tokens every arm is asked for its held-out loss; at the end, for what its techniques
     did and what its model writes

Every answer goes into the ``record``, and what is still missing is read from there: so rounds that
others disturbed are done again, a second build takes its share, and an experiment that was killed
goes on. An arm that fails is noted with its reason, its process is ended, and the others go on. One
that fails only at the very end, in 4, has been measured all the same: it keeps its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.plan import Plan
from hasten.machine import host, processes
from hasten.measure import grouping
from hasten.measure.ablation import Arm, Design, Kind
from hasten.measure.energy import EnergyMeter
from hasten.measure.experiment import Experiment, Table, Tell
from hasten.measure.record import Event, ExperimentRecord, seconds_of
from hasten.measure.rounds import Rounds, arms_of
from hasten.measure.workers import WorkerPool, WorkerSpec


@dataclass(frozen=True)
class Measured:
    """An experiment's arms, and how it was run in the words of the report (``report.design``)."""

    arms: list[Arm]
    design: dict[str, Any]


def table(
    pool: WorkerPool,
    spec: Callable[[Plan], WorkerSpec],
    ranks: int = 1,
    meter: EnergyMeter | None = None,
) -> Table:
    """The table on this machine: its cores, and its free memory, or all of the accelerator's.

    Arms tell how much their neediest rank uses. Ranks share a processor's memory, and have an
    accelerator each, of which the smallest counts.
    """
    here = host.hardware()
    memory = processes.available_bytes(here.memory_limit_bytes) // ranks
    if not pool.on_cpu:
        memory = min((gpu.memory_bytes for gpu in here.accelerators), default=memory)
    joules = EnergyMeter("none").reading if meter is None else meter.reading
    return Table(pool, spec, memory, here.usable_cores, joules)


def measure_arms(
    at: Table,
    plans: Mapping[str, Plan],
    design: Design,
    tell: Tell = lambda text, share: None,
    *,
    kinds: Mapping[str, Kind] | None = None,
    expected: Mapping[str, float] | None = None,
    record: ExperimentRecord | None = None,
) -> Measured:
    """Measure every plan on the recipe's job; arms in the order of ``plans``.

    Args:
        at: the recipe and the machine.
        plans: arms by name; the first is the baseline, the last the result.
        design: how.
        tell: is told what happens.
        kinds: what each arm is.
        expected: gains that are forecast, for a budget that has to leave arms out.
        record: of an earlier start; what it holds isn't measured again.

    Raises:
        InputError: the budget is too small.
    """
    record = record or ExperimentRecord()
    known = dict(kinds or {})
    if not record.done:
        Experiment(at, plans, known, design, tell, expected or {}, record).run()
    words = design_words(record.events, next(iter(plans)), design)
    return Measured(arms_of(record.events, plans, known, design), words)


def design_words(events: Sequence[Event], base: str, design: Design) -> dict[str, Any]:
    """``report.design``: how the experiment was run, what was left out, what was done again."""
    rounds = Rounds(events, base, design)
    dropped = [e for e in events if e["event"] == "dropped"]
    return {
        "rounds": rounds.wanted,
        "steps": design.steps,
        "warmup": design.warmup,
        "seed": design.seed,
        "builds": min([design.builds, *(e["builds"] for e in dropped if "builds" in e)]),
        "seconds": round(seconds_of(events), 1),
        "budget_seconds": design.budget_seconds,
        "grouping": grouping.words(events),
        "dropped": [e["text"] for e in dropped],
        "resumed": sum(e["event"] == "run" for e in events) > 1,
        "redone_rounds": rounds.redone(),
    }
