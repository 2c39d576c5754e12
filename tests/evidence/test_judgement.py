"""The verdict of every arm: quality before speed, proof before both, and several arms at once."""

from __future__ import annotations

import pytest

from evidence.handmade import (
    Fake,
    Other,
    arm,
    baseline,
    report,
    verdict_of,
)
from hasten.report.verdicts import quality

GUILTY = {
    "technique": "fake",
    "fidelity": "EXACT",
    "test": "one-step gradient",
    "verdict": "differs",
    "found": 0.3,
    "allowed": 1e-4,
    "seeds": None,
    "text": "gradient off by 0.3",
}


def test_a_technique_that_did_not_act_has_no_effect_whatever_was_measured() -> None:
    idle = [{"technique": "fake", "acted": False, "evidence": "the fast path was not taken"}]
    assert verdict_of(baseline(), arm(Fake(), speed=2.0)) == "held"
    assert verdict_of(baseline(), arm(Fake(), speed=2.0, acted=idle)) == (
        "no effect: fake did not act"
    )
    both = [*idle, {"technique": "other", "acted": True, "evidence": "seen"}]
    assert verdict_of(baseline(), arm(Fake(), Other(), speed=2.0, acted=both)) == (
        "held: fake did not act"
    )


@pytest.mark.parametrize(
    ("loss", "word"),
    [(2.0, "held"), (1.5, "held"), (2.019, "held"), (2.021, "harmed"), (float("nan"), "harmed")],
)
def test_speed_is_no_gain_where_the_held_out_loss_is_worse(loss: float, word: str) -> None:
    assert verdict_of(baseline(), arm(Fake(), speed=3.0, loss=loss)).partition(":")[0] == word


def test_quality_is_judged_after_equal_tokens_only() -> None:
    good = quality(arm(Fake(), loss=2.01), baseline())
    assert good["verdict"] == "not worse"
    assert "2.0000 → 2.0100 (+0.500 %) after the same 160 tokens" in good["text"]
    assert quality(arm(Fake(), held_out=[(150, 2.0)]), baseline())["verdict"] == "inconclusive"
    for unknown in (float("nan"), 0.0, float("inf")):
        assert quality(arm(Fake()), baseline(loss=unknown))["verdict"] == "inconclusive"
    assert "rounding" in quality(arm(Fake(), held_out=[]), baseline())["text"]


def test_the_look_before_training_says_nothing_of_quality() -> None:
    untrained = [(0, 4.0)]
    found = quality(arm(Fake(), held_out=untrained), baseline(held_out=untrained))
    assert found["verdict"] == "inconclusive"
    rows = report(baseline(held_out=untrained), arm(Fake(), held_out=untrained))["arms"]
    assert [row["held_out_loss"] for row in rows] == [None, None]


@pytest.mark.parametrize("word", ["differs", "worse"])
def test_a_technique_that_the_guard_finds_guilty_has_harmed_however_fast(word: str) -> None:
    arms = [baseline(), arm(Other(), speed=2.0), arm(Fake(), Other(), speed=3.0)]
    found = report(*arms, guard=[{**GUILTY, "verdict": word}])
    assert [a["verdict"].partition(":")[0] for a in found["arms"]] == ["baseline", "held", "harmed"]
    assert found["arms"][2]["verdict"] == "harmed: fake: gradient off by 0.3"
    assert found["quality"]["verdict"] == "worse"
    assert found["quality"]["text"].startswith("The guard finds: fake: gradient off by 0.3.")
    assert found["guard"][0]["found"] == 0.3


@pytest.mark.parametrize("word", ["equal", "not worse", "inconclusive", "not tested"])
def test_a_guard_that_found_nothing_changes_no_verdict(word: str) -> None:
    found = report(baseline(), arm(Fake(), speed=2.0), guard=[{**GUILTY, "verdict": word}])
    assert found["arms"][1]["verdict"] == "held"
    assert found["quality"]["verdict"] == "not worse"


def test_a_second_copy_of_the_baseline_has_no_verdict_and_sets_the_floor() -> None:
    again = arm(name="again", kind="again", speed=1.06)
    fast = arm(Fake(), speed=1.05)
    assert verdict_of(baseline(), fast) == "held"
    found = report(baseline(), again, fast)
    copy, judged = found["arms"][1:]
    assert copy["verdict"] == "baseline: a second copy, for the noise"
    assert copy["p_value"] is copy["rounds_needed"] is None
    assert judged["verdict"] == "inconclusive: within the noise of 6.0 %"
    assert judged["corrected"] is False  # it alone was tested


def test_several_arms_have_to_be_surer_than_one() -> None:
    noise = (1.03, 0.98, 1.0, 1.01, 0.99)
    barely = arm(Fake(), speed=1.04, noise=noise)
    assert verdict_of(baseline(), barely) == "held"
    others = [arm(Other(), name=f"other {n}", noise=noise) for n in range(5)]
    rows = report(baseline(), barely, *others)["arms"]
    assert rows[1]["verdict"].startswith("inconclusive: not beyond doubt among several arms")
    assert rows[1]["corrected"] is True
    assert rows[1]["p_value"] > 0.05
    assert rows[1]["rounds_needed"] > 1


def test_an_inconclusive_arm_says_how_many_rounds_would_tell() -> None:
    vague = arm(Fake(), speed=1.02, noise=(1.04, 0.97, 1.0, 1.03, 0.96))
    row = report(baseline(), vague)["arms"][1]
    assert row["verdict"] == "inconclusive"
    assert 10 < row["rounds_needed"] <= 200
    assert report(baseline(), arm(Fake(), speed=2.0))["arms"][1]["rounds_needed"] is None
    edge = arm(Fake(), speed=1.01, noise=(1.04, 0.97, 1.0, 1.03, 0.96))
    assert report(baseline(), edge)["arms"][1]["rounds_needed"] == "more than 200"
