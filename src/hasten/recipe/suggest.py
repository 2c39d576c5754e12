"""Suggests a first recipe for a model and data, with a reason for every choice.

The length limit follows from a tokenised sample of the data. The choice between LoRA and
all weights follows from model size and memory. Techniques are selected when the training
starts (``plan: auto``).
"""

from __future__ import annotations

import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from hasten.core.context import JobContext
from hasten.core.plan import Plan, entry_of
from hasten.data.prepared import PreparedData
from hasten.data.selection import Tell
from hasten.formatting import count_text
from hasten.models.presets import PRESETS
from hasten.parts.kernels.registry import stored_figures
from hasten.recipe.build import context_of
from hasten.recipe.candidates import first_plan_sentence
from hasten.recipe.prepared_data import prepare_data
from hasten.recipe.schema import Recipe, recipe_from
from hasten.recipe.yaml_reader import check_keys, one_line

SAMPLE = 2000  # examples that are read
BATCH = 32  # examples of a step
BYTES_PER_WEIGHT = 16  # float32 weight, gradient and two moments
STATE_SHARE = 0.6  # largest share of the memory for weights, gradients and moments


@dataclass(frozen=True)
class Line:
    """One key of the recipe and why it has its value."""

    key: str
    value: Any
    reason: str = ""

    def text(self) -> str:
        flow = yaml.safe_dump(self.value, default_flow_style=True, width=10**6).splitlines()[0]
        line = f"{self.key}: {flow}"
        if not self.reason:
            return line
        reason = one_line(self.reason)
        together = f"{line:<28} # {reason}"
        if len(together) <= 100:
            return together
        return "\n".join([*(f"# {part}" for part in textwrap.wrap(reason, 98)), line])


def suggest(model: str, dataset: str, output: str, tell: Tell = lambda text: None) -> str:
    """Returns the text of a recipe that trains ``model`` on ``dataset``.

    Raises:
        InputError: the model or the data can't be used.
    """
    with tempfile.TemporaryDirectory(prefix="hasten-init-") as folder:
        look = recipe_from(
            {
                "model": model,
                "dataset": dataset,
                "eval_data": 0,
                "max_examples": SAMPLE,
                "cutoff_len": 1 << 20,
                "max_steps": 1,
                "output": folder,
            },
            "init",
        )
        prepared_data = prepare_data(look, Path(folder), tell)
        context = context_of(look, prepared_data)
        if stored_figures(context.device) is None:
            tell("compiling and measuring hasten's kernels, once on this machine (half a minute)")
        lines = _lines(look, prepared_data, context, output)
        first = "\n#   ".join(textwrap.wrap(one_line(first_plan_sentence(look, context)), 100))
    head = (
        f"# {one_line(context.model.architecture)}, "
        f"{count_text(context.model.parameters)} parameters, on {context.hardware.short}.\n"
        f"# Seen: {one_line(_sample_text(prepared_data))}.\n"
        f"# {first}.\n"
        "# Check it with `hasten check`, measure it with `hasten speedup`.\n"
    )
    text = head + "\n".join(line.text() for line in lines) + "\n"
    return check_keys(text, [line.key for line in lines])


def _lines(
    look: Recipe, prepared_data: PreparedData, context: JobContext, output: str
) -> list[Line]:
    lengths = prepared_data.train.lengths
    cutoff, why_cut = _cutoff(lengths)
    fresh = look.model in PRESETS
    lora, why_lora = _lora(context, fresh)
    steps, all_seen = -(-len(lengths) * 95 // (100 * BATCH)), len(lengths) < SAMPLE
    warmup = min(10, max(steps // 10, 1)) if all_seen else 10
    every = min(100, max(steps // 3, 1)) if all_seen else 100
    of_all = f"of about {steps:,} steps" if all_seen else ""
    rate, whose = (1e-3, "random weights") if fresh else (2e-4, "LoRA") if lora else (2e-5, "all")
    return [
        Line("model", look.model, "random weights: a preset" if fresh else ""),
        Line("dataset", look.dataset),
        Line("eval_data", 0.05, "of the examples, for the eval loss"),
        Line("cutoff_len", cutoff, why_cut),
        Line("finetuning_type", "lora" if lora else "full", why_lora),
        Line("epochs", 1),
        Line("global_batch_size", BATCH, "examples of a step, over all ranks and micro-batches"),
        Line("learning_rate", rate, f"usual for {whose}"),
        Line("warmup_steps", warmup, of_all),
        Line("eval_every", every, of_all),
        Line("output", output),
        Line("plan", "auto", "compares techniques on this job and machine, takes the fastest"),
    ]


def _sample_text(prepared_data: PreparedData) -> str:
    lengths = prepared_data.train.lengths
    low, middle, high = (int(np.percentile(lengths, q)) for q in (10, 50, 99))
    stats = prepared_data.example_stats
    return (
        f"{stats.count:,} examples, tokens at 10/50/99 %: {low}/{middle}/{high}, "
        f"{stats.trained_share:.0%} of the tokens carry loss"
    )


def _cutoff(lengths: NDArray[np.int32]) -> tuple[int, str]:
    """Returns the 99th percentile, rounded up to 64 tokens, and a reason."""
    cut = -(-int(np.percentile(lengths, 99)) // 64) * 64
    longer = float((lengths > cut).mean())
    return cut, f"holds {f'all but {longer:.2%} of the' if longer else 'all'} examples whole"


def _lora(context: JobContext, fresh: bool) -> tuple[bool, str]:
    """Returns True for LoRA if the state of all weights exceeds the memory, and a reason."""
    gpus = context.hardware.accelerators
    memory = min((g.memory_bytes for g in gpus), default=context.hardware.memory_limit_bytes)
    needed = BYTES_PER_WEIGHT * context.model.parameters
    if fresh or needed <= STATE_SHARE * memory:
        return False, f"weights, gradients and moments take {needed / 1e9:,.1f} GB"
    return True, f"all weights would take {needed / 1e9:,.1f} GB of {memory / 1e9:,.0f}"


def recipe_text(recipe: Recipe, plan: Plan, comment: str) -> str:
    """Returns a short form of a recipe with this plan: the keys that are set, after a comment."""
    values = {
        name: setting
        for name, setting in recipe.model_dump(mode="json").items()
        if name in recipe.model_fields_set and name not in ("plan", "checkpoint_every")
    }
    head = "".join(f"# {line}\n" for line in textwrap.wrap(one_line(comment), 97))
    entries = [entry_of(t) for t in plan]
    return head + yaml.safe_dump({**values, "plan": entries}, sort_keys=False, width=100)
