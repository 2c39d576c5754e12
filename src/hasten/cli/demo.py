"""``hasten demo``: a comparison of techniques on Python's standard library, and a training.

  1. Measuring: seven variants of one training take turns on the same examples. Each has
     one technique more than the one above.
  2. Verification: what each technique requires, on the same job.
  3. Training: with the fastest variant of equal quality. Afterwards the model writes
     text.

On a GPU the model is larger. The demo ends within six minutes on any machine. A slow or
busy machine has fewer rounds, shorter turns and fewer training steps.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hasten.cli.arguments import STARTED, output_option
from hasten.cli.output import say
from hasten.core.plan import Plan, entry_of
from hasten.errors import InputError
from hasten.formatting import count_text, span
from hasten.measure.ablation import Design, plans_of

if TYPE_CHECKING:
    from hasten.core.timing import StepMetrics
    from hasten.measure.experiment import Measured
    from hasten.measure.quality.verification import Rows
    from hasten.measure.recipe_experiment import ExperimentSubject
    from hasten.measure.workers import WorkerPool
    from hasten.progress import Display
    from hasten.recipe.schema import Recipe

TINY, SMALL, LARGE = "deepseek-llm-tiny", "deepseek-llm-small", "deepseek-llm-1b"
LARGE_GPU_BYTES = 60e9  # holds two variants of the larger model with its optimizer's state
TECHNIQUES = (
    *("packed", "document_attention", "fused_layers", "labelled_token_loss"),
    *("bf16_master_weights", "fused_adamw"),
)

# Seconds since the command began. An idle machine needs far less.
MEASURED_BY = 225.0  # no round begins that would end later; the first may take a quarter more
VERIFIED_BY = 285.0
TRAINED_BY = 325.0  # last step; the time until 360 s is for eval loss, sample and saving
LEAST_TRAINING, MOST_TRAINING = 20.0, 100.0
LEAST_VERIFICATION = 25.0

DESIGN = Design(
    rounds=8,
    steps=3,
    warmup=1,
    longest_warmup=2,
    evaluations=1,
    budget_seconds=MEASURED_BY,
    samples=False,
)
TRAINING_STEPS = 160
STEP_RESERVE = 1.3  # time planned for a step, as a multiple of the measured one
SAMPLE_LINES = 12
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556


def demo(
    output: Annotated[Path, output_option("folder of the run")] = Path("runs/demo"),
) -> None:
    """Compare training with and without hasten (6 minutes)."""
    from hasten.cli.speedup import design_line, print_table
    from hasten.formatting import duration
    from hasten.machine import host
    from hasten.measure.recipe_experiment import prepared
    from hasten.progress import Display
    from hasten.report.build import experiment_report
    from hasten.report.page import write_report

    hardware = host.hardware()
    recipe = recipe_for(output, min((g.memory_bytes for g in hardware.accelerators), default=0))
    say(
        f"hasten demo: {recipe.model} on Python's standard library, {hardware.short}\n"
        "variants of one training take turns, then the fastest trains; it ends within 6 min",
        flush=True,
    )
    report = None
    device = "cuda" if hardware.accelerators else "cpu"
    with Display() as display, _warm_pool(recipe, device) as pool:
        subject = with_usable_techniques(prepared(recipe, display), display.tell)
        measured, why = _measured(subject, pool, display)
        pool.close()
        if measured is not None:
            findings = _verified(subject, display)
            command = "hasten demo"
            report = experiment_report(subject, measured, DESIGN, command, command, findings)
        row, sentence = row_to_train(report)
        summary = _trained(subject, row, display)
    if report is None:
        say(f"nothing could be measured: {why}")
    else:
        writer = _writer(summary, subject)
        report["samples"] = [{**sample, "variant": writer} for sample in summary["samples"]]
        page = write_report(report, output)
        print_table(report)
        say(design_line(report["design"]))
        for line in verification_lines(findings):
            say(line)
        say(f"report: {page}")
    _show_training(summary, subject)
    say(
        f"\nnext: {os.path.relpath(sys.executable)} -m hasten init MODEL DATA\n"
        f"\ndone in {duration(_spent_seconds())}\n{sentence}"
    )


def _spent_seconds() -> float:
    return time.perf_counter() - STARTED


def recipe_for(output: Path, gpu_bytes: float) -> Recipe:
    """Returns the demo's job: minutes on two cores, with a larger model on a GPU."""
    from hasten.recipe.schema import Recipe

    on_gpu = gpu_bytes > 0
    return Recipe(
        model=LARGE if gpu_bytes >= LARGE_GPU_BYTES else SMALL if on_gpu else TINY,
        dataset="stdlib",
        eval_data=48,
        cutoff_len=512,
        max_steps=TRAINING_STEPS,
        global_batch_size=16,
        learning_rate=3e-4 if on_gpu else 2e-3,
        warmup_steps=4,
        output=str(output),
        plan=[],
    )


def with_usable_techniques(
    subject: ExperimentSubject, tell: Callable[[str], None]
) -> ExperimentSubject:
    """Returns the subject with the techniques that this machine supports."""
    from hasten.recipe.candidates import supported_here
    from hasten.recipe.shorthands import catalogue

    techniques = []
    for kind in catalogue():
        if kind.name() in TECHNIQUES:
            technique, reasons = supported_here(kind(), subject.context)
            if reasons:
                tell(f"{kind.name()} can't work here, so it isn't measured: {reasons[0]}")
            else:
                techniques.append(technique)
    plan = Plan(techniques)
    recipe = subject.recipe.model_copy(update={"plan": [entry_of(t) for t in plan]})
    return replace(subject, recipe=recipe, plan=plan)


def _warm_pool(recipe: Recipe, device: str) -> WorkerPool:
    """The variants' processes, of which one imports everything while the data is prepared."""
    from hasten.measure.workers import WorkerPool

    path = Path(recipe.output) / "experiments" / "demo" / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(recipe.to_yaml())
    pool = WorkerPool(path.parent, device, fork=True, recipe=path)
    pool.warm_up({})
    return pool


def _measured(
    subject: ExperimentSubject, pool: WorkerPool, display: Display
) -> tuple[Measured | None, str]:
    """Returns the measured variants; or None, and why there was no time for a round."""
    from hasten.measure.recipe_experiment import measured

    plans, kinds = plans_of(subject.plan, "cumulative")
    began = time.monotonic() - _spent_seconds()
    try:
        experiment = measured(subject, plans, kinds, DESIGN, True, display, pool, began)
    except InputError as error:  # another measurement had this machine
        return None, str(error)
    if experiment.variants[0].rounds:
        return experiment, ""
    dropped = "; ".join(experiment.design["dropped"])
    return None, dropped or "no round of all variants ended in time"


def _verified(subject: ExperimentSubject, display: Display) -> Rows:
    """Runs the checks that each technique requires, as far as time allows."""
    from hasten.measure.quality.verification import VerificationDesign, verified

    display.begin()
    display.show("verification: each technique against a reference, on this job", 0.0)
    seconds = max(VERIFIED_BY - _spent_seconds(), LEAST_VERIFICATION)
    return verified(subject, VerificationDesign(budget_seconds=seconds), lambda text: None, False)


def row_to_train(report: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, str]:
    """Returns the fastest row of equal quality in the report, and a sentence with its gain.

    If no speed or no quality could be compared, the row is None: all techniques are used.
    """
    from hasten.report.conclusions import fastest_of_equal_quality, on_the_whole
    from hasten.report.judgement import verdict_word
    from hasten.report.page import recipe_plan
    from hasten.report.schema import read_report

    if report is None:
        return None, "chosen: all techniques, since nothing could be measured"
    read = read_report(report)
    base, *rows = read["variants"]
    row = fastest_of_equal_quality(read)
    undecided = all(verdict_word(other["quality"]) == "undecided" for other in rows)
    if row is None or (row is base and undecided):
        return None, "chosen: all techniques, since there was no time to compare quality"
    row = {**row, "entries": recipe_plan(row, read) or []}
    if row["name"] == base["name"]:
        return row, "chosen: no technique: no row is faster at equal quality"
    gain = f"{span(row['ratio'], 'times')} the baseline's speed at equal quality"
    word = on_the_whole(row, read)
    if len(row["rounds"]) == 1:
        gain += ", in a single round, which proves nothing"
    elif word != "helped":
        gain += f", which is {word}"
    return row, f"chosen: {', '.join(row['techniques'])} (row {row['name']!r}): {gain}"


def _trained(
    subject: ExperimentSubject, row: Mapping[str, Any] | None, display: Display
) -> dict[str, Any]:
    """Trains with a row's plan or all techniques; returns the summary with values to print."""
    from hasten.cli.train import StepLine
    from hasten.core.loop import request_stop
    from hasten.training.recording import call_all
    from hasten.training.run import train

    seconds = max(min(TRAINED_BY - _spent_seconds(), MOST_TRAINING), LEAST_TRAINING)
    recipe, name, steps = subject.recipe, "all techniques", TRAINING_STEPS
    if row is not None:
        name, steps = row["name"], fitting_steps(seconds, row["step_seconds"]["p50"])
        recipe = recipe.model_copy(update={"plan": list(row["entries"])})
    recipe = recipe.model_copy(update={"max_steps": steps})
    line = StepLine(display, recipe)
    over = time.monotonic() + seconds

    def stop(metrics: StepMetrics) -> None:
        if time.monotonic() >= over and line.session is not None:
            request_stop(line.session, haste=False, reason="time limit")

    step = call_all(line.step, stop)
    summary = train(recipe, tell=lambda text: None, on_start=line.start, on_step=step)
    return {**summary, "planned_steps": steps, "name": name}


def fitting_steps(seconds: float, step_seconds: float | None) -> int:
    """Returns the number of steps that fit into the time, with a reserve; all if it's unknown."""
    if not step_seconds:
        return TRAINING_STEPS
    return max(1, min(TRAINING_STEPS, int(seconds / STEP_RESERVE / step_seconds)))


def verification_lines(findings: Rows) -> list[str]:
    """Returns lines on the number of techniques that equal their reference, and on failures."""
    from hasten.measure.quality.requirements import failures

    rows = findings["verification"]
    equal = sum(row["verdict"] == "equal" for row in rows)
    how = "gradients in float64, updates of the weights, or losses bit by bit"
    untested = [row["technique"] for row in rows if row["verdict"] == "not tested"]
    late = f"; no time for {', '.join(untested)}" if untested else ""
    return [
        f"verification on this job: {equal} of {len(rows)} techniques equal their reference "
        f"({how}){late}",
        *(f"FAIL {line}" for line in failures(findings)),
    ]


def _show_training(summary: Mapping[str, Any], subject: ExperimentSubject) -> None:
    loss, rate = summary["eval_loss"], summary["tokens_per_second"]
    stopped = summary["stopped"] == "time limit"
    steps = f" of {summary['planned_steps']} (its time was over)" if stopped else ""
    say(
        f"\ntraining with {summary['name']}: {summary['steps']} steps{steps}, "
        f"{summary['tokens']:,} tokens"
        + (f", eval loss {loss:.4f}" if loss is not None else "")  # None: a signal ended it
        + (f", {rate:,.0f} tokens/s" if rate else "")
        + f", saved in {summary['saved']}"
    )
    for sample in summary["samples"]:
        say(f"\n{_writer(summary, subject)}")
        for part in ("prompt", "answer"):
            lines = sample[part].strip().splitlines()
            more = [f"... {len(lines) - SAMPLE_LINES} more lines"] * (len(lines) > SAMPLE_LINES)
            say("\n  ".join([f"{part}:", *lines[:SAMPLE_LINES], *more]))


def _writer(summary: Mapping[str, Any], subject: ExperimentSubject) -> str:
    """Returns a sentence on the text to expect from the model."""
    parameters = subject.context.model.parameters
    usual = TOKENS_PER_PARAMETER * parameters
    return (
        f"{count_text(parameters)} parameters after {summary['tokens']:,} tokens from random "
        f"weights, where {usual / 1e6:,.0f} M are usual: its text shows at best how Python looks"
    )
