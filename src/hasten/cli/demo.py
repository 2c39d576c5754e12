"""``hasten demo``: a DeepSeek-architecture model on the embedded corpus, plainly and hastened.

  1. the comparison: the same records in the same order, one process per arm, taking turns
  2. the fastest row of equal quality trains a little longer, so that the model can say something

On a GPU the model is larger. Both parts end in time however busy the machine is: the first measures
fewer rows or rounds, the second takes fewer steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.cli.speedup import design_line
from hasten.cli.terminal import Display, print_table
from hasten.cli.train import StepLine
from hasten.core.loop import ask_to_leave
from hasten.core.session import Session
from hasten.core.timing import StepMetrics
from hasten.formatting import duration, span
from hasten.machine import host
from hasten.measure.ablation import Design, Which
from hasten.recipe.schema import Recipe
from hasten.report.gains import fastest_of_equal_quality
from hasten.report.page import recipe_plan, write_report
from hasten.report.schema import read_report
from hasten.report.speedup import ablate
from hasten.training.run import train

TINY, SMALL, LARGE = "deepseek-llm-tiny", "deepseek-llm-small", "deepseek-llm-1b"
PLAN = [
    *("packed", "document_attention", "fused_layers", "labelled_token_loss"),
    *("bf16_master_weights", "fused_adamw"),
]
MEASURING_SECONDS, TRAINING_SECONDS = 300.0, 120.0  # at most, with all that belongs to them
DESIGN = Design(
    rounds=6,
    steps=3,
    warmup=2,
    evaluations=2,
    budget_seconds=0.8 * MEASURING_SECONDS,  # the rest is for what takes longer than forecast
    deadline_seconds=MEASURING_SECONDS,
)
LARGE_GPU_BYTES = 60e9  # holds two arms of the larger model with its optimizer's state
TRAINING_STEPS = 160
STEPPING = 0.6  # of the training's time: the rest is for its held-out loss, its sample and saving


@dataclass(frozen=True)
class DemoRow:
    """The row of the table with which the demo trains."""

    name: str
    plan: list[Any]
    why: str
    step_seconds: float | None = None  # as measured

    def steps(self) -> int:
        """As many as fit by what was measured, with half as much again for a busy machine."""
        if not self.step_seconds:
            return TRAINING_STEPS
        fit = int(STEPPING * TRAINING_SECONDS / 1.5 / self.step_seconds)
        return max(1, min(TRAINING_STEPS, fit))


def demo(output: Path) -> None:
    """Measure, train, print the table and a sample, write the page."""
    began = time.monotonic()
    gpu_bytes = min((gpu.memory_bytes for gpu in host.hardware().accelerators), default=0)
    recipe = recipe_for(output, gpu_bytes)
    arms: Which = "plan" if recipe.model == LARGE else "ladder"  # arms stay in memory side by side
    print(
        f"hasten demo: {recipe.model} on Python's standard library, {host.hardware().short}\n"
        f"measuring ends within {duration(MEASURING_SECONDS)}, the training after it within "
        f"{duration(TRAINING_SECONDS)}; on a busy machine fewer rows, rounds and steps fit",
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
        row = row_to_train(report, recipe.plan)
        recipe = recipe.model_copy(update={"plan": row.plan, "max_steps": row.steps()})
        display.tell(f"training with {row.why}, for {recipe.max_steps} steps")
        line = StepLine(display, recipe)
        stop = TimedStop(time.monotonic() + STEPPING * TRAINING_SECONDS, line.start, line.step)
        summary = train(recipe, tell=display.tell, on_start=stop.start, on_step=stop.step)
    who = f"{row.name}, {summary['steps']} steps"
    report["samples"] = [{**s, "arm": who} for s in summary["samples"]]
    page = write_report(report, output)
    print_table(report)
    print(design_line(report["design"]))
    print(report["quality"]["text"])
    _show_training(summary, row.name)
    print(f"\ndone in {duration(time.monotonic() - began)}; the report: {page}")


def row_to_train(report: Mapping[str, Any], plan: list[Any]) -> DemoRow:
    """The fastest row of equal quality, and in words how fast; all of the plan if none is known."""
    read = read_report(report)
    arm = fastest_of_equal_quality(read)
    if arm is None:
        return DemoRow("the whole plan", plan, "the whole plan: nothing could be measured in time")
    kept = recipe_plan(arm, read) or []
    if arm is read["arms"][0]:
        why = "the baseline: no row was shown to be faster at equal quality"
    else:
        why = (
            f'"{arm["name"]}", the fastest row of equal quality: '
            f"{span(arm['ratio'], 'times')} the baseline's speed"
        )
    return DemoRow(arm["name"], kept, why, arm["step_seconds"]["p50"])


class TimedStop:
    """Follows a training, and asks it to stop between two steps once the time has come.

    Args:
        at: when, on the monotonic clock.
        start, step: who else follows it.
        clock: tells the time.
    """

    def __init__(
        self,
        at: float,
        start: Callable[[Session], None],
        step: Callable[[StepMetrics], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._at, self._start, self._step, self._clock = at, start, step, clock

    def start(self, session: Session) -> None:
        self._session = session
        self._start(session)

    def step(self, metrics: StepMetrics) -> None:
        self._step(metrics)
        if self._clock() >= self._at:
            ask_to_leave(self._session, haste=False)


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
