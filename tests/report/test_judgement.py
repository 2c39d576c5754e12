"""The verdict of every variant: quality before speed, its margin, proof before both."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.errors import InputError
from hasten.measure.ablation import Design, Kind
from hasten.measure.rounds import variants_of
from hasten.measure.significance import non_inferiority
from hasten.report.conclusions import on_the_whole
from hasten.report.judgement import judge_variants, quality
from hasten.report.schema import read_report
from report.handmade import (
    Fake,
    Other,
    baseline,
    report,
    variant,
    verdict_of,
)


@dataclass(frozen=True)
class Third(Fake):
    slot = Slot.FEED


GUILTY = {
    "technique": "fake",
    "fidelity": "EXACT",
    "test": "one-step gradient",
    "verdict": "differs",
    "measured": 0.3,
    "allowed": 1e-4,
    "seeds": None,
    "text": "gradient off by 0.3",
}


def test_a_technique_that_did_not_act_has_no_effect_whatever_was_measured() -> None:
    idle = [{"technique": "fake", "effective": False, "evidence": "the fast path was not taken"}]
    assert verdict_of(baseline(), variant(Fake(), speed=2.0)) == "helped"
    assert verdict_of(baseline(), variant(Fake(), speed=2.0, effective=idle)) == (
        "no effect: fake did not act"
    )
    both = [*idle, {"technique": "other", "effective": True, "evidence": "seen"}]
    assert verdict_of(baseline(), variant(Fake(), Other(), speed=2.0, effective=both)) == (
        "helped: fake did not act"
    )


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        *((2.0, "not worse"), (1.5, "not worse"), (2.019, "not worse")),
        *((2.021, "worse: eval loss 2.0000 → 2.0210"), (float("nan"), None)),
    ],
)
def test_quality_is_judged_apart_from_speed(loss: float, word: str | None) -> None:
    row = report(baseline(), variant(Fake(), speed=3.0, loss=loss))["variants"][1]
    assert row["verdict"] == "helped"
    assert row["quality"] == (word or "worse: eval loss 2.0000 → nan")


def test_a_row_of_a_ladder_is_judged_against_the_row_above() -> None:
    """The second technique takes back half of what the first gained, and is still beyond 1."""
    first = variant(Fake(), speed=3.0, kind="cumulative")
    last = variant(Fake(), Other(), speed=1.5, noise=(1.02, 0.98, 1.0, 1.01, 1.0), kind="all")
    rows = report(baseline(kind="baseline"), first, last)["variants"]
    assert [row["against"] for row in rows] == [None, "baseline", "fake"]
    assert [row["verdict"] for row in rows] == ["baseline", "helped", "hurt"]
    assert rows[2]["ratio"]["median"] == pytest.approx(1.5, rel=1e-2)
    pairs = zip(last.rounds, first.rounds, strict=True)
    logs = [math.log(one / other) for one, other in pairs]  # Student, by scipy
    found = stats.t.interval(0.95, len(logs) - 1, np.mean(logs), stats.sem(logs))
    assert [rows[2]["effect"][k] for k in ("low", "high")] == pytest.approx(list(np.exp(found)))


def test_a_row_above_without_a_result_is_passed_over() -> None:
    failed = variant(Fake(), kind="cumulative", failed="no memory")
    last = variant(Fake(), Other(), speed=2.0, kind="all")
    rows = report(baseline(kind="baseline"), failed, last)["variants"]
    assert [row["against"] for row in rows] == [None, None, "baseline"]
    assert [row["verdict"] for row in rows] == [
        "baseline",
        "failed: no memory",
        "together: adds fake, other at once",  # so its effect is that of neither
    ]


def test_a_row_that_stands_for_dropped_ones_is_named_so_and_has_no_verdict() -> None:
    turn = {"event": "turn", "cohort": 1, "background_load": 0.0}
    step = {"tokens": 10, "positions": 10, "step_seconds": 1.0, "loss": None}
    events: list[Any] = [
        {"event": "dropped", "text": "+ fake: no time for it", "variants": ["+ fake"]},
        {"event": "cohort", "cohort": 1, "members": ["baseline", "+ other", "+ third"]},
    ]
    for round_ in (1, 2, 3):
        for name, rate in (("baseline", 1.0), ("+ other", 4.0), ("+ third", 6.0)):
            jitter = rate * (1 + 0.001 * round_)
            steps = [{**step, "tokens_per_second": jitter}]
            events.append({**turn, "variant": name, "round": round_, "steps": steps})
    plan = [Fake(), Other(), Third()]
    plans = {"baseline": Plan()} | {
        f"+ {t.name()}": Plan(plan[: i + 1]) for i, t in enumerate(plan)
    }
    kinds: dict[str, Kind] = dict.fromkeys(plans, "cumulative")
    kinds |= {"baseline": "baseline", "+ third": "all"}
    variants = variants_of(events, plans, kinds, Design(rounds=3, steps=1))
    assert [one.name for one in variants] == ["baseline", "+ fake + other", "+ third"]
    said = judge_variants(variants)
    assert [one.verdict for one in said[1:]] == [
        "together: adds fake, other at once",
        "helped",
    ]
    assert said[1].effect is not None
    assert said[1].p_value is None
    found = read_report(report(*variants))
    assert on_the_whole(found["variants"][1], found) == "helped"  # the plan as a whole is known


def test_a_plan_without_a_technique_is_judged_against_the_whole_plan() -> None:
    without = variant(Other(), name="without fake", speed=1.2, kind="leave-one-out")
    whole = variant(Fake(), Other(), name="all", speed=1.5, kind="all")
    rows = report(baseline(kind="baseline"), without, whole)["variants"]
    assert [row["against"] for row in rows] == [None, "all", "baseline"]
    assert rows[1]["verdict"] == "hurt"  # leaving it out costs speed
    assert rows[1]["effect"]["median"] == pytest.approx(1.2 / 1.5, rel=1e-2)


def test_only_what_a_row_adds_can_fail_to_act_in_it() -> None:
    idle = [{"technique": "fake", "effective": False, "evidence": "no rows"}]
    seen = [*idle, {"technique": "other", "effective": True, "evidence": "seen"}]
    first = variant(Fake(), speed=1.2, kind="cumulative", effective=idle)
    last = variant(Fake(), Other(), speed=2.0, kind="all", effective=seen)
    rows = report(baseline(kind="baseline"), first, last)["variants"]
    assert [row["verdict"] for row in rows[1:]] == ["no effect: fake did not act", "helped"]


def test_quality_is_judged_after_equal_tokens_only() -> None:
    good = quality(variant(Fake(), loss=2.01), baseline())
    assert good["verdict"] == "not worse"
    assert "2.0000 → 2.0100 (+0.500 %) after the same 160 tokens" in good["text"]
    assert quality(variant(Fake(), eval_data=[(150, 2.0)]), baseline())["verdict"] == "undecided"
    for unknown in (float("nan"), 0.0, float("inf")):
        assert quality(variant(Fake()), baseline(loss=unknown))["verdict"] == "undecided"
    assert "rounding" in quality(variant(Fake(), eval_data=[]), baseline())["text"]


@pytest.mark.parametrize(
    ("accuracy", "pairs", "verdict"), [(0.90, 40, "not worse"), (0.90, 4000, "worse")]
)
def test_fewer_right_pairs_than_chance_explains_are_worse(
    accuracy: float, pairs: int, verdict: str
) -> None:
    right = {"eval_pairs": pairs}
    before = baseline(metrics={"reward_accuracy": 0.95}, **right)
    after = variant(Fake(), speed=2.0, metrics={"reward_accuracy": accuracy}, **right)
    found = quality(after, before)
    assert found["verdict"] == verdict
    assert f"Reward accuracy 0.9500 → 0.9000 of {pairs:,} pairs" in found["text"]
    row = report(before, after)["variants"][1]
    assert row["quality"].startswith(verdict)
    assert ("0.9500 → 0.9000" in row["quality"]) == (verdict == "worse")


def test_the_look_before_training_says_nothing_of_quality() -> None:
    untrained = [(0, 4.0)]
    found = quality(variant(Fake(), eval_data=untrained), baseline(eval_data=untrained))
    assert found["verdict"] == "undecided"
    rows = report(baseline(eval_data=untrained), variant(Fake(), eval_data=untrained))["variants"]
    assert [row["eval_loss"] for row in rows] == [None, None]


@pytest.mark.parametrize("word", ["differs", "worse"])
def test_a_technique_that_the_guard_finds_guilty_is_worse_however_fast(word: str) -> None:
    variants = [baseline(), variant(Other(), speed=2.0), variant(Fake(), Other(), speed=3.0)]
    found = report(*variants, verification=[{**GUILTY, "verdict": word}])
    assert [a["verdict"] for a in found["variants"]] == ["baseline", "helped", "helped"]
    quality_of = [a["quality"] for a in found["variants"]]
    assert quality_of == [None, "not worse", "worse: fake: gradient off by 0.3"]
    assert found["quality"]["verdict"] == "worse"
    assert found["quality"]["text"].startswith("The verification finds: fake: gradient off by 0.3.")
    assert found["verification"][0]["measured"] == 0.3


@pytest.mark.parametrize("word", ["equal", "not worse", "undecided", "not tested"])
def test_a_guard_that_found_nothing_changes_no_verdict(word: str) -> None:
    found = report(
        baseline(), variant(Fake(), speed=2.0), verification=[{**GUILTY, "verdict": word}]
    )
    assert found["variants"][1]["verdict"] == "helped"
    assert found["variants"][1]["quality"] == "not worse"
    assert found["quality"]["verdict"] == "not worse"


def test_a_second_copy_of_the_baseline_has_no_verdict_and_sets_the_floor() -> None:
    again = variant(name="again", kind="again", speed=1.06)
    fast = variant(Fake(), speed=1.05)
    assert verdict_of(baseline(), fast) == "helped"
    found = report(baseline(), again, fast)
    copy, judged = found["variants"][1:]
    assert copy["verdict"] == "baseline: a second copy, for the noise"
    assert copy["p_value"] is copy["rounds_needed"] is None
    assert judged["verdict"] == "undecided: within the noise of 6.0 %"
    assert judged["corrected"] is False  # it alone was tested


def test_several_variants_have_to_be_surer_than_one() -> None:
    noise = (1.03, 0.98, 1.0, 1.01, 0.99)
    barely = variant(Fake(), speed=1.04, noise=noise)
    assert verdict_of(baseline(), barely) == "helped"
    others = [variant(Other(), name=f"other {n}", noise=noise) for n in range(5)]
    rows = report(baseline(), barely, *others)["variants"]
    assert rows[1]["verdict"].startswith("undecided: not certain among several variants")
    assert rows[1]["corrected"] is True
    assert rows[1]["p_value"] > 0.05
    assert rows[1]["rounds_needed"] >= 1


def test_an_undecided_variant_says_how_many_rounds_would_tell() -> None:
    vague = variant(Fake(), speed=1.02, noise=(1.04, 0.97, 1.0, 1.03, 0.96))
    row = report(baseline(), vague)["variants"][1]
    assert row["verdict"] == "undecided"
    assert 10 < row["rounds_needed"] <= 200
    assert report(baseline(), variant(Fake(), speed=2.0))["variants"][1]["rounds_needed"] is None
    edge = variant(Fake(), speed=1.01, noise=(1.04, 0.97, 1.0, 1.03, 0.96))
    assert report(baseline(), edge)["variants"][1]["rounds_needed"] == "more than 200"


def test_the_upper_end_is_students_by_hand() -> None:
    without, with_ = [2.0, 2.1, 1.9, 2.2], [2.01, 2.12, 1.9, 2.19]
    logs = [math.log(b / a) for a, b in zip(without, with_, strict=True)]
    half = 2.353363 * statistics.stdev(logs) / 2  # t(0.95, 3), from a table
    found = non_inferiority(without, with_, 0.01)
    assert found.upper == pytest.approx(math.exp(statistics.fmean(logs) + half), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "word"), [(-0.05, "not worse"), (0.0, "not worse"), (0.05, "worse")]
)
def test_a_clear_truth_is_told(change: float, word: str) -> None:
    draw = random.Random(1)
    without = [2 + draw.gauss(0, 0.1) for _ in range(6)]
    with_ = [v * math.exp(change + draw.gauss(0, 0.003)) for v in without]
    assert non_inferiority(without, with_, 0.01).verdict == word


def test_too_few_seeds_are_told_how_many_more() -> None:
    found = non_inferiority([2.0, 2.0, 2.0], [2.02, 1.98, 2.0], 0.01)
    assert found.verdict == "undecided"
    assert found.more is not None
    assert found.more > 0


def test_one_pair_says_nothing() -> None:
    found = non_inferiority([2.0], [1.0], 0.01)
    assert (found.verdict, found.upper) == ("undecided", math.inf)


losses = st.floats(0.01, 20)


@given(st.lists(st.tuples(losses, losses), min_size=2, max_size=8), st.floats(0.001, 0.5))
def test_the_verdict_follows_from_the_interval(
    pairs: list[tuple[float, float]], margin: float
) -> None:
    found = non_inferiority([a for a, _ in pairs], [b for _, b in pairs], margin)
    assert found.upper >= found.ratio * (1 - 1e-12)
    assert (found.verdict == "not worse") == (math.log(found.upper) < math.log1p(margin))


@pytest.mark.parametrize(
    ("without", "with_", "margin"),
    [([], [], 0.01), ([1.0], [1.0, 2.0], 0.01), ([1.0], [math.nan], 0.01), ([1.0], [1.0], 0.0)],
)
def test_impossible_input_is_refused(
    without: list[float], with_: list[float], margin: float
) -> None:
    with pytest.raises(InputError):
        non_inferiority(without, with_, margin)
