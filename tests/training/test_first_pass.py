"""`hasten train` compares its first pass with transformers' own model and loss."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.core.context import seen_at_start
from hasten.parts.nn import attention
from hasten.parts.nn.losses import LabelOnlyLoss
from hasten.recipe.schema import Recipe
from hasten.techniques.precision import BF16MasterWeights
from hasten.training.run import train
from sample_data import small

half = pytest.mark.skipif(
    bool(BF16MasterWeights().unsupported_reasons(seen_at_start())),
    reason="needs a processor with bf16 products",
)
PLAN = ["packed", "document_attention", "labelled_token_loss"]


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_PROOF", "on")


def trained(folder: Path, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    told: list[str] = []
    values = small(folder, max_steps=2, plan=PLAN, lr_schedule="constant", **changes)
    summary = train(Recipe(**values), tell=told.append)
    return summary, [line for line in told if "taken out" in line]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"plan": [*PLAN, "bf16_master_weights"]}, marks=half),
        pytest.param({"plan": [*PLAN, "autocast"]}, marks=half),
        {"finetuning_type": "lora"},
        {"label_smoothing": 0.1},
        {"plan": [*PLAN, {"activation_checkpointing": {"segments": 2}}]},
    ],
    ids=["float32", "bf16", "autocast", "lora", "smoothing", "activation_checkpointing"],
)
def test_a_right_plan_keeps_its_techniques(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    values = small(tmp_path, **{"max_steps": 1, "plan": PLAN, **changes})
    with caplog.at_level(logging.INFO, "hasten"):
        train(Recipe(**values), tell=told.append)
    assert not [line for line in told if "taken out" in line]
    (line,) = [r.message for r in caplog.records if "proof" in r.message]
    compared = "label_smoothing" not in changes
    assert ("agree with transformers's own" in line) == compared


def test_a_wrong_loss_is_taken_out_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = LabelOnlyLoss.cross_entropy

    def wrong(self: Any, labels: Any, terms: Any, inputs: Any) -> Any:
        loss, output = usual(self, labels.roll(1, -1), terms, inputs)
        return loss, output

    monkeypatch.setattr(LabelOnlyLoss, "cross_entropy", wrong)
    summary, lines = trained(tmp_path)
    assert len(lines) == 1
    assert lines[0].startswith("warning: labelled_token_loss was taken out of the plan: the ")
    names = [entry["technique"] for entry in summary["plan"]]
    assert names == ["packed", "document_attention"]


def test_a_leak_between_documents_is_taken_out_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = attention.attend

    def leaking(*args: Any, **given: Any) -> Any:
        lengths = given.pop("document_lengths", None)
        given.pop("boundaries", None)
        whole = None if lengths is None else (sum(lengths),)
        return usual(*args, **given, document_lengths=whole)

    monkeypatch.setattr(attention, "attend", leaking)
    _, lines = trained(tmp_path)
    assert [line.split()[1] for line in lines] == ["document_attention"]


def test_a_run_with_the_proof_has_the_bits_of_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for proof in ("off", "on"):
        monkeypatch.setenv("HASTEN_PROOF", proof)
        values = small(tmp_path / proof, max_steps=2, plan=PLAN, finetuning_type="lora")
        train(Recipe(**values), tell=lambda line: None)
        found.append((tmp_path / proof / "run" / "metrics.jsonl").read_text())
        found.append(torch.get_rng_state().tolist())
    losses = [
        [line.split('"loss": ')[1].split(",")[0] for line in t.splitlines()] for t in found[::2]
    ]
    assert losses[0] == losses[1]
    assert found[1] == found[3]
