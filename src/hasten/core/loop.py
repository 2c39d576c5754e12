"""The training loop: steps, evaluation, best model so far, early stop, clean interrupt."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.job import Indexed, Metric, MicroBatch, TokenMetric, WorkCounts, with_nll_unit
from hasten.core.setup import Progress, Session, Setup
from hasten.core.step import most_on_a_rank, preferences, training, without_loss
from hasten.core.timing import StepMetrics, data_stall, seconds_by_part, step_stability
from hasten.machine import processes
from hasten.machine.signals import HASTE, stop_signals

# Eval loss over all trained tokens or pairs of the eval examples, and further metrics.

EXAMPLES_AT_ONCE = 16  # most examples of an evaluation's micro-batch: larger ones aren't faster


@dataclass(frozen=True)
class Evaluation:
    """Quality of the current model; the loss is None without eval data."""

    step: int
    tokens: int
    eval_loss: float | None
    metrics: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        line = asdict(self)
        metrics = line.pop("metrics")
        return {**line, **metrics}

    def value(self, name: str) -> float | None:
        """Returns ``eval_loss`` or a metric; None if it wasn't measured or isn't finite."""
        return _finite(self.eval_loss if name == "eval_loss" else self.metrics.get(name))


def evaluate(session: Session) -> Evaluation:
    """Measures the loss per trained token or pair of the eval examples, and all metrics.

    A metric that is a function of the model runs on the first rank. All ranks get its number,
    because they save and stop together by it.
    """
    session.synchronize()
    progress, job = session.progress, session.setup.job
    metrics: dict[str, float] = {}
    if job.reference is not None:
        job.reference.ready(session)
    with evaluation_mode(session.loss_module):
        loss = eval_loss(session)
        metrics |= preferences(session)
        for name, metric in job.metrics.items():
            if not isinstance(metric, TokenMetric):
                metrics[name] = _of_model(session, metric)
            elif (mean := _token_mean(session, metric)) is not None:
                metrics[name] = mean
    return Evaluation(progress.step, progress.tokens, loss, metrics)


def eval_loss(session: Session) -> float | None:
    """Summed loss over trained tokens or pairs, divided by their number, over all ranks."""
    return _mean(session, lambda batch: session.loss_module(**batch.inputs)[0])


def _token_mean(session: Session, metric: TokenMetric) -> float | None:
    return _mean(
        session,
        lambda batch: metric.score(*session.loss_module(predict=True, **batch.inputs)),
    )


def _of_model(session: Session, metric: Metric) -> float:
    is_main = session.setup.context.world.is_main
    number = torch.tensor([float(metric(session.model)) if is_main else 0.0], dtype=torch.float64)
    return float(session.setup.layout.all_reduce_world(number))


def _mean(session: Session, sum_of: Callable[[MicroBatch], Tensor]) -> float | None:
    """Returns a sum over the eval examples of all ranks, divided by the loss's units."""
    setup, eval_data = session.setup, session.setup.job.eval_data
    if not len(eval_data):
        return None
    collate = setup.collate or setup.job.collate
    parts = _eval_parts(setup, eval_data)
    batches = [collate(part) for part in parts]
    local_counts = sum((batch.counts for batch in batches), WorkCounts())
    # Ranks with parts of one model need the same number of passes, even without trained tokens.
    more = most_on_a_rank(setup, len(parts)) - len(parts)
    batches += [without_loss(collate([eval_data[0]]))] * more
    counts = torch.tensor([local_counts.units, local_counts.nll_tokens], dtype=torch.float64)
    units, nll_tokens = map(round, setup.layout.all_reduce_data(counts).tolist())
    loss_sum = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        if setup.job.unit == "pairs":
            batch = with_nll_unit(batch, WorkCounts(units=units, nll_tokens=nll_tokens))
        batch = batch.to(setup.job.device)
        with setup.precision.region():
            loss_sum += float(sum_of(batch))
    return setup.layout.all_reduce_data(loss_sum).item() / units if units else None


def _eval_parts(setup: Setup, eval_data: Indexed) -> list[list[Any]]:
    """Returns this rank's eval examples, cut as BATCH cuts a step to fit into memory."""
    job, layout = setup.job, setup.layout
    examples = job.batch.examples or 0
    if job.batch.tokens:
        examples = job.batch.tokens // max(job.lengths, default=1)
    at_once = min(max(examples // layout.data_size, 1), EXAMPLES_AT_ONCE)
    indices = range(len(eval_data))[layout.data_rank :: layout.data_size]
    parts: list[list[Any]] = []
    for start in range(0, len(indices), at_once):
        portion = [eval_data[i] for i in indices[start : start + at_once]]
        parts += setup.split_micro_batches(portion)
    return parts


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Disables dropout and gradients inside; restores the mode, leaves random state unchanged."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            yield
    finally:
        module.train(was_training)


# Stops between two steps: on Ctrl-C, on a scheduler's signal, on a shutdown notice.
#
# - Ctrl-C (SIGINT): the step ends, state and model are saved; a second one ends at once
# - SIGTERM, SIGUSR1: the same without evaluation and samples; repeated signals change nothing
# - SIGHUP (the terminal was closed): as SIGTERM
# - a notice (a file that appears, or a command that ends with code 0): as SIGTERM
#
# Schedulers repeat signals and send SIGKILL after a grace time. So a second SIGTERM must not end
# the saving, and saving must not wait for an evaluation. Slurm sends SIGUSR1 early
# (``--signal=USR1@120``). Clouds announce the end of a spot machine through a command.

COMMAND_SECONDS = 30.0  # seconds that a notice command may take


def request_stop(session: Session, haste: bool, reason: str = "interrupted") -> None:
    """Stops the run after this step, on all ranks.

    ``haste`` means that the machine is about to be lost. ``reason`` appears in the summary
    of the rank that received the request.
    """
    session.stop_reason = reason
    session.preempted = session.preempted or haste
    session.stop_requested = True


@contextlib.contextmanager
def _signals_to(handle: Callable[[int, Callable[[], object]], None]) -> Iterator[None]:
    """Sends each signal to a function; also passes a function that restores the earlier action."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    before = {n: signal.getsignal(n) for n in stop_signals()}

    def on_signal(number: int, frame: object) -> None:
        handle(number, lambda: signal.signal(number, before[signal.Signals(number)]))

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interruptible(session: Session) -> AbstractContextManager[None]:
    """Lets signals request a stop between two steps; a second Ctrl-C acts as usual."""

    def ask(number: int, restore: Callable[[], object]) -> None:
        request_stop(session, haste=number != signal.SIGINT)
        if number == signal.SIGINT:
            restore()

    return _signals_to(ask)


def defer_signals(session: Callable[[], Session | None]) -> AbstractContextManager[None]:
    """Ignores signals while the run saves after its last step.

    A second Ctrl-C ends the saving too. Before the first step, signals act as before.
    """

    def hear(number: int, restore: Callable[[], object]) -> None:
        active_session = session()
        if active_session is not None and active_session.is_trained:
            if number != signal.SIGINT:
                return
            if not active_session.stop_requested:
                active_session.stop_requested = True
                os.write(2, b"hasten: saving the model; a second Ctrl-C ends that\n")
                return
        restore()
        signal.raise_signal(number)

    return _signals_to(hear)


def ignore_stop_signals() -> None:
    """Ignores the signals of `HASTE` until the process ends, so its own exit code is kept.

    A scheduler repeats them; the default action would replace the exit code, even while Python
    finalises.
    """
    for number in HASTE:
        signal.signal(number, signal.SIG_IGN)


class ShutdownNotice:
    """Watches in a thread for a notice that this machine will shut down.

    Args:
        file: leave as soon as it is there.
        command: leave as soon as it ends with code 0; a program and its arguments, no shell.
        every: seconds between two looks.
    """

    def __init__(
        self,
        on_notice: Callable[[], None],
        file: Path | None = None,
        command: Sequence[str] = (),
        every: float = 5.0,
    ) -> None:
        self._on_notice, self._file, self._command = on_notice, file, tuple(command)
        self._every, self._over = every, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="notice", daemon=True)

    def __enter__(self) -> ShutdownNotice:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def arrived(self) -> bool:
        """Returns True if the notice has arrived."""
        if self._file is not None and os.path.exists(self._file):  # unlike Path's, never raises
            return True
        if not self._command:
            return False
        try:
            done = subprocess.run(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=COMMAND_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def _watch(self) -> None:
        while not self._over.is_set():
            if self.arrived():
                self._on_notice()
                return
            self._over.wait(self._every)


# The loop itself.


@dataclass(frozen=True)
class EvaluationSchedule:
    """Defines when eval data is evaluated, and how the run reacts to the result.

    Args:
        every_steps: evaluate so often; 0: at the end only.
        patience: evaluations without a better one before stopping; 0: never stop early.
        earlier: what an attempt before this one measured, the same on every rank.
        on_step: called after every step (progress, metrics file).
        on_evaluation: called after every evaluation.
        on_best: called when an evaluation is the best so far (keep the model).
        best_by: what decides which evaluation is the best: ``eval_loss`` or a metric's name.
        lower_is_better: of that value.
    """

    every_steps: int = 0
    patience: int = 0
    earlier: Sequence[Evaluation] = ()
    on_step: Callable[[StepMetrics], None] = lambda metrics: None
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None
    on_best: Callable[[Evaluation], None] = lambda evaluation: None
    best_by: str = "eval_loss"
    lower_is_better: bool = True

    def is_due(self, step: int) -> bool:
        """Returns True if the schedule evaluates after this step."""
        return step > 0 < self.every_steps and step % self.every_steps == 0


RECENT_STEPS = 200  # number of recent steps from which the remaining time is predicted


class RemainingTime:
    """Predicts the time until a run's last evaluation, from its steps and evaluations so far.

    A step lasts until the next one: checkpoints and notes count. An evaluation includes what
    follows from it, such as samples and saved weights. Until the first one ended, evaluations
    are unknown and count nothing.

    Args:
        total_steps: number of steps of the run.
        every_steps: an evaluation follows so many steps; 0: one at the end.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        total_steps: int,
        every_steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._total, self._every, self._clock = total_steps, every_steps or total_steps, clock
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._evaluations: list[float] = []
        self._last = clock()

    def _lap(self) -> float:
        before, self._last = self._last, self._clock()
        return self._last - before

    def evaluated(self) -> None:
        """Counts an evaluation that has just ended."""
        self._evaluations.append(self._lap())

    def after_step(self, step: int) -> float | None:
        """Returns the remaining seconds after this step; None if the run should be over."""
        self._steps.append(self._lap())
        if step > self._total:
            return None
        times = [*self._steps][1:] or self._steps  # the oldest step may include compilation
        evaluations = math.ceil(self._total / self._every) - (step - 1) // self._every
        mean = statistics.fmean(self._evaluations or [0.0])
        return (self._total - step) * statistics.fmean(times) + evaluations * mean


@dataclass
class Outcome:
    """Results of a run, from its first step to its last.

    ``before`` is the progress of an earlier process. Times and rates are those of this
    process alone.
    """

    before: Progress = field(default_factory=Progress)
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    epoch_seconds: dict[int, float] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    last_loss: float = math.nan
    peak_memory_bytes: int = 0
    model_flops: float = 0.0
    stopped: str = "done"  # done | early stop | time limit | interrupted | left
    best_by: str = "eval_loss"
    lower_is_better: bool = True

    @property
    def best(self) -> Evaluation | None:
        """Returns the first of the best evaluations by ``best_by``; None if it wasn't measured."""
        sign = 1.0 if self.lower_is_better else -1.0
        measured = [e for e in self.evaluations if e.value(self.best_by) is not None]
        return min(measured, key=lambda e: sign * (e.value(self.best_by) or 0.0), default=None)

    def add(self, metrics: StepMetrics) -> None:
        """Counts a step that has ended."""
        self.step_seconds.append(metrics.step_seconds)
        self.last_loss = metrics.loss
        self.model_flops += metrics.model_flops or 0.0
        self.peak_memory_bytes = max(self.peak_memory_bytes, metrics.peak_memory_bytes)
        spent = self.epoch_seconds
        spent[metrics.epoch] = spent.get(metrics.epoch, 0.0) + metrics.step_seconds

    def tokens(self, session: Session) -> int:
        """Returns the number of tokens that this process trained."""
        return session.progress.tokens - self.before.tokens

    def summary(self, session: Session) -> dict[str, Any]:
        """The measured part of ``summary.json``."""
        progress = session.progress
        trained = sum(self.step_seconds)
        last = self.evaluations[-1] if self.evaluations else None
        loss = _finite(last.eval_loss) if last else None
        examples = progress.examples - self.before.examples
        by_token = session.setup.job.unit == "tokens"
        meter, clocked = session.meter, list(session.setup.clock.steps)
        return {
            "stopped": self.stopped,
            "steps": progress.step,
            "resumed_step": self.before.step,
            "tokens": progress.tokens,
            "resumed_tokens": self.before.tokens,
            "trained_tokens": progress.trained_tokens,
            "examples": progress.examples,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens(session) / trained if trained else None,
            "examples_per_second": examples / trained if trained else None,
            "epoch_seconds": list(self.epoch_seconds.values()),
            "step_seconds_median": statistics.median(self.step_seconds or [0.0]),
            "step_parts": seconds_by_part(clocked, session.has_checkpoints),
            "data_stall_share": data_stall(clocked),
            "stability": step_stability(self.step_seconds),
            "model_flops_per_second": self.model_flops / trained if self.model_flops else None,
            "mfu": meter.mfu(self.model_flops or None, trained),
            "ceiling": asdict(meter) if meter.ceiling else None,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_host_memory_bytes": processes.host_memory_peak(),
            "training_loss": _finite(self.last_loss),
            "eval_loss": loss,
            "perplexity": None if loss is None or not by_token else math.exp(min(loss, 700.0)),
            "metrics": last.metrics if last else {},
            "world_size": session.setup.context.world.size,
        }


def fit(session: Session, watch: EvaluationSchedule | None = None) -> Outcome:
    """Trains until the job's stop; evaluates by the schedule ``watch`` and at the end.

    After an interrupt, the current step finishes on all ranks (``interruptible``). If the
    machine is about to be lost, the evaluation at the end is left out. The caller decides
    what follows: the session is intact.

    Raises:
        NotFiniteError: no step has moved a weight.
    """
    watch = watch or EvaluationSchedule()
    outcome = Outcome(
        replace(session.progress),
        evaluations=[*watch.earlier],
        best_by=watch.best_by,
        lower_is_better=watch.lower_is_better,
    )
    began = time.perf_counter()
    remaining = RemainingTime(session.setup.job.schedule.total_steps, watch.every_steps)
    with interruptible(session):
        step, is_over = session.progress.step, False
        if watch.is_due(step) and all(e.step != step for e in watch.earlier):
            # An earlier process ended after this step's checkpoint and before its evaluation.
            is_over = _evaluate(session, watch, outcome, remaining)
        for metrics in () if is_over else training(session):
            outcome.add(metrics)
            watch.on_step(replace(metrics, eta_seconds=remaining.after_step(metrics.step)))
            if watch.is_due(metrics.step) and _evaluate(session, watch, outcome, remaining):
                is_over = True
                break
        if is_over:
            outcome.stopped = "early stop"
        session.is_trained = True
    session.setup.step_checks.require_moved(session)
    flags = torch.tensor([session.stop_requested, session.preempted], dtype=torch.float64)
    # Of all ranks together; each calls it at the end of a step.
    stopped, in_haste = map(bool, session.setup.layout.all_reduce_data(flags).tolist())
    session.preempted = session.preempted or in_haste
    if stopped:
        outcome.stopped = "left" if in_haste else session.stop_reason
    if in_haste:
        outcome.seconds = time.perf_counter() - began
        return outcome
    evaluations, average = outcome.evaluations[len(watch.earlier) :], session.setup.average
    if average is not None and average.replaces_model:
        precision = session.setup.precision
        for _ in average.versions(precision.parameters()):
            precision.update_model_weights()
            _evaluate(session, watch, outcome, remaining)
        precision.update_model_weights()
    elif not evaluations or evaluations[-1].step != session.progress.step:
        _evaluate(session, watch, outcome, remaining)
    outcome.seconds = time.perf_counter() - began
    return outcome


def _evaluate(
    session: Session, watch: EvaluationSchedule, outcome: Outcome, remaining: RemainingTime
) -> bool:
    """Evaluates; returns True if so many evaluations were no better that training stops."""
    evaluation = evaluate(session)
    outcome.evaluations.append(evaluation)
    best, evaluations = outcome.best, outcome.evaluations
    if evaluation is best:
        watch.on_best(evaluation)  # written first: a restarted run reads this result
    watch.on_evaluation(evaluation)
    remaining.evaluated()
    # An interrupt may evaluate between two scheduled evaluations.
    since = evaluations[evaluations.index(best) + 1 :] if best is not None else []
    return 0 < watch.patience <= sum(watch.is_due(e.step) for e in since)


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None
