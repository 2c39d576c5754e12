"""The command line as a user meets it: exit codes, sentences, and nothing half-written."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sample_data import WORDS, small_recipe
from told import Hasten


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["speedup", "--help"]])
def test_help_imports_neither_torch_nor_transformers(words: list[str]) -> None:
    code = (
        "import sys; from hasten.cli.main import run\n"
        f"sys.argv = ['hasten', *{words!r}]\n"
        "try: run()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def alike(path: Path, count: int = 60) -> Path:
    """Examples of the same words in different orders, so that all have one length."""
    draw, first, rest = random.Random(0), WORDS[0], WORDS[1:]
    lines = []
    for _ in range(count):
        question, answer = (" ".join([first, *draw.sample(rest, len(rest))]) for _ in range(2))
        lines.append(json.dumps({"question": question, "answer": answer}))
    path.write_text("\n".join(lines))
    return path


def test_train_report_and_check_work_on_one_recipe(tmp_path: Path, hasten: Hasten) -> None:
    data = alike(tmp_path / "alike.jsonl")
    path = small_recipe(tmp_path, plan=["packed", "labelled_token_loss"], dataset=str(data))
    code, out, err = hasten("check", path)
    assert code == 0, out + err
    assert "[[" in out
    assert "no obstacle" in out
    assert not (tmp_path / "run" / "summary.json").exists()
    count = re.search(r"([\d.,]+(?: M)?) parameters", out)
    code, out, err = hasten("train", path, "max_steps=4")
    assert code == 0, err
    # The tokenizer that is trained on the data decides how many rows the embedding has.
    assert count is not None
    assert f"{count[1]} parameters of which {count[1]} learn" in err
    assert "; plan: [packed, " in err  # as a recipe has it
    assert "done: 4 steps" in out
    assert "labelled_token_loss: effective (" in out
    assert "warning: packed was requested and had no effect: 0 of" in err  # all have one length
    assert "step 4/4" in err
    code, out, err = hasten("report", tmp_path / "run")
    assert code == 0, err
    assert "eval loss" in out


def lacking_weights(folder: Path) -> str:
    model = folder / "empty-model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "architectures": []}')
    return str(model)


def lacking_tokenizer(folder: Path) -> str:
    from hasten.models.load import load_model
    from hasten.models.save import save_model

    place = folder / "no-tokenizer"
    save_model(load_model("deepseek-llm-tiny", vocab_size=300), None, place)
    return str(place)


def broken(folder: Path, lines: int, bad: int) -> str:
    rows = [json.dumps({"question": f"q{i}", "answer": f"a{i}"}) for i in range(lines)]
    for i in range(bad):
        rows[5 + 3 * i] = '{"question": "no answer here"}' if i % 2 else '{"question": '
    path = folder / "broken.jsonl"
    path.write_text("\n".join(rows))
    return str(path)


def empty(folder: Path) -> str:
    (folder / "empty.jsonl").write_text("")
    return str(folder / "empty.jsonl")


BAD: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "a missing file": (lambda f: {"dataset": str(f / "nothere.jsonl")}, "nothere.jsonl"),
    "an empty file": (lambda f: {"dataset": empty(f)}, "empty.jsonl"),
    "no weights": (lambda f: {"model": lacking_weights(f)}, "weights"),
    "no tokenizer": (lambda f: {"model": lacking_tokenizer(f)}, "tokenizer"),
    "an unknown model": (lambda f: {"model": "deepseek-llm-tiy"}, "did you mean"),
    "an unknown key": (lambda f: {"learning_rte": 1.0}, "did you mean 'learning_rate'"),
    "two for one slot": (
        lambda f: {"plan": ["autocast", "bf16_master_weights"]},
        "slot PRECISION",
    ),
    "an unknown technique": (lambda f: {"plan": ["pcked"]}, "did you mean 'packed'"),
    "lora twice": (lambda f: {"finetuning_type": "lora", "plan": ["lora"]}, "keep one of them"),
    "a batch too small for an example": (
        lambda f: {"global_batch_size": None, "global_batch_tokens": 20},
        "can't hold the longest example",
    ),
    "a micro-batch too small for an example": (
        lambda f: {"plan": [{"gradient_accumulation": {"micro_batch_tokens": 20}}]},
        "can't hold the longest example",
    ),
    "too many bad lines": (
        lambda f: {"dataset": broken(f, 100, 4), "eval_data": 0.1, "max_examples": None},
        "broken.jsonl:6:",
    ),
    "everything held out": (lambda f: {"eval_data": 5000}, "eval_data"),
    "an output that can't be": (lambda f: {"output": "/dev/null/run"}, "output"),
    "a GPU that isn't there": (lambda f: {"device": "cuda"}, "device"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_exit_code_2_and_nothing_trained(
    tmp_path: Path, hasten: Hasten, case: str
) -> None:
    import torch

    if case == "a GPU that isn't there" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    make, words = BAD[case]
    path = small_recipe(tmp_path, **make(tmp_path))
    code, _, err = hasten("train", path)
    assert code == 2
    said = [line for line in err.splitlines() if line.startswith("hasten:")]
    assert len(said) == 1
    assert words in said[0]
    assert "Traceback" not in err
    left = {p.name for p in (tmp_path / "run").glob("*")} if (tmp_path / "run").exists() else set()
    assert left <= {"data"}


def test_check_finds_all_that_is_wrong_at_once(tmp_path: Path, hasten: Hasten) -> None:
    path = small_recipe(tmp_path, dataset=str(tmp_path / "none.jsonl"), plan=["pcked"])
    code, out, _ = hasten("check", path)
    assert code == 2
    failed = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in failed] == ["data", "plan"]


def test_bad_lines_within_the_budget_are_listed_and_left_out(
    tmp_path: Path, hasten: Hasten
) -> None:
    data = broken(tmp_path, 100, 2)
    path = small_recipe(tmp_path, dataset=data, eval_data=0.1, max_examples=None, max_rejected=2)
    code, _, err = hasten("train", path)
    assert code == 0, err
    rejected = [
        json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()
    ]
    assert [(Path(r["file"]).name, r["line"]) for r in rejected] == [
        ("broken.jsonl", 6),
        ("broken.jsonl", 9),
    ]
    assert all(r["reason"] for r in rejected)


def test_a_full_disk_is_noticed_before_training(
    tmp_path: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hasten.recipe.prepare.shutil.disk_usage",
        lambda path: shutil._ntuple_diskusage(9, 9, 0),
    )  # type: ignore[attr-defined]
    code, _, err = hasten("train", small_recipe(tmp_path))
    assert code == 2
    assert "make room" in err


def test_an_obstacle_stops_or_is_skipped_as_the_recipe_says(
    tmp_path: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.parts.nn.attention.ARCHITECTURES", ("qwen2",))
    path = small_recipe(tmp_path, plan=["packed"])
    code, _, err = hasten("train", path)
    assert code == 2
    assert "on_obstacle: skip" in err
    code, _, err = hasten("train", path, "on_obstacle=skip")
    assert code == 0
    assert "continuing without packed" in err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["plan"] == []


def test_report_of_something_else_is_explained(tmp_path: Path, hasten: Hasten) -> None:
    assert hasten("report", tmp_path)[0] == 2
    (tmp_path / "report.json").write_text("[1]")
    code, _, err = hasten("report", tmp_path)
    assert code == 2
    assert "is not a report" in err


def test_a_report_of_another_name_does_not_replace_the_folder_s(
    tmp_path: Path, hasten: Hasten
) -> None:
    example = Path(__file__).parents[1] / "report" / "data" / "report_full.json"
    shutil.copyfile(example, tmp_path / "before.json")
    (tmp_path / "report.json").write_text("of a later experiment")
    code, out, err = hasten("report", tmp_path / "before.json")
    assert code == 0, err
    assert f"report: {tmp_path / 'before' / 'report.html'}" in out
    assert (tmp_path / "report.json").read_text() == "of a later experiment"


def test_an_interrupted_run_saves_its_model_and_says_so(tmp_path: Path) -> None:
    path = small_recipe(tmp_path, max_steps=5000, lr_schedule="constant")
    process = subprocess.Popen(
        [sys.executable, "-m", "hasten", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 180
    try:
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted:" in out
    assert "this run can't continue, since its plan has no checkpoints" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped"] == "interrupted"
    assert summary["steps"] == len(metrics.read_text().splitlines()) < 5000
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    losses = {}
    for nproc in (1, 2):
        path = small_recipe(
            tmp_path, nproc=nproc, output=str(tmp_path / f"run-{nproc}"), max_steps=3
        )
        done = subprocess.run(
            [sys.executable, "-m", "hasten", "train", str(path)],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / f"run-{nproc}" / "metrics.jsonl").read_text().splitlines()
        losses[nproc] = [json.loads(line)["loss"] for line in lines]
        summary = json.loads((tmp_path / f"run-{nproc}" / "summary.json").read_text())
        assert summary["world_size"] == nproc
        assert (tmp_path / f"run-{nproc}" / "model" / "model.safetensors").is_file()
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("command", "option"),
    [("estimate", "--output"), ("verify", "--output"), ("tune", "--output")],
)
def test_a_file_that_could_not_be_written_is_refused_before_any_work(
    command: str, option: str, tmp_path: Path, hasten: Hasten
) -> None:
    path = small_recipe(tmp_path, plan=["packed"])
    code, _, err = hasten(command, path, option, tmp_path / "missing" / "out.json")
    assert code == 2
    assert err.startswith(f"hasten: {option}: ")
    assert "name a file in an existing folder" in err
    assert not (tmp_path / "run").exists()
