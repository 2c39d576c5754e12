"""What peers share as their users would write it: the model, optimizer groups, a padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hasten.machine import host
from step.given import IGNORED, Features, Given


def model_of(given: Given) -> Any:
    """The initial model in float32 as Transformers loads it, in training mode; PEFT on top."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    if given.settings.lora:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, given.adapter, is_trainable=True)
    model.config.use_cache = False
    return model.train()


def device() -> str:
    return host.default_device()


def adamw(given: Given, model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, norms and biases don't, as in every variant."""
    chosen = given.settings
    learns = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in learns if p.ndim >= 2 and not n.endswith("bias")]
    others = [p for n, p in learns if p.ndim < 2 or n.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": chosen.weight_decay}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    betas = (chosen.beta1, chosen.beta2)
    return torch.optim.AdamW(groups, lr=chosen.learning_rate, betas=betas, fused=True)


def padded(features: Sequence[Features]) -> dict[str, torch.Tensor]:
    """Rows padded to the longest; the filler's id is no matter, it is masked."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    width = max(len(f["input_ids"]) for f in features)
    return {
        key: torch.tensor([f[key] + [value] * (width - len(f[key])) for f in features])
        for key, value in fill.items()
    }


def tokens_of(features: Sequence[Any]) -> int:
    return sum(len(f["input_ids"]) for f in features)
