"""``hasten launch`` as a user meets it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from hasten.recipe.schema import load_recipe
from told import Hasten

RECIPE = """\
model: deepseek-llm-7b
from_scratch: true
dataset: data/$(touch PWNED).jsonl
cutoff_len: 4096
max_steps: 100
global_batch_size: 256
plan: [packed, document_attention]
output: runs/x
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my $(touch PWNED) 'recipe'.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    ("target", "options", "names"),
    [
        ("torchrun", ["--hosts", "a,b"], ["node.sh", "recipe.yaml", "start.sh"]),
        ("slurm", ["--time", "24h"], ["job.sbatch", "node.sh", "recipe.yaml"]),
        ("kubernetes", ["--image", "x:1", "--volume", "c"], ["pytorchjob.yaml"]),
        ("skypilot", ["--gpu", "H100"], ["node.sh", "recipe.yaml", "task.yaml"]),
    ],
)
def test_each_target_gets_its_files_and_shell_that_parses(
    hasten: Hasten, recipe: Path, target: str, options: list[str], names: list[str]
) -> None:
    words = [recipe, "--target", target, "--nodes", 2, "--output", "out", *options]
    code, out, err = hasten("launch", *words)
    assert code == 0, err
    assert sorted(path.name for path in Path("out").iterdir()) == names
    assert "to start it: " in out
    for path in Path("out").iterdir():
        if path.suffix in (".sh", ".sbatch"):
            assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert not list(Path().rglob("PWNED"))


def test_the_recipe_goes_on_from_checkpoints_and_leaves_restarts_to_the_launcher(
    hasten: Hasten, recipe: Path
) -> None:
    words = ("max_restarts=3", "nproc=2", "--checkpoints", "/shared/c", "--hosts", "a,b")
    code, _, err = hasten("launch", recipe, "--nodes", 2, *words)
    assert code == 0, err
    found = load_recipe(Path("launch/my-touch-pwned-recipe/recipe.yaml"))
    assert (found.nproc, found.max_restarts, found.resume) == (1, 0, "auto")
    assert found.plan[-1] == {"checkpoints": {"interval": "dynamic", "folder": "/shared/c"}}
    assert found.dataset == "data/$(touch PWNED).jsonl"
    assert found.leave_file == str(Path("launch/my-touch-pwned-recipe/leave").absolute())


def test_a_dry_run_prints_all_and_writes_nothing(hasten: Hasten, recipe: Path) -> None:
    code, out, _ = hasten("launch", recipe, "--target", "slurm", "--nodes", 2, "--dry-run")
    assert code == 0
    assert "--- job.sbatch" in out
    assert list(Path().iterdir()) == [Path(recipe.name)]


def test_the_kubernetes_manifest_carries_the_resolved_recipe(hasten: Hasten, recipe: Path) -> None:
    words = ("--target", "kubernetes", "--image", "x:1", "--volume", "c", "--output", "out")
    assert hasten("launch", recipe, "--nodes", 2, *words)[0] == 0
    first = next(yaml.safe_load_all(Path("out/pytorchjob.yaml").read_text()))
    assert yaml.safe_load(first["data"]["recipe.yaml"])["max_steps"] == 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "slrum"], "did you mean 'slurm'"),
        (["--time", "soon"], "--time: can't read 'soon'"),
        (["--nodes", "0"], "nodes is 0"),
        (["--cluster", "fat_tre"], "did you mean 'fat_tree'"),
        (["--name", "A B"], "lower case letters"),
        (["--target", "kubernetes"], "--image"),
        (["--submit", "--dry-run"], "give one"),
        (["--nodes", "2", "--submit"], "by hand"),
    ],
)
def test_what_can_t_be_launched_is_one_sentence_and_no_file(
    hasten: Hasten, recipe: Path, words: list[str], said: str
) -> None:
    code, _, err = hasten("launch", recipe, "--output", "out", *words)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not Path("out").exists()


def test_somebody_s_files_stay(hasten: Hasten, recipe: Path) -> None:
    Path("out").mkdir()
    Path("out/node.sh").write_text("mine")
    code, _, err = hasten("launch", recipe, "--output", "out")
    assert code == 2
    assert "wasn't written by hasten launch" in err
    assert [p.name for p in Path("out").iterdir()] == ["node.sh"]


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        (("global_batch_size=15",), 2),
        (("global_batch_size=16",), 0),
        (("global_batch_size=4", "plan=[{pipeline: {stages: 4}}]"), 0),
        (("global_batch_size=3", "plan=[{pipeline: {stages: 4}}]"), 2),
        (("global_batch_size=2", "plan=[{hybrid: {tp: 4, pp: 2, dp: 2}}]"), 0),
        (("global_batch_size=null", "global_batch_tokens=30"), 2),
    ],
)
def test_a_batch_with_fewer_examples_than_ranks_is_refused_before_anything_is_written(
    hasten: Hasten, recipe: Path, keys: tuple[str, ...], code: int
) -> None:
    """Ranks that hold pieces of one copy share its examples."""
    words = ("launch", recipe, "--nodes", 2, "--gpus-per-node", 8, "--hosts", "a,b", *keys)
    found, _, err = hasten(*words)
    assert found == code, err
    assert Path("launch").exists() == (code == 0)
    if code:
        assert "16 ranks" in err
        assert "give at least" in err
