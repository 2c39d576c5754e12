"""``hasten demo``: a DeepSeek-architecture model on the embedded corpus, plainly and hastened.

  1. the comparison: the same records in the same order, one process per arm, taking turns
  2. the choice: ``plan: auto`` races changes of the plan, and its winner is proven
  3. the training: what was chosen trains a little longer, so that the model can say something

On a GPU the model is larger. All parts end in time however busy the machine is: the first two
measure fewer rows or rounds, the third takes fewer steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.cli.speedup import design_line
from hasten.cli.terminal import print_table
from hasten.cli.train import StepLine
from hasten.core.loop import ask_to_leave
from hasten.core.session import Session
from hasten.core.timing import StepMetrics
from hasten.formatting import duration, span
from hasten.machine import host
from hasten.measure.ablation import Design, Which
from hasten.measure.budget import GRACE
from hasten.measure.choose import Choice
from hasten.progress import Display
from hasten.recipe.schema import AutoPlan, Recipe
from hasten.report.gains import fastest_of_equal_quality
from hasten.report.page import recipe_plan, write_report
from hasten.report.schema import read_report
from hasten.report.speedup import ablate
from hasten.training.chosen_plan import with_chosen_plan
from hasten.training.run import train

TINY, SMALL, LARGE = "deepseek-llm-tiny", "deepseek-llm-small", "deepseek-llm-1b"
PLAN = [
    *("packed", "document_attention", "fused_layers", "labelled_token_loss"),
    *("bf16_master_weights", "fused_adamw"),
]
MEASURING_SECONDS, TRAINING_SECONDS = 300.0, 120.0  # at most, with all that belongs to them
LADDER_SECONDS = 180.0  # of the measuring: the rest is for the choice and its proof
DESIGN = Design(
    rounds=6,
    steps=3,
    warmup=2,
    evaluations=2,
    budget_seconds=LADDER_SECONDS / (1 + GRACE),
    partial=True,
)
CHOOSING = 0.7  # of what the ladder leaves: the rest is for the proof, and for a last round
LARGE_GPU_BYTES = 60e9  # holds two arms of the larger model with its optimizer's state
TRAINING_STEPS = 160
STEPPING = 0.6  # of the training's time: the rest is for its held-out loss, its sample and saving


@dataclass(frozen=True)
class DemoPlan:
    """The plan with which the demo trains."""

    name: str
    plan: list[Any]
    why: str
    step_seconds: float | None = None  # as measured
    least: float = 1.0  # the lower bound of its speed over the baseline's

    def steps(self) -> int:
        """As many as fit by what was measured, with half as much again for a busy machine."""
        if not self.step_seconds:
            return TRAINING_STEPS
        fit = int(STEPPING * TRAINING_SECONDS / 1.5 / self.step_seconds)
        return max(1, min(TRAINING_STEPS, fit))


def demo(output: Path) -> None:
    """Measure, choose, train, print the table and a sample, write the page."""
    began = time.monotonic()
    gpu_bytes = min((gpu.memory_bytes for gpu in host.hardware().accelerators), default=0)
    recipe = recipe_for(output, gpu_bytes)
    arms: Which = "plan" if recipe.model == LARGE else "ladder"  # arms stay in memory side by side
    print(
        f"hasten demo: {recipe.model} on Python's standard library, {host.hardware().short}\n"
        f"measuring and choosing end within {duration(MEASURING_SECONDS)}, the training within "
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
        display.begin()
        left = MEASURING_SECONDS - (time.monotonic() - began)
        _, choice = with_chosen_plan(auto_of(recipe, CHOOSING * left), display, fresh=True)
        chosen = plan_to_train(report, recipe.plan, choice)
        recipe = recipe.model_copy(update={"plan": chosen.plan, "max_steps": chosen.steps()})
        display.tell(f"training with {chosen.name}, for {recipe.max_steps} steps")
        line = StepLine(display, recipe)
        stop = TimedStop(time.monotonic() + STEPPING * TRAINING_SECONDS, line.start, line.step)
        summary = train(recipe, tell=display.tell, on_start=stop.start, on_step=stop.step)
    who = f"{chosen.name}, {summary['steps']} steps"
    report["samples"] = [{**s, "arm": who} for s in summary["samples"]]
    page = write_report(report, output)
    print_table(report)
    print(design_line(report["design"]))
    print(report["quality"]["text"])
    _show_training(summary, chosen.name)
    print(f"\ndone in {duration(time.monotonic() - began)}; the report: {page}\n{chosen.why}")


def auto_of(recipe: Recipe, seconds: float) -> Recipe:
    """The demo's job with ``plan: auto``: the same as examples/stdlib_tiny.yaml."""
    chosen = {"auto_plan": AutoPlan(), "auto_budget": max(seconds, 1.0)}
    return recipe.model_copy(update={"plan": [], "on_obstacle": "stop", **chosen})


def plan_to_train(report: Mapping[str, Any], plan: list[Any], choice: Choice | None) -> DemoPlan:
    """What ``plan: auto`` chose, or the table's best row where that is surely faster.

    Args:
        report: the ladder's.
        plan: the ladder's; taken where nothing was measured.
        choice: of ``plan: auto``; one without a measured gain counts for nothing.
    """
    row = _best_row(report, plan)
    if choice is None or choice.gain is None or choice.tokens_per_second is None:
        return row
    if row.least > (choice.gain["median"] or 0.0):
        return row
    base = read_report(report)["arms"][0]
    step, rate = base["step_seconds"]["p50"], base["tokens_per_second"]["median"]
    step_seconds = step * rate / choice.tokens_per_second if step and rate else None
    return DemoPlan("the choice", choice.entries, choice.sentence, step_seconds)


def _best_row(report: Mapping[str, Any], plan: list[Any]) -> DemoPlan:
    """The fastest row of equal quality; all of the plan if none is known."""
    read = read_report(report)
    arm = fastest_of_equal_quality(read)
    kept = None if arm is None else recipe_plan(arm, read)
    if arm is None or kept is None:
        why = "chosen: the whole plan, since nothing could be measured in time"
        return DemoPlan("the whole plan", plan, why, least=0.0)
    step = arm["step_seconds"]["p50"]
    if arm is read["arms"][0]:
        why = "chosen: no technique, since no row was shown to be faster at equal quality"
        return DemoPlan(arm["name"], kept, why, step, least=0.0)
    why = (
        f'chosen: "{arm["name"]}" ({", ".join(arm["techniques"])}), the fastest row of equal '
        f"quality: {span(arm['ratio'], 'times')} the baseline's speed"
    )
    return DemoPlan(arm["name"], kept, why, step, arm["ratio"]["low"] or 1.0)


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
