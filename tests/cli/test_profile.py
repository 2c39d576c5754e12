"""``hasten profile``."""

from __future__ import annotations

import json
from pathlib import Path

from sample_data import small_recipe
from told import Hasten


def test_a_profile_leaves_three_files_and_an_earlier_run_as_it_was(
    tmp_path: Path, hasten: Hasten
) -> None:
    output = tmp_path / "run"
    plan = ["packed", "labelled_token_loss", {"checkpoints": {"interval": 1}}]
    path = small_recipe(tmp_path, plan=plan)
    code, out, err = hasten("train", path)
    assert code == 0, err
    assert "data stall" in out
    assert "spread" in out
    summary = json.loads((output / "summary.json").read_text())
    assert summary["step_parts"]["forward"] > 0
    assert 0 <= summary["data_stall_share"] < 1
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    parts = ("data_seconds", "passes_seconds", "optimizer_seconds")
    shares = [sum(line[part] for part in parts) / line["step_seconds"] for line in lines]
    assert 0.5 < max(shares) <= 1  # a busy machine may pause between two parts, but not each time
    before = {p: p.stat().st_mtime_ns for p in output.rglob("*") if "data" not in p.parts}
    code, out, err = hasten("profile", path, "--steps", 2)
    assert code == 0, err
    assert "Where a step's time goes" in out
    assert "between steps" in out
    after = {p: p.stat().st_mtime_ns for p in output.rglob("*") if "data" not in p.parts}
    made = {p.name for p in after.keys() - before.keys()}
    assert made == {"profile.json", "profile.html", "trace.json.gz"}
    assert {p: at for p, at in after.items() if p in before and p.is_file()} == {
        p: at for p, at in before.items() if p.is_file()
    }


def test_the_json_is_that_of_the_file_and_the_plan_is_the_users(
    tmp_path: Path, hasten: Hasten
) -> None:
    path, place = small_recipe(tmp_path), tmp_path / "elsewhere"
    words = ["profile", path, "plan=[packed]", "--steps", 1, "--output", place, "--json"]
    code, out, err = hasten(*words)
    assert code == 0, err
    found = json.loads(out)
    assert found == json.loads((place / "profile.json").read_text())
    assert [technique["technique"] for technique in found["plan"]] == ["packed"]
    assert found["padding_share"] == 0
    assert not (tmp_path / "run").exists()
