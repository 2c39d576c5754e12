"""Arms against each other: ratios over common rounds, the noise, and one verdict per arm.

A ratio is taken only between rounds that ran in the same turn. Arms of one experiment may have been
measured in groups, because memory holds only so many at once; then each carries the baseline's
values of its own rounds (``Arm.beside``), and two arms of different groups never ran side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.technique import Technique
from hasten.formatting import signed, span
from hasten.measure.ablation import Arm
from hasten.measure.quality.requirements import FAILED
from hasten.measure.significance import LEAST_FLOOR, holm, noise_floor, p_beyond, rounds_needed
from hasten.measure.statistics import (
    DOUBT,
    Interval,
    joint_ratio,
    paired_ratio,
    unpaired_ratio,
    verdict,
)

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


# One verdict per arm: from its ratio, the noise, the other arms, the guard, and what acted.
#
# An arm is judged in this order, and the first that applies is said: it failed; the baseline has no
# result; the guard or its held-out loss finds the model worse; nobody knows what its techniques
# did; none of them acted. Only then does its speed decide, by the rules of `statistics.verdict`,
# beyond the noise floor of the experiment and after Holm's correction for the number of its arms.

MARGIN = 0.01  # of the held-out loss: fixed before any run, for the whole plan; wide for one seed
GUILTY = FAILED
Guard = Sequence[Mapping[str, Any]]  # report.guard: one entry per technique that was tested


@dataclass(frozen=True)
class Judgement:
    """What is said of one arm; ``p_value`` is the one after the correction."""

    verdict: str
    p_value: float | None = None
    corrected: bool | None = None
    rounds_needed: int | str | None = None


def judge(arms: Sequence[Arm], guard: Guard = ()) -> list[Judgement]:
    """The verdict of every arm, in their order; the first is the baseline."""
    base, floor = arms[0], floor_of(arms)
    tested = [n for n, arm in enumerate(arms) if _is_tested(arm, base)]
    raw = [p_beyond(ratios_of(arms[n], base), floor, arms[n].luck) for n in tested]
    p_values = dict(zip(tested, holm(raw), strict=True))
    found = []
    for number, arm in enumerate(arms):
        said = _without_speed(arm, base, guard)
        p = p_values.get(number)
        if p is None:
            found.append(Judgement(said or "inconclusive"))
            continue
        word = _speed_word(arm, base, floor, p)
        needed = None
        if said is None and word.startswith("inconclusive"):
            needed = rounds_needed(_ratio(arm, base), floor, len(tested))
        found.append(Judgement(said or _with_idle(arm, word), p, len(tested) > 1, needed))
    return found


def quality(final: Arm, base: Arm, guard: Guard = ()) -> dict[str, Any]:
    """Whether the model is as good: by the guard, and by the held-out loss after equal tokens."""
    found = _held_out(final, base)
    guilty = guilty_of(final, guard)
    if not guilty:
        return found
    said = "; ".join(f"{entry['technique']}: {entry['text']}" for entry in guilty)
    return {**found, "verdict": "worse", "text": f"The guard finds: {said}. {found['text']}"}


def is_worse(arm: Arm, base: Arm, guard: Guard = ()) -> bool:
    """Whether the guard or the held-out loss finds the arm's model worse than the baseline's."""
    return bool(guilty_of(arm, guard)) or _held_out(arm, base)["verdict"] == "worse"


def guilty_of(arm: Arm, guard: Guard) -> list[Mapping[str, Any]]:
    """The guard's entries against techniques of this arm."""
    names = {name for t in arm.plan for name in (t.name(), str(t))}
    return [e for e in guard if e["verdict"] in GUILTY and e["technique"] in names]


def idle(arm: Arm) -> list[str]:
    """Techniques that were seen not to act."""
    return [a["technique"] for a in arm.acted if a["acted"] is False]


def last_loss(arm: Arm) -> float | None:
    """The held-out loss at the end; None for an arm that failed or had no look after training."""
    looked = bool(arm.held_out) and arm.held_out[-1][0] > 0  # the first look is at 0 tokens
    return arm.held_out[-1][1] if looked and not arm.failed else None


def speed_claim(arm: Arm, base: Arm) -> float | None:
    """The claimed ratio of tokens per second of an arm with a single technique of its own."""
    own = _own(arm, base)
    claims = [c for t in own for c in t.claims if c.metric == "tokens_per_second"]
    return claims[0].ratio if claims and len(own) == 1 else None


def _own(arm: Arm, base: Arm) -> list[Technique]:
    """What the arm has and the baseline hasn't, which is nearly always an empty plan."""
    return [t for t in arm.plan if t not in base.plan.techniques]


def _is_tested(arm: Arm, base: Arm) -> bool:
    return arm is not base and arm.kind != "again" and bool(ratios_of(arm, base))


def _without_speed(arm: Arm, base: Arm, guard: Guard) -> str | None:
    """What is said of an arm whatever its speed; None where its speed decides."""
    if arm.failed is not None:
        return f"failed: {arm.failed}"
    if arm is base:
        return "baseline" if arm.unfinished is None else f"baseline: {arm.unfinished}"
    if arm.kind == "again":
        return "baseline: a second copy, for the noise"
    if not ratios_of(arm, base):
        return "inconclusive: the baseline has no result"
    guilty = guilty_of(arm, guard)
    if guilty:
        return f"harmed: {guilty[0]['technique']}: {guilty[0]['text']}"
    if _held_out(arm, base)["verdict"] == "worse":
        return f"harmed: held-out loss {base.held_out[-1][1]:.4f} → {arm.held_out[-1][1]:.4f}"
    if arm.unfinished is not None:
        return f"inconclusive: what its techniques did is not known ({arm.unfinished})"
    own = {t.name() for t in _own(arm, base)}
    if own and own <= set(idle(arm)):
        return f"no effect: {', '.join(idle(arm))} did not act"
    return None


def _speed_word(arm: Arm, base: Arm, floor: float, p: float) -> str:
    """The verdict on the speed, with the reason where the interval alone would say more."""
    ratio = _ratio(arm, base)
    word: str = verdict(ratio, speed_claim(arm, base), floor, nothing=LEAST_FLOOR, p_value=p)
    if word != "inconclusive" or (ratio.high >= 1 - LEAST_FLOOR and ratio.low <= 1 + LEAST_FLOOR):
        return word
    if ratio.low <= 1 + floor and ratio.high >= 1 - floor:
        return f"{word}: within the noise of {100 * floor:.1f} %"
    return f"{word}: not beyond doubt among several arms (p = {p:.3g}, at most {DOUBT:g} wanted)"


def _with_idle(arm: Arm, word: str) -> str:
    names = idle(arm)
    return f"{word}: {', '.join(names)} did not act" if names else word


def _ratio(arm: Arm, base: Arm) -> Interval:
    ratio = ratio_to(arm, base)
    assert ratio is not None  # asked only of arms that were tested
    return ratio


def _held_out(final: Arm, base: Arm) -> dict[str, Any]:
    """Whether the held-out loss after equal tokens is within the margin of the baseline's."""
    ours, theirs = last_loss(final), last_loss(base)
    owed = "; ".join(f"{t}: {t.fidelity.value}" for t in final.plan) or "nothing is owed"
    if ours is None or theirs is None or not 0 < theirs < math.inf:  # NaN included
        return {"margin": MARGIN, "verdict": "inconclusive", "text": f"not measured ({owed})"}
    change = ours / theirs - 1
    tokens = final.held_out[-1][0]
    if final.held_out[-1][0] != base.held_out[-1][0]:
        return {"margin": MARGIN, "verdict": "inconclusive", "text": "tokens differ between arms"}
    text = (
        f"Held-out loss {theirs:.4f} → {ours:.4f} ({signed(100 * change, 3)} %) after the same "
        f"{tokens:,} tokens, one seed. By how much it might be worse was fixed before the run: "
        f"{100 * MARGIN:g} %."
    )
    return {"margin": MARGIN, "verdict": "not worse" if change <= MARGIN else "worse", "text": text}
