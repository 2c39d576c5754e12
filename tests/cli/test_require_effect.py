"""A technique without effect: a warning at the end, or with ``require_effect`` exit code 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from hasten.cli.main import app
from hasten.errors import FAILED
from sample_data import small


def recipe(folder: Path, **changes: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(small(folder, **changes)))
    return str(path)


def call(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


IDLE = [{"gradient_accumulation": {"micro_batch_size": 64}}]  # a step of 8 examples is never cut


def test_a_technique_without_effect_is_a_warning(tmp_path: Path) -> None:
    found = call("train", recipe(tmp_path, plan=IDLE))
    assert found.exit_code == 0
    assert "warning: gradient_accumulation was requested and had no effect" in found.stderr


def test_a_required_effect_that_is_missing_is_exit_code_4_and_the_model_is_saved(
    tmp_path: Path,
) -> None:
    found = call("train", recipe(tmp_path, plan=IDLE, require_effect=True))
    assert found.exit_code == FAILED
    assert (tmp_path / "run" / "model").is_dir()


def test_an_effect_that_is_there_satisfies(tmp_path: Path) -> None:
    found = call("train", recipe(tmp_path, plan=["labelled_token_loss"], require_effect=True))
    assert found.exit_code == 0
    assert "warning" not in found.stderr
