"""From measured arms to the report's dictionary: intervals, verdicts, claims, quality, cost."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hasten.core.technique import Claim, Technique
from hasten.evidence.ablation import Arm
from hasten.evidence.report_words import signed, span
from hasten.evidence.statistics import Interval, paired_ratio, spread, verdict

MARGIN = 0.01  # of the held-out loss: fixed before any run, for the whole plan
MEMORY_NOISE = 0.01  # a change of peak memory that nobody should act on
NOT_MEASURED: dict[str, float | None] = {"median": None, "low": None, "high": None}


def report_of(
    arms: Sequence[Arm],
    *,
    title: str,
    command: str,
    hardware: Mapping[str, Any],
    versions: Mapping[str, str],
    recipe: Mapping[str, Any],
    currency: str | None = None,
    per_device_hour: float = 0.0,
    devices: int = 1,
    mfu: str | None = None,
) -> dict[str, Any]:
    """The report as ``docs/report-schema.md`` describes it; the first arm is the baseline.

    ``mfu`` says what the arms' MFU refers to and counts.
    """
    base, final = arms[0], arms[-1]
    return {
        "schema": 1,
        "title": title,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "arms": [_arm(arm, base) for arm in arms],
        "claims": _claims(arms),
        "quality": quality(final, base),
        "samples": [{**s, "arm": arm.name} for arm in (base, final) for s in arm.samples],
        "hardware": dict(hardware),
        "versions": dict(versions),
        "recipe": dict(recipe),
        "seed": recipe["seed"],
        "cost": _cost(arms, currency, per_device_hour, devices),
        "mfu": mfu,
    }


def ratio_to(arm: Arm, base: Arm) -> Interval | None:
    """Tokens per second of an arm over the baseline's, paired by round; None if one has none.

    Rounds are complete from the first on, so those with the same number ran in the same turn.
    """
    if arm.failed is not None or base.failed is not None:
        return None
    rounds = min(len(arm.rounds), len(base.rounds))
    return paired_ratio(base.rounds[:rounds], arm.rounds[:rounds]) if rounds else None


def quality(final: Arm, base: Arm) -> dict[str, Any]:
    """Whether the held-out loss after equal tokens is within the margin of the baseline's."""
    ours, theirs = _last_loss(final), _last_loss(base)
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


def _arm(arm: Arm, base: Arm) -> dict[str, Any]:
    ratio = ratio_to(arm, base)
    seconds = [s["step_seconds"] for s in arm.steps]
    slots, tokens = (sum(s[k] for s in arm.steps) for k in ("slots", "tokens"))
    measured = arm.failed is None and arm.rounds
    found: dict[str, Any] = {
        "name": arm.name,
        "techniques": [str(t) for t in arm.plan],
        "tokens_per_second": spread(arm.rounds).summary() if measured else NOT_MEASURED,
        "ratio": _ratio(arm, base, ratio),
        "verdict": _verdict(arm, base, ratio),
        "peak_memory_bytes": _peak(arm),
        "held_out_loss": _last_loss(arm),
        "held_out_curve": [list(point) for point in arm.held_out],
        "loss_curve": [list(point) for point in arm.losses],
        "rounds": arm.rounds,
        "padding_share": 1 - tokens / slots if slots else None,
        "mfu": _mfu(arm),
        "startup_seconds": {k: arm.startup_seconds.get(k) for k in ("imports", "data", "model")},
        "acted": arm.acted or _unknown(arm),
    }
    if len(seconds) > 1:
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        found["step_seconds"] = {"p50": cuts[49], "p99": cuts[98]}
    return found


def _mfu(arm: Arm) -> float | None:
    """Over all measured steps, each weighed by its time; None if any step's isn't known."""
    known = [(s.get("mfu"), s["step_seconds"]) for s in arm.steps]
    if not known or arm.failed is not None or any(share is None for share, _ in known):
        return None
    return float(sum(share * taken for share, taken in known) / sum(taken for _, taken in known))


def _ratio(arm: Arm, base: Arm, ratio: Interval | None) -> dict[str, float | None]:
    if arm is base:
        return {"median": 1.0, "low": 1.0, "high": 1.0} if ratio is not None else NOT_MEASURED
    return ratio.summary() if ratio is not None else NOT_MEASURED


def _verdict(arm: Arm, base: Arm, ratio: Interval | None) -> str:
    if arm.failed is not None:
        return f"failed: {arm.failed}"
    if arm is base:
        return "baseline" if arm.unfinished is None else f"baseline: {arm.unfinished}"
    if ratio is None:
        return "inconclusive: the baseline has no result"
    if quality(arm, base)["verdict"] == "worse":
        return f"harmed: held-out loss {base.held_out[-1][1]:.4f} → {arm.held_out[-1][1]:.4f}"
    if arm.unfinished is not None:
        return f"inconclusive: what its techniques did is not known ({arm.unfinished})"
    word = verdict(ratio, _speed_claim(arm) if len(arm.plan) == 1 else None)
    idle = _idle(arm)
    if not idle:
        return word
    return f"{'no effect' if len(idle) == len(arm.plan) else word}: {', '.join(idle)} did not act"


def _idle(arm: Arm) -> list[str]:
    return [a["technique"] for a in arm.acted if not a["acted"]]


def _unknown(arm: Arm) -> list[dict[str, Any]]:
    """One row per technique of an arm that ran, but couldn't say what its techniques did."""
    if arm.unfinished is None:
        return []
    return [{"technique": t.name(), "acted": None, "evidence": arm.unfinished} for t in arm.plan]


def _peak(arm: Arm) -> int | None:
    """What a failed arm had used by then says nothing of what it needs."""
    return arm.peak_memory_bytes if arm.failed is None else None


def _speed_claim(arm: Arm) -> float | None:
    """The claimed ratio of tokens per second of an arm with a single technique."""
    claims = [c for t in arm.plan for c in t.claims if c.metric == "tokens_per_second"]
    return claims[0].ratio if claims else None


def _claims(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """Every claim of the last arm's techniques beside what adding the technique changed here."""
    base, final = arms[0], arms[-1]
    if base is final:
        return []
    found = []
    for technique in final.plan:
        pair = _pair_for(technique, arms)
        for claim in technique.claims:
            measured, word = _checked(technique, claim, pair)
            found.append(
                {
                    "technique": str(technique),
                    "metric": claim.metric,
                    "claimed": f"{claim.ratio:.2f}×",
                    "source": claim.source,
                    "measured": measured,
                    "verdict": word,
                }
            )
    return found


def _checked(technique: Technique, claim: Claim, pair: tuple[Arm, Arm] | None) -> tuple[str, str]:
    """What was measured of one claim, and the verdict on it."""
    if pair is None:
        return "not measured apart", "inconclusive"
    measured, word = "not measured", "inconclusive"
    if claim.metric == "tokens_per_second":
        ratio = ratio_to(pair[1], pair[0])
        if ratio is not None:
            measured, word = span(ratio.summary(), "times"), verdict(ratio, claim.ratio)
    elif claim.metric == "peak_memory_bytes":
        measured, word = _memory_claim(pair, claim.ratio)
    if technique.name() in _idle(pair[1]):
        word = "no effect: it did not act"
    return measured, word


def _pair_for(technique: Technique, arms: Sequence[Arm]) -> tuple[Arm, Arm] | None:
    """The first two arms with a result that differ by this technique alone."""
    measured = [arm for arm in arms if arm.failed is None and arm.rounds]
    for one in measured:
        for other in measured:
            without = set(other.plan.techniques) - {technique}
            if technique in other.plan.techniques and set(one.plan.techniques) == without:
                return one, other
    return None


def _memory_claim(pair: tuple[Arm, Arm], claimed: float) -> tuple[str, str]:
    """Peak memory of a fixed shape repeats itself, so one value per arm is enough.

    The words are those of `statistics.verdict`, for a ratio of which less is better.
    """
    before, after = pair[0].peak_memory_bytes, pair[1].peak_memory_bytes
    if not before or not after:
        return "not measured", "inconclusive"
    found = after / before
    if found <= claimed:
        word = "held"
    elif found > 1 + MEMORY_NOISE:
        word = "harmed"
    else:
        word = "fell short" if found < 1 - MEMORY_NOISE else "no effect"
    return f"{found:.2f}×", word


def _last_loss(arm: Arm) -> float | None:
    return arm.held_out[-1][1] if arm.held_out and not arm.failed else None


def _cost(
    arms: Sequence[Arm], currency: str | None, per_device_hour: float, devices: int
) -> dict[str, Any] | None:
    """Money per million tokens at each arm's median rate; None without a price."""
    if currency is None:
        return None
    per_million = {
        arm.name: per_device_hour * devices / 3600 / statistics.median(arm.rounds) * 1e6
        for arm in arms
        if arm.rounds and arm.failed is None
    }
    return {
        "currency": currency,
        "per_device_hour": per_device_hour,
        "per_million_tokens": per_million,
    }
