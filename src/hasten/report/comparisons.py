"""Arms against each other: ratios over common rounds, the noise, builds, techniques together.

A ratio is taken only between rounds that ran in the same turn. Arms of one experiment may have been
measured in groups, because memory holds only so many at once; then each carries the baseline's
values of its own rounds (``Arm.beside``), and two arms of different groups never ran side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hasten.formatting import span
from hasten.measure.ablation import Arm
from hasten.measure.significance import LEAST_FLOOR, noise_floor
from hasten.measure.statistics import Interval, joint_ratio, paired_ratio, unpaired_ratio

SAME_LOSS = 1e-5  # relative: what the order of float32 sums changes, and no more
NOT_MEASURED: dict[str, float | None] = {"median": None, "low": None, "high": None}


def ratios_of(arm: Arm, base: Arm) -> list[float]:
    """The arm's tokens per second over the baseline's, round by round; empty if one has none."""
    if arm.failed is not None or base.failed is not None:
        return []
    beside = arm.beside or base.rounds
    return [ours / theirs for ours, theirs in zip(arm.rounds, beside, strict=False)]


def ratio_to(arm: Arm, base: Arm) -> Interval | None:
    """Tokens per second of an arm over the baseline's, paired by round; None if one has none.

    Rounds are complete from the first on, so those with the same number ran in the same turn.
    """
    found = ratios_of(arm, base)
    return _widened(paired_ratio([1.0] * len(found), found), arm) if found else None


def ratio_between(arm: Arm, other: Arm, base: Arm) -> tuple[Interval, list[float]] | None:
    """One arm over another, and its value in each round; of different groups without the latter.

    Arms of different groups are compared by their ratios to the baseline, each of its own rounds.
    """
    if other is base or arm is base or _side_by_side([arm, other]):
        theirs = arm.beside if other is base and arm.beside else other.rounds
        ours = other.beside if arm is base and other.beside else arm.rounds
        found = [a / b for a, b in zip(ours, theirs, strict=False)]
        return (_widened(paired_ratio([1.0] * len(found), found), arm), found) if found else None
    sides = ratios_of(other, base), ratios_of(arm, base)
    return (_widened(unpaired_ratio(*sides), arm), []) if all(sides) else None


def floor_of(arms: Sequence[Arm]) -> float:
    """The share that nobody should act on in this experiment."""
    ratios = _again(arms)
    return noise_floor(ratios, arms[0].luck) if ratios else LEAST_FLOOR


def noise_of(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """What a second copy of the baseline showed; None where there was none."""
    ratios = _again(arms)
    if not ratios:
        return None
    luck, floor = arms[0].luck, floor_of(arms)
    ratio = _widened(paired_ratio([1.0] * len(ratios), ratios), arms[0])
    said = span(ratio.summary(), "times")
    rounds = "1 round" if len(ratios) == 1 else f"{len(ratios)} rounds"
    text = f"A second copy of the baseline ran at {said} of the first over {rounds}."
    if len(ratios) == 1:
        text += " One round doesn't show how far rounds vary."
    elif not ratio.low <= 1 <= ratio.high:
        text += (
            " The two are the same program, and yet they differ beyond doubt: something on this "
            "machine favours one process over another."
        )
    text += f" Changes below {100 * floor:.1f} % are not counted as gain or harm."
    if luck is not None:
        text += (
            f" Processes of one program lie {100 * luck.spread:.1f} % apart here (standard "
            "deviation, from all arms' builds); intervals allow for it."
        )
    text += _losses_apart(arms)
    return {"ratio": ratio.summary(), "floor": floor, "text": text}


def _losses_apart(arms: Sequence[Arm]) -> str:
    """A sentence on two copies of one program that computed other losses; empty where none did.

    Sums whose order isn't fixed differ in the last bit; a router's near tie makes more of it.
    """
    copy = next((arm for arm in arms if arm.kind == "again"), None)
    if copy is None:
        return ""
    pairs = list(zip(arms[0].losses, copy.losses, strict=False))
    apart = [abs(a - b) / abs(a) if a else abs(b) for (_, a), (_, b) in pairs]
    step = next((i for i, share in enumerate(apart, start=1) if not share <= SAME_LOSS), None)
    if step is None:
        return ""
    return (
        f" The copies' training losses differ from step {step} on, by {100 * max(apart):.2g} % at "
        "most: this program doesn't compute the same twice, and no held-out loss of a single "
        "process says more than that."
    )


def interaction_of(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """All techniques together against the product of their single gains; None where not asked."""
    base = arms[0]
    together = next((arm for arm in arms if arm.kind == "all" and len(arm.plan) > 1), None)
    if together is None or not any(arm.kind == "alone" for arm in arms):
        return None
    singles = []
    for technique in together.plan:
        alone = [arm for arm in arms if arm.plan.techniques == (technique,)]
        if not alone or not ratios_of(alone[0], base):
            text = f"Not measured: {technique.name()} has no result of its own."
            return {"ratio": NOT_MEASURED, "text": text}
        singles.append(alone[0])
    if not ratios_of(together, base):
        text = "Not measured: the techniques together have no result."
        return {"ratio": NOT_MEASURED, "text": text}
    if not _side_by_side([together, *singles]):
        text = "Not measured: not all of these arms were alive together."
        return {"ratio": NOT_MEASURED, "text": text}
    ratio = _joint(together, singles, base)
    return {"ratio": ratio.summary(), "text": _interaction_words(ratio)}


def rebuilt_of(arm: Arm, base: Arm) -> dict[str, Any] | None:
    """A second fresh build of the arm against its first, both as ratios to the baseline.

    The baseline itself has its speed alone. None where a build has fewer than two rounds.
    """
    values = arm.rounds if arm is base else ratios_of(arm, base)
    pairs = list(zip(values, arm.builds, strict=False))
    first, second = ([value for value, build in pairs if build == n] for n in (0, 1))
    if arm.failed is not None or min(len(first), len(second)) < 2:
        return None
    ratio = unpaired_ratio(first, second)
    text = f"The second build ran at {span(ratio.summary(), 'times')} of the first"
    if not ratio.low <= 1 <= ratio.high:
        text += ": builds differ by more than their rounds do, which the interval above allows for"
    return {"ratio": ratio.summary(), "text": f"{text}."}


def _widened(ratio: Interval, arm: Arm, arms: float = 2.0) -> Interval:
    """At least as wide as the luck of the processes makes it, where that is known."""
    return ratio if arm.luck is None else arm.luck.widened(ratio, arms=arms)


def _again(arms: Sequence[Arm]) -> list[float]:
    copies = [ratios_of(arm, arms[0]) for arm in arms if arm.kind == "again"]
    return copies[0] if copies else []


def _side_by_side(arms: Sequence[Arm]) -> bool:
    """Whether round i of all these arms ran in the same turn."""
    return all(arm.beside == arms[0].beside for arm in arms)


def _joint(together: Arm, singles: Sequence[Arm], base: Arm) -> Interval:
    beside = together.beside or base.rounds
    every = [beside, together.rounds, *(arm.rounds for arm in singles)]
    rounds = min(len(values) for values in every)
    first, second, *rest = (values[:rounds] for values in every)
    # The baseline's luck is in every single gain and once in that of all together.
    return _widened(joint_ratio(first, second, rest), base, 1 + len(rest) + (len(rest) - 1) ** 2)


def _interaction_words(ratio: Interval) -> str:
    said = span(ratio.summary(), "times")
    start = f"Together the techniques reach {said} of what their single gains multiply to"
    if ratio.rounds == 1:
        return f"{start}; one round doesn't show how sure that is."
    if ratio.high < 1:
        return f"{start}: they take from each other."
    if ratio.low > 1:
        return f"{start}: they help each other."
    return f"{start}: no interaction was found."
