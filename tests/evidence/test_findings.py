"""Findings from hand-made arms, whose ratios, losses and prices are known without measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import Claim, Fidelity, Proof, Technique
from hasten.evidence.ablation import Arm
from hasten.evidence.findings import quality, ratio_to, report_of
from hasten.evidence.report_schema import read_report
from hasten.recipe.schema import Recipe
from hasten.run import cost_of

WEATHER = (1.0, 0.5, 1.6, 0.8, 1.2)  # a machine that is busy in some rounds
SPEED, MEMORY = "tokens_per_second", "peak_memory_bytes"


@dataclass(frozen=True)
class Fake(Technique):
    """A technique that only promises."""

    slot = Slot.COLLATE
    promises: tuple[tuple[str, float], ...] = ()

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    @property
    def claims(self) -> tuple[Claim, ...]:
        return tuple(Claim(metric, ratio, "an article") for metric, ratio in self.promises)

    def apply(self, setup: Any) -> None:
        raise NotImplementedError

    def probe(self, session: Any) -> Proof:
        raise NotImplementedError


@dataclass(frozen=True)
class Other(Fake):
    """Another one, in a slot of its own."""

    slot = Slot.LOSS


def arm(
    *techniques: Technique,
    speed: float = 1.0,
    noise: Sequence[float] = (1.01, 0.99, 1.0, 1.005, 0.995),
    loss: float = 2.0,
    memory: float = 4e9,
    **changes: Any,
) -> Arm:
    """An arm that has the weather of the others and a noise of its own."""
    settings: dict[str, Any] = {
        "name": "+".join(t.name() for t in techniques) or "baseline",
        "plan": Plan(techniques),
        "rounds": [1000 * speed * w * n for w, n in zip(WEATHER, noise, strict=True)],
        "steps": [
            {"step_seconds": s, "slots": 100, "tokens": 80} for s in (0.1, 0.2, 0.3, 0.4, 0.9)
        ],
        "losses": [(80, 3.0), (160, loss)],
        "held_out": [(0, 4.0), (160, loss)],
        "peak_memory_bytes": int(memory),
        "acted": [{"technique": t.name(), "acted": True, "evidence": "seen"} for t in techniques],
    }
    return Arm(**settings | changes)


def report(*arms: Arm, **price: Any) -> dict[str, Any]:
    """The findings as the page reads them, so that every test also checks the schema."""
    found = report_of(
        arms,
        title="t",
        command="c",
        hardware={},
        versions={},
        recipe={"seed": 7},
        **price,
    )
    return read_report(found)


def baseline(**changes: Any) -> Arm:
    return arm(noise=(1, 1, 1, 1, 1), **changes)


def verdict_of(*arms: Arm) -> str:
    word: str = report(*arms)["arms"][-1]["verdict"]
    return word


def test_ratios_are_paired_by_round() -> None:
    found = report(baseline(), arm(Fake(), speed=1.5))["arms"][1]
    ratio, alone = found["ratio"], found["tokens_per_second"]
    assert ratio["median"] == pytest.approx(1.5)  # the weather cancels, only the noise is left
    assert 1.48 < ratio["low"] < ratio["high"] < 1.52
    assert alone["high"] / alone["low"] > 2  # one arm by itself carries the weather


def test_only_rounds_that_both_arms_have_are_compared() -> None:
    base, short = baseline(), arm(Fake(), speed=1.5, noise=(1, 1, 1, 1, 1))
    short.rounds = short.rounds[:2]
    ratio = ratio_to(short, base)
    assert ratio is not None
    assert (ratio.rounds, ratio.median) == (2, pytest.approx(1.5))


def test_the_numbers_of_an_arm_are_its_measured_steps() -> None:
    found = report(baseline(), arm(Fake()))["arms"][0]
    assert found["step_seconds"]["p50"] == pytest.approx(0.3)
    assert 0.4 < found["step_seconds"]["p99"] <= 0.9
    assert found["padding_share"] == pytest.approx(0.2)
    assert found["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found["verdict"] == "baseline"


def test_a_failed_arm_has_its_reason_and_no_result() -> None:
    failed = arm(Fake(((SPEED, 1.1),)), failed="the process ended with code -9: killed")
    found = report(baseline(), failed, arm(Other(), speed=2.0), currency="CNY", per_device_hour=1.0)
    row = found["arms"][1]
    assert row["verdict"] == "failed: the process ended with code -9: killed"
    assert set(row["ratio"].values()) == set(row[SPEED].values()) == {None}
    assert row["held_out_loss"] is row[MEMORY] is None
    assert row["name"] not in found["cost"]["per_million_tokens"]
    assert row["rounds"] == failed.rounds  # what is known of its way there stays in the file
    assert found["arms"][2]["verdict"] == "held"  # the others go on


def test_an_arm_that_never_started_is_a_row_of_the_report() -> None:
    found = report(baseline(), Arm("x", Plan([Fake()]), failed="no technique is called 'x'"))
    assert found["arms"][1]["verdict"] == "failed: no technique is called 'x'"
    assert found["arms"][1]["padding_share"] is None
    assert found["quality"]["verdict"] == "inconclusive"


def test_against_a_failed_baseline_nothing_is_said() -> None:
    found = report(baseline(failed="no memory"), arm(Fake(), speed=2.0))
    assert found["arms"][1]["verdict"] == "inconclusive: the baseline has no result"
    assert found["arms"][1]["ratio"]["median"] is None
    assert found["arms"][0]["ratio"]["median"] is None
    assert found["quality"]["text"].startswith("not measured")


def test_an_arm_that_failed_after_its_last_round_keeps_its_numbers() -> None:
    late = arm(Fake(), speed=1.5, acted=[], unfinished="generate: no room")
    row = report(baseline(), late)["arms"][1]
    assert row["ratio"]["median"] == pytest.approx(1.5)
    assert (row["held_out_loss"], row[MEMORY]) == (2.0, 4e9)
    assert row["verdict"] == (
        "inconclusive: what its techniques did is not known (generate: no room)"
    )
    assert row["acted"] == [{"technique": "fake", "acted": None, "evidence": "generate: no room"}]
    assert report(baseline(unfinished="no room"), late)["arms"][0]["verdict"] == "baseline: no room"


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


def test_a_claim_is_judged_by_the_arms_that_differ_by_its_technique_alone() -> None:
    one, two = Fake(((SPEED, 1.2),)), Other(((SPEED, 1.5), ("wire_bytes", 0.1)))
    rungs = [baseline(), arm(one, speed=1.3), arm(one, two, speed=1.3 * 1.1)]
    first, second, third = report(*rungs)["claims"]
    assert first["measured"].startswith("1.30× [")
    assert (first["claimed"], first["verdict"]) == ("1.20×", "held")
    assert second["measured"].startswith("1.10× [")  # against the rung below, not the baseline
    assert (second["source"], second["verdict"]) == ("an article", "fell short")
    assert (third["metric"], third["measured"]) == ("wire_bytes", "not measured")
    assert third["verdict"] == "inconclusive"


def test_a_claim_without_two_such_arms_is_left_open() -> None:
    one, two = Fake(((SPEED, 1.2),)), Other(((SPEED, 1.2),))
    for claim in report(baseline(), arm(one, two, speed=2.0))["claims"]:
        assert (claim["measured"], claim["verdict"]) == ("not measured apart", "inconclusive")
    assert report(baseline())["claims"] == []


def test_a_failed_arm_gives_way_to_another_pair() -> None:
    one, two = Fake(((SPEED, 1.2),)), Other()
    arms = [baseline(), arm(one, failed="x"), arm(two), arm(one, two, speed=1.5)]
    claim = report(*arms)["claims"][0]
    assert claim["measured"].startswith("1.50×")


def test_a_claim_of_a_technique_that_did_not_act_is_not_held() -> None:
    idle = [{"technique": "fake", "acted": False, "evidence": "nothing"}]
    with_it = arm(Fake(((SPEED, 1.2),)), speed=1.5, acted=idle)
    assert report(baseline(), with_it)["claims"][0]["verdict"] == "no effect: it did not act"


@pytest.mark.parametrize(
    ("used", "measured", "word"),
    [
        (0.60, "0.60×", "held"),
        (0.70, "0.70×", "held"),
        (0.85, "0.85×", "fell short"),
        (0.995, "0.99×", "no effect"),
        (1.005, "1.00×", "no effect"),
        (1.02, "1.02×", "harmed"),
        (1.97, "1.97×", "harmed"),
    ],
)
def test_more_memory_where_less_was_promised_is_harm(used: float, measured: str, word: str) -> None:
    lean = arm(Fake(((MEMORY, 0.7),)), memory=4e9 * used)
    claim = report(baseline(), lean)["claims"][0]
    assert (claim["claimed"], claim["measured"], claim["verdict"]) == ("0.70×", measured, word)


def test_a_promise_of_little_more_memory_can_be_kept() -> None:
    claim = report(baseline(), arm(Fake(((MEMORY, 1.1),)), memory=4.2e9))["claims"][0]
    assert claim["verdict"] == "held"


def test_a_million_tokens_cost_price_over_rate() -> None:
    fast = arm(Fake(), speed=2.0, noise=(1, 1, 1, 1, 1))
    found = report(baseline(), fast, currency="CNY", per_device_hour=0.6, devices=4)["cost"]
    assert found["currency"] == "CNY"
    assert found["per_million_tokens"]["baseline"] == pytest.approx(4 * 0.6 / 3600 / 1000 * 1e6)
    assert found["per_million_tokens"]["fake"] == pytest.approx(4 * 0.6 / 3600 / 2000 * 1e6)
    assert report(baseline())["cost"] is None  # no price, no cost


def test_the_articles_example_costs_what_they_say() -> None:
    price = {"currency": "CNY", "per_device_hour": 0.6}
    recipe = Recipe(model="m", dataset="d", max_steps=1, price=price)
    found = cost_of(recipe, seconds=1.8 * 3600, tokens=2_000_000, devices=4)
    assert found is not None
    assert found["total"] == pytest.approx(4.32)
    assert found["device_hours"] == pytest.approx(7.2)
    assert found["per_million_tokens"] == pytest.approx(2.16)
    assert cost_of(recipe.model_copy(update={"price": None}), 1.0, 1, 1) is None


def test_samples_come_from_the_baseline_and_the_last_arm() -> None:
    text = [{"prompt": "p", "answer": "a"}]
    arms = [baseline(samples=text), arm(Fake(), samples=text), arm(Fake(), Other(), samples=text)]
    assert [s["arm"] for s in report(*arms)["samples"]] == ["baseline", "fake+other"]
