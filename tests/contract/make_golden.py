"""Make the stored files that tests/contract/test_golden.py reads, with the hasten that is imported.

    python tests/contract/make_golden.py tests/contract/golden

Runs, reports and checkpoints that one commit writes, the next one reads. They are made anew, by the
commit that changes a format, where nothing that was released has to be read.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

TEXT = "how many apples does she have left if she gives two to her friend"
LONGEST = 64
RECIPE: dict[str, Any] = {
    "model": "model",
    "dataset": "records.jsonl",
    "eval_data": 4,
    "cutoff_len": LONGEST,
    "max_steps": 4,
    "eval_every": 2,
    "global_batch_size": 4,
    "learning_rate": 3e-3,
    "plan": ["packed", {"checkpoints": {"interval": 2}}],
    "output": "run",
}
LEFT_OUT = ("model", "best", "data/verification", "experiments", "ranks", "tuning.log")


def main(target: Path) -> None:
    """Everything happens in a folder of its own, with relative paths: none of this machine's."""
    with tempfile.TemporaryDirectory() as name:
        here = Path(name) / "golden"  # a checkpoint names its model by the last two folders
        here.mkdir()
        _examples(here / "records.jsonl")
        _model(here / "model")
        (here / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
        _hasten(here, "train", "recipe.yaml")
        short = ("--no-verify", "--rounds", "3", "--steps", "2", "--warmup", "1")
        asked = ("output=measured", "plan=[packed]", "eval_every=0")
        files = ("-o", "measured", "--bundle", "bundle")
        _hasten(here, "speedup", "recipe.yaml", *asked, *short, *files)
        _hasten(
            here,
            "tune",
            "recipe.yaml",
            "output=tuned",
            "eval_every=0",
            "--trials",
            "3",
            "--budget",
            "3m",
        )
        for old in ("model", "run"):
            shutil.rmtree(target / old, ignore_errors=True)
        for kept in ("recipe.yaml", "records.jsonl", "model"):
            _keep(here / kept, target / kept)
        _keep(here / "measured/report.json", target / "report.json")
        _keep(here / "bundle/bundle.json", target / "bundle.json")
        _keep(here / "run", target / "run", LEFT_OUT)
        _without_this_machine(target / "run")
        [example] = (here / "measured").glob("experiments/*/record.jsonl")
        _keep(example, target / "record.jsonl")
        [study] = (here / "tuned").rglob("study.json")
        _keep(study, target / "study.json")


def _examples(path: Path) -> None:
    draw = random.Random(0)
    rows = []
    for _ in range(40):
        question, answer = (
            " ".join(draw.choices(TEXT.split(), k=draw.randint(3, 12))) for _ in range(2)
        )
        rows.append(json.dumps({"question": question, "answer": answer}))
    path.write_text("\n".join(rows))


def _model(folder: Path) -> None:
    """A model and a tokenizer of the usual kinds, as small as may be."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    plain.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _hasten(here: Path, *words: str) -> None:
    threads = {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hasten", *words]
    subprocess.run(command, cwd=here, env={**os.environ, **threads}, check=True)


def _without_this_machine(run: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "run.json": {"host": "a host"},
        "summary.json": {"machine": {}},
    }
    for name, changed in changes.items():
        found = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**found, **changed}, indent=1) + "\n")


def _keep(source: Path, target: Path, left_out: tuple[str, ...] = ()) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copyfile(source, target)
        return
    for path in sorted(source.rglob("*")):
        inside = path.relative_to(source)
        if path.is_file() and not any(inside.is_relative_to(name) for name in left_out):
            _keep(path, target / inside)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
