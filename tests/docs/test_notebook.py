"""The notebooks and the tutorial on LoRA run from their first cell to their last."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hasten.cli.import_ import import_
from hasten.recipe.schema import load_recipe, read_yaml
from hasten.training.run import train
from sample_data import small

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_kept_without_outputs_and_each_cell_has_a_name(path: Path) -> None:
    assert len({cell["id"] for cell in cells(path)}) == len(cells(path))
    for cell in cells(path):
        assert cell["source"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_first_cell_says_what_to_install(path: Path) -> None:
    """README's environment has no Jupyter; the code itself needs nothing else, as it runs below."""
    text = "".join(cells(path)[0]["source"])
    packages = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "jupyter" not in packages
    commands = text.split("```bash\n")[1].split("```")[0].splitlines()
    assert commands == [
        "make install",
        ".venv/bin/python -m pip install --constraint constraints.txt jupyterlab",
        f".venv/bin/python -m jupyter lab {path.relative_to(ROOT).as_posix()}",
    ]


def fewer(code: str) -> str:
    """The same with fewer rounds and examples; measured figures are not what is tested here."""
    smaller = {
        "rounds=4": "rounds=2",
        "noise=True": "noise=False",
        "max_examples=400": "max_examples=60",
        "cutoff_len=256": "cutoff_len=128",
        "vocabulary=1000": "vocabulary=400",
        "eval_data=16": "eval_data=4",
        "global_batch_size=8": "global_batch_size=4",
    }
    for usual, less in smaller.items():
        code = code.replace(usual, less)
    return code


@pytest.mark.slow
@pytest.mark.timeout(1200)  # some twenty seconds each start of four processes, on a busy machine
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_to_its_end(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells(path):
        if cell["cell_type"] == "code":
            place = f"{path.name}, cell {cell['id']}"
            exec(compile(fewer("".join(cell["source"])), place, "exec"), names)
    assert "page: " in capsys.readouterr().out


PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "lora-on-one-gpu.md"
HUB_NAME = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"


def block(language: str, begins: str) -> str:
    """The first fenced block of a language that contains a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return next(text for text in blocks if begins in text)


@pytest.mark.slow
def test_the_configuration_becomes_the_recipe_of_the_page_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = block("bash", "dataset_info.json").split("<<'END'\n")[1].split("END")[0]
    Path("data").mkdir()
    subprocess.run([sys.executable, "-c", script], check=True)
    config = block("yml", "model_name_or_path")
    Path("sft.yaml").write_text(config)
    import_(Path("sft.yaml"), [], Path("recipe.yaml"))
    imported = yaml.safe_load(Path("recipe.yaml").read_text())
    shown = read_yaml(block("yaml", HUB_NAME), str(PAGE))
    assert {key: imported[key] for key in shown} == shown

    base = {**small(tmp_path, model="r1-distill-qwen-tiny", max_steps=1), "output": "base"}
    Path("base.yaml").write_text(yaml.safe_dump(base))
    train(load_recipe(Path("base.yaml")), tell=lambda text: None)
    Path("sft.yaml").write_text(config.replace(HUB_NAME, "base/model"))
    changes = ["max_examples=80", "max_steps=2", "global_batch_tokens=2047", "eval_every=0"]
    import_(Path("sft.yaml"), changes, Path("short.yaml"))
    summary = train(load_recipe(Path("short.yaml")), tell=lambda text: None)
    assert summary["steps"] == 2
    assert Path("runs/r1-lora/adapter/adapter_config.json").exists()
