"""A card says what the run wrote down, the same every time, and never takes another's place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hasten.report.card import CARD, MARK, card_text, write_card

RECIPE = {
    "model": "deepseek-ai/deepseek-llm-7b-base",
    "dataset": ["/home/somebody/data/alpaca.json", {"path": "gsm8k", "weight": 2.0}],
    "learning_rate": 2e-4,
    "lr_schedule": "cosine",
    "from_scratch": False,
}
SUMMARY: dict[str, Any] = {
    "steps": 1200,
    "stopped": "done",
    "resumed_step": 0,
    "tokens": 2_626_000,
    "resumed_tokens": 0,
    "trained_tokens": 999_000,
    "seconds": 302.4,
    "tokens_per_second": 8684.2,
    "world_size": 1,
    "peak_memory_bytes": 726_122_496,
    "eval_loss": 1.2345,
    "metrics": {"token_accuracy": 0.5},
    "hardware": {"cpu": "A CPU", "accelerators": []},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "effective": {"packed": {"effective": True, "evidence": "0 of 2 | slots <b>were</b> padding"}},
    "seed": 3,
    "corpus_sha256": "ab12",
}
SPAN = {"median": 1.5, "low": 1.4, "high": 1.6}
UNKNOWN = dict.fromkeys(SPAN)
VARIANT = {"techniques": [], "tokens_per_second": UNKNOWN}
REPORT = {
    "schema": 2,
    "title": "t",
    "created": "2026-11-20T14:03:27+00:00",
    "command": "c",
    "hardware": {},
    "versions": {},
    "recipe": {},
    "seed": 0,
    "variants": [
        {**VARIANT, "name": "baseline", "ratio": SPAN, "verdict": "baseline"},
        {**VARIANT, "name": "only packed", "ratio": SPAN, "against": "baseline", "effect": SPAN}
        | {"verdict": "helped", "quality": "worse: eval loss 2.0 → 2.1"},
        {**VARIANT, "name": "only half", "ratio": UNKNOWN, "verdict": "failed: no memory"},
    ],
    "quality": {"margin": 0.01, "verdict": "undecided", "text": "Eval loss 1.24 → 1.23"},
}


def test_it_says_what_the_run_wrote_down() -> None:
    text = card_text(RECIPE, SUMMARY, REPORT, "transformers")
    for said in ("`alpaca.json`, `gsm8k`", "1.2345", "0.5000", "8,684 tokens/s", "failed"):
        assert said in text
    narrow = re.sub(" +", " ", text)
    assert "| only packed | 1.50× [1.40, 1.60] | helped | worse |" in narrow
    assert "somebody" not in text, "paths of a machine are nobody's business"
    assert "| 0 of 2 \\| slots \\<b\\>were\\</b\\> padding |" in narrow
    assert text == card_text(RECIPE, SUMMARY, REPORT, "transformers")


def test_it_has_the_comparison_of_exported_files() -> None:
    rows = [("logits", "rms"), ("written files", "4e-07")]
    narrow = re.sub(" +", " ", card_text(RECIPE, SUMMARY, None, "gguf", rows))
    assert "| written files | 4e-07 |" in narrow
    assert yaml.safe_load(narrow.split("---")[1])["library_name"] == "gguf"


def test_a_run_that_was_resumed_behind_its_last_step_has_a_card_too() -> None:
    resumed = {"resumed_step": 1200, "resumed_tokens": 2_626_000, "tokens_per_second": None}
    text = card_text(RECIPE, {**SUMMARY, **resumed}, None, "transformers")
    since = "5 min 02 s since the resume at step 1,200 (0 steps, 0 tokens)"
    assert f"| time | {since} |" in re.sub(" +", " ", text)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("deepseek-ai/deepseek-llm-7b-base", True),
        *((m, False) for m in ("./base", "/srv/base", "deepseek-llm-tiny")),
    ],
)
def test_the_front_matter_names_a_base_only_where_others_can_find_it(
    model: str, named: bool
) -> None:
    text = card_text({**RECIPE, "model": model}, SUMMARY, None, "peft")
    meta = yaml.safe_load(text.split("---")[1])
    assert (meta.get("base_model") == model) is named
    assert meta["library_name"] == "peft"


def test_a_card_of_somebody_else_stays(tmp_path: Path) -> None:
    assert write_card(tmp_path, RECIPE, SUMMARY)
    assert write_card(tmp_path, RECIPE, SUMMARY, json.loads(json.dumps(REPORT)))
    assert "1.50×" in (tmp_path / CARD).read_text()
    mine = (tmp_path / CARD).read_text().replace(MARK, "my own words")
    (tmp_path / CARD).write_text(mine)
    assert not write_card(tmp_path, RECIPE, SUMMARY)
    assert (tmp_path / CARD).read_text() == mine
    assert [path.name for path in tmp_path.iterdir()] == [CARD]
