"""A loss that shoots up and stays: go back, learn more slowly, leave out the data that did it.

A declared policy, off by default; each time it acts is a line of ``spikes.jsonl``. The remedy is
that of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1): restart from a checkpoint
before the spike and skip the batches around it; a lower learning rate is that of the articles.

    seen      ``in_a_row`` steps above median + ``sigmas`` x spread of the last ``window`` losses
    then      the newest checkpoint -> learning rate x ``lower`` -> the steps between are left out

While losses are high no checkpoint is written, so that the newest is of a state before them.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hasten.core.checkpointing import NoCheckpoint
from hasten.core.guards import append_line
from hasten.core.meter import StepMetrics
from hasten.core.session import Session
from hasten.errors import InputError, StoppedError

FEWEST = 8  # losses before anything is called unusual
NORMAL = 1.4826  # median absolute deviation to standard deviation, for a normal distribution
SMALLEST_SPREAD = 0.01  # of the median: losses that hardly vary make no spike of a hair's breadth

NEEDS_CHECKPOINTS = (
    "loss_spike goes back to a checkpoint and the plan writes none; add checkpoints to the plan, "
    "or leave loss_spike out"
)


class SpikeError(StoppedError):
    """The loss shot up again and again."""

    code = 5


@dataclass(frozen=True)
class SpikePolicy:
    """When a loss counts as a spike, and what follows."""

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
    """The policy at work; what it remembers is part of a checkpoint."""

    def __init__(self, policy: SpikePolicy, log: Path | None = None) -> None:
        self.policy, self.log = policy, log
        self.rate, self.times = 1.0, 0
        self._losses: deque[float] = deque(maxlen=policy.window)
        self._high: list[float] = []

    @property
    def suspects(self) -> bool:
        return bool(self._high)

    def goes_back(self, session: Session, metrics: StepMetrics) -> bool:
        """Look at a step; True where the session is at an earlier one now.

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
        """The highest loss that isn't unusual."""
        if len(self._losses) < min(FEWEST, self.policy.window):
            return float("inf")
        middle = statistics.median(self._losses)
        spread = NORMAL * statistics.median(abs(x - middle) for x in self._losses)
        return middle + self.policy.sigmas * max(spread, SMALLEST_SPREAD * abs(middle))

    def _act(self, session: Session, metrics: StepMetrics, limit: float) -> bool:
        policy, before = self.policy, session.progress
        found: dict[str, Any] = {"step": metrics.step, "losses": list(self._high), "limit": limit}
        self._high.clear()
        if self.times == policy.at_most:
            self._note(session, {**found, "did": "stopped"})
            raise SpikeError(
                f"the loss rose to {metrics.loss:.4g} at step {metrics.step}, above {limit:.4g}, "
                f"after {self.times} restarts by loss_spike: lower the learning rate, or look at "
                "the data of these steps"
            )
        # The policy's own memory is newer than the checkpoint's.
        times, rate = self.times + 1, self.rate * policy.lower
        place = session.setup.checkpoint.resume(session)
        self.times, self.rate = times, rate
        if place is not None and policy.skip_data:
            session.progress.epoch = before.epoch
            session.progress.step_in_epoch = before.step_in_epoch
        did = "no checkpoint yet: lowered the learning rate alone"
        if place is not None:
            left_out = before.step - session.progress.step if policy.skip_data else 0
            did = f"went back to {place.name}, left out {left_out} steps of data"
        self._note(session, {**found, "rate": rate, "did": did})
        return place is not None

    def _note(self, session: Session, line: dict[str, Any]) -> None:
        if self.log is not None and session.setup.facts.world.is_main:
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
    """Raise InputError where the policy can't do what it says."""
    if isinstance(session.setup.checkpoint, NoCheckpoint):
        raise InputError(NEEDS_CHECKPOINTS)
    if session.setup.agreement.apart:
        raise InputError(
            "loss_spike needs one loss for all ranks and those of this plan train apart; leave it "
            "out"
        )
