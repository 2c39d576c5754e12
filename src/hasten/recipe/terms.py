"""What of a recipe decides the training, beside what every job knows; checkpoints note it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hasten.models.load import read_config
from hasten.recipe.material import Material
from hasten.recipe.schema import Recipe

WORDS = (
    *("from_scratch", "finetuning_type", "learning_rate", "weight_decay"),
    *("adam_betas", "label_smoothing", "z_loss"),
)
# Of a model's config, what says where it came from and not how it computes.
OF_ORIGIN = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")


def words_of(recipe: Recipe) -> dict[str, Any]:
    """As far as the recipe alone says it, before any data is read."""
    lora = {key for key in Recipe.model_fields if key.startswith("lora_")}
    keys = {*WORDS, *(lora if recipe.finetuning_type == "lora" else ())}
    words = recipe.model_dump(mode="json", include=keys)
    return {"model": _name(recipe.model), **words}


def terms_of(recipe: Recipe, material: Material) -> dict[str, Any]:
    """All of it: the model's config and the prepared data by their hashes, too."""
    config = read_config(recipe.model, vocab_size=len(material.tokenizer)).to_diff_dict()
    kept = {key: value for key, value in config.items() if key not in OF_ORIGIN}
    text = json.dumps(kept, sort_keys=True, default=str)
    return {
        **words_of(recipe),
        "model_config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "data": material.identity(),
    }


def _name(model: str) -> str:
    """Of a folder its own name and its parent's: trees may move, and runs/a/model isn't b's."""
    path = Path(model)
    return "/".join(path.resolve().parts[-2:]) if path.is_dir() else model.rstrip("/")
