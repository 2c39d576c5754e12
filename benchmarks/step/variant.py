"""One run of one variant, in a process of its own: trains, then judges the weights it left behind.

The judge is the same for all: Transformers' model in float32 from the saved folder, loss summed
over the eval examples' trained tokens. It comes after everything that is measured.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from step.clock import Clock
from step.common import device, padded
from step.given import IGNORED, Given


@dataclass(frozen=True)
class Variant:
    """Where a variant's code is, how it is set up, and which packages its user has installed."""

    module: str
    settings: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    own_order: bool = False  # chooses which examples share a step; not where order is matched
    never_matched: bool = False

    def chooses(self, matched: bool) -> bool:
        return self.never_matched or (self.own_order and not matched)


PLAN = (
    *("packed", "document_attention", "fused_layers", "labelled_token_loss"),
    {"bf16_master_weights": {"emulate": True}},  # also where a processor has no unit for bf16
    "fused_adamw",
)
IN_FLOAT32 = tuple(entry for entry in PLAN if isinstance(entry, str))
SORTED = {"train_sampling_strategy": "group_by_length"}
GROUPED = {"bf16": True, **SORTED}
SMALLER = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
VARIANTS: dict[str, Variant] = {
    "hasten": Variant("hasten_variant", {"plan": list(PLAN)}),
    "hasten_float32": Variant("hasten_variant", {"plan": list(IN_FLOAT32)}),
    "hasten_defaults": Variant("hasten_variant", {"plan": []}),
    "hf_defaults": Variant("hf_variant"),
    "hf_best": Variant("hf_variant", GROUPED, own_order=True),
    # the same steps in four passes each: smaller logits, and less padding within a pass
    "hf_best_4x8": Variant("hf_variant", {**GROUPED, **SMALLER}, own_order=True),
    "hf_compile": Variant("hf_variant", {**GROUPED, "torch_compile": True}, own_order=True),
    "hf_best_4x8_compile": Variant(
        "hf_variant", {**GROUPED, **SMALLER, "torch_compile": True}, own_order=True
    ),
    # what a user takes whose processor has no unit for bf16
    "hf_float32_4x8": Variant("hf_variant", {**SORTED, **SMALLER}, own_order=True),
    "hf_float32_4x8_compile": Variant(
        "hf_variant", {**SORTED, **SMALLER, "torch_compile": True}, own_order=True
    ),
    "trl_packing": Variant("trl_variant", needs=("trl", "datasets"), never_matched=True),
    "trl_packing_rows": Variant(
        "trl_variant", {"row_by_row": True}, needs=("trl", "datasets"), never_matched=True
    ),
    "lightning_bf16": Variant("lightning_variant", needs=("lightning",)),
    "plain_loop": Variant("loop_variant"),
}


def run(name: str, folder: Path, out: Path, profile: bool = False) -> None:
    """Train one variant and leave ``result.json`` in ``out``."""
    variant, given = VARIANTS[name], Given.read(folder)
    out.mkdir(parents=True, exist_ok=True)
    clock = Clock(given.settings.warmup, given.settings.cpu_time, given.settings.abreast)
    train: Callable[..., dict[str, Any]] = importlib.import_module(f"step.{variant.module}").train
    changes = dict(variant.settings)
    if profile:
        changes["profile"] = True
    if name in ("hasten", "hasten_float32") and given.settings.architecture in ("v2_lite", "v3"):
        changes["plan"] = [*changes["plan"], "experts_implementation"]
    if variant.chooses(given.settings.matched):
        changes["own_order"] = True
    else:
        changes.pop("train_sampling_strategy", None)
    notes = train(given, clock, out, **changes)
    loss = eval_loss(given, Path(notes.pop("saved")))
    found = {**clock.result(), **notes, "eval_loss": loss, "threads": torch.get_num_threads()}
    (out / "result.json").write_text(json.dumps(found))


def eval_loss(given: Given, saved: Path) -> float:
    """Loss per trained token of the weights in ``saved``, a model's folder or an adapter's."""
    from transformers import AutoModelForCausalLM

    where = given.model if given.settings.lora else str(saved)
    model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    if given.settings.lora:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(saved))
    model.eval().to(device())
    total, count = 0.0, 0
    with torch.no_grad():
        for features in given.eval_batches():
            batch = {k: v.to(device()) for k, v in padded(features).items()}
            labels = batch.pop("labels")[:, 1:]
            logits = model(**batch).logits[:, :-1]
            chosen = labels != IGNORED
            total += float(F.cross_entropy(logits[chosen], labels[chosen], reduction="sum"))
            count += int(chosen.sum())
    return total / count
