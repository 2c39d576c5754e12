"""``hasten merge``: a LoRA run becomes one model that answers as the adapted one did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hasten.cli.checkpoint import merge
from hasten.errors import InputError
from hasten.models.adapters import merged
from hasten.models.load import load_model, load_tokenizer
from hasten.models.save import save_model
from hasten.models.weights import NumberFormats
from hasten.recipe.build import model_for
from hasten.recipe.schema import load_recipe
from hasten.training.run import train
from sample_data import small

TOKENS = torch.arange(24).reshape(2, 12)


def trained(folder: Path, **changes: Any) -> Path:
    values = {k: v for k, v in small(folder, **changes).items() if v is not None}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    summary = train(load_recipe(path), tell=lambda text: None)
    return Path(summary["saved"]).parent


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"finetuning_type": "lora", "lora_base": "nf4", "lora_rslora": True},
        {"plan": [{"lora": {"rank": 4, "base": "int8"}}], "model": "v3-tiny"},
    ],
    ids=["by its keys", "by its plan"],
)
def test_a_run_merges_into_a_model_that_loads_alone(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, **changes)
    merge(run, None, "adapter")
    out = capsys.readouterr().out
    assert "the base was rounded to" in out
    assert f"saved: {run / 'merged'}" in out
    model = load_model(str(run / "merged"))
    recipe, tokenizer = load_recipe(run / "recipe.yaml"), load_tokenizer(str(run / "merged"))
    base: Any = "nf4" if "lora_base" in changes else "int8"
    expected = merged(model_for(recipe, tokenizer), run / "adapter", base)  # type: ignore[arg-type]
    assert torch.equal(logits(model), logits(expected))
    assert not torch.equal(logits(model), logits(model_for(recipe, tokenizer)))
    with pytest.raises(InputError, match="is the adapter itself"):
        merge(run, run / "adapter", "adapter")
    with pytest.raises(InputError, match="best holds no adapter"):
        merge(run, None, "best")
    shutil.copy(run / "recipe.yaml", run / "merged" / "notes.txt")
    merge(run, run / "again", "adapter")
    assert (run / "again" / "model.safetensors").is_file()


def test_what_is_no_lora_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no recipe\.yaml"):
        merge(tmp_path, None, "adapter")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"lora_rank": 4}, "lora_rank has no effect on all weights"),
        ({"finetuning_type": "lora", "lora_dora": True, "lora_base": "nf4"}, "keep one"),
        ({"finetuning_type": "lora", "lora_base": "int4"}, "lora_base"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**small(tmp_path), **keys}))
    with pytest.raises(InputError, match=said):
        load_recipe(path)


def test_a_merged_model_has_the_format_of_its_base_and_another_base_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trained(tmp_path / "first", max_steps=1)
    base = tmp_path / "base"
    bfloat16 = NumberFormats(torch.bfloat16)
    save_model(
        load_model(str(first / "model")), load_tokenizer(str(first / "model")), base, bfloat16
    )
    run = trained(tmp_path / "lora", model=str(base), finetuning_type="lora", lora_rank=4)
    merge(run, None, "adapter")
    assert "as its base" not in capsys.readouterr().out
    stored = load_file(run / "merged" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    recipe = load_recipe(run / "recipe.yaml")
    expected = merged(model_for(recipe, load_tokenizer(str(base))), run / "adapter")  # type: ignore[arg-type]
    for name, weight in expected.named_parameters():
        assert torch.equal(stored[name], weight.to(torch.bfloat16))
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "some/other"
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    assert merge(run, run / "again", "adapter") == 0
    assert "the adapter names some/other as its base" in capsys.readouterr().out
