"""Transformers' Trainer; what differs between its variants are ``TrainingArguments`` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from step.clock import Clock
from step.common import device, model_of, tokens_of
from step.given import Given


class StepTimes(TrainerCallback):
    """Tells the clock when a step is over; ``counts`` are the tokens of each collated batch."""

    def __init__(self, clock: Clock, counts: list[int], budget: int | None = None) -> None:
        self._clock, self._counts, self._budget = clock, counts, budget
        self._at = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        until = self._at + args.gradient_accumulation_steps
        self._clock.step(sum(self._counts[self._at : until]))
        self._at = until
        tokens = self._clock.tokens  # ends at the step that is nearest to the budget
        if self._budget is not None and sum(tokens) + tokens[-1] / 2 >= self._budget:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if "loss" in (logs or {}):
            self._clock.losses.append(float(logs["loss"]))


def arguments(given: Given, out: Path) -> dict[str, Any]:
    """What every variant of Transformers and TRL sets, and nothing that slows it down."""
    chosen = given.settings
    return {
        "output_dir": str(out / "trainer"),
        "max_steps": len(given.steps),
        "per_device_train_batch_size": chosen.batch,
        "learning_rate": chosen.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": chosen.weight_decay,
        "adam_beta1": chosen.beta1,
        "adam_beta2": chosen.beta2,
        "max_grad_norm": chosen.clip,
        "seed": chosen.seed,
        "use_cpu": device() == "cpu",
        "dataloader_pin_memory": device() != "cpu",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }


def train(
    given: Given, clock: Clock, out: Path, own_order: bool = False, **changes: Any
) -> dict[str, Any]:
    """Train with the Trainer's own loop, collator and optimizer (fused AdamW by default)."""
    features = given.all_records() if own_order else given.in_order()
    settings = {"train_sampling_strategy": "sequential", **arguments(given, out), **changes}
    pad = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(given.model))
    counts: list[int] = []

    def collate(rows: list[Any]) -> Any:
        counts.append(tokens_of(rows))
        return pad(rows)

    clock.opened()
    model = model_of(given)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=features,
        data_collator=collate,
        callbacks=[StepTimes(clock, counts)],
    )
    clock.started()
    trainer.train()
    if settings.get("torch_compile"):
        clock.compile_seconds = compile_seconds()
    model.save_pretrained(str(out / "model"))
    return {"saved": str(out / "model"), "settings": changes}


def compile_seconds() -> float:
    """Seconds in torch.compile's compilers, as torch itself counted them."""
    from torch._dynamo.utils import compilation_time_metrics

    return float(sum(compilation_time_metrics.get("_compile.compile_inner", [])))
