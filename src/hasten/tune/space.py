"""The tuner's search space: dimensions with a few values each, and refused combinations.

A point is a tuple of indices, one per dimension. A dimension may apply only if another
one has a certain value, for example a compiler's setting if compiling is chosen.
Otherwise its index is 0. So equal settings are equal points, and no setting is measured
twice. ``refuse`` returns the reason why a point is invalid.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.setup import unsupported_reasons
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Knob, Technique
from hasten.errors import InputError
from hasten.formatting import did_you_mean

Point = tuple[int, ...]
SMALL = 20_000  # points up to which a space is listed completely; larger ones are sampled


@dataclass(frozen=True)
class Dimension:
    """One decision.

    Args:
        name: name in messages and records.
        values: the choices; the first is used if the dimension doesn't apply.
        ordered: True if ``values`` are rising numbers (a size, a rate).
        needs: name and value of the dimension under which this one applies.
    """

    name: str
    values: tuple[Any, ...]
    ordered: bool = False
    needs: tuple[str, Any] | None = None


@dataclass(frozen=True)
class Space:
    """Dimensions, the start, and a function that refuses points.

    Raises:
        InputError: there is no dimension.
    """

    dimensions: tuple[Dimension, ...]
    start: Point
    refuse: Callable[[Point], str | None] = field(default=lambda point: None, compare=False)

    def __post_init__(self) -> None:
        if not self.dimensions:
            raise InputError("tune: there is nothing to choose: no knob applies to this job")
        object.__setattr__(self, "start", self.canonical(self.start))

    @property
    def size(self) -> int:
        """Returns the number of points, including equal and refused ones."""
        return math.prod(len(d.values) for d in self.dimensions)

    def active(self, point: Point) -> tuple[bool, ...]:
        """Returns True for each dimension that has an effect at a point."""
        places = {d.name: i for i, d in enumerate(self.dimensions)}
        flags: list[bool] = []
        for d in self.dimensions:
            if d.needs is None:
                flags.append(True)
                continue
            above = places[d.needs[0]]
            choice = self.dimensions[above].values[point[above]]
            flags.append(flags[above] and choice == d.needs[1])
        return tuple(flags)

    def canonical(self, point: Point) -> Point:
        """Returns the point with index 0 for each dimension without an effect."""
        return tuple(i if on else 0 for i, on in zip(point, self.active(point), strict=True))

    def settings(self, point: Point) -> dict[str, Any]:
        """Returns the values of the dimensions with an effect, by name."""
        pairs = zip(self.dimensions, point, self.active(point), strict=True)
        return {d.name: d.values[i] for d, i, on in pairs if on}

    def point(self, settings: Mapping[str, Any]) -> Point:
        """Returns the point with these settings; other dimensions are as at the start.

        Raises:
            InputError: a name or value that the space doesn't have.
        """
        names = [d.name for d in self.dimensions]
        for name in settings:
            if name not in names:
                raise InputError(f"tune: nothing is called {name!r}{did_you_mean(name, names)}")
        indices = []
        for d, first in zip(self.dimensions, self.start, strict=True):
            if d.name in settings and settings[d.name] not in d.values:
                raise InputError(f"tune: {d.name} can't be {settings[d.name]!r} here")
            indices.append(d.values.index(settings[d.name]) if d.name in settings else first)
        return self.canonical(tuple(indices))

    def changes(self, point: Point) -> dict[str, Any]:
        """Returns the differences from the start, as name: value."""
        first, settings = self.settings(self.start), self.settings(point)
        return {n: v for n, v in settings.items() if n not in first or first[n] != v}

    def neighbours(self, point: Point) -> list[Point]:
        """Returns valid points that differ in one dimension."""
        near_points: dict[Point, None] = {}
        active = self.active(point)
        for index, (d, choice, on) in enumerate(zip(self.dimensions, point, active, strict=True)):
            for i in range(len(d.values)) if on else ():
                near = self.canonical((*point[:index], i, *point[index + 1 :]))
                if i != choice and near != point and self.refuse(near) is None:
                    near_points[near] = None
        return list(near_points)

    def summit(self, worth: Callable[[Point], float], seed: int = 0) -> Point:
        """Returns a local maximum of ``worth``: climbs by neighbours from the best of `points`."""
        best = max(self.points(seed), key=worth)
        while (near := max(self.neighbours(best), key=worth, default=best)) != best:
            if worth(near) <= worth(best):
                break
            best = near
        return best

    def points(self, seed: int = 0) -> list[Point]:
        """Returns all valid points; for a large space, a sample and the neighbours of the start."""
        legal_points: dict[Point, None] = {self.start: None}
        counts = [len(d.values) for d in self.dimensions]
        source: Iterable[Point] = itertools.product(*map(range, counts))
        if self.size > SMALL:
            draw = random.Random(seed)
            sample = (tuple(map(draw.randrange, counts)) for _ in range(SMALL // 4))
            source = itertools.chain(self.neighbours(self.start), sample)
        for raw in source:
            point = self.canonical(raw)
            if point not in legal_points and self.refuse(point) is None:
                legal_points[point] = None
        return list(legal_points)


def changes_text(changes: Mapping[str, Any]) -> str:
    """Returns settings as a text: ``name=value, name=value``."""
    return ", ".join(f"{name}={setting}" for name, setting in changes.items())


# The space of plans: the technique of each slot, and the values of its knobs.
#
# A slot is a dimension with ``none`` and the techniques that could fill it on this job. A knob is a
# dimension that has an effect if its technique is chosen. The recipe's techniques keep all other
# settings. A plan is refused before it is tried if a technique's checks or ``unsupported_reasons``
# object to it. The caller passes the catalogue and the job's bounds.

NONE = "none"
MOST_VALUES = 6  # values of a range
# Largest share of a step's time that is proportional to each forecast quantity.
TIME_SHARES = {"positions": 1.0, "flops": 0.7, "bytes": 0.4, "comm_bytes": 0.3}
CLAIMED = 0.5  # expected gain / claimed gain, as logarithms of speed
MEANT = 0.01  # expected gain of a technique without forecast and claim, as a logarithm of speed
CHANGED_KNOB = 0.003  # expected loss for each knob that isn't at its default, likewise
# Slots that decide what is trained and saved, not how fast.
NOT_FOR_SPEED = frozenset(
    {Slot.ADAPTER, Slot.ROUTING, Slot.OBJECTIVE, Slot.INDEXER, Slot.AVERAGE, Slot.CHECKPOINT}
)
AMONG_RANKS = frozenset({Slot.LAYOUT, Slot.COMMUNICATION})
Bounds = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class PlanSpace:
    """A space in which each point is a plan."""

    space: Space
    kinds: Mapping[str, Technique]  # by name, with the default values of their knobs
    fixed: tuple[Technique, ...]  # techniques of slots that aren't tuned
    context: JobContext
    plan: Callable[[Point], Plan]  # returns a point's plan, or raises the techniques' errors

    def gain(self, point: Point) -> float:
        """Returns the expected logarithm of the speed relative to the start, without measuring.

        A technique's default settings are expected to be its best, because its authors chose
        them.
        """
        changed_knobs = sum(
            bool(getattr(self.kinds[name.rpartition(".")[0]], name.rpartition(".")[2]) != setting)
            for name, setting in self.space.settings(point).items()
            if "." in name
        )
        first = expected(self.plan(self.space.start), self.context)
        return expected(self.plan(point), self.context) - first - CHANGED_KNOB * changed_knobs

    def resident(self, point: Point) -> float:
        """Returns the resident bytes that the techniques are predicted to add or save."""
        return math.fsum(t.forecast(self.context).resident_bytes for t in self.plan(point))

    def without(self, point: Point, names: Collection[str]) -> tuple[Point, list[str]]:
        """Returns the point without these techniques, if possible, and the removed names.

        Techniques of the start stay, because the user chose them. A technique stays, too, if
        the plan is invalid without it.
        """
        start_techniques, lost = set(self.plan(self.space.start)), list[str]()
        for technique in self.plan(point):
            slot, settings = technique.slot.name, self.space.settings(point)
            if (
                technique.name() not in names
                or technique in start_techniques
                or slot not in settings
            ):
                continue
            remaining = {
                n: v for n, v in settings.items() if not n.startswith(f"{settings[slot]}.")
            }
            nearer = self.space.point({**remaining, slot: NONE})
            if self.space.refuse(nearer) is None:
                point, lost = nearer, [*lost, technique.name()]
        return point, lost


def plan_space(  # noqa: C901  # a clause for each kind of choice
    catalogue: Sequence[type[Technique]],
    base: Plan,
    context: JobContext,
    bounds: Bounds | None = None,
    lossy: bool = False,
    only: Collection[str] = (),
    more: Sequence[Technique] = (),
) -> PlanSpace:
    """Returns the space of every decision about speed that the catalogue offers for this job.

    Args:
        catalogue: all techniques.
        base: the recipe's plan, where the search starts.
        context: facts about machine, model and examples.
        bounds: (lowest, highest) by ``technique.knob``, to narrow the technique's range.
        lossy: include techniques that change the mathematics.
        only: names of slots or techniques to tune; all others stay unchanged.
        more: instances that are additional choices to those of the catalogue.

    Raises:
        InputError: there is nothing to choose, or a name in ``only`` is unknown.
    """
    fixed = NOT_FOR_SPEED if context.world.size > 1 else NOT_FOR_SPEED | AMONG_RANKS
    present = {t.slot: t for t in base}
    kinds: dict[str, Technique] = {}
    dimensions: list[Dimension] = []
    wanted = {name.lower() for name in only}
    known_names = {n for kind in catalogue for n in (kind.name(), kind.slot.name.lower())}
    for name in sorted(wanted - known_names):
        near = did_you_mean(name, sorted(known_names))
        raise InputError(f"only: {name!r} is neither a technique nor a slot{near}")
    for slot in Slot:
        base_technique = present.get(slot)
        offered = _offered(slot, catalogue, base_technique, context, lossy, more)
        if wanted and slot.name.lower() not in wanted:
            offered = {n: t for n, t in offered.items() if t.name() in wanted}
        if (
            slot in fixed
            or not offered
            or (base_technique is not None and base_technique not in offered.values())
        ):
            continue
        dimensions.append(Dimension(slot.name, (NONE, *offered)))
        for name, technique in offered.items():
            kinds[name] = technique
            dimensions += _knobs(name, technique, bounds or {})
    fixed_techniques = tuple(t for t in base if t.name() not in kinds)

    @functools.cache  # a study needs the same points and techniques thousands of times
    def plan(point: Point) -> Plan:
        settings = raw.settings(point)
        knobs: dict[str, dict[str, Any]] = {
            choice: {} for name, choice in settings.items() if "." not in name and choice != NONE
        }
        for path, setting in settings.items():
            choice, dot, name = path.rpartition(".")
            if dot:
                knobs[choice][name] = setting
        built = [replace(kinds[choice], **values) for choice, values in knobs.items()]  # type: ignore[type-var]  # a frozen dataclass
        return Plan((*built, *fixed_techniques))

    @functools.cache
    def reasons_against(technique: Technique) -> list[str]:
        return unsupported_reasons(Plan([technique]), context)

    def refuse(point: Point) -> str | None:
        """Returns why a plan can't be tried here; None if it can."""
        try:
            wanted = plan(point)
        except (ValueError, InputError) as error:
            return str(error)
        for t in wanted if not lossy else ():
            if (
                t.fidelity is Fidelity.LOSSY
                and t != kinds.get(t.name())
                and t not in fixed_techniques
            ):
                return f"{t} changes the mathematics; --lossy permits it"
        return next((text for t in wanted for text in reasons_against(t)), None)

    raw = Space(tuple(dimensions), _start(dimensions, base))
    return PlanSpace(replace(raw, refuse=refuse), kinds, fixed_techniques, context, plan)


def expected(plan: Plan, context: JobContext) -> float:
    """Returns the expected speed of a plan relative to no plan, as a logarithm.

    A technique's gain is the measured one of its kernels on this machine or, without it, the
    forecast's. Each term of a forecast concerns a share of the step's time (``TIME_SHARES``).
    If the forecast predicts no change, half of the claim is used. The result orders the first
    trials, before measurements correct it.
    """
    total = 0.0
    for technique in plan:
        if (measured := technique.gain(context)) is not None:
            total += math.log(measured.ratio)
            continue
        forecast = technique.forecast(context)
        terms = {name: getattr(forecast, name) for name in TIME_SHARES}
        if not context.world.size > 1:
            terms.pop("comm_bytes")
        gain = -math.fsum(TIME_SHARES[n] * math.log(max(v, 1e-3)) for n, v in terms.items())
        if gain == 0.0:
            claims = [c.ratio for c in technique.claims if c.metric == "tokens_per_second"]
            gain = CLAIMED * math.log(claims[0]) if claims else MEANT
        total += gain
    return total


def _offered(
    slot: Slot,
    catalogue: Sequence[type[Technique]],
    base_technique: Technique | None,
    context: JobContext,
    lossy: bool,
    more: Sequence[Technique],
) -> dict[str, Technique]:
    """Returns the techniques that may fill a slot, by the name of the choice."""
    offered: dict[str, Technique] = {}
    for kind in catalogue:
        if kind.slot is not slot:
            continue
        instance = (
            base_technique
            if base_technique is not None and isinstance(base_technique, kind)
            else kind()
        )
        allowed = instance is base_technique or lossy or instance.fidelity is not Fidelity.LOSSY
        if allowed and not instance.unsupported_reasons(context):
            offered[kind.name()] = instance
    for one in more:
        allowed = lossy or one.fidelity is not Fidelity.LOSSY
        if (
            one.slot is slot
            and allowed
            and one != base_technique
            and not one.unsupported_reasons(context)
        ):
            offered[str(one)] = one
    return offered


def _knobs(choice: str, technique: Technique, bounds: Bounds) -> list[Dimension]:
    """Returns a dimension for each knob with more than one value."""
    dimensions = []
    for name, knob in technique.knobs().items():
        knob_path = f"{choice}.{name}"
        start_value = getattr(technique, name)
        values = values_of(knob, start_value, bounds.get(knob_path))
        if len(values) < 2:
            continue
        ordered = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        dimensions.append(
            Dimension(knob_path, values, ordered, needs=(technique.slot.name, choice))
        )
    return dimensions


def values_of(
    knob: Knob, start_value: Any, bounds: tuple[float, float] | None = None
) -> tuple[Any, ...]:
    """Returns the values of a knob to try: its choices, or a few of its range.

    Whole numbers double; others have equal steps, or equal ratios if ``log``. The result is sorted.
    """
    if knob.choices:
        values = [start_value, *(v for v in knob.choices if v != start_value)]
    elif knob.low is not None and knob.high is not None:
        low, high = knob.low, knob.high
        is_integer = isinstance(low, int) and isinstance(high, int)
        if bounds is not None:
            low, high = max(low, bounds[0]), min(high, bounds[1])
        if high < low:
            return (start_value,)
        spread = _doublings(int(low), int(high)) if is_integer else _steps(low, high, knob.log)
        values = [start_value, *(v for v in spread if v != start_value)]
    else:
        values = [start_value]
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        values.sort()
    return tuple(values)


def _doublings(low: int, high: int) -> list[int]:
    doublings = [low]
    while doublings[-1] * 2 <= high and doublings[-1] > 0:
        doublings.append(doublings[-1] * 2)
    if len(doublings) <= MOST_VALUES:
        return doublings
    every = (len(doublings) - 1) / (MOST_VALUES - 1)
    return sorted({doublings[round(i * every)] for i in range(MOST_VALUES)})


def _steps(low: float, high: float, log: bool, count: int = 5) -> list[float]:
    if log:
        return [low * (high / low) ** (i / (count - 1)) for i in range(count)]
    return [low + (high - low) * i / (count - 1) for i in range(count)]


def _start(dimensions: Sequence[Dimension], base: Plan) -> Point:
    names = {t.slot.name: t for t in base}
    indices = []
    for d in dimensions:
        if d.needs is None:
            technique = names.get(d.name)
            indices.append(d.values.index(technique.name()) if technique is not None else 0)
            continue
        technique = names.get(d.needs[0])
        is_chosen = technique is not None and technique.name() == d.needs[1]
        setting = getattr(technique, d.name.partition(".")[2]) if is_chosen else d.values[0]
        indices.append(d.values.index(setting))
    return tuple(indices)
