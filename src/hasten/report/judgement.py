"""One verdict per arm: from its ratio, the noise, the other arms, the guard, and what acted.

An arm is judged in this order, and the first that applies is said: it failed; the baseline has no
result; the guard or its held-out loss finds the model worse; nobody knows what its techniques did;
none of them acted. Only then does its speed decide, by the rules of `statistics.verdict`, beyond
the noise floor of the experiment and after Holm's correction for the number of its arms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.technique import Technique
from hasten.formatting import signed
from hasten.measure.ablation import Arm
from hasten.measure.quality.requirements import FAILED
from hasten.measure.significance import LEAST_FLOOR, holm, p_beyond, rounds_needed
from hasten.measure.statistics import DOUBT, Interval, verdict
from hasten.report.comparisons import floor_of, ratio_to, ratios_of

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
