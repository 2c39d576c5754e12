"""``hasten check`` on data: what each file was taken for, how many examples are too long."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hasten.cli.check import check


def test_files_with_their_containers_and_long_records_have_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("question,answer\n" + "why,because of it\n" * 9)
    recipe = {"model": "v3-tiny", "dataset": str(tmp_path / "a.csv"), "vocabulary": 300}
    recipe |= {"eval_data": 0, "max_steps": 1, "output": str(tmp_path / "out")}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    for cut, said in ((2048, 0), (20, 1)):
        check(path, [f"cutoff_len={cut}"])
        out = capsys.readouterr().out
        assert f"ok   files        {tmp_path / 'a.csv'} (csv): question\n" in out
        assert out.count("9 examples are longer than cutoff_len=20 (too_long: truncate)") == said
