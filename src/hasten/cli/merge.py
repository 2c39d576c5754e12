"""``hasten merge``: a LoRA run's adapter added into the full weights, as one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.models.adapters import merged
from hasten.models.load import load_tokenizer
from hasten.models.save import save_model
from hasten.recipe.build import model_for, requested_plan
from hasten.recipe.schema import Recipe, load_recipe
from hasten.report.card import write_card
from hasten.techniques.adapter import LoRA


def merge(run: Path, to: Path | None, adapter: str) -> None:
    """Build the run's base again, add the adapter, save; the run itself stays as it is."""
    source, target = run / adapter, to or run / "merged"
    if not (run / "recipe.yaml").is_file():
        raise InputError(f"{run} holds no recipe.yaml; give the folder of a finished LoRA run")
    if not (source / "adapter_config.json").is_file():
        raise InputError(
            f"{source} holds no adapter; a run without LoRA saves full weights already"
        )
    if target.resolve() == source.resolve():
        raise InputError(f"{target} is the adapter itself; choose another folder for the model")
    recipe = load_recipe(run / "recipe.yaml")
    tokenizer = load_tokenizer(str(source))
    model: Any = model_for(recipe, tokenizer)
    base = _lora_of(recipe).base
    save_model(merged(model, source, base), tokenizer, target)
    if base:
        print(f"the base was rounded to {base}, as it was while the adapter learned")
    if (run / "summary.json").is_file():
        summary = json.loads((run / "summary.json").read_text())
        write_card(target, recipe.model_dump(mode="json"), summary)
    print(f"saved: {target}")


def _lora_of(recipe: Recipe) -> LoRA:
    """The run's LoRA, from the recipe's own keys or from its plan."""
    planned = [t for t in requested_plan(recipe) if isinstance(t, LoRA)]
    return planned[0] if planned else LoRA(base=recipe.lora_base)
