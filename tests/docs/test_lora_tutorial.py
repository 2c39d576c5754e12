"""The tutorial on LoRA, on a local folder of the same config class instead of the hub's model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hasten.cli.import_ import import_
from hasten.recipe.schema import load_recipe, read_yaml
from hasten.training.run import train
from sample_data import small

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
