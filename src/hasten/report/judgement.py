"""All judgements of a report: ratios over common rounds, noise, gains, and losses.

A ratio is only calculated between rounds that ran in the same turn. Memory may force an
experiment to measure its variants in groups. Each variant then has the baseline's
values of its own rounds (``Variant.baseline_rounds``). Two variants of different groups never
ran side by side.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hasten.formatting import signed, span
from hasten.measure.ablation import Variant
from hasten.measure.quality.requirements import FAILED
from hasten.measure.significance import (
    LEAST_FLOOR,
    EffectVerdict,
    judge_effects,
    noise_floor,
    ratio_of_rounds,
    rounds_needed,
)
from hasten.measure.statistics import Interval, joint_ratio, unpaired_ratio

SAME_LOSS = 1e-5  # relative difference that another order of float32 sums may cause
NOT_MEASURED: dict[str, float | None] = {"median": None, "low": None, "high": None}


def ratios_of(variant: Variant, base: Variant) -> list[float]:
    """Returns the variant's speed over the baseline's, round by round; empty if one has none."""
    if variant.failed is not None or base.failed is not None:
        return []
    base_rounds = variant.baseline_rounds or base.rounds
    return [ours / theirs for ours, theirs in zip(variant.rounds, base_rounds, strict=False)]


def ratio_to(variant: Variant, base: Variant) -> Interval | None:
    """Returns the ratio of a variant to the baseline, paired by round; None if one has none.

    Rounds are complete from the first on, so those with the same number ran in the same turn.
    """
    ratios = ratios_of(variant, base)
    return ratio_of_rounds(ratios, variant.process_variance) if ratios else None


def ratio_between(
    variant: Variant, other: Variant, base: Variant
) -> tuple[Interval, list[float]] | None:
    """Returns the ratio of one variant to another, and its value in each round.

    Variants of different groups are compared by their ratios to the baseline, each of its own
    rounds; then there is no value for each round.
    """
    if other is base or variant is base or _side_by_side([variant, other]):
        theirs = (variant.baseline_rounds if other is base else []) or other.rounds
        ours = (other.baseline_rounds if variant is base else []) or variant.rounds
        ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
        return (ratio_of_rounds(ratios, variant.process_variance), ratios) if ratios else None
    sides = ratios_of(other, base), ratios_of(variant, base)
    return (_widened(unpaired_ratio(*sides), variant), []) if all(sides) else None


def floor_of(variants: Sequence[Variant]) -> float:
    """Returns the noise floor of this experiment: smaller changes have no meaning."""
    ratios = _again(variants)
    return noise_floor(ratios, variants[0].process_variance) if ratios else LEAST_FLOOR


def noise_of(variants: Sequence[Variant]) -> dict[str, Any] | None:
    """Results of a second copy of the baseline; None without a copy."""
    ratios = _again(variants)
    if not ratios:
        return None
    process_variance, floor = variants[0].process_variance, floor_of(variants)
    ratio = ratio_of_rounds(ratios, process_variance)
    ratio_text = span(ratio.summary(), "times")
    rounds = "1 round" if len(ratios) == 1 else f"{len(ratios)} rounds"
    text = f"A second copy of the baseline ran at {ratio_text} of the first over {rounds}."
    if len(ratios) == 1:
        text += " One round doesn't show how far rounds vary."
    elif not ratio.low <= 1 <= ratio.high:
        text += (
            " The two are the same program, and yet they certainly differ: something on this "
            "machine favours one process over another."
        )
    text += f" Changes below {100 * floor:.1f} % are not counted as gain or harm."
    if process_variance is not None:
        text += (
            f" Processes of one program lie {100 * process_variance.spread:.1f} % apart here "
            "(standard deviation, from all variants' builds); intervals allow for it."
        )
    text += _losses_apart(variants)
    return {"ratio": ratio.summary(), "floor": floor, "text": text}


def _losses_apart(variants: Sequence[Variant]) -> str:
    """Returns a sentence if two copies of one program computed different losses; else "".

    Sums without a fixed order differ in the last bit, and a router's near tie increases
    this difference.
    """
    copy = next(variant for variant in variants if variant.kind == "again")
    pairs = list(zip(variants[0].losses, copy.losses, strict=False))
    shares = [abs(a - b) / abs(a) if a else abs(b) for (_, a), (_, b) in pairs]
    step = next((i for i, share in enumerate(shares, start=1) if not share <= SAME_LOSS), None)
    if step is None:
        return ""
    return (
        f" The copies' training losses differ from step {step} on, by {100 * max(shares):.2g} % at "
        "most: this program doesn't compute the same twice, and no eval loss of a single "
        "process is more exact than that."
    )


def interaction_of(variants: Sequence[Variant]) -> dict[str, Any] | None:
    """Compares all techniques together with the product of single gains; None: not measured."""
    base = variants[0]
    together = next((v for v in variants if v.kind == "all" and len(v.plan) > 1), None)
    if together is None or not any(variant.kind == "single" for variant in variants):
        return None
    singles, missing = [], ""
    for technique in together.plan:
        alone = [variant for variant in variants if variant.plan.techniques == (technique,)]
        if not alone or not ratios_of(alone[0], base):
            missing = missing or f"{technique.name()} has no result of its own"
        singles += alone[:1]
    if not missing and not ratios_of(together, base):
        missing = "the techniques together have no result"
    if not missing and not _side_by_side([together, *singles]):
        missing = "not all of these variants were alive together"
    if missing:
        return {"ratio": NOT_MEASURED, "text": f"Not measured: {missing}."}
    base_rounds = together.baseline_rounds or base.rounds
    every = [base_rounds, together.rounds, *(variant.rounds for variant in singles)]
    first, second, *others = (values[: min(map(len, every))] for values in every)
    # The baseline's process variance is in every single gain, and once in that of all together.
    weights = 1 + len(others) + (len(others) - 1) ** 2
    ratio = _widened(joint_ratio(first, second, others), base, weights)
    ratio_text = span(ratio.summary(), "times")
    text = f"Together the techniques reach {ratio_text} of what their single gains multiply to"
    if ratio.rounds == 1:
        text += "; one round doesn't show how sure that is."
    elif ratio.high < 1:
        text += ": they take from each other."
    elif ratio.low > 1:
        text += ": they help each other."
    else:
        text += ": no interaction was found."
    return {"ratio": ratio.summary(), "text": text}


def rebuilt_of(variant: Variant, base: Variant) -> dict[str, Any] | None:
    """Compares a second new build of the variant with its first, as ratios to the baseline.

    The baseline itself has its speed alone. None where a build has fewer than two rounds.
    """
    values = variant.rounds if variant is base else ratios_of(variant, base)
    pairs = list(zip(values, variant.builds, strict=False))
    first, second = ([value for value, build in pairs if build == n] for n in (0, 1))
    if variant.failed is not None or min(len(first), len(second)) < 2:
        return None
    ratio = unpaired_ratio(first, second)
    text = f"The second build ran at {span(ratio.summary(), 'times')} of the first"
    if not ratio.low <= 1 <= ratio.high:
        text += ": builds differ by more than their rounds do, which the interval above allows for"
    return {"ratio": ratio.summary(), "text": f"{text}."}


def _widened(ratio: Interval, variant: Variant, variants: float = 2.0) -> Interval:
    """Returns an interval at least as wide as the process variance, if that is known."""
    variance = variant.process_variance
    return ratio if variance is None else variance.widened(ratio, variants=variants)


def _again(variants: Sequence[Variant]) -> list[float]:
    copies = [ratios_of(variant, variants[0]) for variant in variants if variant.kind == "again"]
    return copies[0] if copies else []


def _side_by_side(variants: Sequence[Variant]) -> bool:
    return all(variant.baseline_rounds == variants[0].baseline_rounds for variant in variants)


# One judgement per variant: its effect against its reference, and its quality.
#
# A variant's effect is its speed against another variant: in a cumulative the row above, for a plan
# without one technique the full plan, else the baseline. The model's quality is judged separately,
# against the baseline. The effect's word is the first that applies: it failed; it is a row of a
# cumulative that adds several techniques at once, so the effect belongs to none of them; the effect
# of its techniques is unknown; none of the techniques that the other variant lacks had an effect.
# Otherwise the ratio decides, by the rules of `significance.judge_effects`: beyond the noise floor
# of the experiment and after Holm's correction for the number of its variants.

MARGIN = 0.01  # share of the eval loss: fixed before any run, for the full plan; wide for one seed
Verification = Sequence[Mapping[str, Any]]  # report.verification: an entry for each technique
Row = Mapping[str, Any]  # a variant as in the report
Plans = Mapping[str, Sequence[str]]  # each variant's techniques as texts, by the variant's name


@dataclass(frozen=True)
class Judgement:
    """The judgement of one variant; the fields are keys of its row in the report.

    The field ``verdict`` is about ``effect``, its speed over that of the variant
    ``against``. The field ``p_value`` is the value after the correction. The field
    ``quality`` compares its model with the baseline's.
    """

    verdict: str
    quality: str | None = None
    against: str | None = None
    effect: Interval | None = None
    p_value: float | None = None
    corrected: bool | None = None
    rounds_needed: int | str | None = None


def verdict_word(text: str | None) -> str:
    """Returns the verdict's word; a reason may follow it after a colon."""
    return (text or "").partition(":")[0]


def judge_variants(variants: Sequence[Variant], verification: Verification = ()) -> list[Judgement]:
    """Returns the judgement of every variant, in order; the first is the baseline.

    ``verification`` has the proofs of equal quality.
    """
    base, floor = variants[0], floor_of(variants)
    plans = {variant.name: [str(t) for t in variant.plan] for variant in variants}
    others = references(variants, plans)
    usable = others if _has_result(base) else {}
    effects = {n: ratio_between(a, usable[n], base) for a in variants if (n := a.name) in usable}
    rows = _cumulative(variants, plans)[1:]
    rows = rows or [v.name for v in variants[1:] if v.name.startswith("+ ")]  # a cumulative's end
    several = {n: new for n in rows if n in usable and len(new := _new(n, others, plans)) > 1}
    single_effects = {n: e for n, e in effects.items() if e is not None and n not in several}
    verdicts = judge_effects(single_effects, floor, base.process_variance)
    tested = sum(each.p_value is not None for each in verdicts.values())
    judgements = []
    for variant in variants:
        effect, names = effects.get(variant.name), plans[variant.name]
        is_as_good = _quality_of(variant, base, verification, names)
        if effect is None or variant.failed is not None:
            judgements.append(Judgement(_state(variant, base), is_as_good))
            continue
        (ratio, rounds), other = effect, others[variant.name].name
        if variant.name in several:
            text = f"together: adds {', '.join(several[variant.name])} at once"
            judgements.append(Judgement(text, is_as_good, other, ratio))
            continue
        effect_verdict = verdicts[variant.name]
        new_techniques = set(_new(variant.name, others, plans))
        text = _effect_text(variant, new_techniques, effect_verdict)
        needed = None
        if verdict_word(text) == "undecided" and variant.unfinished is None:
            by_rounds = ratio_of_rounds(rounds) if rounds else ratio
            needed = rounds_needed(by_rounds, floor, effect_verdict.rivals, base.process_variance)
        corrected = None if effect_verdict.p_value is None else tested > 1
        judgements.append(
            Judgement(text, is_as_good, other, ratio, effect_verdict.p_value, corrected, needed)
        )
    return judgements


def _new(name: str, others: Mapping[str, Variant], plans: Plans) -> list[str]:
    before = plans[others[name].name]
    return [text.partition("(")[0] for text in plans[name] if text not in before]


def _cumulative(variants: Sequence[Variant], plans: Plans) -> list[str]:
    rows = ({"name": a.name, "kind": a.kind, "techniques": plans[a.name]} for a in variants)
    return [row["name"] for row in cumulative_of(list(rows))]


def references(variants: Sequence[Variant], plans: Plans) -> dict[str, Variant]:
    """Returns the reference of each variant's effect, by name."""
    measured = [v for v in variants[1:] if v.kind != "again" and _has_result(v)]
    full_plans = [variant for variant in measured if variant.kind == "all"] or [variants[0]]
    against = {
        a.name: full_plans[-1] if a.kind == "leave-one-out" else variants[0] for a in measured
    }
    above, cumulative = variants[0], _cumulative(variants, plans)
    for variant in measured:
        if variant.name in cumulative:
            against[variant.name], above = above, variant
    return against


def cumulative_of(variants: Sequence[Row]) -> list[Row]:
    """Returns the baseline and variants that each extend the one above; empty if none do."""
    base, *others = variants
    rungs = [variant for variant in others if variant.get("kind") in (None, "cumulative", "all")]
    plans = [set(variant["techniques"]) for variant in (base, *rungs)]
    named = any(variant.get("kind") in (None, "cumulative") for variant in rungs)
    is_cumulative = named and len(rungs) > 1 and all(one < other for one, other in pairwise(plans))
    return [base, *rungs] if is_cumulative else []


def quality(final: Variant, base: Variant, verification: Verification = ()) -> dict[str, Any]:
    """Judges the model's quality by the verification and the eval loss at equal tokens."""
    assessment = _eval_data(final, base)
    guilty = guilty_of(map(str, final.plan), verification)
    if not guilty:
        return assessment
    findings = "; ".join(f"{entry['technique']}: {entry['text']}" for entry in guilty)
    return {
        **assessment,
        "verdict": "worse",
        "text": f"The verification finds: {findings}. {assessment['text']}",
    }


def guilty_of(techniques: Iterable[str], verification: Verification) -> list[Mapping[str, Any]]:
    """Returns the verification's entries against these techniques."""
    names = {name for text in techniques for name in (text, text.partition("(")[0])}
    return [e for e in verification if e["verdict"] in FAILED and e["technique"] in names]


def idle_techniques(variant: Variant) -> list[str]:
    """Returns techniques without an observed effect."""
    return [a["technique"] for a in variant.effective if a["effective"] is False]


def last_loss(variant: Variant) -> float | None:
    """Returns the last eval loss; None if the variant failed or wasn't evaluated after training."""
    # the first evaluation is at 0 tokens
    looked = bool(variant.eval_data) and variant.eval_data[-1][0] > 0
    return variant.eval_data[-1][1] if looked and not variant.failed else None


def _has_result(variant: Variant) -> bool:
    return variant.failed is None and bool(variant.rounds)


def _state(variant: Variant, base: Variant) -> str:
    if variant.failed is not None:
        return f"failed: {variant.failed}"
    if variant is base:
        return "baseline" if variant.unfinished is None else f"baseline: {variant.unfinished}"
    if variant.kind == "again":
        return "baseline: a second copy, for the noise"
    return f"undecided: {'it' if _has_result(base) else 'the baseline'} has no result"


def _effect_text(
    variant: Variant, new_techniques: Collection[str], effect_verdict: EffectVerdict
) -> str:
    """Returns the verdict on an effect, if its techniques are known to have acted.

    ``new_techniques`` are the techniques that the other variant hasn't.
    """
    if variant.unfinished is not None:
        return f"undecided: what its techniques did is not known ({variant.unfinished})"
    at_rest = [name for name in idle_techniques(variant) if name in new_techniques]
    if new_techniques and set(new_techniques) <= set(at_rest):
        return f"no effect: {', '.join(at_rest)} did not act"
    if at_rest:
        return f"{effect_verdict.word}: {', '.join(at_rest)} did not act"
    return effect_verdict.text


def _quality_of(
    variant: Variant, base: Variant, verification: Verification, techniques: Iterable[str]
) -> str | None:
    """Quality of a variant's model relative to the baseline's; a reason if it is worse."""
    if variant is base or variant.kind == "again" or not _has_result(variant):
        return None
    guilty = guilty_of(techniques, verification)
    if guilty:
        return f"worse: {guilty[0]['technique']}: {guilty[0]['text']}"
    word: str = _eval_data(variant, base)["verdict"]
    if word != "worse":
        return word
    if is_less_accurate(variant, base):
        accuracies = (v.metrics[ACCURACY] for v in (base, variant))
        return "worse: reward accuracy {:.4f} → {:.4f}".format(*accuracies)
    return f"worse: eval loss {base.eval_data[-1][1]:.4f} → {variant.eval_data[-1][1]:.4f}"


def _eval_data(final: Variant, base: Variant) -> dict[str, Any]:
    """Compares the eval loss after equal tokens with the baseline's, within the margin."""
    ours, theirs = last_loss(final), last_loss(base)
    required = "; ".join(f"{t}: {t.fidelity.value}" for t in final.plan) or "nothing is required"
    if ours is None or theirs is None or not 0 < theirs < math.inf:  # NaN included
        return {"margin": MARGIN, "verdict": "undecided", "text": f"not measured ({required})"}
    change = ours / theirs - 1
    tokens = final.eval_data[-1][0]
    if final.eval_data[-1][0] != base.eval_data[-1][0]:
        return {"margin": MARGIN, "verdict": "undecided", "text": "tokens differ between variants"}
    text = (
        f"Eval loss {theirs:.4f} → {ours:.4f} ({signed(100 * change, 3)} %) after the same "
        f"{tokens:,} tokens, one seed. By how much it might be worse was fixed before the run: "
        f"{100 * MARGIN:g} %."
    )
    is_worse = not change <= MARGIN  # NaN is worse
    if ACCURACY in final.metrics and ACCURACY in base.metrics:
        text += (
            f" Reward accuracy {base.metrics[ACCURACY]:.4f} → {final.metrics[ACCURACY]:.4f} of "
            f"{final.eval_pairs:,} pairs; {accuracy_doubt(final, base):.4f} less might be chance "
            "(95 %)."
        )
        is_worse = is_worse or is_less_accurate(final, base)
    return {"margin": MARGIN, "verdict": "worse" if is_worse else "not worse", "text": text}


ACCURACY = "reward_accuracy"


def accuracy_doubt(final: Variant, base: Variant) -> float:
    """Returns the half width of the 95 % interval of the difference of two reward accuracies.

    Agresti and Caffo, The American Statistician 54, 2000: each share has one more success and one
    more failure. So a share of 0 or 1 has an interval too.
    """
    counts = [v.eval_pairs + 2 for v in (final, base)]
    shares = [
        (v.metrics[ACCURACY] * v.eval_pairs + 1) / n
        for v, n in zip((final, base), counts, strict=True)
    ]
    return 1.96 * math.sqrt(sum(p * (1 - p) / n for p, n in zip(shares, counts, strict=True)))


def is_less_accurate(final: Variant, base: Variant) -> bool:
    """Returns True if the reward accuracy is lower than the baseline's, beyond chance."""
    if not (ACCURACY in final.metrics and ACCURACY in base.metrics):
        return False
    lost = base.metrics[ACCURACY] - final.metrics[ACCURACY]
    return lost > accuracy_doubt(final, base)
