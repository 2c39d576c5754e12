"""What a run leaves of its model: weights in the form that others load, averages, samples.

All ranks call these functions: where a layout has dealt the model out, each brings its part, and
the first rank writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hasten.core.session import Session
from hasten.models.adapters import adapted_table
from hasten.models.save import save_adapter, save_model
from hasten.recipe.prepared_data import Material
from hasten.recipe.sample import Sample, write_samples


def form(session: Session) -> str:
    """What is saved, as its folder is called: a model, or the adapter alone."""
    return "adapter" if adapted_table(session.model) else "model"


def save_weights(session: Session, material: Material, folder: Path) -> None:
    """The model as it is now, or its adapter, in the format that Transformers and PEFT load."""
    with session.setup.layout.gather(session.model):
        if session.setup.facts.world.is_main:
            _write(session.model, material, folder)


def save_all(session: Session, material: Material, output: Path) -> Sequence[Sample]:
    """Every version of the weights that AVERAGE has; then what the model writes, on rank 0."""
    for suffix in session.versions():
        save_weights(session, material, output / f"{form(session)}{suffix}")
    if session.leaving:  # samples take long on a large model
        return []
    with session.setup.layout.gather(session.model):
        if session.setup.facts.world.is_main:
            return write_samples(session, material.tokenizer, material.held_out)
    return []


def _write(model: nn.Module, material: Material, folder: Path) -> None:
    any_model: Any = model
    if adapted_table(model):
        save_adapter(any_model, material.tokenizer, folder)
    else:
        save_model(any_model, material.tokenizer, folder)
