"""The verification against planted techniques, each of which does one kind of wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.measure.quality.requirements import FLOAT32, bound_of, failures, lossy_rows
from hasten.measure.quality.verification import VerificationDesign, verification_report
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.feed import Prefetched
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW
from hasten.techniques.precision import Autocast, BF16MasterWeights
from measure.quality.verify_plants import (
    HalfRate,
    Here,
    Leaky,
    MeanOfMeans,
    NotExact,
    Ruinous,
    bench,
)

Report = dict[str, list[dict[str, Any]]]


def verified(folder: Path, *techniques: Technique, **design: Any) -> Report:
    return verification_report(Plan(techniques), Here(bench(folder)), VerificationDesign(**design))


def verdicts(report: Report) -> dict[str, str]:
    return {row["technique"]: row["verdict"] for row in report["verification"]}


def line(report: Report, words: str) -> dict[str, Any]:
    return next(row for row in report["invariance"] if words in row["what"])


def test_an_honest_plan_passes_in_float32_and_in_bf16(tmp_path: Path) -> None:
    cut = GradientAccumulation(micro_batch_size=3)
    plan = (Packed(), cut, DocumentAttention(), LabelledTokenLoss(), BF16MasterWeights())
    report = verified(tmp_path, *plan, ActivationCheckpointing(), Prefetched())
    assert set(verdicts(report).values()) == {"equal"}
    assert {row["verdict"] for row in report["invariance"]} == {"equal", "not tested"}
    assert not failures(report)
    assert line(report, "as planned")["measured"] < 1e-5
    assert "number format" in report["verification"][0]["text"]


def test_a_leak_between_documents_is_found_and_its_author_named(tmp_path: Path) -> None:
    report = verified(tmp_path, Leaky(), LabelledTokenLoss())
    leak = line(report, "neighbours")
    assert leak["verdict"] == "differs"
    assert leak["measured"] > 10 * leak["tolerance"]
    assert "without leaky" in leak["text"]
    assert verdicts(report) == {"leaky": "differs", "labelled_token_loss": "undecided"}
    assert line(report, "each example in a micro-batch")["verdict"] == "equal"  # alone, no leak


def test_a_leak_is_found_in_the_plans_number_format_too(tmp_path: Path) -> None:
    report = verified(tmp_path, Leaky(), Autocast())
    assert line(report, "number format")["verdict"] == "differs"


def test_a_loss_that_is_scaled_by_the_cut_is_found(tmp_path: Path) -> None:
    report = verified(tmp_path, MeanOfMeans(), LabelledTokenLoss())
    assert verdicts(report)["mean_of_means"] == "differs"
    planned = line(report, "as planned")
    assert planned["verdict"] == "differs"
    assert "without mean_of_means" in planned["text"]
    assert line(report, "all examples in one")["verdict"] == "equal"


def test_two_that_are_to_blame_are_not_mistaken_for_one(tmp_path: Path) -> None:
    report = verified(tmp_path, Leaky(), MeanOfMeans())
    assert verdicts(report) == {"leaky": "differs", "mean_of_means": "differs"}
    assert "no single technique" in line(report, "as planned")["text"]


def test_a_technique_that_claims_every_bit_and_changes_some_is_found(tmp_path: Path) -> None:
    report = verified(tmp_path, LabelledTokenLoss(), NotExact())
    assert verdicts(report) == {"labelled_token_loss": "equal", "not_exact": "differs"}


def test_another_update_rule_under_the_name_of_adamw_is_found(tmp_path: Path) -> None:
    row = verified(tmp_path, HalfRate())["verification"][0]
    assert row["verdict"] == "differs"
    assert row["measured"] == pytest.approx(0.5, rel=1e-3)


def test_a_technique_that_ruins_the_eval_loss_is_found(tmp_path: Path) -> None:
    row = verified(tmp_path, Ruinous(), seeds=5, tokens=2500)["verification"][0]
    assert (row["verdict"], row["seeds"]) == ("worse", 5)


def test_a_harmless_lossy_technique_is_not_worse(tmp_path: Path) -> None:
    row = verified(tmp_path, CompactAdamW(), seeds=4, tokens=1000, margin=0.02)["verification"][0]
    assert row["verdict"] == "not worse"
    assert row["measured"] < row["allowed"] == 0.02


def test_without_seeds_nothing_is_said_of_a_lossy_technique(tmp_path: Path) -> None:
    row = verified(tmp_path, CompactAdamW())["verification"][0]
    assert row["verdict"] == "not tested"
    assert row["measured"] is None
    assert "--seeds" in row["text"]


def test_what_could_not_be_run_is_not_tested_and_never_equal(tmp_path: Path) -> None:
    def broken(orders: Any) -> list[dict[str, Any]]:
        return [{"failed": "no memory"} for _ in orders]

    plan = Plan(
        [Packed(), ActivationCheckpointing(), BF16MasterWeights(), CompactAdamW(), Prefetched()]
    )
    report = verification_report(plan, broken, VerificationDesign(seeds=2, tokens=10))
    assert {row["verdict"] for key in report for row in report[key]} == {"not tested"}
    texts = [row["text"] for row in report["verification"]]
    assert all("no memory" in text for text in texts)


def test_with_little_time_there_are_fewer_seeds_and_all_plans_have_them() -> None:
    left, seen = [100.0], []

    def perform(orders: Any) -> list[dict[str, Any]]:
        seen.append([order.details["seed"] for order in orders])
        left[0] -= 30.0
        return [trained(2.0 + 0.01 * order.details["seed"], 0.8) for order in orders]

    plan = Plan([CompactAdamW()])
    (row,) = lossy_rows(plan, perform, 8, 100, margin=0.01, time_left=lambda: left[0])
    assert seen == [[1, 1], [2, 2], [3, 3]]
    assert row["seeds"] == 3


def test_a_bound_is_widened_by_the_bare_jobs_own_error_and_not_for_ever() -> None:
    def usual(error: float) -> dict[str, Any]:
        return {"error": error, "worst": 0.0, "loss_error": 0.0, "name": "w"}

    assert bound_of(False, None).gradient == FLOAT32
    assert bound_of(False, usual(FLOAT32 / 10)).gradient == FLOAT32
    assert bound_of(False, usual(FLOAT32)).gradient == pytest.approx(4 * FLOAT32)
    assert bound_of(False, usual(1.0)).gradient == pytest.approx(10 * FLOAT32)
    assert bound_of(False, usual(float("nan"))).gradient == FLOAT32


def test_a_number_that_is_not_finite_passes_no_bound() -> None:
    answer = {"error": float("nan"), "worst": 0.0, "loss_error": 0.0, "name": "w"}
    assert bound_of(False, None).excess(answer) > 1


def trained(loss: float, accuracy: float) -> dict[str, Any]:
    return {"eval_loss": loss, "metrics": {"token_accuracy": accuracy}, "tokens": 100}


@pytest.mark.parametrize(
    ("accuracy", "verdict"), [(0.70, "worse"), (0.80, "not worse"), (0.90, "not worse")]
)
def test_a_measure_of_the_jobs_own_counts_beside_the_eval_loss(
    accuracy: float, verdict: str
) -> None:
    """Without it 0.80 of the tokens are right; the loss is the same in all."""

    def perform(orders: Any) -> list[dict[str, Any]]:
        jitter = [1 + 0.001 * (order.details["seed"] % 3) for order in orders]
        with_it = ["compact_adamw" in str(order.plan) for order in orders]
        return [
            trained(2.0 * j, j * (accuracy if with_ else 0.80))
            for j, with_ in zip(jitter, with_it, strict=True)
        ]

    (row,) = lossy_rows(Plan([CompactAdamW()]), perform, seeds=4, tokens=100, margin=0.01)
    assert row["verdict"] == verdict
    assert "token_accuracy" in row["test"]
    assert f"{accuracy:.2f}" in row["text"]


def test_numbers_that_describe_preferences_are_not_judged() -> None:
    def perform(orders: Any) -> list[dict[str, Any]]:
        return [
            {
                "eval_loss": 2.0 + 0.001 * order.details["seed"],
                "metrics": {
                    "reward_accuracy": 0.8 + 0.001 * order.details["seed"],
                    "reward_margin": 1.0 if "compact_adamw" in str(order.plan) else 5.0,
                    "log_ratio": 0.1 if "compact_adamw" in str(order.plan) else 0.5,
                },
                "tokens": 100,
            }
            for order in orders
        ]

    (row,) = lossy_rows(Plan([CompactAdamW()]), perform, seeds=4, tokens=100, margin=0.01)
    assert row["verdict"] == "not worse"
    assert "eval loss and reward_accuracy at" in row["test"]
