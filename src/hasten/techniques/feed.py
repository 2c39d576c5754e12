"""FEED: how a batch reaches the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hasten.core.context import JobContext
from hasten.core.job import MicroBatch
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.parts.data.prefetch import ReadAhead, SmartPrefetcher


@dataclass(frozen=True)
class Prefetched(Technique):
    """Reads, lays out and copies a step in a thread while the step before it computes.

    Ranks agree on a step's counts in the main thread, after the feed, so no collective
    moves. The data position counts the steps taken, not those read ahead.
    """

    slot = Slot.FEED
    fidelity = Fidelity.EXACT
    auto = "try"
    lookahead: int = knob(
        4, "steps that may wait; grows while training has to wait", low=1, high=32
    )
    max_lookahead: int = setting(32, "bound of that growth")
    memory_mb: int = setting(1024, "bound of the tensors that wait, in MB; one step may always")

    def __post_init__(self) -> None:
        if not 1 <= self.lookahead <= self.max_lookahead or self.memory_mb < 1:
            raise ValueError(
                "lookahead must be at least 1 and at most max_lookahead, and memory_mb at least 1"
            )

    def apply(self, setup: Setup) -> None:
        setup.feed = PrefetchedFeed(self)

    def forecast(self, context: JobContext) -> Forecast:
        # A lower bound: token ids, labels and positions in int64, of one mean example in each
        # waiting step. The number of examples per step is unknown here.
        examples = context.examples
        mean = examples.tokens / examples.count if examples.count else 0.0
        waiting = 3 * 8 * mean * self.lookahead
        return Forecast(
            resident_bytes=min(waiting, self.memory_mb * 1e6) if context.on_gpu else 0.0
        )

    def check_effect(self, session: Session) -> EffectCheck:
        feed = session.setup.feed
        if not isinstance(feed, PrefetchedFeed) or feed.prefetcher is None:
            return EffectCheck(False, "no step was read ahead")
        statistics = feed.prefetcher.statistics
        evidence = (
            f"{statistics.ready} of {statistics.batches} steps were ready before they were asked "
            f"for, {statistics.stall_seconds:.3f} s of waiting, look-ahead {statistics.lookahead}"
        )
        if statistics.left_alone:
            evidence += "; not read ahead, since reading an example draws random numbers"
        return EffectCheck(statistics.ready > 0, evidence)


class PrefetchedFeed:
    """The feed of one run: one prefetcher for all epochs."""

    def __init__(self, settings: Prefetched) -> None:
        self.settings = settings
        self.prefetcher: SmartPrefetcher | None = None
        self._ahead: ReadAhead | None = None

    def __call__(
        self, steps: Iterator[tuple[MicroBatch, ...]], device: str
    ) -> Iterator[tuple[MicroBatch, ...]]:
        if self.prefetcher is None:
            self.prefetcher = SmartPrefetcher(
                self.settings.lookahead,
                device=None if device.startswith("cpu") else device,
                max_lookahead=self.settings.max_lookahead,
                memory_bytes=self.settings.memory_mb * 1_000_000,
            )
            self._ahead = self.prefetcher.wrap(())
        assert self._ahead is not None  # created with the prefetcher
        # Each step as its inputs, which are copied, and the part that stays on the host.
        self._ahead.loader = ([(m.inputs, _HostPart(m)) for m in step] for step in steps)
        for step in self._ahead:
            yield tuple(replace(carrier.micro_batch, inputs=inputs) for inputs, carrier in step)


class _HostPart:
    """The part of a micro-batch that stays on the host: its counts and its examples."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        self.micro_batch = micro_batch
