"""``hasten demo``: a DeepSeek-architecture model on the embedded corpus.

It is trained without techniques and with them:

  1. Data: Python's standard library, tokenised.
  2. Measuring: seven variants of one training take turns on the same examples. Each has
     one technique more than the one above.
  3. Verification: what each technique requires, on the same job, if time allows.
  4. Training: with the fastest variant of equal quality. Afterwards the model writes
     text.

On a GPU the model is larger. The demo ends within six minutes on any machine. A slow or
busy machine has fewer rounds, shorter turns and fewer training steps, but always all
variants. If other processes use much of the processor, every variant computes with
fewer threads: threads that wait for each other lose most there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hasten.cli.arguments import STARTED, output_option
from hasten.cli.output import say
from hasten.core.plan import Plan, entry_of, name_of
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.formatting import count_text, duration, span
from hasten.measure.ablation import Design, plans_of

if TYPE_CHECKING:
    from hasten.cli.train import StepLine
    from hasten.core.timing import StepMetrics
    from hasten.machine.processes import LoadMeter
    from hasten.measure.experiment import Measured
    from hasten.measure.quality.verification import Rows
    from hasten.measure.recipe_experiment import ExperimentSubject
    from hasten.measure.workers import WorkerPool
    from hasten.progress import Audience
    from hasten.recipe.schema import Recipe
    from hasten.training.chosen_plan import TrainingSpeed

TINY, SMALL, LARGE = "deepseek-llm-tiny", "deepseek-llm-small", "deepseek-llm-1b"
LARGE_GPU_BYTES = 60e9  # holds two variants of the larger model with its optimizer's state
TECHNIQUES = (
    *("packed", "document_attention", "fused_layers", "labelled_token_loss"),
    *("bf16_master_weights", "fused_adamw"),
)
SPARES = ("prefetched", "allocator")  # in place of those that can't work on a machine

# Seconds since the command began. On a quiet machine nothing comes near them.
MEASURED_BY = 225.0  # rounds that end later aren't begun; a first one may take a quarter more
VERIFIED_BY = 285.0
TRAINED_BY = 325.0  # the last step: the rest is for the eval loss, a sample and saving
LEAST_TRAINING, MOST_TRAINING = 20.0, 100.0
LEAST_VERIFICATION = 25.0  # less isn't worth the start of its processes

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
BUSY_LATER = 1.3  # a training that is foretold to fit has so much time for each step
TOO_SLOW = 0.6  # of the measured speed: a training below it is named, with the cause
BUSY = 0.2  # of the processor: others that use more are named, and get a share of the threads
SAMPLE_SECONDS = 1.0  # for which they are looked at
PHASES = {"data": 45.0, "measuring": 160.0, "verification": 40.0, "training": 80.0}
NEARLY = 0.99  # of a phase, or of all: done is what has ended
SAMPLE_LINES = 12
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556


class PhasedProgress:
    """One bar from 0 to 100 % over several phases, each with a name and a share of time.

    A phase's progress is the larger of two values: the elapsed time, and the share that the
    phase reports. It never decreases.

    Args:
        display: shows the bar.
        phases: names in their order, with the seconds that each usually takes at most.
        clock: returns the time.
    """

    def __init__(
        self,
        display: Audience,
        phases: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display, self._phases, self._clock = display, phases, clock
        self._name, self._from, self._share = next(iter(phases)), 0.0, 0.0
        self._began = clock()
        display.begin()

    def enter(self, name: str) -> None:
        """The phase that is shown from now on."""
        names = list(self._phases)
        before = sum(self._phases[n] for n in names[: names.index(name)])
        self._name, self._from = name, before / sum(self._phases.values())
        self._began = self._clock()
        self.show("", 0.0)

    def tell(self, text: str) -> None:
        self._display.tell(text)

    def begin(self) -> None:
        """Pieces of a phase have no bar of their own."""

    def show(self, text: str, share: float, remaining: float | None = None) -> None:
        seconds = self._phases[self._name]
        done = max(share, (self._clock() - self._began) / seconds)
        width = seconds / sum(self._phases.values())
        self._share = max(self._share, self._from + width * min(max(done, 0.0), NEARLY))
        self._display.show(f"{self._name}: {text}" if text else self._name, self._share)

    def end(self) -> None:
        self._display.show("done", 1.0)


@dataclass(frozen=True)
class Neighbours:
    """Load of this machine by other processes.

    Args:
        cores: number of cores that this process may use.
        share: share of their time (0 to 1) that other processes used in the demo's first
            second.
        load_average: load average of the last minute before the demo began.
    """

    cores: int
    share: float
    load_average: float

    @property
    def threads(self) -> int:
        """With how many threads each variant computes: the cores that others leave."""
        if self.share < BUSY:
            return self.cores
        return max(1, round(self.cores * (1 - self.share)))

    def __str__(self) -> str:
        return (
            f"other processes use {self.share:.0%} of the processor (load average "
            f"{self.load_average:.1f} on {self.cores} cores)"
        )


@dataclass(frozen=True)
class DemoPlan:
    """The plan with which the demo trains, and why.

    Args:
        name: of its row in the table.
        plan: as a recipe lists it.
        why: one sentence, with the gain as the table has it.
        tokens_per_second: as measured; None: it wasn't.
        step_seconds: likewise.
    """

    name: str
    plan: list[Any]
    why: str
    tokens_per_second: float | None = None
    step_seconds: float | None = None

    def steps(self, seconds: float) -> int:
        """Returns the number of steps that fit by the measured speed, with some reserve."""
        if not self.step_seconds:
            return TRAINING_STEPS
        fit = int(seconds / BUSY_LATER / self.step_seconds)
        return max(1, min(TRAINING_STEPS, fit))


def demo(
    output: Annotated[Path, output_option("folder of the run")] = Path("runs/demo"),
) -> None:
    """Compare training with and without hasten (6 minutes)."""
    from hasten.cli.speedup import design_line, print_table
    from hasten.machine import host
    from hasten.machine.processes import LoadMeter
    from hasten.measure.recipe_experiment import prepared
    from hasten.progress import Display
    from hasten.report.build import experiment_report
    from hasten.report.page import write_report
    from hasten.report.schema import read_report

    hardware = host.hardware()
    gpus = hardware.accelerators
    recipe = recipe_for(output, min((gpu.memory_bytes for gpu in gpus), default=0))
    say(
        f"hasten demo: {recipe.model} on Python's standard library, {hardware.short}\n"
        "seven variants of one training take turns, then the fastest trains; it ends within 6 min",
        flush=True,
    )
    neighbours = look_at_neighbours()
    with Display() as display, contextlib.ExitStack() as stack:
        progress = PhasedProgress(display, PHASES)
        if not gpus:
            _share_cores(neighbours, stack)
        with _warm_pool(recipe, "cuda" if gpus else "cpu") as pool:
            subject = with_usable_techniques(prepared(recipe, progress), progress.tell)
            progress.enter("measuring")
            measured = _measured(subject, pool, progress)
        report = None
        if measured is not None and measured.variants[0].rounds:
            progress.enter("verification")
            proofs = _verified(subject, progress)
            report = experiment_report(
                subject, measured, DESIGN, "hasten demo", "hasten demo", proofs
            )
        chosen = plan_to_train(report, subject.recipe.plan)
        progress.enter("training")
        meter = LoadMeter(hardware.usable_cores)
        summary, speed = _trained(subject.recipe, chosen, progress, meter)
        progress.end()
    if report is None:
        say(f"nothing could be measured: {_why_nothing(measured)}; {neighbours}")
    else:
        report["samples"] = [
            {**s, "variant": _writer(summary, subject)} for s in summary["samples"]
        ]
        write_report(report, output)
        print_table(report)
        say(design_line(report["design"]))
        say(quality_words(read_report(report)))
        say(verification_words(report["verification"]))
    _show_training(summary, chosen, speed, subject)
    _show_next_steps(output, report is not None)
    say(f"\ndone in {duration(_spent_seconds())}\n{chosen.why}")


def _spent_seconds() -> float:
    return time.perf_counter() - STARTED


def recipe_for(output: Path, gpu_bytes: float) -> Recipe:
    """The demo's job: minutes on two cores, a larger model where there is a GPU."""
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
    """The subject with as many techniques as the demo has rows for, each of which can work here."""
    from hasten.recipe.candidates import supported_here
    from hasten.recipe.shorthands import catalogue

    kinds = {kind.name(): kind for kind in catalogue()}
    usable: dict[str, Technique] = {}
    refused: dict[str, str] = {}
    for name in (*TECHNIQUES, *SPARES):
        technique, why = supported_here(kinds[name](), subject.context)
        if why:
            refused[name] = why[0]
        elif len(usable) < len(TECHNIQUES):
            usable[name] = technique
    spares = [name for name in usable if name in SPARES]
    for name in TECHNIQUES:
        if name in refused:
            other = spares.pop(0) if spares else "nothing"
            tell(f"{name} can't work here, so {other} is measured instead: {refused[name]}")
    plan = Plan(usable.values())
    recipe = subject.recipe.model_copy(update={"plan": [entry_of(t) for t in plan]})
    return replace(subject, recipe=recipe, plan=plan)


def plan_to_train(report: Mapping[str, Any] | None, plan: Sequence[Any]) -> DemoPlan:
    """The fastest row of equal quality in the table; all techniques where nothing was measured."""
    from hasten.report.conclusions import fastest_of_equal_quality
    from hasten.report.judgement import verdict_word
    from hasten.report.page import recipe_plan
    from hasten.report.schema import read_report

    def everything(reason: str) -> DemoPlan:
        why = f"chosen: {', '.join(map(name_of, plan))}: all techniques{reason}"
        return DemoPlan("all techniques", list(plan), why)

    if report is None:
        return everything(", since nothing could be measured")
    read = read_report(report)
    base, *rows = read["variants"]
    variant = fastest_of_equal_quality(read)
    entries = None if variant is None else recipe_plan(variant, read)
    if variant is None or entries is None or not any(row["quality"] for row in rows):
        return everything(", since no speed could be compared")
    if variant is base and all(verdict_word(row["quality"]) == "undecided" for row in rows):
        return everything("; there was no time to compare quality")
    speed, step = variant["tokens_per_second"]["median"], variant["step_seconds"]["p50"]
    why = "chosen: no technique: no row is faster at equal quality"
    if variant is not base:
        why = _choice_words(variant, read)
    return DemoPlan(variant["name"], entries, why, speed, step)


def _choice_words(variant: Mapping[str, Any], read: Mapping[str, Any]) -> str:
    """Returns a sentence on the chosen variant and its gain, as in its row of the table."""
    from hasten.report.conclusions import on_the_whole
    from hasten.report.judgement import cumulative_of, verdict_word

    gain = f"{span(variant['ratio'], 'times')} the baseline's speed at equal quality"
    word = on_the_whole(variant, read)
    if len(variant["rounds"]) == 1:
        gain += ", in a single round, which proves nothing"
    elif word != "helped":
        gain += f", which is {word}"
    rows = cumulative_of(read["variants"])
    inside = rows[1 : next((i for i, row in enumerate(rows) if row is variant), 0) + 1]
    sentence = f"chosen: {', '.join(variant['techniques'])} (row {variant['name']!r}): {gain}"
    by_verdict: dict[str, list[str]] = {}
    for row in inside if len(variant["rounds"]) > 1 else ():
        by_verdict.setdefault(verdict_word(row["verdict"]), []).append(
            row["name"].removeprefix("+ ")
        )
    for word in ("undecided", "no effect", "hurt", "failed"):
        if word in by_verdict:
            sentence += f"; {word} by itself in it: {', '.join(by_verdict[word])}"
    return sentence


def look_at_neighbours() -> Neighbours:
    """Measures the current load of this machine by other processes."""
    from hasten.machine import host
    from hasten.machine.processes import LoadMeter

    cores = host.usable_cores()
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    meter = LoadMeter(cores)
    time.sleep(SAMPLE_SECONDS)
    meter.lap(Neighbours)
    return Neighbours(cores, meter.share(Neighbours), average)


def _warm_pool(recipe: Recipe, device: str) -> WorkerPool:
    """The variants' processes, of which one imports everything while the data is prepared."""
    from hasten.measure.workers import WorkerPool

    folder = Path(recipe.output) / "experiments" / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    pool = WorkerPool(folder, device, fork=True, recipe=path)
    pool.warm_up({})
    return pool


def _share_cores(neighbours: Neighbours, stack: contextlib.ExitStack) -> None:
    """Compute with fewer threads where others use the processor, unless the user set a number."""
    from hasten.machine import environment
    from hasten.machine.threads import with_threads

    chosen = environment.variable("OMP_NUM_THREADS")
    if chosen is not None or neighbours.threads == neighbours.cores:
        return
    count = neighbours.threads
    stack.enter_context(with_threads(count))
    threads = "1 thread" if count == 1 else f"{count} threads"
    say(f"{neighbours}: every variant computes with {threads}", flush=True)


def _measured(
    subject: ExperimentSubject, pool: WorkerPool, progress: PhasedProgress
) -> Measured | None:
    """All variants; None where another measurement had this machine all the time."""
    from hasten.machine.locks import one_measurement
    from hasten.measure.recipe_experiment import measured

    plans, kinds = plans_of(subject.plan, "cumulative")
    with contextlib.ExitStack() as machine:
        try:
            machine.enter_context(one_measurement(progress.tell, MEASURED_BY - _spent_seconds()))
        except InputError:
            return None
        began = time.monotonic() - _spent_seconds()
        options: dict[str, Any] = {"audience": progress, "pool": pool, "began": began}
        return measured(subject, plans, kinds, DESIGN, fresh=True, **options)


def _why_nothing(measured: Measured | None) -> str:
    from hasten.measure.budget import rounded_up

    if measured is None:
        return f"another measurement had this machine for {rounded_up(MEASURED_BY)}"
    dropped = measured.design["dropped"]
    why = dropped[0] if dropped else "no round of all variants ended"
    return f"{why}, which the {rounded_up(MEASURED_BY)} for data and measuring don't hold"


def _verified(subject: ExperimentSubject, progress: PhasedProgress) -> Rows:
    """Runs the checks that each technique requires, if time allows."""
    from hasten.measure.quality.requirements import verification_row
    from hasten.measure.quality.verification import VerificationDesign, verified

    remaining_seconds = VERIFIED_BY - _spent_seconds()
    if remaining_seconds < LEAST_VERIFICATION:
        why = "not tested", "there was no time"
        rows = [verification_row(t, "", *why) for t in subject.plan]
        return {"verification": rows, "invariance": []}
    progress.show("each technique against a reference, on this job", 0.0)
    design = VerificationDesign(budget_seconds=remaining_seconds)
    return verified(subject, design, lambda text: None, fresh=False)


def _trained(
    recipe: Recipe, chosen: DemoPlan, progress: PhasedProgress, load: LoadMeter
) -> tuple[dict[str, Any], TrainingSpeed | None]:
    """Train with the chosen plan: its summary, and how its speed compares with the measured one."""
    from hasten.cli.train import StepLine
    from hasten.training.chosen_plan import TrainingSpeed
    from hasten.training.recording import call_all
    from hasten.training.run import train

    seconds = max(min(TRAINED_BY - _spent_seconds(), MOST_TRAINING), LEAST_TRAINING)
    steps = chosen.steps(seconds)
    recipe = recipe.model_copy(update={"plan": chosen.plan, "max_steps": steps})
    measured_speed = chosen.tokens_per_second
    speed = None if measured_speed is None else TrainingSpeed(measured_speed, load)
    line = StepLine(progress, recipe)
    stop = stopping(time.monotonic() + seconds, line)
    step = call_all(*([] if speed is None else [speed.note]), line.step, stop)
    summary = train(recipe, tell=lambda text: None, on_start=line.start, on_step=step)
    return {**summary, "planned_steps": steps, "seconds_allowed": seconds}, speed


def stopping(
    at: float, line: StepLine, clock: Callable[[], float] = time.monotonic
) -> Callable[[StepMetrics], None]:
    """The function that is called after each step, and requests the training's stop in time.

    Args:
        at: time of the stop, by the clock.
        line: has the session.
    """
    from hasten.core.loop import request_stop

    def look(metrics: StepMetrics) -> None:
        if clock() >= at and line.session is not None:
            request_stop(line.session, haste=False, reason="time limit")

    return look


# What is printed at the end.


def quality_words(read: Mapping[str, Any]) -> str:
    """Returns a phrase on the models' measured quality and the difference between them."""
    from hasten.report.judgement import MARGIN

    base, *rows = read["variants"]
    losses = [row["eval_loss"] for row in rows if row["eval_loss"] is not None]
    if base["eval_loss"] is None or not losses:
        return "quality: there was no time to compare eval losses"
    largest_difference = max(abs(loss / base["eval_loss"] - 1) for loss in losses)
    tokens = base["eval_curve"][-1][0]
    return (
        f"quality: the eval losses of {len(losses)} variants lie within {largest_difference:.2g} "
        f"of the "
        f"baseline's {base['eval_loss']:.4f} (relative; {MARGIN:g} is allowed), after the same "
        f"{tokens:,.0f} tokens from random weights, one seed"
    )


def verification_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the verification's result in one line."""
    from hasten.measure.quality.requirements import FAILED

    by_verdict: dict[str, list[str]] = {}
    for row in rows:
        by_verdict.setdefault(row["verdict"], []).append(row["technique"])
    clauses = []
    if equal := by_verdict.pop("equal", []):
        clauses.append(
            f"{len(equal)} of {len(rows)} techniques equal their reference (gradients in float64, "
            "updates of the weights, or losses bit by bit)"
        )
    for row in rows:
        if row["verdict"] in FAILED:
            clauses.append(f"{row['technique']} {row['verdict']}: {row['text']}")
    if untested := by_verdict.get("not tested"):
        clauses.append(f"no time for {', '.join(untested)}")
    return f"verification on this job: {'; '.join(clauses)}"


def _show_training(
    summary: dict[str, Any],
    chosen: DemoPlan,
    speed: TrainingSpeed | None,
    subject: ExperimentSubject,
) -> None:
    loss, rate = summary["eval_loss"], summary["tokens_per_second"]
    steps = f"{summary['steps']} steps"
    if summary["stopped"] == "time limit":
        allowed = duration(summary["seconds_allowed"])
        steps += f" of {summary['planned_steps']} (its {allowed} were over)"
    say(
        f"\ntraining with {chosen.name}: {steps}, {summary['tokens']:,} tokens"
        + (f", eval loss {loss:.4f}" if loss is not None else "")  # None: asked to leave
        + (f", {rate:,.0f} tokens/s" if rate else "")
        + f", saved in {summary['saved']}"
    )
    if speed is not None and (shortfall := speed.shortfall(TOO_SLOW)):
        say(f"slower than measured: {shortfall}")
    for sample in summary["samples"]:
        say(f"\n{_writer(summary, subject)}")
        say(f"prompt:\n{_indented(sample['prompt'])}\nanswer:\n{_indented(sample['answer'])}")


def _writer(summary: Mapping[str, Any], subject: ExperimentSubject) -> str:
    """Returns a sentence on the text to expect from the model."""
    parameters = subject.context.model.parameters
    usual = TOKENS_PER_PARAMETER * parameters
    return (
        f"{count_text(parameters)} parameters after {summary['tokens']:,} tokens from random "
        f"weights, where {usual / 1e6:,.0f} M are usual: its text shows at best how Python looks"
    )


def _indented(text: str) -> str:
    lines = text.strip().splitlines()
    more = [f"... {len(lines) - SAMPLE_LINES} more lines"] if len(lines) > SAMPLE_LINES else []
    return "\n".join(f"  {line}".rstrip() for line in [*lines[:SAMPLE_LINES], *more])


def _show_next_steps(output: Path, has_page: bool) -> None:
    command = _command()
    say(f"\nnext, in {Path.cwd()}:")
    rows = [
        (f"{command} init MODEL DATA", "a recipe for your own model and data"),
        (f"{command} train recipe.yaml", "trains it; plan: auto chooses the techniques"),
    ]
    if has_page:
        page = output / "report.html"
        opener = {"darwin": "open", "win32": "start"}.get(sys.platform, "xdg-open")
        rows.insert(0, (f"{opener} {page}", "curves and intervals; one file, needs no network"))
    width = max(len(row[0]) for row in rows)
    for row in rows:
        say(f"  {row[0].ljust(width)}  {row[1]}")


def _command() -> str:
    """How ``hasten`` is started from this folder."""
    path = Path(sys.executable).with_name("hasten")
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path) if path.exists() else f"{sys.executable} -m hasten"
