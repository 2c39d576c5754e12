"""``hasten card`` after a run: the cards are there, and an experiment's findings join."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hasten.cli.report import card
from hasten.errors import InputError
from hasten.recipe.schema import Recipe
from hasten.report.card import card_text
from hasten.training.run import train
from sample_data import small


def test_a_run_writes_its_models_card_and_findings_join_it_later(tmp_path: Path) -> None:
    train(Recipe(**small(tmp_path, plan=["packed", "weight_average"])), tell=lambda text: None)
    run, report = tmp_path / "run", tmp_path / "report.json"
    cards = [run / name / "README.md" for name in ("model", "model_average")]
    for place in cards:
        assert "| `packed` " in place.read_text()
        assert "\nA language model trained from `" in place.read_text()
    summary = json.loads((run / "summary.json").read_text())
    of_adapter = card_text(Recipe(**small(tmp_path)).model_dump(mode="json"), summary, None, True)
    assert "\nAn adapter (LoRA) for `" in of_adapter
    report.write_text((Path(__file__).parents[1] / "report/data/report_full.json").read_text())
    card(run, report)
    for place in cards:
        narrow = re.sub(" +", " ", place.read_text())
        assert "| only fused_layers | 1.07× [1.06, 1.08] | helped | not worse |" in narrow
    cards[1].write_text("mine")
    with pytest.raises(InputError, match="somebody else"):
        card(run, None)
    assert cards[1].read_text() == "mine"


def test_what_is_no_run_or_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="finished run"):
        card(tmp_path, None)
    (tmp_path / "recipe.yaml").write_text(Recipe(**small(tmp_path)).to_yaml())
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(InputError, match="holds no object"):
        card(tmp_path, tmp_path / "report.json")
