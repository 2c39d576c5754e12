"""Whole runs of preference training: pairs in, metrics and a model out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from hasten.core.setup import Session
from hasten.errors import InputError, StoppedError
from hasten.models.load import as_reward_model, load_tokenizer
from hasten.parts.nn.preference import PreferenceLoss
from hasten.recipe.build import model_for
from hasten.recipe.schema import Recipe
from hasten.release.export import Export, export
from hasten.release.trained_model import load_run
from hasten.training.run import train
from sample_data import small
from told import json_lines

PLAN = ["packed", "document_attention", "labelled_token_loss", "fused_layers"]


def pairs_file(folder: Path, count: int = 48) -> str:
    """Sums with a right and a wrong answer."""
    path = folder / "pairs.jsonl"
    rows = [
        {
            "prompt": f"Add {i} and {i * 7 % 11}.",
            "chosen": f"The sum is {i + i * 7 % 11}, as asked.",
            "rejected": f"It is {i}.",
        }
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    values = small(folder, model="deepseek-llm-tiny", stage="dpo", dataset=pairs_file(folder))
    common = {"plan": PLAN, "max_steps": 4, "global_batch_size": 8, "eval_data": 6}
    return Recipe(
        **{**values, **common, "learning_rate": 1e-3, "lr_schedule": "constant", **changes}
    )


def run(recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    return train(recipe, tell=lines.append), lines


def test_dpo_begins_at_ln_2_and_prefers_the_chosen_answers(tmp_path: Path) -> None:
    summary, lines = run(recipe_of(tmp_path, max_steps=12))
    steps = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert summary["eval_loss"] < 0.5
    assert summary["metrics"]["reward_accuracy"] == 1.0
    assert summary["perplexity"] is None
    assert all(proof["effective"] for proof in summary["effective"].values())
    assert sum(line.startswith("reference:") for line in lines) == 1


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    saves = {"checkpoint_every": 2, "epochs": 2, "max_steps": None}
    whole = tmp_path / "whole"
    whole.mkdir()
    run(recipe_of(whole, **saves))
    parts = tmp_path / "parts"
    parts.mkdir()
    run(recipe_of(parts, checkpoint_every=2, epochs=2, max_steps=4))
    _, lines = run(recipe_of(parts, resume="auto", **saves))
    told = [line for line in lines if line.startswith("reference:")]
    assert told == ["reference: log-probabilities of 10 pairs, once"]  # 32 are in the first's file
    expected, resumed = (
        [line["loss"] for line in json_lines(folder / "run" / "metrics.jsonl")]
        for folder in (whole, parts)
    )
    assert len(expected) == 12
    assert resumed[-8:] == expected[4:]


@pytest.mark.parametrize("stage", ["orpo", "simpo", "kto"])
def test_other_stages_lower_their_loss(stage: str, tmp_path: Path) -> None:
    summary, _ = run(recipe_of(tmp_path, stage=stage, max_steps=10, epochs=None))
    first = json_lines(tmp_path / "run" / "metrics.jsonl")[0]["loss"]
    assert summary["training_loss"] < first


def test_a_reward_model_opens_in_transformers(tmp_path: Path) -> None:
    plan = ["packed", "document_attention"]
    summary, _ = run(recipe_of(tmp_path, stage="rm", max_steps=12, plan=plan))
    assert summary["metrics"]["reward_accuracy"] == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.num_labels == 1
    assert not summary["unsaved"]


def test_another_reference_makes_another_loss(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    run(recipe_of(first, max_steps=6))
    second = tmp_path / "second"
    second.mkdir()
    model = str(first / "run" / "model")
    summary, _ = run(recipe_of(second, model=model, reference=model, max_steps=1))
    loss = json_lines(second / "run" / "metrics.jsonl")[0]["loss"]
    assert loss == pytest.approx(math.log(2), abs=1e-4)
    assert summary["steps"] == 1


def test_a_policy_that_differs_from_its_reference_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = PreferenceLoss.forward

    def wrong(self: Any, *args: Any, log_probs: bool = False, **inputs: Any) -> Any:
        sums, counts = usual(self, *args, log_probs=log_probs, **inputs)
        if log_probs:  # the rejected answers' sums are wrong by 3
            sums = sums.clone()
            sums[:, 1] += 3
        return sums, counts

    monkeypatch.setattr(PreferenceLoss, "forward", wrong)
    with pytest.raises(StoppedError, match=r"the first loss is .* and must be 0.693147"):
        run(recipe_of(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": "sft", "preference": {"beta": 0.2}}, "preference has no effect with stage: sft"),
        ({"preference": {"loss": "kto"}}, "isn't a loss of stage: dpo"),
        ({"label_smoothing": 0.1}, "label_smoothing is of stage: sft"),
        ({"stage": "orpo", "reference": "x"}, "reference has no effect with stage: orpo"),
        ({"too_long": "split"}, "split can't cut pairs"),
        ({"preference": {"gamma": 0.7}}, "the loss sigmoid has no gamma"),
        ({"preference": {"centre": 0.1}}, "the loss sigmoid has no centre"),
        ({"preference": {"label_smoothing": 0.1}}, "cdpo and robust have it"),
        ({"stage": "rm", "preference": {"beta": 0.5}}, "the loss bradley_terry has no beta"),
        ({"stage": "kto", "preference": {"sft_weight": 1.0}}, "the loss kto has no sft_weight"),
        ({"preference": {"ld_alpha": 0.3, "sft_weight": 0.5}}, "ld_alpha scales"),
    ],
)
def test_keys_that_do_not_fit_the_stage_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_of(tmp_path, **changes)


def test_an_adapter_of_a_reward_model_opens_in_peft_with_its_score(tmp_path: Path) -> None:
    sessions: list[Session] = []
    recipe = recipe_of(tmp_path, stage="rm", finetuning_type="lora", plan=PLAN[:2], max_steps=3)
    train(recipe, tell=lambda text: None, on_start=sessions.append)
    ids = torch.arange(3, 30).unsqueeze(0)
    trained: Any = sessions[0].model.eval()
    start = trained.get_base_model().score.original_module.weight
    assert not torch.equal(trained.get_base_model().score.weight, start)
    base = as_reward_model(model_for(recipe, load_tokenizer(str(tmp_path / "run" / "adapter"))), 9)
    opened = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")).eval()
    with torch.no_grad():
        expected, found = (model(input_ids=ids).logits for model in (trained, opened))
    torch.testing.assert_close(found, expected)
    for use in (load_run, lambda run: export(Export(run, tmp_path / "out"))):
        with pytest.raises(InputError, match=r"reward model .*AutoModelForSequenceClassification"):
            use(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("nothing/here", "", "nothing/here is no folder"),
        ("other", "adapter_config.json", "other holds an adapter, .* hasten export"),
        ("other", "README.md", "other has no config.json"),
    ],
)
def test_a_reference_that_is_no_model_is_refused_before_data_is_read(
    name: str, file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if file:
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    with pytest.raises(InputError, match=f"^reference: .*{message}"):
        run(recipe_of(tmp_path, reference=name))
    assert not (tmp_path / "run" / "data").exists()


def test_an_adapter_learns_against_the_model_without_it(tmp_path: Path) -> None:
    sessions: list[Session] = []
    recipe = recipe_of(tmp_path, finetuning_type="lora", max_steps=10)
    summary = train(recipe, tell=lambda text: None, on_start=sessions.append)
    steps = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert summary["training_loss"] < steps[0]["loss"]
