"""BATCH: how a step's records are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.facts import Facts
from hasten.core.session import Session
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Forecast, Proof, Technique, knob
from hasten.parts import cut


@dataclass(frozen=True)
class Accumulate(Technique):
    """Gradient accumulation: a step in several forward and backward passes, one update.

    The loss is divided by the trained tokens of the whole step, so that the cut changes memory and
    speed and nothing else. Give ``micro_batch_size`` in records or ``micro_batch_tokens``.
    """

    slot = Slot.BATCH
    micro_batch_size: int = knob(8, "records of one pass; 0: cut by tokens", low=1, high=512)
    micro_batch_tokens: int = knob(
        0, "tokens of one pass at most, longest first; 0: cut by records", low=256, high=65536
    )

    def __post_init__(self) -> None:
        if self.micro_batch_size < 0 or self.micro_batch_tokens < 0:
            raise ValueError("micro_batch_size and micro_batch_tokens can't be negative")
        if not self.micro_batch_size and not self.micro_batch_tokens:
            raise ValueError("give micro_batch_size or micro_batch_tokens")

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    def apply(self, setup: Setup) -> None:
        setup.cut = self._cut

    def _cut(self, records: Sequence[Any]) -> list[list[Any]]:
        if self.micro_batch_tokens:
            lengths = [len(r.input_ids) for r in records]
            return cut.by_tokens(records, lengths, self.micro_batch_tokens)
        return cut.by_count(records, self.micro_batch_size)

    def obstacles(self, facts: Facts) -> tuple[str, ...]:
        longest = facts.records.longest
        if self.micro_batch_tokens and longest > self.micro_batch_tokens:
            return (
                f"micro_batch_tokens={self.micro_batch_tokens} can't hold the longest record of "
                f"{longest} tokens; raise it or lower cutoff_len",
            )
        return ()

    def forecast(self, facts: Facts) -> Forecast:
        return Forecast()

    def probe(self, session: Session) -> Proof:
        passes, steps = session.progress.micro_batches, session.progress.step
        return Proof(passes > steps > 0, f"{passes} passes in {steps} steps on this rank")
