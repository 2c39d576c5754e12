"""``hasten demo``: a DeepSeek-architecture model on the embedded corpus, plainly and hastened.

First the comparison: the same records in the same order, one process per arm, taking turns. Then
the whole plan trains a little longer, so that the model has something to say. On a GPU the model
is larger; everything else is the same.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hasten.cli.display import Display, duration
from hasten.cli.train import StepLine
from hasten.core import facts
from hasten.evidence.ablation import Design, Which
from hasten.evidence.report import render_markdown, write_report
from hasten.experiment import ablate
from hasten.recipe.schema import Recipe
from hasten.run import train

TINY, SMALL, LARGE = "deepseek-llm-tiny", "deepseek-llm-small", "deepseek-llm-1b"
PLAN = [
    *("packed", "document_attention", "fused_layers", "labelled_token_loss"),
    *("bf16_master_weights", "fused_adamw"),
]
DESIGN = Design(rounds=6, steps=3, warmup=2, evaluations=2)
LARGE_GPU_BYTES = 60e9  # holds two arms of the larger model with its optimizer's state
TRAINING_STEPS = 160


def demo(output: Path) -> None:
    """Measure, train, print the table and a sample, write the page."""
    began = time.monotonic()
    gpu_bytes = min((gpu.memory_bytes for gpu in facts.hardware().accelerators), default=0)
    recipe = recipe_for(output, gpu_bytes)
    arms: Which = "plan" if recipe.model == LARGE else "ladder"  # arms stay in memory side by side
    print(
        f"hasten demo: {recipe.model} on Python's standard library, {facts.hardware().short}",
        flush=True,
    )
    with Display() as display:
        report = ablate(
            recipe,
            arms,
            design=DESIGN,
            title="hasten demo",
            command="hasten demo",
            fresh=True,
            audience=display,
        )
        display.tell(f"training with the whole plan for {TRAINING_STEPS} steps")
        line = StepLine(display, recipe)
        summary = train(recipe, tell=display.tell, on_start=line.start, on_step=line.step)
    report["samples"] = [
        {**s, "arm": f"the whole plan, {TRAINING_STEPS} steps"} for s in summary["samples"]
    ]
    page = write_report(report, output)
    print(render_markdown(report))
    print(report["quality"]["text"])
    _show_training(summary)
    print(f"\ndone in {duration(time.monotonic() - began)}; the report: {page}")


def recipe_for(output: Path, gpu_bytes: float) -> Recipe:
    """The demo's job: minutes on two cores, a larger model where there is a GPU."""
    on_gpu = gpu_bytes > 0
    return Recipe(
        model=LARGE if gpu_bytes >= LARGE_GPU_BYTES else SMALL if on_gpu else TINY,
        dataset="stdlib",
        held_out=48,
        cutoff_len=512,
        max_steps=TRAINING_STEPS,
        global_batch_size=16,
        learning_rate=3e-4 if on_gpu else 2e-3,
        warmup_steps=4,
        output=str(output),
        plan=PLAN,
        on_obstacle="skip",
    )


def _show_training(summary: dict[str, Any]) -> None:
    loss, rate = summary["held_out_loss"], summary["tokens_per_second"]
    print(
        f"\nafter {summary['steps']} steps with the whole plan: "
        + (f"held-out loss {loss:.4f}, " if loss is not None else "")  # None: asked to leave
        + (f"{rate:,.0f} tokens/s, " if rate else "")
        + f"saved in {summary['saved']}"
    )
    for sample in summary["samples"]:
        print(f"\nasked:\n{sample['prompt']}\nit writes:\n{sample['answer']}")
