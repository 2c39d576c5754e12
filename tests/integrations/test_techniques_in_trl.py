"""Techniques in TRL's SFT, DPO and GRPO trainers: they train, with TRL's own losses."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.transformers import with_techniques
from hasten.parts.kernels import rowwise
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.layers import FusedLayers
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW
from hasten.techniques.sampler import LengthGrouped
from tiny import SILENT, tiny_model
from words import WORDS, tokenizer

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("trl", "datasets", "tokenizers")),
    reason="needs trl",
)
STEPS = 3
ROOT = Path(__file__).parents[2]
HAS_TRL = importlib.util.find_spec("trl") is not None
# SFTTrainer of TRL 1.0 reads the logits of all positions, so its loss is left as it is.
READS_LOGITS = HAS_TRL and importlib.metadata.version("trl").startswith("1.0.")
PLANS: dict[str, list[Technique]] = {
    "SFT": [
        *(Packed(), DocumentAttention(), ActivationCheckpointing()),
        *([] if READS_LOGITS else [LabelledTokenLoss()]),
    ],
    "DPO": [DocumentAttention(), ActivationCheckpointing()],
    "GRPO": [DocumentAttention(), ActivationCheckpointing()],
}
if rowwise.library().library is not None:  # there is a compiler
    PLANS = {kind: [*plan, FusedLayers()] for kind, plan in PLANS.items()}


def trainer_of(kind: str, folder: Path) -> Any:
    trl: Any = importlib.import_module("trl")
    dataset: Any = importlib.import_module("datasets").Dataset
    data: dict[str, list[dict[str, Any]]] = {
        "SFT": [{"text": " ".join(WORDS[: 4 + i % 8])} for i in range(16)],
        "DPO": [
            {"prompt": "the cat", "chosen": " sat on the mat", "rejected": " ran"}
            for _ in range(16)
        ],
        "GRPO": [{"prompt": "the cat"} for _ in range(16)],
    }
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        **SILENT,
        "bf16": False,
        "seed": 3,
        "gradient_checkpointing": False,
    }
    more: dict[str, Any] = {}
    if kind == "GRPO":
        settings |= {"num_generations": 2, "max_completion_length": 4}
        more["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    start: Any = tiny_model()
    start.save_pretrained(folder / "start")  # DPO reads its reference model from there
    torch.manual_seed(0)
    return getattr(trl, f"{kind}Trainer")(
        model=type(start).from_pretrained(folder / "start"),
        args=getattr(trl, f"{kind}Config")(**settings),
        train_dataset=dataset.from_list(data[kind]),
        processing_class=tokenizer(),
        **more,
    )


def losses_of(trainer: Any) -> list[float]:
    torch.manual_seed(0)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_a_trainer_of_trl_has_the_losses_it_has_alone(kind: str, tmp_path: Path) -> None:
    alone = losses_of(trainer_of(kind, tmp_path / "alone"))
    found = losses_of(with_techniques(trainer_of(kind, tmp_path / "with"), PLANS[kind]))
    assert len(found) == STEPS
    assert found == pytest.approx(alone, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_optimizer_and_checkpoints_work_in_it(kind: str, tmp_path: Path) -> None:
    plan = [*PLANS[kind], CompactAdamW("bf16"), Checkpoints(interval=1)]
    if kind == "SFT":
        plan.append(LengthGrouped())
    trainer = with_techniques(trainer_of(kind, tmp_path), plan)
    losses_of(trainer)
    assert "CompactAdamW" in repr(type(trainer.optimizer.optimizer))
    assert len(list((tmp_path / "hasten").glob("step-*"))) == STEPS


def test_the_order_of_grpo_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="draws its examples itself"):
        with_techniques(trainer_of("GRPO", tmp_path), [LengthGrouped()])


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_program_of_a_readme_trains_the_model_of_the_demo(
    readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    model: Any = tiny_model()
    model.save_pretrained("runs/demo/model")
    tokenizer().save_pretrained("runs/demo/model")
    blocks = re.findall(
        r"^```py\n(.*?)^```$", (ROOT / readme).read_text(), re.DOTALL | re.MULTILINE
    )
    (program,) = (block for block in blocks if "SFTTrainer(" in block)
    space: dict[str, Any] = {}
    with caplog.at_level(logging.WARNING, "hasten"):
        exec(program.replace("max_steps=30", "max_steps=3, use_cpu=True"), space)
    assert space["trainer"].state.global_step == STEPS
    joined = next(m for m in caplog.messages if re.match("speed_up: .* joined", m))
    assert joined.startswith("speed_up: packed, document_attention")
    assert not any("taken out" in message for message in caplog.messages)
