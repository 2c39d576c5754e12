"""Finished runs that the tests of this package share."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hasten.recipe.schema import load_recipe
from hasten.training.run import train
from sample_data import small


def trained(folder: Path, **changes: object) -> Path:
    """The folder of a finished run."""
    values = {k: v for k, v in small(folder, **changes).items() if v is not None}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return Path(train(load_recipe(path), tell=lambda text: None)["saved"]).parent


@pytest.fixture(scope="session")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="session")
def lora_run(tmp_path_factory: pytest.TempPathFactory, full_run: Path) -> Path:
    model = str(full_run / "model")
    return trained(
        tmp_path_factory.mktemp("lora"), model=model, tokenizer=None, finetuning_type="lora"
    )
