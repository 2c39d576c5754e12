"""``hasten demo``: a DeepSeek-architecture model on the embedded corpus, plainly and hastened.

First the comparison: the same records in the same order, one process per arm, taking turns, for
five minutes at most. Then the fastest row of equal quality trains for two minutes at most, so that
the model has something to say. On a GPU the model is larger; everything else is the same.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hasten.cli.display import Display, duration
from hasten.cli.train import StepLine
from hasten.core import facts
from hasten.core.session import Session
from hasten.core.step import StepMetrics
from hasten.errors import InputError
from hasten.evidence.ablation import Design, Which
from hasten.evidence.budget import words
from hasten.evidence.report import render_markdown, write_report
from hasten.evidence.report_gains import head, slower_than_above
from hasten.evidence.report_schema import read_report
from hasten.experiment import ablate, prepared
from hasten.recipe.schema import Recipe
from hasten.run import train

TINY, SMALL, LARGE = "deepseek-llm-tiny", "deepseek-llm-small", "deepseek-llm-1b"
PLAN = [
    *("packed", "document_attention", "fused_layers", "labelled_token_loss"),
    *("bf16_master_weights", "fused_adamw"),
]
MEASURING_SECONDS, TRAINING_SECONDS = 300.0, 120.0
DESIGN = Design(rounds=5, steps=2, warmup=1, evaluations=1)
SPARE_SECONDS = 30.0  # of both: what has begun is finished, and the model is saved
LARGE_GPU_BYTES = 60e9  # holds two arms of the larger model with its optimizer's state
TRAINING_STEPS, FEWEST_STEPS = 160, 10


def demo(output: Path) -> None:
    """Measure, train with what was fastest, print the table and a sample, write the page."""
    began = time.monotonic()
    gpu_bytes = min((gpu.memory_bytes for gpu in facts.hardware().accelerators), default=0)
    recipe = recipe_for(output, gpu_bytes)
    arms: Which = "plan" if recipe.model == LARGE else "ladder"  # arms stay in memory side by side
    print(
        f"hasten demo: {recipe.model} on Python's standard library, {facts.hardware().short}; "
        f"measures for {words(MEASURING_SECONDS)} and trains for {words(TRAINING_SECONDS)} at most",
        flush=True,
    )
    with Display() as display:
        prepared(recipe, display)  # the data is part of the five minutes
        report = _measured(recipe, arms, display, began)
        chosen = fastest_row(report["arms"]) if report else None
        recipe = recipe.model_copy(update=trained_as(recipe, chosen))
        display.tell(_choice(chosen))
        summary = _trained(recipe, display)
    name, where = chosen["name"] if chosen else "the baseline", ""
    if report:
        samples = [{**s, "arm": f"{name}, {summary['steps']} steps"} for s in summary["samples"]]
        where = f"; the report: {write_report({**report, 'samples': samples}, output)}"
        print_with_red(render_markdown(report), slower_than_above(read_report(report)["arms"]))
        print(report["quality"]["text"])
    _show_training(summary, name)
    print(f"\ndone in {duration(time.monotonic() - began)}{where}")


def _measured(recipe: Recipe, arms: Which, display: Display, began: float) -> dict[str, Any] | None:
    """The report; None where this machine is too slow, or too busy, for two rounds in the time."""
    left = MEASURING_SECONDS - SPARE_SECONDS - (time.monotonic() - began)
    try:
        return ablate(
            recipe,
            arms,
            design=replace(DESIGN, budget_seconds=max(left, 1.0)),
            title="hasten demo",
            command="hasten demo",
            fresh=True,
            audience=display,
        )
    except InputError as error:
        if not str(error).startswith("budget:"):
            raise
        display.tell(f"nothing is compared: {error}")
        return None


def fastest_row(arms: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row that was the fastest, of those whose model is as good; the baseline's ratio is 1."""
    good = [a for a in arms[1:] if head(a["verdict"]) not in ("failed", "harmed", "no effect")]
    faster = [arm for arm in good if (arm["ratio"]["median"] or 0.0) > 1]
    return max(faster, key=lambda arm: arm["ratio"]["median"], default=arms[0])


def trained_as(recipe: Recipe, arm: Mapping[str, Any] | None) -> dict[str, Any]:
    """The recipe's keys that make the chosen arm's training, as long as there is time for."""
    if arm is None:
        return {"plan": [], "max_steps": FEWEST_STEPS}
    names = set(arm["techniques"])
    step = arm["step_seconds"]["p50"] or 1.0
    fit = int((TRAINING_SECONDS - SPARE_SECONDS) / step)
    return {
        "plan": [name for name in PLAN if name in names],
        "max_steps": max(FEWEST_STEPS, min(TRAINING_STEPS, fit)),
    }


def _choice(arm: Mapping[str, Any] | None) -> str:
    if arm is None or not arm["techniques"]:
        return "training without techniques: none was measured to be faster"
    ratio = arm["ratio"]
    return (
        f"training with {', '.join(arm['techniques'])}: the fastest row of equal quality, "
        f"{ratio['median']:.2f} times as fast as the baseline "
        f"[{ratio['low']:.2f}, {ratio['high']:.2f}]"
    )


def _trained(recipe: Recipe, display: Display) -> dict[str, Any]:
    """Train for the recipe's steps, or until there is no more time."""
    line, live = StepLine(display, recipe), list[Session]()
    end = time.monotonic() + TRAINING_SECONDS - SPARE_SECONDS

    def start(session: Session) -> None:
        live.append(session)
        line.start(session)

    def step(metrics: StepMetrics) -> None:
        line.step(metrics)
        if time.monotonic() > end:
            live[0].stop_requested = True

    return train(recipe, tell=display.tell, on_start=start, on_step=step)


def print_with_red(table: str, names: Collection[str]) -> None:
    """Print a Markdown table; rows of these arms are red where the terminal has colours."""
    console = Console(highlight=False, soft_wrap=True)
    for line in table.splitlines():
        name = line.split("|")[1].strip() if line.count("|") > 1 else ""
        console.print(line, style="red" if name in names else None, markup=False)


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


def _show_training(summary: dict[str, Any], name: str) -> None:
    loss, rate = summary["held_out_loss"], summary["tokens_per_second"]
    print(
        f"\nafter {summary['steps']} steps with {name}: "
        + (f"held-out loss {loss:.4f}, " if loss is not None else "")  # None: asked to leave
        + (f"{rate:,.0f} tokens/s, " if rate else "")
        + f"saved in {summary['saved']}"
    )
    for sample in summary["samples"]:
        print(f"\nasked:\n{sample['prompt']}\nit writes:\n{sample['answer']}")
