"""A recipe with ``automatic`` on two hosts with a slow link between them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from netlab import lab_with_links
from sample_data import small

STEPS = 20  # two to begin with, four on the clock, twelve in turns


def chosen(folder: Path, rate: str) -> tuple[list[Any], dict[str, Any]]:
    """The results of both ranks, and rank 0's summary."""
    recipe = folder / "recipe.yaml"
    wanted = small(folder, plan=["automatic"], max_steps=STEPS, held_out=0)
    recipe.write_text(yaml.safe_dump(wanted))
    command = [sys.executable, "-W", "ignore", "-m", "hasten", "train", str(recipe)]
    with lab_with_links(hosts=2, ranks=1, rate=rate) as lab:
        results = lab.run(command, seconds=200)
    assert [r.code for r in results] == [0, 0], [r.output for r in results]
    return results, json.loads((folder / "run" / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.timing
def test_a_codec_is_kept_on_a_slow_link_once_a_trial_has_confirmed_it(tmp_path: Path) -> None:
    _, summary = chosen(tmp_path, "40mbit")
    proof = summary["acted"]["automatic"]
    assert proof["acted"]
    assert "between hosts is foretold to save" in proof["evidence"]
    assert "tried in turns over 12 steps it saved" in proof["evidence"]
    assert ": kept;" in proof["evidence"]
    assert summary["steps"] == STEPS
