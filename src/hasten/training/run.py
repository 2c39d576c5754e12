"""The life of one training run: folder, data, model, steps, and its files.

Files in ``output/``:

  - recipe.yaml: the resolved recipe
  - metrics.jsonl: a line per step
  - evaluations.jsonl: eval loss and metrics
  - samples.jsonl: answers of the model at each evaluation, if the recipe has ``samples``
  - summary.json: the whole run in one object
  - model/ or adapter/: Hugging Face or PEFT form
  - model_average/ or adapter_average/: their running mean, if the plan has one
  - best/: weights of the best evaluation by ``best_metric``, if the recipe has ``eval_every``
  - data/: tokens, mapped by later runs
  - checkpoints/: if the plan writes them
  - quarantined.jsonl, spikes.jsonl, restarts.jsonl: faults, if there were any
  - rejected.jsonl: examples left out, and why
  - adjustments.jsonl: settings tried while training, if the recipe has ``live_tuning``
  - run.json, machine.jsonl, ranks/: for observers
  - stop: written by an observer; the run saves and stops
  - tensorboard/, wandb/, mlflow/: if the recipe requires them

An earlier run in the same folder is not overwritten: its results move to ``previous/1``
and so on.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hasten.core.health import (
    BusyMachine,
    SlowLink,
    SpikeWatch,
    StepChecks,
    check_comparable,
    check_policy,
)
from hasten.core.job import share_of
from hasten.core.loop import (
    Evaluation,
    EvaluationSchedule,
    Outcome,
    ShutdownNotice,
    defer_signals,
    fit,
    request_stop,
)
from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare
from hasten.core.step import assemble
from hasten.core.timing import StepMetrics, clock_on
from hasten.data.prepared import PreparedData, rejected_words, write_rejected
from hasten.errors import InputError
from hasten.foreign_files import STOP_FILE
from hasten.formatting import duration, one_line
from hasten.launch.ranks import check_agreement, naming_ranks, process_group
from hasten.machine import environment, host
from hasten.machine.processes import Heartbeat, attempt_folder, attempt_number, reporting_errors
from hasten.measure.energy import meter_of_run
from hasten.models.save import AS_IN_MEMORY
from hasten.models.weights import NumberFormats
from hasten.progress import SilentProgress
from hasten.recipe.build import PreparedJob, job_of, plan_of, prepare_run
from hasten.recipe.gpu_check import check_ranks, without_refused
from hasten.recipe.memory_check import advising, settle_memory
from hasten.recipe.peak_flops import meter_of
from hasten.recipe.prepare import (
    Tell,
    evaluations_before,
    resume_from,
    saved_formats,
    tell_what_trains,
    terms_of_all_ranks,
)
from hasten.recipe.price import cost_of
from hasten.recipe.sample import Sample, write_samples
from hasten.recipe.schema import Recipe, load_recipe
from hasten.report.card import CARD, write_card
from hasten.training.auto_adjust import adjust, adjusted
from hasten.training.chosen_plan import SpeedWatch, same_on_all_ranks, with_chosen_plan
from hasten.training.first_pass import check_first_loss, proven
from hasten.training.folder import (
    BEST,
    STEP_LINES,
    LineFile,
    archive_previous_run,
    form,
    keep_lines_until,
    save_all,
    save_weights,
    write_summary,
)
from hasten.training.recording import call_all, machine_facts, recording_of

METRICS, EVALUATED, SAMPLES = STEP_LINES
REFERENCE_LINE_SECONDS = 10.0
REFERENCE = "reference"  # log-probabilities of preference pairs, in the folder of the data
OnStep = Callable[[StepMetrics], None]
OnEvaluation = Callable[[Evaluation], None]


def train(
    recipe: Recipe | str | Path,
    *,
    import_seconds: float = 0.0,
    tell: Tell = print,
    on_tokens: Callable[[int, int], None] | None = None,
    on_start: Callable[[Session], None] = lambda session: None,
    on_step: OnStep = lambda metrics: None,
    on_evaluation: OnEvaluation = lambda evaluation: None,
) -> dict[str, Any]:
    """Trains a recipe and returns the content of ``summary.json``.

    Args:
        recipe: or the path of its file. With ``plan: auto`` the plan is chosen first.
        import_seconds: seconds that the process spent on imports, for the summary.
        ``tell``: receives messages, a line at a time.
        on_tokens: receives the number of tokenised examples, and of all.
        on_start: receives the session before the first step.
        on_step: receives each step.
        on_evaluation: receives each evaluation of the eval loss.

    Raises:
        InputError: a part of the recipe can't be used; nothing was trained.
        StoppedError: a check ended the run, or a rank can't be reached.
    """
    resolved = recipe if isinstance(recipe, Recipe) else load_recipe(Path(recipe))
    choice = None
    if environment.world().size == 1:
        resolved, choice = with_chosen_plan(resolved, SilentProgress(tell))
        if choice is not None:
            on_step = call_all(SpeedWatch(choice, tell).note, on_step)
    live: list[Session] = []
    with ExitStack() as stack:
        stack.enter_context(reporting_errors())
        stack.enter_context(defer_signals(lambda: next(iter(live), None)))
        began = time.perf_counter()
        prepared = prepare_run(resolved, tell, on_tokens, exit_stack=stack)
        context, world = prepared.context, prepared.context.world
        seconds = {"imports": import_seconds, "data": time.perf_counter() - began}
        host.reset_memory_peak(context.device)
        met = time.perf_counter()
        timeout = datetime.timedelta(seconds=resolved.link_seconds)
        with (
            process_group(world, context.device, timeout, resolved.backend),
            reporting_errors(),
            naming_ranks(world),
        ):
            main_tell = tell if world.is_main else _silent
            if resolved.auto_plan is not None:
                resolved = same_on_all_ranks(resolved, context, main_tell)
                plan = plan_of(resolved, context, tell)
                job = job_of(resolved, prepared.data, context, plan)
                prepared = replace(prepared, recipe=resolved, plan=plan, job=job)
            check_agreement(world, terms_of_all_ranks(resolved, context))
            if context.on_gpu:
                check_ranks(world, context.device)
            seconds["meeting"] = time.perf_counter() - met
            run = _Run(prepared, Path(resolved.output), main_tell, began)
            return _train(run, seconds, call_all(live.append, on_start), on_step, on_evaluation)


def _open_folder(recipe: Recipe, data: PreparedData, keep: Sequence[str], tell: Tell) -> None:
    """Prepares the folder for this run. Prints what was archived and which examples were left out.

    ``keep`` are names of the earlier run's results that this run continues.
    """
    output = Path(recipe.output)
    if attempt_number() == 1:  # a later attempt continues in the same files
        keep_checkpoints = recipe.resume != "never"
        if unfinished := archive_previous_run(output, keep_checkpoints, keep):
            tell(unfinished)
        try:
            (output / STOP_FILE).unlink(missing_ok=True)  # meant for an earlier run
            (output / "recipe.yaml").write_text(recipe.to_yaml())
        except OSError as error:
            name, reason = error.filename or output, error.strerror or error
            raise InputError(
                f"output: can't write {name}: {reason}; remove it, or choose another output"
            ) from error
    if data.note.rejected:
        write_rejected(data.note, output / "rejected.jsonl")
        tell(f"{rejected_words(data.note)}; listed in {output / 'rejected.jsonl'}")


def set_step_checks(session: Session, recipe: Recipe, output: Path) -> None:
    """Sets the checks after each step of the session, before it resumes.

    Raises:
        InputError: a check isn't possible in this plan.
    """
    session.setup.step_checks = StepChecks(
        recipe.max_skipped, output / "quarantined.jsonl", recipe.check_replicas
    )
    check_comparable(session, recipe.check_replicas)
    if recipe.loss_spike is not None:
        session.setup.spike_policy = SpikeWatch(recipe.loss_spike, output / "spikes.jsonl")
        check_policy(session)


@contextmanager
def watch_notices(session: Session, recipe: Recipe) -> Iterator[None]:
    """Requests a stop if a file appears, or the recipe's command requires it.

    The file ``stop`` in the run's folder acts as Ctrl-C. It runs on the first rank.
    """
    with ExitStack() as notices:
        if session.setup.context.world.is_main:
            stop = partial(request_stop, session, haste=False)
            stop_file = Path(recipe.output) / STOP_FILE
            notices.enter_context(ShutdownNotice(stop, stop_file, every=1.0))
            if recipe.leave_file or recipe.leave_command:
                file = Path(recipe.leave_file) if recipe.leave_file else None
                leave = partial(request_stop, session, haste=True)
                notices.enter_context(ShutdownNotice(leave, file, recipe.leave_command or ()))
        yield


@dataclass(frozen=True)
class _Run:
    """Arguments of a run."""

    prepared: PreparedJob
    output: Path
    tell: Tell
    began: float  # in seconds of time.perf_counter
    formats: NumberFormats = AS_IN_MEMORY  # formats of saved weights


def _train(
    run: _Run,
    seconds: dict[str, float],
    on_start: Callable[[Session], None],
    on_step: OnStep,
    on_evaluation: OnEvaluation,
) -> dict[str, Any]:
    prepared, recipe, context = run.prepared, run.prepared.recipe, run.prepared.context
    main = context.world.is_main
    helps: Any = None

    def build(plan: Plan) -> Session:
        nonlocal helps
        same = plan == prepared.plan
        job = prepared.job if same else job_of(recipe, prepared.data, context, plan)
        setup = prepare(job, plan, context, run.output / "checkpoints")
        helps = settle_memory(recipe, setup, run.tell)
        with advising(helps):
            return assemble(setup)

    session, plan = proven(build, prepared.plan, run.tell)
    # Read now: the base may be removed before a long training ends.
    run = replace(run, formats=saved_formats(recipe))
    without_refused(session.model)
    set_step_checks(session, recipe, run.output)
    adjust(session, recipe, run.output, run.tell)
    heartbeat = Heartbeat(attempt_folder(), context.world.rank)
    if session.setup.job.reference is not None:
        seconds["reference"] = _prepare_reference(run, session, heartbeat)
    if recipe.resume != "never":
        resume_from(session, recipe.resume, run.tell)
    earlier, keep = _earlier_evaluations(session, recipe, run.output)
    if main:  # after everything that may be refused
        _open_folder(recipe, prepared.data, keep, run.tell)
        if keep or attempt_number() > 1:
            keep_lines_until(run.output, session.progress.step)
    session.startup_seconds |= seconds
    session.meter = meter_of(recipe, context, session.model)
    session.setup.clock = clock_on(context.device)
    tell_what_trains(session, prepared.data, run.tell)
    on_start(session)
    steps, evaluations = _observers(run, session, heartbeat, on_step, on_evaluation)
    steps.append(check_first_loss(session))
    energy = meter_of_run(context) if main else None
    recording = recording_of(session, recipe, run.output)
    watch = _schedule(
        run,
        session,
        earlier,
        heartbeat,
        call_all(*steps, recording.step),
        call_all(*evaluations, recording.evaluation),
    )
    with advising(helps), watch_notices(session, recipe), recording:
        outcome = fit(session, watch)
    heartbeat.beat(session.progress.step, over=True)
    used = energy.totals() if energy is not None else {}
    proofs = {t.name(): asdict(t.check_effect(session)) for t in plan}
    session.finish()
    saved, samples, unsaved = save_all(session, prepared.data, run.output, run.formats)
    if not main:
        return {}
    summary = {
        **outcome.summary(session),
        "startup_seconds": session.startup_seconds,
        "saved": None if saved is None else str(saved),
        "unsaved": unsaved,
        "plan": session.setup.plan.to_list(),
        "effective": proofs,
        "adjusted": adjusted(session),
        "samples": [asdict(s) for s in samples],
        "energy": used,
    }
    return _leave(run, session, outcome, summary)


def _prepare_reference(run: _Run, session: Session, heartbeat: Heartbeat) -> float:
    """Computes the log-probabilities of the reference; returns the seconds that it took.

    The supervisor gets a heartbeat after each pass, and the user a line every ten seconds.
    """
    began = last_line = time.perf_counter()

    def on_pass(done: int, passes: int) -> None:
        nonlocal last_line
        heartbeat.beat(0)
        now = time.perf_counter()
        if now - last_line > REFERENCE_LINE_SECONDS:
            last_line, remaining = now, (now - began) / done * (passes - done)
            run.tell(f"reference: pass {done:,} of {passes:,}  ETA {duration(remaining)}")

    reference = session.setup.job.reference
    assert reference is not None
    reference.prepare(session, run.output / "data" / REFERENCE, run.tell, on_pass)
    return time.perf_counter() - began


def _earlier_evaluations(
    session: Session, recipe: Recipe, output: Path
) -> tuple[list[Evaluation], Sequence[str]]:
    """Returns evaluations before the checkpoint in this folder that the run resumes from.

    Also returns the names of the earlier run's results that stay: the best weights do unless they
    are of a later step. Every rank calls it.
    """
    step, folder = session.progress.step, Path(recipe.resume).resolve().parent
    is_same_run = recipe.resume == "auto" or folder == (output / "checkpoints").resolve()
    if attempt_number() == 1 and not (step and is_same_run):
        return [], ()
    evaluations = evaluations_before(session, output / EVALUATED, recipe.best_metric)
    lower_is_better = recipe.best_metric == "eval_loss"
    best = Outcome(
        evaluations=evaluations, best_by=recipe.best_metric, lower_is_better=lower_is_better
    ).best
    keep = (EVALUATED, BEST) if best is not None and best.step <= step else (EVALUATED,)
    return [e for e in evaluations if e.step <= step], keep


def _schedule(
    run: _Run,
    session: Session,
    earlier: Sequence[Evaluation],
    heartbeat: Heartbeat,
    on_step: OnStep,
    on_evaluation: OnEvaluation,
) -> EvaluationSchedule:
    """Returns the evaluation schedule, which also keeps the best model."""
    recipe = run.prepared.recipe

    def keep_best(evaluation: Evaluation) -> None:
        heartbeat.beat(evaluation.step)
        best = run.output / BEST
        for problem in save_weights(session, run.prepared.data, best, run.formats).problems:
            run.tell(f"warning: {best}: {problem}")

    return EvaluationSchedule(
        every_steps=share_of(recipe.eval_every, session.setup.job.schedule.total_steps),
        patience=recipe.patience,
        earlier=earlier,
        on_step=on_step,
        on_evaluation=on_evaluation,
        on_best=keep_best if recipe.eval_every else _silent,
        best_by=recipe.best_metric,
        lower_is_better=recipe.best_metric == "eval_loss",
    )


def _observers(
    run: _Run, session: Session, heartbeat: Heartbeat, on_step: OnStep, on_evaluation: OnEvaluation
) -> tuple[list[OnStep], list[OnEvaluation]]:
    """Returns the functions after each step and evaluation: heartbeats, and lines on rank 0."""
    recipe, world = run.prepared.recipe, run.prepared.context.world
    heartbeat.beat(session.progress.step)

    def first_step(metrics: StepMetrics) -> None:
        spent = time.perf_counter() - run.began + session.startup_seconds["imports"]
        session.startup_seconds.setdefault("until_first_step", spent)

    steps: list[OnStep] = [first_step, lambda metrics: heartbeat.beat(metrics.step)]
    evaluations: list[OnEvaluation] = [lambda evaluation: heartbeat.beat(evaluation.step)]
    if recipe.samples:  # all ranks contribute their part of the model
        evaluations.append(SamplesInTime(run, session).note)
    if world.is_main:
        metric_lines, loss_lines = LineFile(run.output / METRICS), LineFile(run.output / EVALUATED)
        steps += [SlowLink(run.tell).note, lambda m: metric_lines.add(m.to_dict())]
        evaluations.append(lambda e: loss_lines.add(e.to_dict()))
        if world.size == 1:
            steps.append(BusyMachine(run.tell).note)
        steps.append(on_step)
        evaluations.append(on_evaluation)
    return steps, evaluations


class SamplesInTime:
    """Writes the answers of each evaluation's model to ``samples.jsonl``, on the first rank."""

    def __init__(self, run: _Run, session: Session) -> None:
        self._run, self._session = run, session
        is_main = run.prepared.context.world.is_main
        self._lines = LineFile(run.output / SAMPLES) if is_main else None
        self._is_over = False

    def note(self, evaluation: Evaluation) -> None:
        """Called after each evaluation, on every rank."""
        if self._is_over:
            return
        prepared, samples = self._run.prepared, list[Sample]()
        tokens, count = prepared.data, prepared.recipe.samples
        try:
            samples = write_samples(self._session, tokens.tokenizer, tokens.eval_data, count)
        except Exception as error:  # an error in a library must not end the training
            self._is_over = True
            if self._lines is not None:
                self._run.tell(
                    f"warning: samples: none can be written in this run: {one_line(error)}"
                )
        if self._lines is None:
            return
        for sample in samples:
            self._lines.add({"step": evaluation.step, **asdict(sample)})


def _leave(
    run: _Run, session: Session, outcome: Outcome, summary: dict[str, Any]
) -> dict[str, Any]:
    """Adds what doesn't depend on the steps, and writes cards and summary."""
    recipe, context, data = run.prepared.recipe, run.prepared.context, run.prepared.data
    tokens, kwh = outcome.tokens(session), summary["energy"]["kwh"]
    summary |= {
        "cost": cost_of(recipe.price, outcome.seconds, tokens, context.world.size, kwh),
        "corpus_sha256": data.note.corpus_sha256,
        "rejected": len(data.note.rejected),
        "hardware": asdict(context.hardware),
        "machine": machine_facts(),
        "versions": dict(context.versions),
        "seed": recipe.seed,
    }
    for folder in run.output.glob(f"{form(session)}*"):
        try:
            write_card(folder, recipe.model_dump(mode="json"), summary)
        except Exception as error:  # an error in the card must not prevent the summary
            summary["unsaved"].append(f"{folder / CARD} couldn't be written: {error}")
    write_summary(run.output / "summary.json", summary)
    return summary


def _silent(value: Any) -> None:
    return None
