"""``hasten tune``: what it refuses before any work, each with one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hasten.cli.main import app
from hasten.cli.tune import objections, show
from hasten.errors import InputError
from hasten.recipe.price import Price

RECIPE = """
model: deepseek-llm-tiny
dataset: stdlib
max_steps: 4
max_examples: 40
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
        (("--budget", "1s"), "is too short"),
    ],
)
def test_what_can_not_be_is_refused_with_a_sentence(
    options: tuple[str, ...], said: str, folder: Path
) -> None:
    error = tuned(folder, *options)
    assert isinstance(error, InputError)
    assert said in str(error)


@pytest.mark.parametrize(
    ("verdict", "fidelity", "stays"),
    [
        ("not worse", "LOSSY", True),
        ("equal", "ROUNDING", True),
        ("undecided", "EXACT", True),  # the plan doesn't repeat its own bits
        ("undecided", "LOSSY", False),  # too few seeds to tell: that is no proof
        ("worse", "LOSSY", False),
        ("not tested", "LOSSY", False),
        ("differs", "ROUNDING", False),
    ],
)
def test_a_winner_stays_if_every_proof_that_it_owes_was_made(
    verdict: str, fidelity: str, stays: bool
) -> None:
    row = {"technique": "float8", "verdict": verdict, "fidelity": fidelity, "text": "why"}
    found = objections({"invariance": [], "verification": [row]})
    assert found == ([] if stays else ["float8: why"])


def test_the_price_of_a_million_tokens_is_that_of_all_devices_and_of_spot_hours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    price = Price(
        currency="EUR", per_device_hour=3.0, spot_per_device_hour=1.0, spot_share=0.5, devices=None
    )
    report = {
        "final_comparison": None,
        "winner": {"ratio": {"median": 2.0}},
        "start": {"rate": 1000.0},
        "objective": "money",
        "seconds": 60.0,
        "budget_seconds": 90.0,
    }
    found: Any = SimpleNamespace(report=report)
    show(found, price, devices=4)
    # 1,000 s of four devices at 2 EUR an hour on the mean
    assert "a million tokens: 2.222 EUR before, 1.111 after" in capsys.readouterr().out


def test_an_unknown_sampler_is_refused_by_the_command_line() -> None:
    found = CliRunner().invoke(app, ["tune", "recipe.yaml", "--sampler", "best"])
    assert found.exit_code == 2
