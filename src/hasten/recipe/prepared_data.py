"""Prepares the data of a recipe with ``hasten.data.prepared``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hasten.data.prepared import (
    DataSettings,
    OnProgress,
    PreparedData,
    advice_on_template,
    all_advice,
    prepare,
    stored,
)
from hasten.data.selection import SourceSettings, Tell
from hasten.data.sources import entry_of
from hasten.machine import host
from hasten.models.load import fitting_tokenizer, load_tokenizer, model_type, stop_tokens
from hasten.models.presets import PRESETS
from hasten.recipe.schema import Recipe

TAKEN_OVER = (
    *("columns", "eval_data", "max_examples", "max_rejected", "cutoff_len", "too_long"),
    *("chat_template", "loss_on", "vocabulary", "seed", "stage"),
)


def settings_of(recipe: Recipe) -> DataSettings:
    """Returns the recipe's settings for its data."""
    tokenizer = recipe.tokenizer or recipe.model
    workers = recipe.data_workers
    return DataSettings(
        **{name: getattr(recipe, name) for name in TAKEN_OVER},
        sources=[SourceSettings(**source.model_dump()) for source in recipe.datasets],
        workers=host.usable_cores() if workers == "auto" else workers,
        recorded=recipe.model_dump(include={*TAKEN_OVER, "model", "tokenizer", "dataset"}),
        output=Path(recipe.output),
        model=tokenizer,
        base_tokenizer=None
        if tokenizer in PRESETS
        else partial(fitting_tokenizer, tokenizer, recipe.model, from_scratch=recipe.from_scratch),
        saved_tokenizer=load_tokenizer,
        model_type=partial(model_type, recipe.model),
    )


def prepare_data(
    recipe: Recipe,
    folder: Path,
    tell: Tell = lambda text: None,
    on_progress: OnProgress | None = None,
) -> PreparedData:
    """Opens the recipe's prepared data in ``folder``, or prepares it there first.

    Raises:
        InputError: a missing or unusable file, too many rejected examples, nothing to train on,
            or a link instead of the folder.
    """
    return prepare(settings_of(recipe), folder, tell, on_progress)


def stored_data(recipe: Recipe, folder: Path) -> PreparedData | None:
    """Returns the data that a run has prepared in ``folder``, even if its files have changed.

    Returns None if the prepared data doesn't exist.
    """
    return stored(settings_of(recipe), folder)


def template_advice(recipe: Recipe, prepared_data: PreparedData) -> list[str]:
    """Returns a sentence for each cause of missing stop tokens, and for untrained tokens."""
    return advice_on_template(prepared_data, recipe.chat_template, _base_stops(recipe))


def advice_on(recipe: Recipe, prepared_data: PreparedData) -> list[str]:
    """Returns the sentences on the data that a user should read before the training."""
    return all_advice(prepared_data, recipe.chat_template, _base_stops(recipe))


def _base_stops(recipe: Recipe) -> Sequence[int]:
    return stop_tokens(recipe.model) if recipe.finetuning_type == "lora" else ()


def data_files(recipe: Recipe) -> list[Path]:
    """Returns the existing files and folders of the data sets, in the recipe's order."""
    paths = []
    for name in settings_of(recipe).names():
        entry = entry_of(name, recipe.stage)
        paths.append(Path(str(entry[0])) if entry else Path(name))
    return [path for path in paths if path.exists()]
