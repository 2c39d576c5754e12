"""The data of a recipe: its settings for ``data.prepared``, the one way into that package."""

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
    *("chat_template", "loss_on", "vocabulary", "seed"),
)


def settings_of(recipe: Recipe) -> DataSettings:
    """The recipe's keys that decide its data."""
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
    """The data that a run has prepared in ``folder``, whatever its files are now; None if gone."""
    return stored(settings_of(recipe), folder)


def template_advice(recipe: Recipe, data: PreparedData) -> list[str]:
    """A sentence for each cause of a model that doesn't stop, and for what isn't trained."""
    return advice_on_template(data, recipe.chat_template, _base_stops(recipe))


def advice_on(recipe: Recipe, data: PreparedData) -> list[str]:
    """Every sentence on the data that a user should read before anything is trained."""
    return all_advice(data, recipe.chat_template, _base_stops(recipe))


def _base_stops(recipe: Recipe) -> Sequence[int]:
    return stop_tokens(recipe.model) if recipe.finetuning_type == "lora" else ()


def data_files(recipe: Recipe) -> list[Path]:
    """Files and folders, in the recipe's order; embedded corpora and names on a hub have none."""
    paths = []
    for name in settings_of(recipe).names():
        entry = entry_of(name)
        paths.append(Path(str(entry[0])) if entry else Path(name))
    return [path for path in paths if path.exists()]
