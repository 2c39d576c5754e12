"""What every variant of the step benchmark starts from: settings, token examples, steps, weights.

``prepare.py`` writes the folder once; each variant's process reads it. Nothing here imports hasten,
so that a peer's process runs what its own user's would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

IGNORED = -100  # torch's label of what carries no loss
Features = dict[str, list[int]]


@dataclass(frozen=True)
class Settings:
    """One experiment; the same for all of its variants."""

    workload: str = "ragged"  # ragged | fixed | lora
    architecture: str = "llama"  # llama | qwen2 | v2_lite | v3
    hidden: int = 384
    layers: int = 6
    vocabulary: int = 16_384
    longest: int = 1536  # tokens
    examples: int = 3840
    eval_data: int = 64
    batch: int = 32  # examples of a step
    steps: int = 60
    warmup: int = 10  # steps before the steady figures begin
    cpu_time: bool = False  # seconds are CPU seconds, of one thread
    abreast: bool = False  # stops itself after each step, until the benchmark continues it
    matched: bool = False  # every variant that can takes hasten's examples step by step
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0

    @property
    def lora(self) -> bool:
        return self.workload == "lora"


class Examples:
    """Token examples end to end in three arrays."""

    def __init__(self, ids: Any, trained: Any, starts: Any) -> None:
        self.ids, self.trained, self.starts = ids, trained, starts
        self.lengths = np.diff(starts)

    @classmethod
    def read(cls, path: Path) -> Examples:
        with np.load(path) as found:
            return cls(found["ids"], found["trained"], found["starts"])

    def write(self, path: Path) -> None:
        np.savez(path, ids=self.ids, trained=self.trained, starts=self.starts)

    def __len__(self) -> int:
        return len(self.lengths)

    def features(self, index: int) -> Features:
        """One example as Transformers' collators take it; nothing predicts the first token."""
        here = slice(int(self.starts[index]), int(self.starts[index + 1]))
        ids = self.ids[here].astype(np.int64)
        labels = np.where(self.trained[here], ids, IGNORED)
        labels[0] = IGNORED
        return {
            "input_ids": ids.tolist(),
            "attention_mask": [1] * len(ids),
            "labels": labels.tolist(),
        }


@dataclass(frozen=True)
class Given:
    """The prepared folder, opened."""

    folder: Path
    settings: Settings
    train: Examples
    eval_data: Examples
    steps: list[list[int]]  # hasten's own: the examples of each step

    @classmethod
    def read(cls, folder: Path) -> Given:
        steps = json.loads((folder / "steps.json").read_text())
        return cls(
            folder,
            Settings(**json.loads((folder / "settings.json").read_text())),
            Examples.read(folder / "train.npz"),
            Examples.read(folder / "eval_data.npz"),
            steps,
        )

    @property
    def model(self) -> str:
        """Config, initial weights and tokenizer in Hugging Face's form."""
        return str(self.folder / "model")

    @property
    def adapter(self) -> str:
        """The initial LoRA matrices in PEFT's form, where the workload has them."""
        return str(self.folder / "adapter")

    def in_order(self) -> list[Features]:
        """All examples of the run, step after step."""
        return [self.train.features(i) for step in self.steps for i in step]

    def all_records(self) -> list[Features]:
        """The training set, for variants that choose by themselves."""
        return [self.train.features(i) for i in range(len(self.train))]

    def budget(self) -> int:
        """Tokens of the run in hasten's order."""
        return sum(int(self.train.lengths[i]) for step in self.steps for i in step)

    def eval_batches(self, size: int = 8) -> Iterator[list[Features]]:
        order = np.argsort(self.eval_data.lengths, kind="stable").tolist()
        for start in range(0, len(order), size):
            yield [self.eval_data.features(i) for i in order[start : start + size]]


def write_settings(settings: Settings, folder: Path) -> None:
    (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=1))
