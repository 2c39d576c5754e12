"""`hasten train` compares its first pass with transformers' own model and loss."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig

from hasten.core.context import seen_at_start
from hasten.data.tokenize import train_bpe
from hasten.parts.nn import attention, compressed_attention, sparse_attention
from hasten.parts.nn.compressed_attention import attend_apart
from hasten.parts.nn.losses import LabelOnlyLoss
from hasten.recipe.schema import Recipe
from hasten.techniques.precision import BF16MasterWeights
from hasten.training.run import train
from sample_data import WORDS, small
from tiny import tiny_config

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
    (line,) = [
        r.message
        for r in caplog.records
        if "without hasten" in r.message or "no proof" in r.message
    ]
    compared = "label_smoothing" not in changes
    assert ("equal to" in line) == compared


def saved(folder: Path, config: PreTrainedConfig) -> str:
    """A folder with the config of a model and a tokenizer for it."""
    config.save_pretrained(folder)
    train_bpe(WORDS, config.vocab_size).save_pretrained(folder)
    return str(folder)


SIZES = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def test_dropout_in_the_config_is_no_difference_between_the_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LlamaConfig(**SIZES, **HEADS, attention_dropout=0.5, initializer_range=0.3)
    with caplog.at_level(logging.INFO, "hasten"):
        trained(tmp_path, model=saved(tmp_path / "model", config), from_scratch=True)
    (line,) = [
        r.message
        for r in caplog.records
        if "without hasten" in r.message or "no proof" in r.message
    ]
    difference = re.search(r"equal to (\S+) of those", line)
    assert difference is not None
    assert float(difference[1]) < 1e-4


def test_a_model_without_sdpa_trains_with_its_own_attention(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", Gemma2Config(**SIZES, **HEADS))
    summary, _ = trained(tmp_path, model=model, from_scratch=True, on_obstacle="skip")
    assert summary["stopped"] == "done"


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


def leaking(*args: Any, document_lengths: Any = None, **given: Any) -> Any:
    whole = None if document_lengths is None else (sum(document_lengths),)
    return attend_apart(*args, document_lengths=whole, **given)


@pytest.mark.slow
@pytest.mark.parametrize("leaks", [False, True])
def test_packed_v4_is_compared_with_transformers_padded_rows(
    leaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if leaks:
        monkeypatch.setattr(compressed_attention, "attend_apart", leaking)
    config = tiny_config("deepseek_v4")
    config.vocab_size = 400
    model = saved(tmp_path / "model", config)
    with caplog.at_level(logging.INFO, "hasten"):
        _, lines = trained(tmp_path, model=model, from_scratch=True)
    assert [line.split()[1] for line in lines] == ["packed"][:leaks]
    assert any("equal to" in record.message for record in caplog.records)


@pytest.mark.parametrize("index_topk", [8, 500])
def test_the_choice_of_an_indexer_is_compared_where_a_document_is_long_enough(
    index_topk: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny_config("deepseek_v32")
    config.vocab_size, config.index_topk, config.initializer_range = 400, index_topk, 0.3
    model = saved(tmp_path / "model", config)
    with caplog.at_level(logging.INFO, "hasten"):
        _, lines = trained(tmp_path, model=model, from_scratch=True)
    assert not lines
    untested = [r for r in caplog.records if "tests nothing of the indexer's choice" in r.message]
    assert len(untested) == (index_topk == 500)
    if not untested:
        monkeypatch.setattr(sparse_attention, "taken", lambda index, topk: index > -torch.inf)
        monkeypatch.setattr(sparse_attention, "_listed", all_keys)
        _, lines = trained(tmp_path / "wrong", model=model, from_scratch=True)
        assert [line.split()[1] for line in lines] == ["document_attention"]


def all_keys(mask: torch.Tensor, first: int, topk: int) -> torch.Tensor:
    """The first keys, whatever was chosen."""
    columns = torch.arange(topk, dtype=torch.int32).expand(len(mask), -1)
    count = mask.sum(1, keepdim=True).clamp(max=topk)
    return (columns + first).masked_fill(columns >= count, -1)


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
