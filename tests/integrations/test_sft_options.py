"""Options of TRL's SFTTrainer: with `speed_up` it trains what it trains without."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten
from integrations.test_trainer_options import Outcome, assert_same_training, model_of, tokenizer
from technique_counts import counted
from tiny import SILENT

needs_trl = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("trl", "datasets")), reason="needs trl"
)
STEPS = 3
PACKS = frozenset({"packed", "document_attention"})
CHAT = (
    "{% for m in messages %}t3 {% if m.role == 'assistant' %}{% generation %}{{ m.content }} t4 "
    "{% endgeneration %}{% else %}{{ m.content }} t5 {% endif %}{% endfor %}"
)


def words(first: int, count: int) -> str:
    return " ".join(f"t{6 + (first * 7 + i * 3) % 80}" for i in range(count))


TEXTS = [{"text": words(i, 4 + i * 5 % 17)} for i in range(24)]
ANSWERED = [
    {"prompt": words(i, 3 + i % 5) + " ", "completion": words(i + 40, 2 + i * 3 % 11)}
    for i in range(24)
]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": words(i, 3 + i % 5)},
            {"role": "assistant", "content": words(i + 40, 2 + i * 3 % 11)},
        ]
    }
    for i in range(24)
]
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 3,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-6,
    **SILENT,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": 32,
}


@dataclass(frozen=True)
class Case:
    """One set-up of SFTTrainer, as those of the Trainer."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    examples: Any = None
    architecture: str = "llama"
    lora: bool = False
    acts: frozenset[str] = PACKS
    rests: frozenset[str] = frozenset({"labelled_token_loss"})  # SFTTrainer has a loss of its own
    tolerance: float = 1e-4


# Its rows hold several documents already: they stay, and attention keeps them apart.
PACKED_BY_TRL: dict[str, Any] = {
    "acts": frozenset({"document_attention"}),
    "rests": frozenset({"packed", "labelled_token_loss"}),
}
EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1}
CASES = {
    "text": Case(),
    "qwen2": Case(architecture="qwen2"),
    "packing": Case({"packing": True}, **PACKED_BY_TRL),
    "packing, wrapped": Case({"packing": True, "packing_strategy": "wrapped"}),
    "padding free": Case({"padding_free": True, "max_length": None}, **PACKED_BY_TRL),
    "completion only": Case(examples=ANSWERED),
    "prompt and completion": Case({"completion_only_loss": False}, ANSWERED),
    "assistant only": Case({"assistant_only_loss": True}, CHATS),
    "two passes": Case({"gradient_accumulation_steps": 2}),
    "bf16": Case({"bf16": True}, tolerance=2e-2),
    "checkpointed activations": Case({"gradient_checkpointing": True}),
    "noise on embeddings": Case(
        {"neftune_noise_alpha": 5.0}, acts=frozenset(), rests=frozenset({"packed"})
    ),
    "evaluated": Case(EACH_STEP),
    "packed and evaluated": Case(
        {**EACH_STEP, "packing": True, "eval_packing": False}, **PACKED_BY_TRL
    ),
    "dft": Case({"loss_type": "dft"}),
    "lora": Case(lora=True),
    "padding to a multiple": Case({"pad_to_multiple_of": 8}),
    "sgd": Case({"optim": "sgd", "learning_rate": 0.1}),
}


def trained(case: Case, folder: Path, speed_up: bool) -> Outcome:
    """Trains once; the model has the same weights and the same random state in both runs."""
    trl: Any = importlib.import_module("trl")
    dataset: Any = importlib.import_module("datasets").Dataset
    spoken = tokenizer()
    spoken.chat_template = CHAT
    examples = TEXTS if case.examples is None else case.examples
    settings = trl.SFTConfig(str(folder), **{**SETTINGS, **case.settings})
    more: dict[str, Any] = {}
    if case.lora:
        peft: Any = importlib.import_module("peft")
        more["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(1)
    trainer = trl.SFTTrainer(
        model=model_of(case.architecture),
        args=settings,
        train_dataset=dataset.from_list(examples),
        eval_dataset=dataset.from_list(examples[:6]),
        processing_class=spoken,
        **more,
    )
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with counted() as counts:
        if speed_up:
            with counts.paused():
                hasten.speed_up(trainer)
        torch.manual_seed(5)
        trainer.train()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return Outcome(trainer.state.log_history, start, weights, None, frozenset(counts.effective()))


@needs_trl
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sft_trains_the_same_with_techniques(case: Case, tmp_path: Path) -> None:
    plain = trained(case, tmp_path / "plain", speed_up=False)
    found = trained(case, tmp_path / "found", speed_up=True)
    assert not plain.effective
    assert case.acts <= found.effective
    assert not case.rests & found.effective
    assert_same_training(plain, found, case.tolerance)
    accuracy, tokens = "mean_token_accuracy", "num_tokens"
    # Rounding may change which of two near tokens is the likeliest: one of 50 at a time.
    assert found.series(accuracy) == pytest.approx(plain.series(accuracy), abs=0.021)
    assert found.series(tokens) == plain.series(tokens)


def test_the_page_has_the_number_of_set_ups() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "trainers.md").read_text()
    assert f"{len(CASES)} of SFTTrainer" in page
