"""``hasten train``: trains in one process, or in one per rank, and prints steps and summary."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasten.cli.arguments import STARTED, Fresh, Overrides, RecipePath
from hasten.cli.output import say, show_table
from hasten.core.plan import name_of
from hasten.core.slot import Slot
from hasten.errors import FAILED, INTERRUPTED, LEFT, UNSAVED, InputError
from hasten.foreign_files import read_json_object
from hasten.formatting import flow, size, span
from hasten.machine.environment import World
from hasten.machine.signals import interrupt_behind

if TYPE_CHECKING:
    from hasten.core.setup import Session
    from hasten.core.timing import StepMetrics
    from hasten.measure.choice import Choice
    from hasten.progress import Audience
    from hasten.recipe.schema import Recipe


def train(
    path: RecipePath,
    overrides: Overrides = None,
    choose_only: Annotated[
        bool,
        typer.Option(
            "--choose-only", help="print the choice of plan: auto with reasons, then stop"
        ),
    ] = False,
    fresh: Fresh = False,
) -> int:
    """Train with a recipe."""
    sessions: list[Session] = []
    try:
        return _train(path, list(overrides or []), choose_only, fresh, sessions)
    except BaseException as error:
        interrupt = interrupt_behind(error)
        if interrupt is not None and not sessions and not hasattr(interrupt, "__notes__"):
            interrupt.add_note("before the first step: nothing was trained")
        raise


def _train(
    path: Path, changes: list[str], choose_only: bool, fresh: bool, sessions: list[Session]
) -> int:
    """Trains; the session is appended to ``sessions`` before the first step."""
    from hasten.core.loop import defer_signals, ignore_stop_signals
    from hasten.launch.ranks import restart_with
    from hasten.machine import environment
    from hasten.machine.processes import attempt_folder, exit_with_parent
    from hasten.progress import Display
    from hasten.recipe.schema import load_recipe
    from hasten.training.chosen_plan import SpeedWatch, with_chosen_plan
    from hasten.training.recording import call_all
    from hasten.training.run import train as run_training

    import_seconds = time.perf_counter() - STARTED
    exit_with_parent()
    recipe = load_recipe(path, changes)
    if recipe.auto_plan is None and (choose_only or fresh):
        option = "--choose-only" if choose_only else "--fresh"
        raise InputError(f"{option}: nothing is chosen, since the recipe doesn't have plan: auto")
    alone = environment.world().size == 1 and attempt_folder() is None
    choice: Choice | None = None
    if alone and recipe.auto_plan is not None:
        with Display() as display:
            recipe, choice = with_chosen_plan(recipe, display, fresh=fresh)
        if choose_only:
            if choice is not None:
                show_choice(choice)
            return 0
        path, changes = Path(recipe.output) / "data" / "chosen.yaml", []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe.to_yaml())
    if alone and (recipe.max_restarts or recipe.nproc > 1):
        with ExitStack() as stack:  # until the last attempt is over
            return train_as_ranks(recipe, stack)
    if missing := lacking(recipe):
        restart_with(["train", str(path), *changes], missing)
    with Display() as display, ExitStack() as stack:
        line = StepLine(display, recipe)
        silent = not environment.world().is_main
        for name in () if silent else measured_to_hurt(recipe):
            display.tell(
                f"warning: this plan was faster without {name}, by {recipe.output}/report.json"
            )
        watched = None if choice is None else SpeedWatch(choice, display.tell)
        signals = stack.enter_context(ExitStack())
        signals.enter_context(defer_signals(lambda: line.session))
        summary = run_training(
            recipe,
            import_seconds=import_seconds,
            tell=(lambda text: None) if silent else display.tell,
            on_tokens=None if silent else line.tokenising,
            on_start=call_all(sessions.append, line.start),
            on_step=line.step if watched is None else call_all(watched.note, line.step),
            on_evaluation=lambda e: display.tell(_evaluation(e.step, e.eval_loss, e.metrics)),
        )
        signals.pop_all()
        ignore_stop_signals()  # the model is saved: a signal must not change the exit code
    if summary:
        _conclude(summary)
        idle = warn_of_idle(summary["effective"])
        if idle and recipe.require_effect:
            return FAILED
        # A supervisor reads this from the summary: an error code would cause a restart.
        if summary["unsaved"] and attempt_folder() is None:
            return UNSAVED
    return {"interrupted": INTERRUPTED, "left": LEFT}.get(summary.get("stopped", ""), 0)


def show_choice(choice: Choice) -> None:
    """Prints every candidate with its reason, and the plan as a line of a recipe."""
    columns = ("change of the first plan, or technique", "speed [95 %]", "", "why")
    rows = [
        (row.name, "" if row.ratio is None else span(row.ratio, "times"), row.decision, row.why)
        for row in choice.rows
    ]
    show_table(columns, rows)
    say(f"\n{choice.sentence}\n\nplan: {flow(choice.entries)}")


def measured_to_hurt(recipe: Recipe) -> list[str]:
    """Returns the plan's techniques that hurt speed or model in the last `hasten speedup`."""
    from hasten.report.conclusions import unpaid
    from hasten.report.schema import read_report

    path = Path(recipe.output) / "report.json"
    try:
        report = read_report(read_json_object(path, "report"))
    except ValueError:
        return []
    planned = {name_of(entry) for entry in recipe.plan}
    hurts = {
        row["name"].removeprefix("+ ").partition("(")[0]: row["why"]
        for row in unpaid(report)
        if row["word"] in ("hurt", "worse")
    }
    return [f"{name} ({why})" for name, why in hurts.items() if name in planned]


def lacking(recipe: Recipe) -> dict[str, str]:
    """Returns the variables that this process would have needed when it started."""
    from hasten.machine import environment
    from hasten.recipe.build import environ_of

    if not (recipe.plan or recipe.transport):
        return {}
    return environment.not_yet_so({**environ_of(recipe), **recipe.transport})


def warn_of_idle(effective: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Prints the techniques that were requested and had no effect, on the error stream."""
    idle = [name for name, proof in effective.items() if proof["effective"] is False]
    for name in idle:
        say(
            f"warning: {name} was requested and had no effect: {effective[name]['evidence']}",
            file=sys.stderr,
        )
    return idle


class StepLine:
    """The line that shows a run's current step."""

    def __init__(self, display: Audience, recipe: Recipe) -> None:
        self._display, self._recipe = display, recipe
        self._steps = 1
        self._began = time.perf_counter()
        self._devices = 1
        self.session: Session | None = None  # once it has started

    def tokenising(self, done: int, total: int) -> None:
        self._display.show(f"tokenising {done:,}/{total:,} examples", done / max(total, 1))

    def start(self, session: Session) -> None:
        self.session = session
        self._steps = session.setup.job.schedule.total_steps
        self._devices = session.setup.context.world.size
        self._began = time.perf_counter()
        self._display.begin()

    def step(self, m: StepMetrics) -> None:
        parts = [
            f"step {m.step}/{self._steps}",
            f"loss {m.loss:.4f}",
            f"{m.tokens_per_second:,.0f} tokens/s",
            f"padding {m.padding_share:.0%}",
            size(m.peak_memory_bytes),
        ]
        if m.mfu is not None:
            parts.append(f"MFU {m.mfu:.1%}")
        price = self._recipe.price
        if price is not None:
            # The time includes evaluations and saving.
            cost = price.money(time.perf_counter() - self._began, price.paid(self._devices))
            parts.append(f"{cost:.4f} {price.currency}")
        if m.skipped:
            parts.append("SKIPPED: not finite")
        self._display.show("  ".join(parts), min(m.step / self._steps, 1.0), m.eta_seconds)


def as_ranks(
    recipe: Recipe, command: str, options: Sequence[str] = (), stack: ExitStack | None = None
) -> int:
    """Prepares the data once, runs a command in one process per rank, and returns the exit code.

    A training is restarted from the newest checkpoint, as often as the recipe allows.

    ``stack`` holds the lock of the run's folder; a command that only reads needs none.
    """
    from hasten.launch.supervisor import RankTimeouts, SupervisedRanks, Supervision, supervise
    from hasten.machine import host
    from hasten.progress import Display
    from hasten.recipe.build import prepare_run, supervision_of
    from hasten.training.folder import archive_previous_run

    output = Path(recipe.output)
    supervision, log = Supervision(0, RankTimeouts(math.inf, math.inf)), None
    with Display() as display:
        line = StepLine(display, recipe)
        prepared = prepare_run(recipe, display.tell, line.tokenising, recipe.nproc, stack)
        context, plan = prepared.context, prepared.plan
        if command == "train" and recipe.max_restarts:
            supervision, log = supervision_of(recipe), output / "restarts.jsonl"
            if Slot.CHECKPOINT not in plan:
                display.tell(
                    "max_restarts: the plan writes no checkpoints, so a restart begins at step 0"
                )
            moves = recipe.resume == "never"
            if moves and (unfinished := archive_previous_run(output, keep_checkpoints=False)):
                display.tell(unfinished)
    resolved = output / "data" / f"ranks-{command}.yaml"
    resolved.write_text(recipe.to_yaml())

    def arguments(count: int, trained: bool) -> Sequence[str]:
        fewer = [f"nproc={count}", "min_nproc=null"] if count < recipe.nproc else []
        resumes = ["resume=auto"] if trained else []
        return [command, str(resolved), *options, *fewer, *resumes]

    def environ(rank: int, count: int) -> Mapping[str, str]:
        rank_context = replace(context, world=World(rank, rank, count))
        return {**plan.environment(rank_context), **recipe.transport}

    ranks = SupervisedRanks(arguments, environ, recipe.nproc, host.usable_cores())
    return supervise(ranks, supervision, output / "data", log)


def train_as_ranks(recipe: Recipe, stack: ExitStack) -> int:
    """Trains with ``as_ranks``; returns UNSAVED if a file next to the weights isn't saved."""
    code = as_ranks(recipe, "train", stack=stack)
    if code != 0:
        return code
    try:
        unsaved = json.loads((Path(recipe.output) / "summary.json").read_text())["unsaved"]
    except (OSError, ValueError):  # the rank has printed why
        return UNSAVED
    return UNSAVED if unsaved else 0


def _conclude(summary: dict[str, Any]) -> None:
    from hasten.report.card import time_and_speed

    peak = summary["peak_memory_bytes"]  # 0 if this process trained no step
    say(
        f"{summary['stopped']}: {summary['steps']} steps, {summary['tokens']:,} tokens"
        + ("; " if summary["resumed_step"] else " in ")
        + time_and_speed(summary)
        + (f", peak {size(peak)}" if peak else "")
    )
    if summary["data_stall_share"] is not None and summary["tokens_per_second"]:
        times = summary["stability"]
        say(
            f"data stall {summary['data_stall_share']:.2%}; steps: median {times['p50']:.3f} s, "
            f"p99 {times['p99']:.3f} s, spread {times['relative_spread']:.1%}, "
            f"{times['stalls']} stalled"
        )
    if summary["mfu"] is not None:
        ceiling = summary["ceiling"]
        say(f"MFU {summary['mfu']:.1%} of {ceiling['source']}; {ceiling['convention']}")
    if summary["eval_loss"] is not None:
        metrics = "".join(f", {k.replace('_', ' ')} {v:.4f}" for k, v in summary["metrics"].items())
        by_token = summary["perplexity"] is not None
        say(f"eval loss {summary['eval_loss']:.4f}", end="")
        say(f", perplexity {summary['perplexity']:.1f}" if by_token else metrics)
    for name, proof in summary["effective"].items():
        say(f"{name}: {'effective' if proof['effective'] else 'NO EFFECT'} ({proof['evidence']})")
    for sample in summary["samples"]:
        say(f"--- prompt\n{sample['prompt']}\n--- answer\n{sample['answer']}\n---")
    if summary["cost"]:
        since = " since the resume" if summary["resumed_step"] else ""
        say(f"cost {summary['cost']['total']:.4f} {summary['cost']['currency']}{since}")
    if summary["energy"]["kwh"] is not None:
        say(f"energy {summary['energy']['kwh']:.4g} kWh, {summary['energy']['source']}")
    if summary["saved"] is None:
        for problem in ("the weights are NOT saved", *summary["unsaved"]):
            say(f"error: {problem}", file=sys.stderr)
    else:
        say(f"saved: {summary['saved']}")
        warn_of_unsaved(summary["unsaved"])
    if summary["stopped"] in ("interrupted", "left"):
        has_checkpoints = "checkpoints" in summary["effective"]
        say(
            "to continue: the same command with resume=auto"
            if has_checkpoints
            else "this run can't continue, since its plan has no checkpoints: add "
            "checkpoint_every: dynamic to the recipe before the next one"
        )


def warn_of_unsaved(problems: Sequence[str]) -> None:
    """Prints what couldn't be saved next to the weights, on the error stream."""
    for problem in problems:
        say(f"warning: the weights are saved, but {problem}", file=sys.stderr)


def _evaluation(step: int, loss: float | None, metrics: dict[str, float]) -> str:
    phrases = [f"step {step}: eval loss " + ("not measured" if loss is None else f"{loss:.4f}")]
    return ", ".join([*phrases, *(f"{name} {metric:.4g}" for name, metric in metrics.items())])
