"""`max_examples` of a source takes its first examples, before weights and eval examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.recipe.read_conversations import read_source
from hasten.recipe.schema import recipe_from


def written(path: Path, count: int) -> Path:
    rows = ({"prompt": f"{path.stem} {i}", "completion": f"answer {i} " * 4} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_source_gives_its_first_records(tmp_path: Path) -> None:
    sources = [
        {"path": str(written(tmp_path / "a.jsonl", 20)), "max_examples": 3},
        {"path": str(written(tmp_path / "b.jsonl", 2)), "max_examples": 3},
        str(written(tmp_path / "c.jsonl", 4)),
    ]
    values = {"model": "deepseek-llm-tiny", "dataset": sources, "max_steps": 1, "eval_data": 0.0}
    found = read_source(recipe_from(values, "r.yaml"), lambda text: None).train
    texts = [example.messages[0].content for example in found]
    assert texts == [*(f"a {i}" for i in range(3)), "b 0", "b 1", *(f"c {i}" for i in range(4))]


@pytest.mark.parametrize("weight", [2.0, 0.5])
def test_a_weight_counts_the_first_records_alone(tmp_path: Path, weight: float) -> None:
    source = {"path": str(written(tmp_path / "a.jsonl", 50)), "max_examples": 10, "weight": weight}
    values = {"model": "deepseek-llm-tiny", "dataset": [source], "max_steps": 1, "eval_data": 0.0}
    found = read_source(recipe_from(values, "r.yaml"), lambda text: None).train
    assert len(found) == 10 * weight
    assert {example.messages[0].content for example in found} <= {f"a {i}" for i in range(10)}


def test_the_embedded_corpus_gives_its_first_records() -> None:
    source = {"path": "stdlib", "max_examples": 5}
    values = {"model": "deepseek-llm-tiny", "dataset": [source], "max_steps": 1}
    assert len(read_source(recipe_from(values, "r.yaml"), lambda text: None).train) == 5
