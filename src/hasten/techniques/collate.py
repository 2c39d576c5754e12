"""COLLATE: how records become one tensor."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.facts import Facts
from hasten.core.job import with_language_counts
from hasten.core.session import Session
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Forecast, Proof, Technique
from hasten.parts.data import collate
from hasten.parts.nn import attention
from hasten.techniques import probes
from hasten.techniques.compile import Bucketed


@dataclass(frozen=True)
class Packed(Technique):
    """The records of a micro-batch end to end in one row, without padding.

    The same records share the step as before, so the mathematics is the same. Positions restart
    with each record and keep documents apart in every attention that reads them.
    """

    slot = Slot.COLLATE
    fidelity = Fidelity.ROUNDING
    auto = "usual"

    def apply(self, setup: Setup) -> None:
        setup.collate = with_language_counts(collate.packed)

    def obstacles(self, facts: Facts) -> tuple[str, ...]:
        known = attention.ARCHITECTURES
        if facts.model.architecture in known:
            return ()
        return (
            f"packing is proven not to leak between documents for {', '.join(known)}, "
            f"not for {facts.model.architecture}",
        )

    def forecast(self, facts: Facts) -> Forecast:
        records = facts.records
        if not records.tokens:
            return Forecast()
        mean = records.tokens / records.count
        return Forecast(slots=mean / max(records.longest, 1))  # at worst: every batch has a longest

    def probe(self, session: Session) -> Proof:
        slots, tokens = session.progress.slots, session.progress.tokens
        # COMPILE may fill a row up at its end; nothing else puts padding into a packed one.
        collator, passes = session.setup.collate, session.progress.micro_batches
        most = collator.bucket - 1 if isinstance(collator, Bucketed) else 0
        filler = most * passes * session.setup.layout.data_size
        acted = slots > 0 and slots - tokens <= filler
        evidence = f"{slots - tokens} of {slots} slots were padding"
        padded = probes.laid_out(session, session.setup.sampler, session.setup.job.collate)
        if padded is None:
            return Proof(acted, evidence)
        there = padded.slots > padded.tokens  # or there was nothing to take out
        return Proof(acted and there, f"{evidence}; padded rows have {padded.padding_share:.1%}")
