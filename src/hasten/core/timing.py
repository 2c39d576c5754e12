"""Timing of a step by its parts, and how well the machine is used: clock and meter.

A step runs in one thread, from the wait for data to the moved weights. So one mark at
the end of each part is enough: the time since the last mark belongs to this part. The
parts add up to the step by construction. No context is entered or left.

    begin | reading -> data | copy | agreeing -> communication
    | per micro-batch: forward, backward | norm -> optimizer
    | over all ranks: communication | update -> optimizer | note -> idle | end
    | between | checkpoint

The last two are between two steps and so don't count in the step's own time.

``NoPhaseTimer`` is the default and does nothing. On a processor a mark reads a counter.
On an accelerator it records an event on the stream, without waiting. The events are
read at the step's end, where the step has already waited for its loss.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch

from hasten.core.job import WorkCounts
from hasten.machine.processes import running_time

DATA, COPY, FORWARD, BACKWARD = "data", "copy", "forward", "backward"
COMMUNICATION, OPTIMIZER = "communication", "optimizer"
CHECKPOINT, IDLE = "checkpoint", "idle"  # idle: the remaining time, as of Python between two parts
PARTS = (DATA, COPY, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, CHECKPOINT, IDLE)
BETWEEN = "between"  # recording the step, which is no part of it
EXPOSED = "exposed"  # spent waiting for other ranks in a part, counted as communication
KEPT_STEPS = 4096  # number of newest steps that are stored; a run may have millions
STALLED = 3.0  # factor of the median step from which a step counts as a stall

Item = TypeVar("Item")
Laps = list[tuple[str, float]]  # (part, seconds) in their order


class Clock(Protocol):
    """Measures the parts of a step; ``steps`` has the seconds of each part, step by step."""

    steps: deque[dict[str, float]]

    def begin(self) -> None:
        """Called when a step begins to wait for its data."""
        return

    def reading(self, source: Iterator[Item]) -> Iterator[Item]:
        """Returns FEED's source of steps with the time of reading measured, apart from copying."""

    def fed(self) -> None:
        """Called when the step's micro-batches are on the device."""
        return

    def mark(self, part: str) -> None:
        """Counts the time since the last mark for ``part``."""
        return

    def exposed(self, part: str, seconds: float) -> None:
        """Counts ``seconds`` of a part that has ended as waiting for other ranks."""
        return

    def end(self) -> Mapping[str, float]:
        """Ends the step and returns the seconds of its parts; empty if nothing was measured."""


class NoPhaseTimer(Clock):
    """Measures nothing."""

    def __init__(self) -> None:
        self.steps: deque[dict[str, float]] = deque(maxlen=0)

    def reading(self, source: Iterator[Item]) -> Iterator[Item]:
        return source

    def end(self) -> Mapping[str, float]:
        return {}


class HostClock:
    """Measures a step that runs on the processor, where nothing is copied to a device.

    ``busy`` are the processor seconds of all threads of this process, step by step; ``laps`` the
    parts of the last step in their order.
    """

    def __init__(self) -> None:
        self.steps: deque[dict[str, float]] = deque(maxlen=KEPT_STEPS)
        self.busy: deque[float] = deque(maxlen=KEPT_STEPS)
        self.laps: Laps = []
        self._parts: dict[str, float] = {}
        self._busy = time.process_time()
        self._last = running_time()

    def begin(self) -> None:
        self._parts, self.laps = {}, []
        self._busy = time.process_time()
        self._last = running_time()

    def reading(self, source: Iterator[Item]) -> Iterator[Item]:
        return source

    def fed(self) -> None:
        self.mark(DATA)

    def mark(self, part: str) -> None:
        now = running_time()
        spent, self._last = now - self._last, now
        self._parts[part] = self._parts.get(part, 0.0) + spent
        self.laps.append((part, spent))

    def exposed(self, part: str, seconds: float) -> None:
        _expose(self._parts, part, seconds)
        lap_index = max((i for i, (name, _) in enumerate(self.laps) if name == part), default=None)
        if lap_index is not None:  # where the waiting was inside a lap is unknown: put at its end
            remaining_seconds = max(0.0, self.laps[lap_index][1] - seconds)
            self.laps[lap_index : lap_index + 1] = [
                (part, remaining_seconds),
                (COMMUNICATION, seconds),
            ]

    def end(self) -> Mapping[str, float]:
        self.busy.append(time.process_time() - self._busy)
        self.steps.append(self._parts)  # a mark before the next begin is added to the same step
        return self._parts


class DeviceClock:
    """Measures a step with work queued on an accelerator, by events on its stream."""

    def __init__(self, device: str) -> None:
        self.steps: deque[dict[str, float]] = deque(maxlen=KEPT_STEPS)
        self.laps: Laps = []
        self._device = torch.device(device)
        self._thread = threading.get_ident()
        self._marks: list[tuple[str, Any]] = []
        self._parts: dict[str, float] = {}
        self._read = self._over = False
        self._between = time.perf_counter()

    def begin(self) -> None:
        self._parts, self._read, self._over = {}, False, False
        self._marks = [("", self._event())]

    def reading(self, source: Iterator[Item]) -> Iterator[Item]:
        for item in source:
            if threading.get_ident() == self._thread:  # otherwise reading overlaps with the step
                self._read = True
                self.mark(DATA)
            yield item

    def fed(self) -> None:
        self.mark(COPY if self._read else DATA)

    def mark(self, part: str) -> None:
        if self._over:  # between two steps the stream is empty, so the host's clock is exact
            now = time.perf_counter()
            self._parts[part] = self._parts.get(part, 0.0) + now - self._between
            self._between = now
        else:
            self._marks.append((part, self._event()))

    def exposed(self, part: str, seconds: float) -> None:
        _expose(self._parts, part, seconds)

    def end(self) -> Mapping[str, float]:
        if not self._marks:  # a step without ``begin``
            return {}
        self._marks[-1][1].synchronize()  # the step has waited for its loss, so the stream is empty
        pairs = zip(self._marks, self._marks[1:], strict=False)
        self.laps = [(part, a.elapsed_time(b) / 1e3) for (_, a), (part, b) in pairs]
        for part, seconds in self.laps:
            self._parts[part] = self._parts.get(part, 0.0) + seconds
        self._over, self._between = True, time.perf_counter()
        self.steps.append(self._parts)
        return self._parts

    def _event(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def clock_on(device: str) -> Clock:
    """Returns the clock for a step on this device."""
    return HostClock() if device.startswith("cpu") else DeviceClock(device)


def _expose(parts: dict[str, float], part: str, seconds: float) -> None:
    parts[part] = parts.get(part, 0.0) - seconds
    parts[EXPOSED] = parts.get(EXPOSED, 0.0) + seconds


def step_total(parts: Mapping[str, float]) -> float:
    """Returns the seconds of a step without recording it and without checkpoints."""
    return sum(seconds for part, seconds in parts.items() if part not in (BETWEEN, CHECKPOINT))


def seconds_by_part(
    steps: Sequence[Mapping[str, float]], checkpoints: bool = False
) -> dict[str, float | None]:
    """Returns seconds per step of each part; None if not separable or absent.

    This is the mean over the middle half of the steps by their time. It is as steady as a
    median, and the parts add up to the step. Medians of parts don't.

    If the run writes ``checkpoints``, their mean is over all steps, because they are rare.
    Waiting for gradients happens inside backward. If the layout can't separate it,
    communication stays None, because the other parts alone would give too small a number.
    """
    if not steps:
        return dict.fromkeys(PARTS)
    ordered = sorted(steps, key=step_total)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    means: dict[str, float | None] = dict.fromkeys(PARTS)
    for part in {name for step in middle for name in step} - {BETWEEN, CHECKPOINT}:
        means[part] = sum(step.get(part, 0.0) for step in middle) / len(middle)
    if checkpoints:
        means[CHECKPOINT] = sum(step.get(CHECKPOINT, 0.0) for step in steps) / len(steps)
    waited = means.pop(EXPOSED, None)
    if waited is None:
        _into_idle(means, COMMUNICATION)
    else:
        means[COMMUNICATION] = (means[COMMUNICATION] or 0.0) + waited
    if means[FORWARD] is None:  # an engine that doesn't mark the end of forward
        _into_idle(means, BACKWARD)
    return means


def _into_idle(means: dict[str, float | None], part: str) -> None:
    if means[part] is not None:
        means[IDLE] = (means[IDLE] or 0.0) + (means[part] or 0.0)
        means[part] = None


def data_stall(steps: Sequence[Mapping[str, float]]) -> float | None:
    """Returns the share of all steps' time spent waiting for data; rare long waits count."""
    total_seconds = sum(map(step_total, steps))
    return sum(step.get(DATA, 0.0) for step in steps) / total_seconds if total_seconds else None


def step_stability(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Returns how even steps are: median absolute deviation / median, quantiles, stalls."""
    if not seconds:
        return {"relative_spread": None, "p50": None, "p99": None, "stalls": None}
    middle = statistics.median(seconds)
    spread = statistics.median(abs(s - middle) for s in seconds)
    ordered = sorted(seconds)
    return {
        "relative_spread": spread / middle if middle else None,
        "p50": middle,
        "p99": ordered[-(-99 * len(ordered) // 100) - 1],  # nearest rank
        "stalls": sum(s > STALLED * middle for s in seconds),
    }


# Model FLOPs utilisation: the model FLOPs of a step as a share of the machine's best matrix product
# rate.
#
# Model FLOPs are linear in two counts of a batch: tokens and pairs (the sum of squared example
# lengths). So the FLOPs of a step are two products. Other code counts a model's FLOPs and measures
# the machine. Without these figures a meter returns None and never guesses.


@dataclass(frozen=True)
class Meter:
    """FLOPs per token and per pair of the model; FLOP/s of all devices; 0: unknown.

    ``source`` is where the ceiling comes from, ``convention`` what is counted.
    """

    per_token: float = 0.0
    per_pair: float = 0.0
    ceiling: float = 0.0
    source: str = ""
    convention: str = ""

    def flops(self, counts: WorkCounts) -> float | None:
        """Returns the model FLOPs of a batch."""
        if not self.per_token:
            return None
        return self.per_token * counts.tokens + self.per_pair * counts.attention_pairs

    def mfu(self, flops: float | None, seconds: float) -> float | None:
        """Returns the model FLOPs utilisation of work that took ``seconds``."""
        if flops is None or not self.ceiling or seconds <= 0:
            return None
        return flops / seconds / self.ceiling


# Metrics of preference pairs without a better direction.
DESCRIPTIVE = ("reward_margin", "chosen_logp", "rejected_logp", "log_ratio")


def preference_metrics(sums: Sequence[float]) -> dict[str, float]:
    """Returns the metrics of preference pairs from their sums.

    Args:
        sums: eight numbers. These are pairs, pairs with a positive margin, and their margins.
            Log-probability and tokens follow for the chosen answers, then for the rejected
            ones. The last one is the sum of both answers' log-ratios to the reference.

    Returns:
        ``reward_accuracy``: share of pairs with the higher reward for the chosen answer.
        ``reward_margin``: mean difference of both rewards.
        ``chosen_logp``, ``rejected_logp``: per token.
        ``log_ratio``: log-probability minus the reference's, per token of both answers; it
            estimates how far the policy is from the reference.
    """
    pairs, right, margins, chosen, chosen_tokens, rejected, rejected_tokens, ratios = sums
    if not pairs:
        return {}
    metrics = {"reward_accuracy": right / pairs, "reward_margin": margins / pairs}
    if chosen_tokens and rejected_tokens:
        metrics["chosen_logp"] = chosen / chosen_tokens
        metrics["rejected_logp"] = rejected / rejected_tokens
        metrics["log_ratio"] = ratios / (chosen_tokens + rejected_tokens)
    return metrics


@dataclass(frozen=True)
class StepMetrics:
    """Results and cost of one step over all ranks: a line of ``metrics.jsonl``.

    ``grad_norm`` is the norm before clipping. A ``skipped`` step moved no weights.
    ``model_flops`` and ``mfu`` are None if the session's meter has no value for them. The
    seconds of the step's parts are this rank's. They are None if its clock measures
    nothing. The time and bytes of communication are this rank's too, None if unknown. On
    one rank nothing is sent. ``eta_seconds`` predicts the time until the run's last evaluation.
    It is None if the number of steps is unknown. Those from ``reward_accuracy`` to ``log_ratio``
    are of preference pairs (:func:`preference_metrics`), the last two of indexers that learn.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    positions: int
    examples: int
    step_seconds: float
    tokens_per_second: float
    padding_share: float
    peak_memory_bytes: int
    model_flops: float | None
    mfu: float | None
    skipped: bool = False
    expert_load_ratio: float | None = None
    data_seconds: float | None = None
    passes_seconds: float | None = None
    optimizer_seconds: float | None = None
    comm_seconds: float | None = None
    exposed_comm_seconds: float | None = None
    hidden_communication_seconds: float | None = None
    comm_bytes: int | None = None
    eta_seconds: float | None = None
    reward_accuracy: float | None = None
    reward_margin: float | None = None
    chosen_logp: float | None = None
    rejected_logp: float | None = None
    log_ratio: float | None = None
    indexer_kl: float | None = None
    indexer_captured: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready dict; a number that isn't finite becomes None."""
        metrics = asdict(self)
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in metrics.items()
        }
