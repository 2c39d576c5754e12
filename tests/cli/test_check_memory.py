"""``hasten check`` tells what a rank needs, and refuses what can't fit, with what would."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.cli.check import check
from hasten.recipe import memory_check
from hasten.recipe.schema import Recipe
from sample_data import small


@pytest.mark.parametrize(
    ("room", "code", "said"),
    [
        (64e9, 0, "ok   memory       about "),
        (0.71e9, 0, "it may run out: "),
        (0.5e9, 2, "FAIL memory       memory: weights, gradients and optimizer of"),
        (0.695e9, 2, "finetuning_type: lora"),
    ],
)
def test_memory_has_a_row_and_what_can_not_fit_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    room: float,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(memory_check, "room_of", lambda known: room)
    path = tmp_path / "recipe.yaml"
    path.write_text(Recipe(**small(tmp_path, plan="auto")).to_yaml())
    assert check(path, []) == code
    found = capsys.readouterr().out
    assert said in found
    assert "plan         auto, which begins with" in found


def test_a_batch_with_fewer_examples_than_ranks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(Recipe(**small(tmp_path, nproc=2, global_batch_size=1)).to_yaml())
    assert check(path, []) == 2
    found = capsys.readouterr().out
    assert "FAIL batch        global_batch_size: 1 examples a step are too few for 2 ranks" in found
    assert "give at least global_batch_size: 2" in found
