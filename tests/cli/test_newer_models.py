"""DeepSeek-V3.2 and V4 from a folder: check, train and estimate agree on what works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from sample_data import small
from tiny import NEWER, tiny_config
from told import Hasten


def recipe(folder: Path, architecture: str, **changes: Any) -> Path:
    tiny_config(architecture).save_pretrained(folder / "model")
    given = {"model": str(folder / "model"), "tokenizer": "deepseek-llm-tiny", **changes}
    values = small(folder, from_scratch=True, **given)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("architecture", NEWER)
def test_it_is_checked_trained_and_planned(
    tmp_path: Path, hasten: Hasten, architecture: str
) -> None:
    path = recipe(tmp_path, architecture, max_steps=1)
    code, out, err = hasten("check", path)
    assert code == 0, out + err
    own = "eager" if architecture == "deepseek_v4" else "sdpa"
    assert f"attention: {own}" in out
    code, out, err = hasten("train", path)
    assert code == 0, out + err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
    code, out, err = hasten("estimate", tmp_path / "model", "--gpu", "h100")
    assert code == 0, out + err
    assert "tokens/s/GPU" in out


def test_check_fails_where_train_would(
    tmp_path: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = {"finetuning_type": "lora", "lora_targets": ["wq_b"]}  # an indexer's, which never learn
    path = recipe(tmp_path, "deepseek_v32", **lora)
    for command in ("check", "train"):
        code, out, err = hasten(command, path)
        assert code == 2
        assert "the target 'wq_b' finds nothing to adapt" in out + err

    def refuses(self: Any, kind: str) -> None:
        raise ValueError(f"no {kind} here")

    path = recipe(tmp_path, "deepseek_v32", **lora | {"lora_targets": "auto"})
    monkeypatch.setattr(transformers.PreTrainedModel, "set_attn_implementation", refuses)
    for command in ("check", "train"):
        code, out, err = hasten(command, path)
        assert code == 2
        assert "a deepseek_v32 model can't take sdpa attention: no sdpa here" in out + err
