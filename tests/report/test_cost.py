"""Money, kilowatt-hours, payback, and the two figures that are easily mixed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.recipe.preset_plans import preset
from hasten.recipe.price import Price
from hasten.report.claims import preset_claims
from hasten.report.cost import (
    cost_of_experiment,
    payback,
    speed_words,
    time_saved,
)
from hasten.report.schema import read_report

PRICE = Price(currency="CNY", per_device_hour=0.6, devices=4)


def test_half_as_much_again_saves_a_third_of_the_time() -> None:
    assert time_saved(1.5) == pytest.approx(1 / 3)
    assert speed_words(1.5) == "1.50× the speed, 33 % less time"
    assert speed_words(0.8) == "0.80× the speed, 25 % more time"
    assert speed_words(1.0) == "1.00× the speed, the same time"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_no_speed_is_no_ratio(value: float) -> None:
    with pytest.raises(InputError):
        time_saved(value)


def test_an_experiment_pays_back_after_its_cost_over_what_an_hour_saves() -> None:
    found = payback({"median": 1.5, "low": 1.25, "high": 1.7}, seconds=3600)
    assert found["hours"] == pytest.approx(2)
    assert "after 2.0 h" in found["text"]
    assert "33 % less time" in found["text"]
    assert "4.0 h at the interval's lower end" in found["text"]


@given(st.floats(1.001, 100), st.floats(1, 1e6))
def test_at_the_payback_the_saved_hours_are_those_of_the_experiment(
    ratio: float, seconds: float
) -> None:
    hours = payback({"median": ratio, "low": ratio, "high": ratio}, seconds)["hours"]
    slow = hours * ratio  # hours the baseline would have needed for the same work
    assert (slow - hours) * 3600 == pytest.approx(seconds)


@pytest.mark.parametrize(("median", "good"), [(0.9, True), (1.0, True), (2.0, False)])
def test_nothing_saved_never_pays_back(median: float, good: bool) -> None:
    found = payback({"median": median, "low": 0.8, "high": 2.1}, 60, good)
    assert found == {"hours": None, "text": "never: nothing was saved"}


def test_an_uncertain_gain_says_that_it_may_never_pay() -> None:
    assert "never does" in payback({"median": 1.1, "low": 0.9, "high": 1.3}, 60)["text"]
    assert "never does" in payback({"median": 1.1, "low": None, "high": None}, 60)["text"]
    assert payback({"median": None, "low": None, "high": None}, 60)["text"] == "not measured"


def test_the_report_s_cost_is_priced_per_token_and_readable(report: dict[str, Any]) -> None:
    report["design"] = {"seconds": 1800.0}
    found = cost_of_experiment(report, PRICE)
    assert found is not None
    base = report["variants"][0]
    by_hand = 4 * 0.6 / 3600 / base["tokens_per_second"]["median"] * 1e6
    assert found["per_million_tokens"]["baseline"] == pytest.approx(by_hand)
    assert found["experiment"] == {"seconds": 1800.0, "money": pytest.approx(1.2)}
    assert found["energy"] == {"kwh_per_million_tokens": {}, "source": "not measured"}
    assert found["payback"]["hours"] == pytest.approx(
        0.5 / (report["variants"][-1]["ratio"]["median"] - 1)
    )
    assert read_report({**report, "cost": found})["cost"]["currency"] == "CNY"


def test_energy_counts_where_it_was_counted_and_has_a_price(report: dict[str, Any]) -> None:
    report["design"] = {"seconds": 3600.0}
    joules = {"baseline": 0.0036, "packing": None}
    found = cost_of_experiment(
        report, PRICE.model_copy(update={"per_kwh": 2.0}), 1, joules, "NVML (1 GPU)"
    )
    plain = cost_of_experiment(report, PRICE)
    assert found is not None
    assert plain is not None
    assert found["energy"]["kwh_per_million_tokens"] == {"baseline": pytest.approx(0.001)}
    more = found["per_million_tokens"]["baseline"] - plain["per_million_tokens"]["baseline"]
    assert more == pytest.approx(0.002)
    assert found["energy"]["source"] == "NVML (1 GPU)"


def test_without_a_price_nothing_is_said_and_worse_quality_saves_nothing(
    report: dict[str, Any],
) -> None:
    assert cost_of_experiment(report, None) is None
    report["design"] = {"seconds": 60.0}
    report["quality"]["verdict"] = "worse"
    found = cost_of_experiment(report, PRICE)
    assert found is not None
    assert found["payback"]["hours"] is None


def test_a_failed_variant_has_no_price(report: dict[str, Any]) -> None:
    report["variants"][1]["verdict"] = "failed: killed"
    found = cost_of_experiment(report, PRICE)
    assert found is not None
    assert "packing" not in found["per_million_tokens"]
    assert "experiment" not in found  # its seconds aren't known


def test_the_articles_table_says_what_is_missing_measured_and_not_comparable(
    report: dict[str, Any],
) -> None:
    rows = {r["claimed"]: r for r in preset_claims(preset("article"), report)}
    compression = rows["+12 % speed"]
    assert compression["measured"] == "not measured"
    assert compression["verdict"].startswith("not comparable: needs several ranks")
    total = rows["12.5 -> 18.4 it/s, +47 %"]
    assert total["technique"] == "the whole plan without gradient compression"
    assert total["verdict"] == "held"  # 1.62 is above 1.47
    assert rows["9.8 -> 6.5 GB"]["measured"] == "0.63×"
    quality = rows["accuracy 92.3 -> 92.1 %"]
    assert quality["measured"].startswith("eval loss ")
    assert quality["verdict"] == {"not worse": "held"}[report["quality"]["verdict"]]
    assert any(r["verdict"].startswith("not comparable") for r in rows.values())
    assert len(read_report({**report, "claims": list(rows.values())})["claims"]) == len(rows)


def test_a_promise_is_judged_beyond_the_noise_and_the_number_of_variants(
    report: dict[str, Any],
) -> None:
    def word() -> str:
        rows = {r["claimed"]: r for r in preset_claims(preset("article"), report)}
        return rows["12.5 -> 18.4 it/s, +47 %"]["verdict"]

    assert word() == "held"
    final = report["variants"][-1]
    for verdict in ("undecided: within the noise of 90.0 %", "undecided: not certain"):
        final["verdict"] = verdict
        assert word() == "not comparable"
    # of a cumulative: the plan as a whole did not
    final |= {"against": "packing", "verdict": "hurt"}
    assert word() == "held"
    report["noise"] = {"floor": 0.9}  # a machine on which nothing below 90 % may be acted on
    assert word() == "not comparable"


def test_what_led_to_an_experiment_is_a_part_of_its_cost(report: dict[str, Any]) -> None:
    report["design"] = {"seconds": 600.0}
    found = cost_of_experiment(report, PRICE, earlier_seconds=3000.0)
    assert found is not None
    assert found["experiment"]["seconds"] == 3600.0
    assert found["experiment"]["money"] == pytest.approx(2.4)
    alone = cost_of_experiment(report, PRICE)
    assert alone is not None
    assert found["payback"]["hours"] == pytest.approx(6 * alone["payback"]["hours"])


def test_a_promise_that_only_the_plan_makes_is_checked_on_the_technique_alone(
    report: dict[str, Any],
) -> None:
    def row() -> dict[str, str]:
        rows = preset_claims(preset("article"), report)
        return next(r for r in rows if r["technique"] == "dynamic batch")

    assert row()["measured"] == "not measured apart"
    variant = report["variants"][1]
    variant["techniques"] = ["adaptive_batch(start=1024)"]
    variant["effective"] = [{"technique": "adaptive_batch", "effective": True, "evidence": ""}]
    assert row()["measured"].startswith("1.4")
    assert row()["verdict"] == "held"
    variant["effective"][0]["effective"] = False
    assert row()["verdict"] == "not comparable: it did not act"
    report["claims"].append({"technique": "adaptive_batch", "metric": "tokens_per_second"})
    with pytest.raises(StopIteration):
        row()  # it carries the claim itself, and the report has the row


def test_an_undecided_gain_may_pay_and_no_effect_never_does(report: dict[str, Any]) -> None:
    report["design"] = {"seconds": 60.0}
    final = report["variants"][-1]
    final["verdict"], final["ratio"] = "undecided", {"median": 1.9, "low": 0.8, "high": 4.5}
    found = cost_of_experiment(report, PRICE)
    assert found is not None
    assert "the interval allows that it never does" in found["payback"]["text"]
    final["verdict"] = "no effect: it did not act"
    found = cost_of_experiment(report, PRICE)
    assert found is not None
    assert found["payback"]["hours"] is None


def test_the_articles_total_is_what_their_own_figures_give() -> None:
    found = {total["said"]: total.get("ratio") for total in preset("article")["totals"]}
    expected = {
        "12.5 -> 18.4 it/s, +47 %": 18.4 / 12.5,
        "9.8 -> 6.5 GB": 6.5 / 9.8,
        "an epoch 32 -> 21.5 min, -32.8 %": 21.5 / 32,
        "in all 160 -> 107 min": 107 / 160,
        "78 -> 65 GB, -16.7 %": 65 / 78,
    }
    for said, ratio in expected.items():
        assert found[said] == pytest.approx(ratio, rel=1e-3)


def rows_of(report: dict[str, Any], ranks: int = 1) -> dict[str, dict[str, str]]:
    return {r["claimed"]: r for r in preset_claims(preset("article", ranks), report)}


def test_every_figure_of_the_articles_has_a_row_with_a_figure_or_a_reason(
    report: dict[str, Any],
) -> None:
    rows = rows_of(report)
    epoch = rows["an epoch 32 -> 21.5 min, -32.8 %"]
    assert epoch["measured"].startswith("0.62× [")  # 1 / 1.62
    assert epoch["verdict"] == rows["in all 160 -> 107 min"]["verdict"] == "held"
    assert rows["78 -> 65 GB, -16.7 %"]["verdict"] == "held"
    for said in ("parallel efficiency 82 -> 94 %", "communication 15 -> 5 % of the time"):
        assert rows[said]["verdict"] == "not comparable: needs several ranks (nproc 2 or more)"
    for row in rows.values():
        assert row["measured"] != "not measured" or len(row["verdict"].split()) > 2


def shown_on_two_ranks(report: dict[str, Any]) -> None:
    base, final = report["variants"][0], report["variants"][-1]
    step = dict.fromkeys(("forward", "backward"), 0.4)
    base["ledger"] = {"step": {**step, "communication": 0.2}, "parallel_efficiency": 0.8}
    final["ledger"] = {"step": {**step, "communication": 0.02}, "parallel_efficiency": 0.95}
    for variant in (base, final):
        variant["ledger"]["utilisation"] = 0.99
    base["throughput_spread"], final["throughput_spread"] = 0.05, 0.03
    report["design"] = {"ranks": 2, "epoch_tokens": 10_000, "epoch_examples": 100}


def test_on_ranks_shares_are_shown_before_and_after_and_judged_by_what_was_said(
    report: dict[str, Any],
) -> None:
    shown_on_two_ranks(report)
    report["hardware"]["device"] = "cuda:0"
    rows = rows_of(report, 2)
    efficiency = rows["parallel efficiency 82 -> 94 %"]
    assert (efficiency["measured"], efficiency["verdict"]) == ("80.0 % → 95.0 %", "held")
    share = rows["communication 15 -> 5 % of the time"]
    assert (share["measured"], share["verdict"]) == ("20.0 % → 2.4 %", "held")
    steady = rows["throughput steady within +-2 %"]
    assert (steady["measured"], steady["verdict"]) == ("5.0 % → 3.0 %", "fell short")
    assert rows["GPU utilisation 85 -> 98 %"]["verdict"] == "held"
    report["hardware"]["device"] = "cpu"
    assert rows_of(report, 2)["GPU utilisation 85 -> 98 %"]["verdict"].startswith("not comparable")


def test_figures_of_one_job_are_shown_and_compared_with_none(report: dict[str, Any]) -> None:
    shown_on_two_ranks(report)
    for variant, rate in ((report["variants"][0], 1000.0), (report["variants"][-1], 2000.0)):
        variant["tokens_per_second"] = {"median": rate, "low": rate, "high": rate}
    names = [report["variants"][0]["name"], report["variants"][-1]["name"]]
    report["cost"] = {
        "currency": "CNY",
        "per_million_tokens": dict(zip(names, (4, 2), strict=True)),
    }
    rows = rows_of(report, 2)
    samples = rows["3,200 -> 12,800 samples/s, 4x"]
    assert samples["measured"] == "10 → 20 examples/s"  # 100 tokens in an example
    assert rows["an epoch 32 -> 21.5 min, -32.8 %"]["measured"].endswith("10.00 s → 5.00 s")
    cost = rows["4.32 CNY: 4 devices, 1.8 hours"]
    assert cost["measured"] == "0.04 → 0.02 CNY for a pass over the data"
    for row in (samples, cost):
        assert row["verdict"].startswith("not comparable: ")
    report["cost"] = None
    assert "no price" in rows_of(report, 2)["4.32 CNY: 4 devices, 1.8 hours"]["measured"]


def test_nothing_holds_where_the_model_is_worse(report: dict[str, Any]) -> None:
    shown_on_two_ranks(report)
    assert any(row["verdict"] == "held" for row in rows_of(report, 2).values())
    final = report["variants"][-1]
    final["quality"] = "worse: eval loss 2.0 against 1.5"
    rows = rows_of(report, 2)
    assert rows["12.5 -> 18.4 it/s, +47 %"]["verdict"] == "fell short: the model is worse"
    assert rows["9.8 -> 6.5 GB"]["verdict"] == "fell short: the model is worse"
    whole = [row for row in rows.values() if row["technique"] == "the whole plan"]
    assert [r for r in whole if r["verdict"] == "held" and r["metric"] != "quality"] == []


def test_on_two_ranks_compression_is_a_switch_like_the_others(report: dict[str, Any]) -> None:
    variant = report["variants"][1]
    variant["techniques"] = ["topk(dense_share=0.0)"]
    variant["effective"] = [{"technique": "topk", "effective": True, "evidence": "fewer bytes"}]
    rows = {r["claimed"]: r for r in preset_claims(preset("article", 2), report)}
    assert rows["+12 % speed"]["technique"] == "gradient compression"
    assert rows["+12 % speed"]["measured"].startswith("1.4")
    assert rows["12.5 -> 18.4 it/s, +47 %"]["technique"] == "the whole plan"


def test_quality_that_nobody_measured_is_not_said_to_have_held(report: dict[str, Any]) -> None:
    report["variants"][-1]["eval_loss"] = None
    rows = {r["claimed"]: r for r in preset_claims(preset("article"), report)}
    row = rows["accuracy 92.3 -> 92.1 %"]
    assert (row["measured"], row["verdict"]) == ("not measured", "not comparable")
