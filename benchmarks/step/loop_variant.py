"""A good engineer's own loop on the Hugging Face model: little padding, no logits without label.

A step's examples are sorted by length and cut into passes, so that padding is short; the head runs
on labelled positions alone; bf16 by autocast, fused AdamW, one division by the step's labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from step.clock import Clock
from step.common import adamw, device, model_of, padded, tokens_of
from step.given import IGNORED, Features, Given

PASSES = 4


def train(given: Given, clock: Clock, out: Path) -> dict[str, Any]:
    """Train on hasten's steps in order."""
    clock.opened()
    model = model_of(given).to(device())
    optimizer = adamw(given, model)
    learns = [p for group in optimizer.param_groups for p in group["params"]]
    clock.started()
    for step in given.steps:
        examples = sorted((given.train.features(i) for i in step), key=_length, reverse=True)
        labelled = sum(label != IGNORED for r in examples for label in r["labels"])
        size = -(-len(examples) // PASSES)
        total = 0.0
        for start in range(0, len(examples), size):
            loss = _loss_sum(model, padded(examples[start : start + size])) / labelled
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(learns, given.settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(tokens_of(examples))
        clock.losses.append(total)
    model.save_pretrained(str(out / "model"))
    return {"saved": str(out / "model"), "settings": {"passes": PASSES}}


def _loss_sum(model: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = {key: value.to(device()) for key, value in rows.items()}
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.autocast(device().split(":")[0], dtype=torch.bfloat16):
        hidden = causal.model(rows["input_ids"], attention_mask=rows["attention_mask"])[0]
        labels = rows["labels"][:, 1:]
        chosen = labels != IGNORED
        logits = causal.lm_head(hidden[:, :-1][chosen])
    return F.cross_entropy(logits.float(), labels[chosen], reduction="sum")


def _length(example: Features) -> int:
    return len(example["input_ids"])
