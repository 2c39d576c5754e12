"""``hasten check`` on kernels: one line, which never fails the check."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hasten.cli.check import check
from hasten.parts.kernels import build


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "a.csv").write_text("question,answer\n" + "why,because of it\n" * 9)
    settings = {"model": "v3-tiny", "dataset": str(tmp_path / "a.csv"), "vocabulary": 300}
    settings |= {"eval_data": 0, "max_steps": 1, "output": str(tmp_path / "out")}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def kernels_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " kernels " in line]
    return line


def test_kernels_have_a_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(recipe, []) == 0
    line = kernels_line(capsys)
    assert line.startswith("ok   kernels      rows: ")
    assert ", products: compiled" in line
    assert ", codec: " in line


def test_without_a_compiler_the_line_says_why_and_a_plan_without_them_is_fine(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("c++-that-is-nowhere",))
    build.build_library.cache_clear()
    try:
        assert check(recipe, []) == 0
        assert "rows: no C++ compiler was found" in kernels_line(capsys)
        assert check(recipe, ["plan=[fused_layers]"]) == 2
        assert "FAIL fused_layers no C++ compiler was found" in capsys.readouterr().out
    finally:
        build.build_library.cache_clear()
