"""The trainer's loop: steps, evaluation, the best model so far, early stop, a clean interrupt."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hasten.core.clock import data_stall, split, stability
from hasten.core.evaluate import Evaluation, evaluate
from hasten.core.leaving import asked, interruptible
from hasten.core.meter import StepMetrics
from hasten.core.session import Progress, Session
from hasten.core.step import training
from hasten.machine import host


@dataclass(frozen=True)
class Watch:
    """When to look at held-out data, and what follows from it.

    Args:
        every_steps: evaluate so often; 0: at the end only.
        patience: evaluations without a better held-out loss before stopping; 0: never stop early.
        earlier: what an attempt before this one measured, the same on every rank.
        on_step: called after every step (progress, metrics file).
        on_evaluation: called after every evaluation.
        on_best: called when the held-out loss is the lowest so far (keep the model).
    """

    every_steps: int = 0
    patience: int = 0
    earlier: Sequence[Evaluation] = ()
    on_step: Callable[[StepMetrics], None] = lambda metrics: None
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None
    on_best: Callable[[Evaluation], None] = lambda evaluation: None


@dataclass
class Outcome:
    """What a run did, from its first step to its last.

    ``before`` is what an earlier process had done; times and rates are of this one alone.
    """

    before: Progress = field(default_factory=Progress)
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    epoch_seconds: dict[int, float] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    last_loss: float = math.nan
    peak_memory_bytes: int = 0
    model_flops: float = 0.0
    stopped: str = "done"  # done | early stop | interrupted | left

    @property
    def best(self) -> Evaluation | None:
        measured = [e for e in self.evaluations if _finite(e.held_out_loss) is not None]
        return min(measured, key=lambda e: e.held_out_loss or 0.0, default=None)

    def tokens(self, session: Session) -> int:
        """Those that this process trained."""
        return session.progress.tokens - self.before.tokens

    def summary(self, session: Session) -> dict[str, Any]:
        """The measured part of ``summary.json``."""
        progress = session.progress
        trained = sum(self.step_seconds)
        last = self.evaluations[-1] if self.evaluations else None
        loss = _finite(last.held_out_loss) if last else None
        records = progress.records - self.before.records
        meter, clocked = session.meter, list(session.setup.clock.steps)
        return {
            "stopped": self.stopped,
            "steps": progress.step,
            "tokens": progress.tokens,
            "trained_tokens": progress.trained_tokens,
            "records": progress.records,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens(session) / trained if trained else None,
            "records_per_second": records / trained if trained else None,
            "epoch_seconds": list(self.epoch_seconds.values()),
            "step_seconds_median": statistics.median(self.step_seconds or [0.0]),
            "step_parts": split(clocked, session.saves),
            "data_stall_share": data_stall(clocked),
            "stability": stability(self.step_seconds),
            "model_flops_per_second": self.model_flops / trained if self.model_flops else None,
            "mfu": meter.mfu(self.model_flops or None, trained),
            "ceiling": asdict(meter) if meter.ceiling else None,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_host_memory_bytes": host.host_memory_peak(),
            "training_loss": _finite(self.last_loss),
            "held_out_loss": loss,
            "perplexity": math.exp(min(loss, 700.0)) if loss is not None else None,
            "metrics": last.metrics if last else {},
            "world_size": session.setup.facts.world.size,
        }


def fit(session: Session, watch: Watch | None = None) -> Outcome:
    """Train to the job's stop, evaluating as ``watch`` says and once at the end.

    An interrupt lets the current step finish on all ranks (:mod:`hasten.core.leaving`); where the
    machine goes away, the evaluation at the end is left out. What comes after is up to the caller:
    the session is intact.
    """
    watch = watch or Watch()
    outcome = Outcome(replace(session.progress), evaluations=[*watch.earlier])
    began = time.perf_counter()
    with interruptible(session):
        for metrics in training(session):
            _take_note(outcome, metrics)
            watch.on_step(metrics)
            if watch.every_steps and metrics.step % watch.every_steps == 0:
                _look(session, watch, outcome)
                if _should_stop(outcome, watch):
                    outcome.stopped = "early stop"
                    break
    stopped, in_haste = asked(session)
    if stopped:
        outcome.stopped = "left" if in_haste else "interrupted"
    if in_haste:
        outcome.seconds = time.perf_counter() - began
        return outcome
    here = outcome.evaluations[len(watch.earlier) :]
    if not here or here[-1].step != session.progress.step:
        _look(session, watch, outcome)
    outcome.seconds = time.perf_counter() - began
    return outcome


def _take_note(outcome: Outcome, metrics: StepMetrics) -> None:
    outcome.step_seconds.append(metrics.step_seconds)
    outcome.last_loss = metrics.loss
    outcome.model_flops += metrics.model_flops or 0.0
    outcome.peak_memory_bytes = max(outcome.peak_memory_bytes, metrics.peak_memory_bytes)
    spent = outcome.epoch_seconds
    spent[metrics.epoch] = spent.get(metrics.epoch, 0.0) + metrics.step_seconds


def _look(session: Session, watch: Watch, outcome: Outcome) -> None:
    evaluation = evaluate(session)
    outcome.evaluations.append(evaluation)
    if evaluation is outcome.best:
        watch.on_best(evaluation)  # first: an attempt after this one believes what was told
    watch.on_evaluation(evaluation)


def _should_stop(outcome: Outcome, watch: Watch) -> bool:
    best = outcome.best
    if not watch.patience or best is None:
        return False
    return len(outcome.evaluations) - 1 - outcome.evaluations.index(best) >= watch.patience


def _finite(loss: float | None) -> float | None:
    """A loss that JSON can say."""
    return loss if loss is not None and math.isfinite(loss) else None
