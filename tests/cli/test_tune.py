"""``hasten tune``: what it refuses before any work, each with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hasten.cli.main import app
from hasten.errors import InputError

RECIPE = """
model: deepseek-llm-tiny
dataset: stdlib
max_steps: 4
max_records: 40
cutoff_len: 64
vocabulary: 512
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tune")  # the data is prepared once


def tuned(folder: Path, *options: str) -> BaseException | None:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE + f"output: {folder / 'out'}\n")
    return CliRunner().invoke(app, ["tune", str(path), *options]).exception


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--budget", "a while"), "budget: can't read 'a while'"),
        (("--only", "packt"), "neither a technique nor a slot"),
        (("--json", "/nowhere/study.json"), "name a file in an existing folder"),
        (("--output", "/nowhere/tuned.yaml"), "name a file in an existing folder"),
        (("--objective", "money"), "give price in the recipe"),
        (("--budget", "1s"), "is too short"),
        (("--study", "learning", "nproc=2"), "set nproc: 1"),
        (("--study", "learning", "--lossy"), "--lossy is of the study of speed"),
        (("--study", "learning", "--sampler", "tpe"), "--sampler is of the study of speed"),
        (("--study", "learning", "--seeds", "5"), "--seeds is of the study of speed"),
        (("--study", "learning", "--only", "precision"), "no 'precision' to learn"),
        (("--study", "learning", "--trials", "1"), "one other are 2"),
        (("--study", "learning", "held_out=0"), "hold some records out"),
        (("--study", "learning", "max_steps=2"), "too few to study"),
    ],
)
def test_what_can_not_be_is_refused_with_a_sentence(
    options: tuple[str, ...], said: str, folder: Path
) -> None:
    error = tuned(folder, *options)
    assert isinstance(error, InputError)
    assert said in str(error)


def test_an_unknown_sampler_is_refused_by_the_command_line() -> None:
    found = CliRunner().invoke(app, ["tune", "recipe.yaml", "--sampler", "best"])
    assert found.exit_code == 2
