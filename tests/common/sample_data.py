"""Examples for tests of whole runs, generated in the shape of well-known files."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hasten.data import corpus
from hasten.parts.data.collate import TokenizedExample

TEXT = "how many apples does she have left if she gives two to her friend and eats one"
WORDS = TEXT.split()


def real_dataset(name: str) -> str:
    """Path of the real file, for tests with the mark ``data``."""
    return str(Path(os.environ["HASTEN_TEST_DATA"]) / name)


def dataset(name: str, folder: Path) -> str:
    """Path of a new file of the shape of ``gsm8k_train.jsonl`` or ``alpaca_en_demo.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for _ in range(300):
        question, answer = (" ".join(draw.choices(WORDS, k=draw.randint(5, 40))) for _ in range(2))
        if name.startswith("gsm8k"):
            rows.append({"question": question, "answer": answer})
        else:
            rows.append({"instruction": question, "input": "", "output": answer})
    path = folder / name
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) if name.endswith("l") else f"[{','.join(lines)}]")
    return str(path)


@functools.cache
def some_modules() -> corpus.Corpus:
    """What the corpus holds of every eighth module of the standard library."""
    with pytest.MonkeyPatch.context() as patch:
        whole = corpus._files
        patch.setattr(corpus, "_files", lambda root: itertools.islice(whole(root), 0, None, 8))
        return corpus.stdlib_corpus()


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe that trains in seconds."""
    return {
        "model": "deepseek-llm-tiny",
        "dataset": dataset("gsm8k_train.jsonl", folder),
        "eval_data": 8,
        "max_examples": 80,
        "cutoff_len": 64,
        "vocabulary": 400,
        "max_steps": 3,
        "global_batch_size": 8,
        "learning_rate": 3e-3,
        "output": str(folder / "run"),
        **changes,
    }


def small_recipe(folder: Path, **changes: Any) -> Path:
    """The file of such a recipe; keys that are None are left out."""
    path = folder / "recipe.yaml"
    values = {k: v for k, v in small(folder, **changes).items() if v is not None}
    path.write_text(yaml.safe_dump(values))
    return path


class InMemory:
    """Examples as a store has them."""

    def __init__(self, examples: list[TokenizedExample]) -> None:
        self._examples = examples
        self.lengths = np.array([r.length for r in examples], np.int32)
        self.trained_counts = np.array([r.trained_tokens for r in examples], np.int32)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> TokenizedExample:
        return self._examples[index]
