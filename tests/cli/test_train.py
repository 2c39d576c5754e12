"""``hasten train``: before its first step, its progress line, a technique without effect."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import re
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hasten as package
from hasten.cli import train
from hasten.cli.main import app
from hasten.cli.train import StepLine
from hasten.core.health import NotFiniteError
from hasten.core.plan import Plan
from hasten.errors import FAILED
from hasten.machine.locks import only_run_in
from hasten.models.load import load_model, load_tokenizer, read_config
from hasten.models.save import save_model
from hasten.models.weights import NumberFormats
from hasten.parts.checkpoint import checkpoints
from hasten.parts.checkpoint.format import read_manifest
from hasten.recipe.prepare import weight_notes
from hasten.recipe.schema import Recipe
from hasten.training import folder as folder_module
from hasten.training.run import train as run_training
from sample_data import small, small_recipe
from told import Hasten


@pytest.mark.parametrize("command", ["train", "profile"])
def test_the_transport_s_variables_stand_before_a_process_trains(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BegunError(Exception):  # in the place of execve
        pass

    def again(words: list[str], missing: dict[str, str]) -> None:
        raise BegunError(words[0], missing)

    path = small_recipe(tmp_path, transport={"GLOO_SOCKET_IFNAME": "lo"})
    monkeypatch.setattr("hasten.launch.ranks.restart_with", again)
    found = CliRunner().invoke(app, [command, str(path)]).exception
    assert isinstance(found, BegunError)
    assert found.args == (command, {"GLOO_SOCKET_IFNAME": "lo"})


def test_the_money_so_far_counts_all_time_and_not_that_of_the_steps_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    price = {"currency": "EUR", "per_device_hour": 3.0}
    recipe = Recipe(model="m", dataset="d", max_steps=2, price=price)
    shown: list[tuple[str, float, float]] = []
    display: Any = SimpleNamespace(begin=lambda: None, show=lambda *state: shown.append(state))
    job = SimpleNamespace(schedule=SimpleNamespace(total_steps=2))
    known = SimpleNamespace(world=SimpleNamespace(size=2))
    session: Any = SimpleNamespace(setup=SimpleNamespace(job=job, context=known))
    step: Any = SimpleNamespace(
        step=1,
        loss=2.0,
        tokens_per_second=100.0,
        padding_share=0.0,
        peak_memory_bytes=10**6,
        mfu=None,
        skipped=False,
        step_seconds=1.0,
        eta_seconds=3360.0,
    )
    clock = iter([0.0, 10.0, 10.0 + 1800.0])
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    line = StepLine(display, recipe)
    line.start(session)
    line.step(step)  # a second, and half an hour of evaluation before it
    [(text, share, remaining)] = shown
    assert "3.0000 EUR" in text  # two devices for half an hour
    assert (share, remaining) == (0.5, 3360.0)


@pytest.mark.parametrize("how", ["nproc=1", "nproc=2", "max_restarts=1"])
def test_a_folder_where_another_run_trains_is_refused_before_anything_is_written(
    how: str, tmp_path: Path, hasten: Hasten
) -> None:
    path, output = tmp_path / "recipe.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(small(tmp_path)))
    output.mkdir()
    with only_run_in(output):
        code, out, err = hasten("train", path, how)
        assert code == 2
        assert f"{output} is in use by process {os.getpid()}" in err
        assert "Traceback" not in err + out
        assert [file.name for file in output.iterdir()] == ["run.lock"]


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run of two steps, with a checkpoint of the second."""
    folder = tmp_path_factory.mktemp("half")
    values = small(folder, max_steps=2, checkpoint_every=2, lr_schedule="constant", eval_data=0)
    run_training(Recipe(**values), tell=lambda text: None)
    lines = Path(values["dataset"]).read_text().splitlines()
    (folder / "turned.jsonl").write_text("\n".join(reversed(lines)))
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("seed=7", "seed was 0 and is 7 now"),
        ("global_batch_size=4", "global_batch_size was 8 and is 4 now"),
        ("learning_rate=1", "learning_rate was 0.003 and is 1.0 now"),
        ("dataset=turned.jsonl", r"data was examples=80, .* and is examples=80, .* now"),
        ("model=v3-tiny", "model was deepseek-llm-tiny and is v3-tiny now"),
    ],
)
def test_another_training_does_not_go_on_from_a_checkpoint(
    change: str, said: str, half_done: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = half_done.parent / "run"
    results = [p for p in output.rglob("*") if p.is_file() and "data" not in p.parts]
    before = {path: path.read_bytes() for path in results}
    monkeypatch.chdir(half_done.parent)
    code, out, err = hasten("train", half_done, "max_steps=4", "resume=auto", change)
    assert code == 2
    assert re.search(said, err)
    assert "Traceback" not in err + out
    left = [p for p in output.rglob("*") if p.is_file() and "data" not in p.parts]
    assert {path: path.read_bytes() for path in left} == before


def test_what_may_change_is_told_in_the_line_of_the_resumption(
    half_done: Path, tmp_path: Path, hasten: Hasten
) -> None:
    shutil.copytree(half_done.parent / "run", tmp_path / "run")
    changes = ["max_steps=3", "plan=[packed]", "checkpoint_every=1", "resume=auto"]
    code, out, err = hasten("train", half_done, f"output={tmp_path / 'run'}", *changes)
    assert code == 0, err
    assert re.search(r"resuming from \S+, step 2; .*max_steps was 2 and is 3 now", out + err)
    assert "plan: packed was off and is on (" in out + err
    assert "plan: checkpoints: interval was 2 and is 1 now" in out + err


def test_time_and_speed_after_a_resume_are_shown_with_the_steps_that_they_are_of(
    half_done: Path, tmp_path: Path, hasten: Hasten
) -> None:
    shutil.copytree(half_done.parent / "run", output := tmp_path / "run")
    code, out, err = hasten("train", half_done, f"output={output}", "max_steps=3", "resume=auto")
    assert code == 0, err
    files = (half_done.parent / "run" / "metrics.jsonl", output / "metrics.jsonl")
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    rate = f"{lines[2]['tokens'] / lines[2]['step_seconds']:,.0f} tokens/s"
    since = f"{rate} since the resume at step 2 (1 steps, {lines[2]['tokens']:,} tokens)"
    assert re.search(rf"done: 3 steps, {sum(x['tokens'] for x in lines):,} tokens; \d+ s, ", out)
    assert since in out
    assert since in hasten("report", output)[1]
    assert since in (output / "model" / "README.md").read_text()
    assert "checkpoints: effective (resumed from step-00000002; 0 checkpoint(s) written" in out
    assert "checkpoints was requested and had no effect" not in err


def test_what_a_checkpoint_notes_of_its_job_is_documented_key_by_key(half_done: Path) -> None:
    (saved,) = checkpoints(half_done.parent / "run" / "checkpoints")
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "resume.md").read_text()
    table = page.split("## What may change")[1].split("\n## ")[0]
    told = {word for row in table.splitlines() for word in re.findall("`(.+?)`", row[:170])}
    assert set(read_manifest(saved)["meta"]["job"]) - told == set()


def saved_base(folder: Path) -> Path:
    """A model with a tokenizer, as a user would bring it: bfloat16, and a contradictory config."""
    first = run_training(Recipe(**small(folder / "first")), tell=lambda text: None)
    base = folder / "base"
    shutil.copytree(first["saved"], base)
    model = load_model(str(base), dtype=torch.bfloat16)
    save_model(model, load_tokenizer(str(base)), base, NumberFormats(torch.bfloat16))
    (base / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    return base


def test_a_training_in_which_no_weight_moved_fails(tmp_path: Path) -> None:
    base = saved_base(tmp_path)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    recipe = Recipe(**small(tmp_path, model=str(base), max_steps=2))
    with pytest.raises(NotFiniteError, match="not finite in any step, so no weight has moved"):
        run_training(recipe, tell=lambda text: None)
    assert not (tmp_path / "run" / "model").exists()


def test_a_finished_training_is_saved_whatever_lies_beside_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, output, lines = saved_base(tmp_path), tmp_path / "run", []
    recipe = Recipe(**small(tmp_path, model=str(base), max_steps=1))
    summary = run_training(recipe, tell=lines.append)
    assert summary["unsaved"] == []
    assert "weights will be saved in bfloat16 (save_dtype)" in lines
    notes = weight_notes(recipe.model_copy(update={"cutoff_len": 2**20}), fetch=True)
    assert [note for note in notes if note not in lines] == [
        f"cutoff_len is 1,048,576, but the model was trained on "
        f"{read_config(str(base)).max_position_embeddings:,} positions "
        "(max_position_embeddings): it has never seen later ones"
    ]
    assert any("generation_config.json contradictory (temperature, top_p)" in x for x in lines)
    generation = json.loads((output / "model" / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"]) == (0.6, 0.9)
    stored = load_file(output / "model" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}

    def fails(*given: object, **named: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr("hasten.models.save._write_tokenizer", fails)
    monkeypatch.setattr("hasten.training.run.write_card", fails)
    monkeypatch.setattr("hasten.training.folder.write_samples", fails)
    path = tmp_path / "recipe.yaml"
    changed = small(tmp_path, model=str(base), max_steps=1, save_dtype="float32")
    path.write_text(yaml.safe_dump(changed))
    assert train.train(path, []) == 1
    said = capsys.readouterr().err
    for part in ("the tokenizer couldn't be written", "no sample", "README.md couldn't be written"):
        assert f"warning: the weights are saved, but {part}" in said or part in said
    stored = load_file(output / "model" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.float32}
    assert len(json.loads((output / "summary.json").read_text())["unsaved"]) == 3


@pytest.mark.parametrize(("unsaved", "code"), [([], 0), (["the tokenizer couldn't be written"], 1)])
def test_a_supervisor_does_not_restart_what_is_trained_but_ends_with_code_1(
    unsaved: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(model="m", dataset="d", max_steps=1, max_restarts=1, output=str(tmp_path))
    (tmp_path / "data").mkdir()

    def supervise(*given: object) -> int:
        (tmp_path / "summary.json").write_text(json.dumps({"unsaved": unsaved}))
        return 0

    job = SimpleNamespace(context=None, plan=Plan())
    monkeypatch.setattr("hasten.recipe.build.prepare_run", lambda *given: job)
    monkeypatch.setattr("hasten.launch.supervisor.supervise", supervise)
    assert train.train_as_ranks(recipe, ExitStack()) == code


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process may become larger, as if the disk had no more room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_at_the_end_leaves_a_summary_that_says_what_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_recipe(tmp_path, max_steps=1)
    with full_disk(1 << 18):
        assert train.train(path, []) == 1
    said = capsys.readouterr().err
    assert "error: the weights are NOT saved" in said
    assert f"the weights couldn't be written to {tmp_path / 'run' / 'model'}: " in said
    assert "File too large" in said
    assert "these weights are lost: make room" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["saved"]) == (1, None)
    assert not list((tmp_path / "run").glob(".model.partial*")), "room is given back"


def test_a_summary_without_room_is_a_sentence(tmp_path: Path) -> None:
    summary: dict[str, Any] = {"unsaved": []}
    run = tmp_path / "run"
    run.write_text("no folder")  # nothing can be written in it
    folder_module.write_summary(run / "summary.json", summary)
    assert "summary.json couldn't be written: " in summary["unsaved"][0]


def call(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


IDLE = [{"gradient_accumulation": {"micro_batch_size": 64}}]  # a step of 8 examples is never cut


def test_a_required_effect_that_is_missing_is_exit_code_4_and_the_model_is_saved(
    tmp_path: Path,
) -> None:
    found = call("train", small_recipe(tmp_path, plan=IDLE, require_effect=True))
    assert found.exit_code == FAILED
    assert (tmp_path / "run" / "model").is_dir()


def test_an_effect_that_is_there_satisfies(tmp_path: Path) -> None:
    found = call("train", small_recipe(tmp_path, plan=["labelled_token_loss"], require_effect=True))
    assert found.exit_code == 0
    assert "warning" not in found.stderr


SOURCE = Path(package.__file__).parent
WATCHED = ("recipe/build.py", "recipe/prepared_data.py")
OF_THE_JOB = ("Building.", "adamw", "job_of.<locals>.")  # its factories, which the session calls


def home(frame: FrameType | None) -> str:
    """The file of this package that a call comes from."""
    while frame is not None and not frame.f_code.co_filename.startswith(str(SOURCE)):
        frame = frame.f_back
    return "" if frame is None else Path(frame.f_code.co_filename).relative_to(SOURCE).as_posix()


@pytest.mark.slow
def test_preparing_is_entered_twice_at_most(tmp_path: Path, hasten: Hasten) -> None:
    path = small_recipe(tmp_path, max_steps=2, plan=["packed"])
    importlib.import_module("hasten.training.run")  # loading modules is no entry

    entered: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code  # a generator is entered again for each of its items
        if event != "call" or code.co_flags & inspect.CO_GENERATOR:
            return
        if not code.co_filename.endswith(WATCHED):
            return
        name = code.co_qualname
        if name != "<module>" and not name.startswith(OF_THE_JOB):
            file = home(frame)
            if home(frame.f_back) != file:
                entered[file] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        code, _, err = hasten("train", path)
    finally:
        sys.setprofile(before)
    assert code == 0, err
    assert set(entered) == set(WATCHED)
    assert max(entered.values()) <= 2, entered
