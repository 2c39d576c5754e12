"""The design of an experiment, the plans that it compares, and the result per variant.

The module ``experiment`` measures variants; ``report.judgement`` turns numbers into verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.errors import InputError
from hasten.formatting import did_you_mean
from hasten.measure.statistics import ProcessVariance

Kind = Literal["baseline", "again", "single", "leave-one-out", "cumulative", "all", "other"]
Which = Literal["full", "cumulative", "single", "leave-one-out", "all"]
Grouping = Literal["auto", "together", "groups", "fresh"]
BASELINE, AGAIN = "baseline", "baseline again"


@dataclass(frozen=True)
class Design:
    """The settings of an experiment.

    Args:
        rounds: turns of each variant that count; with a budget, the maximum.
        steps: steps of a turn.
        warmup: minimum of steps before the first round.
        evaluations: measurements of the eval loss, spread evenly over the rounds; 0: none.
        seed: seed of the order of turns.
        longest_warmup: maximum of warm-up steps. The warm-up continues while step times
            still fall or something is still compiled. 0: exactly ``warmup`` steps.
        builds: fresh builds of every variant, each for its share of the rounds.
        noise: a second process of the baseline takes turns like a variant.
        foreign_load: maximum share of the machine that other programs may take during a
            round. A round above it is repeated; None: no round is repeated.
        budget_seconds: time of the experiment; None: as long as the rounds need. Every
            result within it counts, even one round. Variants for which there is no time are
            left out. Work that has begun may take a quarter of it longer.
        grouping: selects the variants that are alive together; auto: as many as memory
            holds.
        eliminate: a comparison that searches the fastest variant. A variant that is
            significantly slower than the first one has no further rounds. The rounds end
            when all variants are decided, and variants end without an effect check.
        slices: if possible, the variants of a round run in slices of a quarter of a second.
            All of them then meet the same state of the machine. If False, they run one
            after the other.
        samples: the model of each variant writes samples at the end.
    """

    rounds: int = 8
    steps: int = 4
    warmup: int = 2
    evaluations: int = 3
    seed: int = 0
    longest_warmup: int = 0
    builds: int = 1
    noise: bool = False
    foreign_load: float | None = None
    budget_seconds: float | None = None
    grouping: Grouping = "auto"
    slices: bool = True
    eliminate: bool = False
    samples: bool = True

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("steps", 1), ("warmup", 0), ("builds", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be {least} at least")
        if self.builds > self.rounds:
            raise InputError(
                f"builds: {self.builds} builds of every variant need as many rounds, and there are "
                f"{self.rounds}"
            )
        if self.foreign_load is not None and not 0 <= self.foreign_load <= 1:
            raise InputError(f"the foreign load is a share from 0 to 1, not {self.foreign_load}")
        if self.grouping not in get_args(Grouping):
            groupings = ", ".join(get_args(Grouping))
            raise InputError(f"grouping: there is no {self.grouping!r}; there are {groupings}")

    @property
    def most_warmup(self) -> int:
        return max(self.warmup, self.longest_warmup)

    @property
    def steps_in_all(self) -> int:
        """The most steps that one process of a variant takes; rounds may be done twice."""
        most_rounds = self.rounds * (1 if self.foreign_load is None else 2)
        return self.most_warmup + most_rounds * self.steps

    def looks(self, rounds: int) -> set[int]:
        """After which of so many rounds the eval loss is taken: evenly, the last included."""
        return {round(rounds * look / self.evaluations) for look in range(1, self.evaluations + 1)}


@dataclass
class Variant:
    """Measured results of one plan.

    ``rounds``, ``baseline_rounds``, ``foreign_load`` and ``builds`` have an element for every round
    that counts. The list ``baseline_rounds`` has the baseline's value in the same rounds; without a
    baseline it is empty. If variants were measured in groups, these values differ from the
    baseline's own ``rounds``.
    """

    name: str
    plan: Plan
    rounds: list[float] = field(default_factory=list)  # tokens per second of a middling step
    steps: list[dict[str, Any]] = field(default_factory=list)  # measured steps, warm-up left out
    losses: list[tuple[int, float]] = field(default_factory=list)  # (tokens, loss), all steps
    eval_data: list[tuple[int, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # the job's own, at the last look
    eval_pairs: int = 0  # preference pairs in an evaluation
    startup_seconds: dict[str, float] = field(default_factory=dict)
    effective: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)
    peak_memory_bytes: int | None = None
    failed: str | None = None  # why there is no result
    unfinished: str | None = None  # why what its techniques did, and its samples, aren't known
    kind: Kind = "other"
    baseline_rounds: list[float] = field(default_factory=list)
    foreign_load: list[float] = field(default_factory=list)
    joules_per_token: float | None = None  # of the rounds that count, where energy was counted
    builds: list[int] = field(default_factory=list)  # which fresh build had the round, from 0
    process_variance: ProcessVariance | None = None  # of all processes; None: not known
    warmup: dict[str, float | None] = field(default_factory=dict)
    ledger: dict[str, Any] | None = None


def plans_of(
    plan: Plan, which: Which, only: Sequence[str] = ()
) -> tuple[dict[str, Plan], dict[str, Kind]]:
    """The plans to compare and their kinds, by name: baseline first, full plan last.

    Args:
        plan: the techniques to measure.
        which: see ``hasten speedup --help``.
        only: names of techniques. Between the first and the last variant, only the variants
            that single out one of these techniques stay. The design ``full`` has no such
            variants; these techniques are then measured as ``single``.

    Raises:
        InputError: an empty plan, a name that isn't in it, or an unknown ``which``.
    """
    if which not in get_args(Which):
        raise InputError(f"variants: there is no {which!r}; there are {', '.join(get_args(Which))}")
    if not len(plan):
        raise InputError("plan: there is nothing to compare; list techniques under plan")
    names = [t.name() for t in plan]
    for name in only:
        if name not in names:
            raise InputError(
                f"only: {name!r} is not in the plan{did_you_mean(name, names)}; it has "
                f"{', '.join(names)}"
            )
    if which == "full":
        which = "single" if only else which
    plans: dict[str, Plan] = {BASELINE: Plan()}
    kinds: dict[str, Kind] = {BASELINE: "baseline"}
    for index, technique in enumerate(plan):
        if only and technique.name() not in only:
            continue
        for name, kind, variant in _between(plan, index, which):
            if set(variant) not in map(set, plans.values()):
                plans[name], kinds[name] = variant, kind
    last = {"full": "plan", "cumulative": f"+ {names[-1]}"}.get(which, "all")
    plans[last], kinds[last] = plan, "all"
    return plans, kinds


def _between(plan: Plan, index: int, which: Which) -> list[tuple[str, Kind, Plan]]:
    """The variants that single out one technique, less those that equal the whole plan."""
    technique = plan.techniques[index]
    name = technique.name()
    variants: list[tuple[str, Kind, Plan]] = []
    if which in ("single", "all"):
        variants.append((f"only {name}", "single", Plan([technique])))
    if which in ("leave-one-out", "all"):
        variants.append((f"without {name}", "leave-one-out", plan.without(technique)))
    if which == "cumulative":
        variants.append((f"+ {name}", "cumulative", Plan(plan.techniques[: index + 1])))
    return [entry for entry in variants if 0 < len(entry[2]) < len(plan)]


def with_second_baseline(
    plans: Mapping[str, Plan], kinds: Mapping[str, Kind]
) -> tuple[dict[str, Plan], dict[str, Kind]]:
    """The baseline a second time, after the first: what differs between them is noise."""
    (base, plan), *others = plans.items()
    return (
        {base: plan, AGAIN: plan, **dict(others)},
        {base: "baseline", AGAIN: "again", **{n: kinds.get(n, "other") for n, _ in others}},
    )


def check_turns(plans: Mapping[str, Plan], steps: int) -> None:
    """A turn has to hold as many steps as pass between two exchanges of ranks that train apart.

    Raises:
        InputError: most turns would hold no exchange, and what it costs would not be seen.
    """
    for technique in {t for plan in plans.values() for t in plan if t.slot is Slot.COMMUNICATION}:
        every = technique.settings().get("every")
        if isinstance(every, int) and steps % every:
            raise InputError(
                f"steps: {technique.name()} exchanges once in {every} steps, which most turns of "
                f"{steps} would leave out; give --steps {every}"
            )
