"""A finished run instead of a model: predicted against measured, by ``estimate`` and ``report``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Hasten = Callable[..., tuple[int, str, str]]
TERMS = ("step", "rate of a device", "peak memory", "passes", "optimizer", "waiting for data")


def a_run(folder: Path, *accelerators: str, world: int = 8, seconds: float = 2.0) -> Path:
    """The folder that eight ranks of a launched run leave."""
    folder.mkdir()
    recipe = "model: deepseek-llm-7b\ncutoff_len: 4096\nnproc: 1\nplan: [autocast]\n"
    (folder / "recipe.yaml").write_text(recipe)
    line = {"step_seconds": seconds, "positions": 4096 * world, "peak_memory_bytes": 60e9}
    parts = {"passes_seconds": 1.8, "optimizer_seconds": 0.1, "data_seconds": 0.0}
    (folder / "metrics.jsonl").write_text((json.dumps({**line, **parts}) + "\n") * 20)
    chips = [{"name": name, "memory_bytes": 80e9, "capability": "9.0"} for name in accelerators]
    summary: dict[str, Any] = {
        "steps": 20,
        "stopped": "done",
        "tokens": 1,
        "trained_tokens": 1,
        "seconds": 40.0,
        "tokens_per_second": 1.0,
        "step_seconds_median": 2.0,
        "peak_memory_bytes": 1,
        "eval_loss": None,
        "world_size": world,
        "saved": "x",
        "hardware": {"accelerators": chips, "memory_limit_bytes": 24e9},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"])
def test_a_run_on_known_gpus_is_predicted_and_measured_term_by_term(
    hasten: Hasten, tmp_path: Path, name: str
) -> None:
    run = a_run(tmp_path / "run", *[name] * 8)
    for command in ("estimate", "report"):
        code, out, err = hasten(command, run)
        assert code == 0, err
        rows = [line for line in out.splitlines() if line.startswith(TERMS)]
        assert [row.split("  ")[0] for row in rows][-6:] == list(TERMS)
        assert "dp=8" in out  # the ranks that ran, not the recipe's nproc
        assert "fitted to published measurements" in out


def test_the_ratio_follows_what_was_measured(hasten: Hasten, tmp_path: Path) -> None:
    ratios = []
    for number, seconds in enumerate((2.0, 4.0)):
        run = a_run(tmp_path / str(number), *["NVIDIA H100 80GB HBM3"] * 8, seconds=seconds)
        out = hasten("estimate", run)[1]
        row = next(line for line in out.splitlines() if line.startswith("step "))
        ratios.append(float(row.split()[5]))
    assert ratios[1] == pytest.approx(2 * ratios[0], rel=0.02)


def test_a_processor_s_rates_are_asked_for(hasten: Hasten, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", world=1)
    code, _, err = hasten("estimate", run)
    assert code == 2
    assert "hasten env --bench -o" in err
    code, out, _ = hasten("report", run)
    assert code == 0
    assert "predicted against measured: " in out


def test_an_unknown_gpu_is_named_and_the_report_stands(hasten: Hasten, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "Sigma 9000")
    code, _, err = hasten("estimate", run)
    assert code == 2
    assert "Sigma 9000" in err
    assert hasten("report", run)[0] == 0


def test_a_run_takes_no_changes(hasten: Hasten, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", *["NVIDIA H100 80GB HBM3"])
    code, _, err = hasten("estimate", run, "max_steps=3")
    assert code == 2
    assert "a run that is over" in err


def test_a_run_on_several_hosts_is_asked_how_they_are_wired(hasten: Hasten, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", *["NVIDIA H100 80GB HBM3"] * 8, world=16)
    code, _, err = hasten("estimate", run)
    assert code == 2
    assert "--cluster fat_tree" in err
    told = ("--gpu", "h100", "--cluster", "ethernet", "--nodes", 2)
    slow = hasten("estimate", run, *told)[1]
    fast = hasten("estimate", run, *told[:2], "--cluster", "fat_tree", "--nodes", 2)[1]
    seconds = [float(out.split("step ")[1].split()[0]) for out in (slow, fast)]
    assert seconds[0] > 1.5 * seconds[1]


def test_a_model_that_was_dealt_out_is_not_predicted_as_if_it_were_replicated(
    hasten: Hasten, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run", *["NVIDIA H100 80GB HBM3"] * 8)
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(
        text.replace("[autocast]", "[autocast, pipeline: {stages: 2}]")
    )
    code, _, err = hasten("estimate", run)
    assert code == 2
    assert "(pipeline)" in err
    (run / "recipe.yaml").write_text(text.replace("[autocast]", "[autocast, fsdp2]"))
    assert "zero=3" in hasten("estimate", run)[1]


def test_an_experiment_s_page_has_the_run_of_its_folder_too(hasten: Hasten, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", *["NVIDIA H100 80GB HBM3"] * 8)
    one = {"median": 1.0, "low": 1.0, "high": 1.0}
    variant = {"name": "baseline", "techniques": [], "tokens_per_second": one, "ratio": one}
    report = {"schema": 2, "title": "t", "created": "2026-11-21T00:00:00+00:00", "command": "c"}
    report |= {
        "variants": [{**variant, "verdict": "baseline"}],
        "recipe": {"model": "m"},
        "seed": 0,
    }
    report |= {"hardware": {}, "versions": {}}
    (run / "report.json").write_text(json.dumps(report))
    code, _, err = hasten("report", run)
    assert code == 0, err
    page = (run / "report.html").read_text()
    assert "Predicted and measured" in page
    rows = json.loads((run / "report.json").read_text())["predicted"]["rows"]
    assert tuple(row["name"] for row in rows) == TERMS
    assert [row["within"] is None for row in rows] == [False] * 3 + [True] * 3
    (run / "metrics.jsonl").unlink()  # no run any more: nothing is made up, and nothing is lost
    assert hasten("report", run)[0] == 0
