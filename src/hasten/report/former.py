"""Reports of an earlier schema, read as the present one.

Until schema 1 an arm had one verdict, against the baseline, that spoke of speed, claim and quality
at once. Its rounds are in the report, so the effect against the row above is found from them. What
was said of speed against the baseline, and of the guard, stays, in the words of today.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.measure.statistics import Interval
from hasten.report.claims import UNKNOWN, pair_of, without_quality
from hasten.report.gains import fastest_of_equal_quality, measured_arm, word_of
from hasten.report.verdicts import Judgement, judge_arms, verdict_word

_EFFECTS = {"held": "helped", "fell short": "helped", "harmed": "hurt", "inconclusive": "undecided"}
_CLAIMS = {
    "held": "held",
    "fell short": "fell short",
    "harmed": "fell short",
    "no effect": "fell short",
    "inconclusive": UNKNOWN,
    UNKNOWN: UNKNOWN,
}
_NOT_KNOWN = "what its techniques did is not known"


def from_schema_1(plain: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """The report with what schema 2 says of its arms, and the words of today.

    Args:
        plain: as it was stored.
        read: the same, checked and filled in.
    """
    base, floor = read["arms"][0], read["noise"]["floor"]
    plans = {arm["name"]: arm["techniques"] for arm in read["arms"]}
    arms = [measured_arm(row, base) for row in read["arms"]]
    judgements = judge_arms(arms, read["guard"], plans=plans, floor=_usable(floor))
    rows = [
        {**arm, **_judged(row, said, base["name"], floor)}
        for arm, row, said in zip(plain["arms"], read["arms"], judgements, strict=True)
    ]
    best = fastest_of_equal_quality({"arms": rows})
    found = {**plain, "schema": 2, "arms": rows, "fastest": best and best["name"]}
    for key in ("guard", "invariance"):
        if plain.get(key):
            found[key] = [row | {"verdict": _undecided(row["verdict"])} for row in plain[key]]
    if plain.get("quality"):
        found["quality"] = plain["quality"] | {"verdict": _undecided(read["quality"]["verdict"])}
    if plain.get("claims"):
        found["claims"] = [_claim(claim, found) for claim in plain["claims"]]
    return found


def _judged(
    row: Mapping[str, Any], said: Judgement, base: str, floor: float | None
) -> dict[str, Any]:
    """What schema 2 has of an arm, from its old verdict and from its rounds."""
    old, _, reason = row["verdict"].partition(":")
    worse = old == "harmed" and bool(reason) and not reason.endswith("did not act")
    found: dict[str, Any] = {"against": said.against, "effect": row["ratio"]}
    found["quality"] = f"worse:{reason}" if worse else said.quality
    found["verdict"] = _EFFECTS.get(old, old) + row["verdict"][len(old) :]
    if old in ("failed", "baseline"):
        return found | {"against": None, "effect": None}
    if said.against not in (None, base) and _NOT_KNOWN not in reason and said.effect is not None:
        told: dict[str, Any] = {"p_value": said.p_value, "corrected": said.corrected}
        told["rounds_needed"] = said.rounds_needed
        return found | {"effect": said.effect.summary(), "verdict": said.verdict} | told
    if worse:
        span = row["ratio"]
        known = None not in span.values()
        ratio = Interval(span["median"], **span, rounds=0) if known else None
        found["verdict"] = "undecided" if ratio is None else word_of(ratio, floor)
    return found | {"against": base}


def _claim(claim: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """A claim in the words of today; none is held where its arm's model is worse."""
    old, _, reason = claim["verdict"].partition(":")
    word = _CLAIMS.get(old)
    if word is None or reason:  # a reason alone, or one behind a word
        word = f"{UNKNOWN}: {(reason if word else claim['verdict']).strip()}"
    pair = pair_of(claim["technique"], report["arms"])
    of_arm = pair[1]["quality"] if pair else (report.get("quality") or {}).get("verdict")
    return {**claim, "verdict": without_quality(word) if verdict_word(of_arm) == "worse" else word}


def _undecided(word: str) -> str:
    return (
        "undecided" + word[len("inconclusive") :] if verdict_word(word) == "inconclusive" else word
    )


def _usable(floor: float | None) -> float | None:
    return floor if floor is not None and 0 <= floor < 1 else None
