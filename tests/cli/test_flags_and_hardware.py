"""Another trainer's flags are named with what to do; ``check_hardware`` prints and returns."""

from __future__ import annotations

import sys

import pytest

from hasten import check_hardware
from hasten.cli.main import run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--model_name_or_path", "m", "--deepspeed=d.json"],
            "(--model_name_or_path, --deepspeed)",
        ),
        (["recipe.yaml", "--output_dir=out"], "(--output_dir)"),
    ],
)
def test_flags_of_another_trainer_become_a_recipe_by_import(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["hasten", "train", *words])
    with pytest.raises(SystemExit) as left:
        run()
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert f"look like another trainer's flags {said}" in error
    assert "`hasten import` it" in error


def test_a_slip_in_a_flag_of_its_own_is_left_to_the_parser(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hasten", "train", "recipe.yaml", "--choose_only"])
    with pytest.raises(SystemExit):
        run()
    assert "another trainer" not in capsys.readouterr().err


def test_the_hardware_is_printed_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    found = check_hardware()
    lines = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " " in line
    )
    assert lines["CPU"].strip() == found["cpu"]
    assert f"{found['usable_cores']} usable" in lines["cores"]
    assert found["accelerators"] or lines["GPUs"].startswith("none")
    assert found["disk_speed"] is None
    assert found["versions"]["torch"]
