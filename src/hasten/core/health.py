"""Checks after each step for non-finite values, diverged replicas, spikes, slow links.

- not finite: the loss or a gradient isn't finite on any one rank. No weight moves. The
  step's examples are written to ``quarantined.jsonl``. After a number of such steps in
  a row the run ends (exit code 3).
- replicas: at a fixed interval of steps the ranks compare a fingerprint of their
  weights. If a bit has flipped in one memory, the run ends (exit code 6) and names the
  rank.
- spikes: if the loss rises sharply and stays high, the run returns to a checkpoint.
- slow link: if steps wait for communication, a message reports the link's rate.
- busy machine: while other processes use the processor, idle threads sleep sooner. If
  they slow down a step, a message reports their share.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.core.job import StepBatch
from hasten.core.layout import rank_rows
from hasten.core.setup import Session
from hasten.core.timing import StepMetrics
from hasten.errors import InputError, StoppedError
from hasten.machine import host
from hasten.machine.processes import IdleThreads, LoadMeter

MAX_SKIPPED = 10  # number of successive steps without finite gradients after which a run ends
PIECES, PIECE_BITS = 4, 16  # a fingerprint is sent in pieces that float64 adds exactly
ODD = 0x9E3779B97F4A7C15  # bits of the golden ratio: the order of tensors changes the checksum


class NotFiniteError(StoppedError):
    """Loss or gradients stayed infinite or NaN for several steps. Those steps changed no weight."""

    code = 3


class ReplicasDifferError(StoppedError):
    """Ranks that must hold equal weights don't: memory or a link changed bits."""

    code = 6


class StepChecks:
    """Checks after each step of a run.

    Args:
        max_skipped: the run ends after this many non-finite steps in a row.
        quarantine: file for the examples of such steps; None: they aren't stored.
        replicas_every: steps between two comparisons of the ranks' weights; 0: never.
    """

    def __init__(
        self,
        max_skipped: int = MAX_SKIPPED,
        quarantine: Path | None = None,
        replicas_every: int = 0,
    ) -> None:
        self.max_skipped, self.quarantine = max_skipped, quarantine
        self.replicas_every = replicas_every
        self.in_a_row = 0
        self.compared_at = 0  # the last step after which all replicas were equal
        self._own_loss = math.nan

    def store_loss(self, loss_sum: float) -> None:
        """Stores this rank's loss of a step without an update."""
        self._own_loss = loss_sum

    def after_step(self, session: Session, batch: StepBatch, metrics: StepMetrics) -> None:
        """Checks a step that has ended.

        Raises:
            NotFiniteError: too many steps in a row were given up.
            ReplicasDifferError: a rank holds other weights than the others.
        """
        if metrics.skipped:
            self._skipped(session, batch, metrics)
        else:
            self.in_a_row = 0
        if self.replicas_every and metrics.step % self.replicas_every == 0:
            compare_replicas(session, self.compared_at)
            self.compared_at = metrics.step

    def require_moved(self, session: Session) -> None:
        """Raises NotFiniteError at the end of a training in which no step moved a weight."""
        if 0 < session.progress.step <= self.in_a_row:
            raise NotFiniteError(
                "the gradients were not finite in any step, so no weight has moved: look for NaN "
                "in the model's weights, or lower the learning rate"
            )

    def _skipped(self, session: Session, batch: StepBatch, metrics: StepMetrics) -> None:
        """Counts and records a skipped step.

        While the loss scale is still falling, a skipped step is neither a failure nor a
        success. If the loss itself isn't finite, the step is a failure at any scale.
        """
        scale = session.setup.loss_scale
        if scale is not None and scale.searching and math.isfinite(metrics.loss):
            return
        self.in_a_row += 1
        if self.quarantine is not None:
            finite = math.isfinite(metrics.loss), math.isfinite(metrics.grad_norm)
            line = {
                "step": metrics.step,
                "epoch": batch.epoch,
                "rank": session.setup.context.world.rank,
                "own_loss_finite": math.isfinite(self._own_loss),
                "loss": metrics.loss if finite[0] else None,
                "grad_norm": metrics.grad_norm if finite[1] else None,
                "examples": examples_of_last_step(session),
            }
            append_line(self.quarantine, line)
        if self.in_a_row >= self.max_skipped:
            raise NotFiniteError(
                f"the gradients were not finite for {self.in_a_row} steps in a row, up to step "
                f"{metrics.step}; the weights are those before them: lower the learning rate, or "
                "look at the examples of these steps"
                + (f" in {self.quarantine}" if self.quarantine is not None else "")
            )


def examples_of_last_step(session: Session) -> list[int] | None:
    """Returns the indices of this rank's examples of the last step; None with the user's loader.

    The order is a pure function of seed, epoch and position: nothing has to be remembered.
    """
    setup, progress = session.setup, session.progress
    if setup.job.stream is not None or setup.sampler is None:
        return None
    layout, position = setup.layout, progress.step_in_epoch - 1
    steps = setup.sampler.local_steps(progress.epoch, layout.data_rank, layout.data_size)
    pieces: Sequence[Sequence[int]] = next(itertools.islice(steps, position, None), [])
    return [index for group in pieces for index in group]


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Appends one line of JSON in one write, so ranks may share the file (open(2), O_APPEND).

    A disk that takes nothing doesn't end the run: the line is lost.
    """
    line = (json.dumps(entry) + "\n").encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return
    try:
        os.write(handle, line)
    except OSError:
        return
    finally:
        os.close(handle)


def check_comparable(session: Session, every: int) -> None:
    """Raises InputError if ranks are designed to hold different weights."""
    if every and session.setup.rank_sync.diverged:
        raise InputError(
            "check_replicas: ranks of this plan train apart, so that their weights differ between "
            "two exchanges; leave it out"
        )
    if every and not session.setup.layout.replicated:
        raise InputError(
            "check_replicas: ranks of this layout hold different parts of the model, so that there "
            "is nothing to compare; leave it out"
        )


def compare_replicas(session: Session, compared_at: int = 0) -> None:
    """Compares the weights of all ranks bit by bit; every rank calls it after the same step.

    Raises:
        ReplicasDifferError: the ranks that differ from the majority, or all where there is none.
    """
    size = session.setup.layout.size
    if size == 1:
        return
    prints = fingerprints(session.setup.precision.parameters())
    checksum = sum(value * pow(ODD, i + 1, 1 << 64) for i, value in enumerate(prints)) % (1 << 64)
    of_ranks = [row[0] for row in _gathered(session, [checksum])]
    if len(set(of_ranks)) == 1:
        return
    (_, most), *_ = Counter(of_ranks).most_common(1)
    wrong = [r for r, p in enumerate(of_ranks) if most * 2 <= size or of_ranks.count(p) < most]
    each = _gathered(session, prints)
    weight_index = next(i for i in range(len(prints)) if len({row[i] for row in each}) > 1)
    wanted = session.setup.precision.parameters()[weight_index]
    names = [n for n, p in session.loss_module.named_parameters() if p is wanted]
    weight_name = names[0] if names else f"master weight {weight_index}"
    ranks = " and ".join(f"rank {r}" for r in wrong)
    others = "those of the others"
    if len(wrong) == size:
        others = "each other, without a majority that is right"
    raise ReplicasDifferError(
        f"the weights of {ranks} differ from {others} after step {session.progress.step}, first in "
        f"{weight_name}: memory or a link changed bits without an error; they were equal after "
        f"step {compared_at}: test that machine, and resume from a checkpoint that is not newer "
        f"than step {compared_at}"
    )


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Returns 64 bits for each tensor: the wrapping sum of its bits as integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        t.detach().contiguous().view(kinds[t.element_size()]).sum(dtype=torch.int64).reshape(1)
        for t in tensors
    ]
    return [v % (1 << 64) for v in torch.cat(sums).tolist()]  # the only wait for the device


def _gathered(session: Session, numbers: Sequence[int]) -> list[list[int]]:
    """Returns the numbers of every rank; each rank writes its own row of a sum."""
    mask = (1 << PIECE_BITS) - 1
    pieces = [[value >> (PIECE_BITS * p) & mask for p in range(PIECES)] for value in numbers]
    rows = rank_rows(session.setup.layout, session.setup.context.world, pieces)
    return [
        [sum(int(part) << (PIECE_BITS * p) for p, part in enumerate(v)) for v in row]
        for row in rows.tolist()
    ]


# Loss spikes: if the loss rises sharply and stays high, resume from a checkpoint with a lower
# learning rate and skip the data in between.
#
# The policy is off by default. Each time it acts, it writes a line to ``spikes.jsonl``. The remedy
# is that of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1): restart from a checkpoint
# before the spike and skip the batches around it. The lower learning rate comes from the articles.
#
# 1. detection: ``in_a_row`` steps above median + ``sigmas`` x spread of the last ``window`` losses
# 2. remedy: load the newest checkpoint, multiply the learning rate by ``lower``, skip the steps
# between
#
# While losses are high, no checkpoint is written. So the newest one stores a state before the
# spike.

FEWEST = 8  # number of losses before the policy acts
NORMAL = 1.4826  # ratio of standard deviation to median absolute deviation of a normal distribution
SMALLEST_SPREAD = 0.01  # share of the median: a loss that hardly varies causes no spike

NEEDS_CHECKPOINTS = (
    "loss_spike goes back to a checkpoint and the plan writes none; add checkpoints to the plan, "
    "or leave loss_spike out"
)


class SpikeError(StoppedError):
    """The loss spiked more often than the policy permits."""

    code = 5


@dataclass(frozen=True)
class SpikePolicy:
    """Defines when a loss counts as a spike, and how the run reacts."""

    sigmas: float = 6.0
    window: int = 64
    in_a_row: int = 3
    lower: float = 0.5
    skip_data: bool = True
    at_most: int = 3

    def __post_init__(self) -> None:
        if not self.sigmas > 0 or self.window < FEWEST or self.in_a_row < 1 or self.at_most < 1:
            raise ValueError(
                f"sigmas must be above 0, window at least {FEWEST}, in_a_row and at_most at least 1"
            )
        if not 0 < self.lower <= 1:
            raise ValueError(
                f"lower is {self.lower}; the learning rate is multiplied by it: 0 to 1"
            )


class SpikeWatch:
    """Applies the policy to each step. Its state is part of a checkpoint."""

    def __init__(self, policy: SpikePolicy, log: Path | None = None) -> None:
        self.policy, self.log = policy, log
        self.rate, self.times = 1.0, 0
        self._losses: deque[float] = deque(maxlen=policy.window)
        self._high: list[float] = []

    @property
    def in_spike(self) -> bool:
        return bool(self._high)

    def rollback_if_spike(self, session: Session, metrics: StepMetrics) -> bool:
        """Checks a step; returns True if the session has returned to an earlier step.

        Raises:
            SpikeError: the loss shot up once more than the policy allows.
        """
        if metrics.skipped:
            return False
        limit = self.limit()
        if metrics.loss <= limit:
            self._losses.append(metrics.loss)
            self._high.clear()
            return False
        self._high.append(metrics.loss)
        return len(self._high) >= self.policy.in_a_row and self._act(session, metrics, limit)

    def limit(self) -> float:
        """Returns the highest loss that isn't a spike."""
        if len(self._losses) < min(FEWEST, self.policy.window):
            return float("inf")
        middle = statistics.median(self._losses)
        spread = NORMAL * statistics.median(abs(x - middle) for x in self._losses)
        return middle + self.policy.sigmas * max(spread, SMALLEST_SPREAD * abs(middle))

    def _act(self, session: Session, metrics: StepMetrics, limit: float) -> bool:
        policy, before = self.policy, session.progress
        record: dict[str, Any] = {"step": metrics.step, "losses": list(self._high), "limit": limit}
        self._high.clear()
        if self.times == policy.at_most:
            self._note(session, {**record, "did": "stopped"})
            raise SpikeError(
                f"the loss rose to {metrics.loss:.4g} at step {metrics.step}, above {limit:.4g}, "
                f"after {self.times} restarts by loss_spike: lower the learning rate, or look at "
                "the data of these steps"
            )
        # Loading the checkpoint also restores an older state of the policy.
        times, rate = self.times + 1, self.rate * policy.lower
        checkpoint = session.resume()
        self.times, self.rate = times, rate
        if checkpoint is not None and policy.skip_data:
            session.progress.epoch = before.epoch
            session.progress.step_in_epoch = before.step_in_epoch
        did = "no checkpoint yet: lowered the learning rate alone"
        if checkpoint is not None:
            left_out = before.step - session.progress.step if policy.skip_data else 0
            did = f"went back to {checkpoint.name}, left out {left_out} steps of data"
        self._note(session, {**record, "rate": rate, "did": did})
        return checkpoint is not None

    def _note(self, session: Session, line: dict[str, Any]) -> None:
        if self.log is not None and session.setup.context.world.is_main:
            append_line(self.log, line)

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": asdict(self.policy),
            "rate": self.rate,
            "times": self.times,
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate, self.times = state["rate"], state["times"]
        self._losses = deque(state["losses"], maxlen=self.policy.window)
        self._high = []


def check_policy(session: Session) -> None:
    """Raises InputError if the spike policy can't work: no checkpoints, or diverged ranks."""
    if session.setup.checkpoint is None:
        raise InputError(NEEDS_CHECKPOINTS)
    if session.setup.rank_sync.diverged:
        raise InputError(
            "loss_spike needs one loss for all ranks and those of this plan train apart; leave it "
            "out"
        )


# Slow links: prints a message with the rate in MB/s if steps wait for the link between ranks, and
# again if the rate falls.
#
# The rate is measured in steps that mostly wait for the exchange. Waiting for a slow rank lowers it
# too, so the message names both causes. If the layout can't measure the exchange
# (``core.layout.CommTiming``), no message is printed.

LOOK = 10  # number of steps that are judged together
SHARE, LEAST = 0.5, 0.1  # share of a step, and seconds of it, spent waiting: less is not reported
SLOW = 125e6  # bytes per second: 1 Gbit/s


class SlowLink:
    """Checks a run's steps on the first rank for a slow link; ``tell`` receives the message."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._exchanges: list[tuple[float, float, float, int]] = []
        self._reported_rate = math.inf  # bytes per second of the last report

    def note(self, metrics: StepMetrics) -> None:
        """Counts a step that has ended."""
        exposed, sent = metrics.exposed_comm_seconds, metrics.comm_bytes
        if not exposed or not sent:
            return
        under_way = exposed + (metrics.hidden_communication_seconds or 0.0)
        self._exchanges.append((metrics.step_seconds, exposed, under_way, sent))
        if len(self._exchanges) == LOOK:
            self._look()
            self._exchanges.clear()

    def _look(self) -> None:
        step, exposed, under_way, sent = (
            statistics.median(column) for column in zip(*self._exchanges, strict=True)
        )
        rate = sent / under_way
        if exposed < LEAST or exposed < SHARE * step or rate > min(SLOW, self._reported_rate / 2):
            return
        self._reported_rate = rate
        self._tell(
            f"the exchange between ranks is slow: a step waits {exposed:.2f} s of {step:.2f} s for "
            f"it, and rank 0 sends its {sent / 1e6:,.2f} MB at {rate / 1e6:,.2f} MB/s, because of "
            "its link or of a rank that is behind; see what may send less "
            "(docs/how-to/slow-networks.md)"
        )


# Busy machine: idle threads sleep sooner if other processes use the processor. One message names
# the cost.

FEWEST_STEPS, WATCHED_STEPS = 8, 50  # number of earlier steps that a step is compared with
SLOWER = 3.0  # factor of the median seconds per position
LEAST_SHARE = 0.1  # share of the processor's time that other processes used
LEAST_CORES = 0.25  # cores used by other processes, from which idle threads sleep sooner
CALM_LOOKS = 5  # number of successive quiet measurements after which idle threads wait as usual
SPAN_SECONDS = 1.0  # seconds between two measurements, each a third of a millisecond


class BusyMachine:
    """Lets idle threads sleep sooner while other processes use the processor; reports a slow step.

    A step is slow if a position takes over three times the median of the steps before it. One
    message names the first slow step with busy processes. Use it in a single process, because
    other ranks of a run would count as busy processes.

    Args:
        ``tell``: prints a message.
        load: the meter of what other processes take of this machine.
    """

    def __init__(self, tell: Callable[[str], None], load: LoadMeter | None = None) -> None:
        self._tell = tell
        self._cores = host.usable_cores()
        self._load = load or LoadMeter(self._cores)
        self._load_since = time.monotonic()
        self._seconds: deque[float] = deque(maxlen=WATCHED_STEPS)  # seconds per position
        self._is_over = False
        self._calm = 0  # successive measurements
        self.idle_threads = IdleThreads()

    def note(self, metrics: StepMetrics) -> None:
        """Compares a step that has ended with earlier ones."""
        if not self._is_over and metrics.positions:
            self._compare(metrics.step, metrics.step_seconds / metrics.positions)
        self.look()

    def look(self) -> None:
        """Measures once a second what other processes use. Call it after each step."""
        if time.monotonic() - self._load_since < SPAN_SECONDS:
            return
        self._load.lap("steps")
        busy = self._load.share("steps") * self._cores >= LEAST_CORES
        self._calm = 0 if busy else self._calm + 1
        if busy or self._calm >= CALM_LOOKS:
            self.idle_threads.sleep_sooner = busy
        self._load.begin()
        self._load_since = time.monotonic()

    def _compare(self, step: int, seconds: float) -> None:
        before = statistics.median(self._seconds) if self._seconds else 0.0
        if len(self._seconds) >= FEWEST_STEPS and seconds > SLOWER * before:
            self._load.lap("steps")
            share = self._load.share("steps")
            if share >= LEAST_SHARE:
                self._is_over = True
                self._tell(
                    f"step {step} took {seconds / before:.1f} times as long as the median "
                    f"step: other processes used {share:.0%} of the processor meanwhile"
                )
        self._seconds.append(seconds)
