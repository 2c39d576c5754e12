"""``hasten estimate``: tables, files, errors, and a finished run instead of a model."""

from __future__ import annotations

import json
import subprocess
import sys
from html import escape as html_text
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hasten.cli.main import app
from hasten.errors import InputError
from hasten.recipe.schema import load_recipe
from sample_data import small_recipe
from told import Hasten

MODEL = "deepseek-llm-7b"
HERE = ("--cluster", "dgx_h100", "--nodes", "2", "--global-batch", "256", "--tokens", "1B")


def run(*words: str, stdout_only: bool = False) -> str:
    result = CliRunner().invoke(app, ["estimate", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout if stdout_only else result.output


def complaint(*words: str) -> str:
    result = CliRunner().invoke(app, ["estimate", *words])
    assert isinstance(result.exception, InputError), result.output
    said = str(result.exception)
    assert "\n" not in said
    return said


def test_the_table_says_what_people_ask() -> None:
    said = run(MODEL, *HERE, "--top", "3")
    for word in ("6.91 B parameters", "tokens/s/GPU", "MFU", "memory GB", "GPU hours", "["):
        assert word in said
    for part in ("products", "weights", "stay free at P90"):
        assert part in said
    assert "no price given" in said
    lines = said.split("lines for the recipe")[1].splitlines()
    assert [line.strip()[:5] for line in lines if "#" in line] == ["# 1: ", "# 2: ", "# 3: "]
    assert sum(line.startswith("  layout: {") for line in lines) == 3


def test_no_line_is_wider_than_the_terminal_or_100_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for columns in (100, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        said = run("deepseek-llm-1b", "--gpu", "h100", "--gpus-per-node", "4")
        assert max(map(len, said.splitlines())) <= columns
        assert "MFU" in said


def test_files_hold_the_plan(tmp_path: Path) -> None:
    price = tmp_path / "price.yaml"
    price.write_text("currency: CNY\nper_device_hour: 0.6\n")
    html = tmp_path / "plan.html"
    words = [MODEL, *HERE, "--price", str(price), "--json", "-o", str(html)]
    result = CliRunner().invoke(app, ["estimate", *words], catch_exceptions=False)
    assert " CNY" in result.stderr
    found = json.loads(result.stdout)
    assert found["kind"] == "hasten estimate"
    best = found["best"][0]
    assert best["spending"]["currency"] == "CNY"
    hours = best["spending"]["device_hours"]["middle"]
    assert best["spending"]["money"]["middle"] == pytest.approx(0.6 * hours)
    for span in (best["step_seconds"], best["memory_bytes"], best["spending"]["days"]):
        assert span["low"] < span["middle"] < span["high"]
    text = html.read_text()
    HTMLParser().feed(text)
    assert all(html_text(one["recipe"]) in text for one in found["best"])
    assert text.count('<div class="scroll"><table>') == text.count("<table>") == 3
    assert ".scroll { overflow-x: auto; }" in text  # a word is never cut to fit a telephone
    assert "<script" not in text
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert not list(tmp_path.glob(".*"))  # nothing half-written is left


def test_a_recipe_is_planned_as_it_trains(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    lines = [f"model: {MODEL}", "dataset: stdlib", "cutoff_len: 1024", "max_steps: 100"]
    lines += ["global_batch_size: 32", "finetuning_type: lora", "lora_rank: 8"]
    lines += ["price: {currency: EUR, per_device_hour: 2}"]
    recipe.write_text("\n".join(lines) + "\n")
    four = ("--cluster", "dgx_a100", "--gpus-per-node", "4")
    said = run(str(recipe), *four)
    assert "lora, 32 sequences of 1,024" in said
    assert "3.277e+06 tokens" in said
    assert "EUR" in said
    assert "1,024" not in run(str(recipe), "cutoff_len=512", *four)
    assert "is a model" in complaint(MODEL, "cutoff_len=512", *HERE)


def test_a_device_of_the_users_own(tmp_path: Path) -> None:
    figures: dict[str, Any] = {"name": "mine", "peak16": 4e14, "memory_bytes": 96e9}
    figures |= {"memory_rate": 3e12, "link": 2e11}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(figures))
    small = ("deepseek-llm-1b", "--gpu", str(path), "--gpus-per-node", "2")
    assert "2 mine" in run(*small)
    for change, said in (
        ({"link": None}, "must be a finite number"),
        ({"links": 3}, "unknown key"),
        ({"peak16": -1}, "must be a finite number, at least 0"),
        ({"peak16": 0}, "must be above 0"),
    ):
        path.write_text(json.dumps({**figures, **change}))
        assert said in complaint(*small)
    path.write_text(json.dumps({"name": "mine"}))
    assert "lacks peak16" in complaint(*small)
    path.write_text("[]")
    assert "expected an object" in complaint(*small)
    assert "No such file" in complaint(MODEL, "--gpu", str(tmp_path / "none.json"))


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    assert "name a recipe" in complaint()
    assert "no preset" in complaint("deepsek-v3", *HERE)
    assert "h100" in complaint(MODEL, "--gpu", "h1000")
    assert "define the devices" in complaint(MODEL, "--cluster", "fat_tree")
    assert "did you mean 'dgx_h100'" in complaint(MODEL, "--cluster", "dgx_h10")
    assert "it would fit" in complaint(MODEL, "--gpu", "t4", "--gpus-per-node", "1")
    assert "give a number such as" in complaint(MODEL, *HERE[:-1], "many")
    assert "must be one of pretrain" in complaint(MODEL, *HERE, "--task", "rlhf")
    assert "must be one of bf16" in complaint(MODEL, *HERE, "--precision", "int3")
    for option in ("--sequence", "--global-batch"):
        assert CliRunner().invoke(app, ["estimate", MODEL, *HERE, option, "0"]).exit_code == 2
    assert "at least 1" in complaint(MODEL, *HERE, "--nodes", "0")
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 4, "hidden_size": 512}')
    assert "num_attention_heads" in complaint(str(config), *HERE)
    price = tmp_path / "price.yaml"
    price.write_text("per_device_hour: 0.6\n")
    assert "'currency' is missing" in complaint(MODEL, *HERE, "--price", str(price))
    assert "can't be written" in complaint(MODEL, *HERE, "-o", str(tmp_path / "no" / "p.html"))


def test_lines_for_a_recipe_start_as_many_ranks_as_were_planned(tmp_path: Path) -> None:
    job = ("--gpu", "a100", "--gpus-per-node", "2", "--precision", "fp32", "--json")
    found = json.loads(run(str(small_recipe(tmp_path)), *job, stdout_only=True))
    layouts = [yaml.safe_load(one["recipe"]) for one in found["best"]]
    assert {next(iter(lines["layout"])) for lines in layouts} == {"dp", "fsdp2", "pipeline"}
    assert {load_recipe(Path(small_recipe(tmp_path, **one))).nproc for one in layouts} == {2}


def test_planning_imports_no_torch() -> None:
    code = "import hasten.cli.estimate, sys; print([m for m in ('torch', 'transformers') if m in "
    code += "sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def machine_file(path: Path) -> Path:
    product = {"dtype": "bf16", "best": 2e11}
    rates: dict[str, Any] = {"kind": "hasten machine rates", "device": "cpu"}
    rates |= {"products": [product, {"dtype": "fp32", "best": 5e10}]}
    path.write_text(json.dumps({**rates, "copies": [{"way": "memory", "best": 1e10}]}))
    return path


def finished_run(folder: Path, batch: int, seconds: float) -> Path:
    folder.mkdir()
    recipe = "model: deepseek-llm-tiny\nvocabulary: 4096\ncutoff_len: 512\nplan: [autocast]\n"
    (folder / "recipe.yaml").write_text(recipe)
    row = {"positions": 512 * batch, "step_seconds": seconds}
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(row)] * 20) + "\n")
    return folder


def test_runs_of_ones_own_fit_the_plan_to_the_machine(tmp_path: Path) -> None:
    here = ("--gpu", str(machine_file(tmp_path / "bench.json")), "--gpus-per-node", "1")
    job = ("deepseek-llm-tiny", *here, "--sequence", "512", "--global-batch", "16")
    assert "give --memory" in complaint(*job)
    slow = [finished_run(tmp_path / f"b{n}", n, 2.0 * n / 16 + 0.1) for n in (4, 8)]
    words = ("--memory", "16")
    runs = [word for folder in slow for word in ("--calibrate", str(folder))]
    said = run(*job, *words, *runs)
    assert "2 runs of your own" in said
    found = json.loads(run(*job, *words, *runs, "--json", stdout_only=True))
    rows = [c for c in found["best"] if c["layout"]["micro_batch"] == 16]
    step = (rows or found["best"])[0]["step_seconds"]
    assert step["middle"] == pytest.approx(2.1, rel=0.15)  # a batch that no run had
    said = run(str(slow[0]), *here, *words, *runs)
    row = next(line for line in said.splitlines() if line.startswith("step  "))
    assert "600 ms" in row  # as it ran: four examples a step
    assert "yes" in row
    assert "recipe.yaml" in complaint(*job, *words, "--calibrate", str(bare_run(tmp_path / "bare")))


def bare_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step_seconds": 1.0, "positions": 512}\n')
    return folder


H100S = ["NVIDIA H100 80GB HBM3"] * 8
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
        "resumed_step": 0,
        "resumed_tokens": 0,
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
        run = a_run(tmp_path / str(number), *H100S, seconds=seconds)
        out = hasten("estimate", run)[1]
        row = next(line for line in out.splitlines() if line.startswith("step "))
        ratios.append(float(row.split()[5]))
    assert ratios[1] == pytest.approx(2 * ratios[0], rel=0.02)


@pytest.mark.parametrize(
    ("gpus", "world", "changes", "said"),
    [
        ([], 1, [], "hasten env --bench -o"),
        (["Sigma 9000"], 8, [], "Sigma 9000"),
        (H100S, 8, ["max_steps=3"], "a run that is over"),
    ],
    ids=["a processor", "an unknown gpu", "changes"],
)
def test_what_hinders_a_prediction_is_said_and_the_report_stands(
    hasten: Hasten, tmp_path: Path, gpus: list[str], world: int, changes: list[str], said: str
) -> None:
    run = a_run(tmp_path / "run", *gpus, world=world)
    code, _, err = hasten("estimate", run, *changes)
    assert code == 2
    assert said in err
    code, out, _ = hasten("report", run)
    assert code == 0
    assert "predicted against measured: " in out or gpus


def test_a_run_on_several_hosts_is_asked_how_they_are_wired(hasten: Hasten, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", *H100S, world=16)
    code, _, err = hasten("estimate", run)
    assert code == 2
    assert "--cluster fat_tree" in err
    told = ("--gpu", "h100", "--cluster", "ethernet", "--nodes", 2)
    slow = hasten("estimate", run, *told)[1]
    fast = hasten("estimate", run, *told[:2], "--cluster", "fat_tree", "--nodes", 2)[1]
    rates = [
        float(out.split("rate of a device ")[1].split()[0].replace(",", "")) for out in (slow, fast)
    ]
    assert rates[1] > 1.5 * rates[0]


def test_a_model_that_was_dealt_out_is_not_predicted_as_if_it_were_replicated(
    hasten: Hasten, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run", *H100S)
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
    run = a_run(tmp_path / "run", *H100S)
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
