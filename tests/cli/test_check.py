"""``hasten check``: data, kernels, memory, and the self-test of resuming (``--faults``)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hasten.cli.check import check
from hasten.errors import FAILED, InputError
from hasten.machine.locks import only_run_in
from hasten.parts.kernels import build
from hasten.recipe import memory_check
from hasten.recipe.schema import Recipe, load_recipe
from hasten.training import fault_test as module
from hasten.training.fault_test import CheckFailedError, SelfTest, check_faults
from hasten.training.run import train
from sample_data import small


@pytest.mark.parametrize(
    ("room", "code", "said"),
    [
        (64e9, 0, "ok   memory       about "),
        (0.71e9, 0, "it may run out: "),
        (0.5e9, 2, "FAIL memory       memory: weights, gradients and optimizer of"),
    ],
)
def test_memory_has_a_row_and_what_can_not_fit_is_refused(
    tmp_path: Path,
    published_presets: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    room: float,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(memory_check, "room_of", lambda known: room)
    monkeypatch.setattr(memory_check, "host_room", lambda known, resident: 64e9)
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


def test_files_with_their_containers_and_long_records_have_a_line_each(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for cut, said in ((2048, 0), (20, 1)):
        check(recipe, [f"cutoff_len={cut}"])
        out = capsys.readouterr().out
        assert f"ok   files        {recipe.parent / 'a.csv'} (csv): question\n" in out
        assert out.count("9 examples are longer than cutoff_len=20 (too_long: truncate)") == said


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "KILLS", 1)
    path = tmp_path / "recipe.yaml"
    path.write_text(Recipe(**small(tmp_path, plan=["packed"])).to_yaml())
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)  # five processes start one after the other
def test_a_job_that_resumes_to_the_bit_passes_and_leaves_nothing(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_faults(recipe_file, [], seed=5) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line[:17].split() for line in said[1:]] == [
        *(["ok", "undisturbed"], ["ok", "kills"]),
        *(["ok", "bit", "flip"], ["ok", "full", "disk"]),
    ]
    assert "killed after steps" in said[2]
    assert not (tmp_path / "run" / "faults").exists()


def test_a_resumed_run_that_differs_in_one_bit_is_told_with_the_step(
    recipe_file: Path, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    test = SelfTest(load_recipe(recipe_file, []), place, random.Random(1))

    def here(output: Path, limit: int | None = None) -> str:
        train(load_recipe(output.with_suffix(".yaml")), tell=lambda text: None)
        return ""

    test._train = here  # type: ignore[method-assign]  # a process of its own takes seconds to start
    test.undisturbed()
    truth = test._truth
    assert truth is not None
    output = place / "undisturbed"
    test._compare(output)
    wrong = [*truth.losses]
    wrong[4] += 1e-12
    test._truth = replace(truth, losses=wrong)
    test._repeats = lambda: ""  # type: ignore[method-assign]
    with pytest.raises(CheckFailedError, match="loss of step 5 differs"):
        test._compare(output)
    name, content = next(iter(truth.model.items()))
    test._truth = replace(truth, model={name: content[:-1] + bytes([content[-1] ^ 1])})
    with pytest.raises(CheckFailedError, match="saved model differs in model"):
        test._compare(output)


def test_a_job_that_cannot_train_fails_at_once_and_what_happened_stays(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_faults(recipe_file, ["max_examples=4", "eval_data=3", "cutoff_len=4"]) == FAILED
    said = capsys.readouterr().out
    assert "FAIL undisturbed" in said
    assert "exit code" in said
    assert (tmp_path / "run" / "faults").is_dir()


def test_a_folder_that_is_not_of_the_test_is_not_touched(recipe_file: Path, tmp_path: Path) -> None:
    mine = tmp_path / "run" / "faults"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="move it away"):
        check_faults(recipe_file, [])
    assert (mine / "notes.txt").read_text() == "mine"


def test_two_self_tests_in_one_folder_do_not_meet(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with only_run_in(tmp_path / "run"), pytest.raises(InputError, match="in use by process"):
        check_faults(recipe_file, [])
    assert not (tmp_path / "run" / "faults").exists()
