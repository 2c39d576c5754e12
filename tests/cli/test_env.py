"""``hasten env``, what its file does for other commands, other trainers' flags."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hasten import check_hardware
from hasten.cli.main import run
from hasten.parts.kernels import registry
from hasten.parts.nn import kernel_variants
from sample_data import small
from told import Hasten


def written(path: Path, **values: Any) -> Path:
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    return path


def test_a_bench_s_file_gives_training_an_mfu_that_the_report_repeats(
    tmp_path: Path, hasten: Hasten
) -> None:
    rates = tmp_path / "rates.json"
    code, out, err = hasten("env", "--bench", "--seconds", 1, "-o", rates)
    assert code == 0, err
    assert "ceiling" in out
    assert "TFLOP/s" in out
    bests = [product["best"] for product in json.loads(rates.read_text())["products"]]
    assert bests
    path = written(tmp_path / "r.yaml", **small(tmp_path, ceiling=str(rates), device="cpu"))
    code, out, err = hasten("train", path)
    assert code == 0, err
    assert "MFU " in err
    assert "active experts, causal attention" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    # Of the ceiling as it was measured, whatever else the machine did then and does now.
    ceilings = {step["model_flops"] / step["step_seconds"] / step["mfu"] for step in steps}
    assert any(all(c == pytest.approx(best) for c in ceilings) for best in bests)
    mfus = [step["mfu"] for step in steps]
    assert 0 < min(mfus) <= summary["mfu"] <= max(mfus)
    code, out, _ = hasten("report", tmp_path / "run")
    assert f"{summary['mfu']:.1%}" in out
    code, out, _ = hasten("check", path)
    assert "MFU of" in out


def test_bench_shows_what_kernels_gain_and_what_is_wrong_and_measures_again_when_asked(
    hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    usual = registry.figures_here()
    wrong = {kernel_variants.PASS_HALF.key: registry.Verdict(0.5, 0.2)}

    def figures(device: str, fresh: bool) -> registry.DeviceFigures:
        asked.append(fresh)
        return replace(usual, proofs={**usual.proofs, **wrong})

    monkeypatch.setattr(registry, "figures_here", figures)
    code, out, err = hasten("env", "--bench", "--seconds", 0)
    assert (code, err) == (0, "")
    assert "2.40× [2.40, 2.40]" in out
    assert "training pass: torch, bf16: its result is wrong: the largest error" in out
    assert "it is left out of plans" in " ".join(out.split())
    assert "ceiling" not in out
    assert hasten("env", "--bench", "--seconds", 0, "--fresh")[0] == 0
    assert asked == [False, True]
    code, _, err = hasten("env", "--bench", "--seconds", 0, "-o", "rates.json")
    assert code == 2
    assert "or 0 without --output for kernels only" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0.5"], "--seconds is 0.5"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--output", "/nowhere/at/all.json"], "can't be written"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_measured(
    words: list[str], message: str, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.machine.benchmark.measure", lambda *a: pytest.fail("measured"))
    code, out, err = hasten("env", "--bench", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


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
