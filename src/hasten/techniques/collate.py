"""COLLATE: how examples become one tensor."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.context import JobContext
from hasten.core.job import with_language_counts
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique
from hasten.parts.data import collate
from hasten.parts.nn import attention
from hasten.techniques import probes
from hasten.techniques.compile import Bucketed


@dataclass(frozen=True)
class Packed(Technique):
    """Lays the examples of a micro-batch end to end in one row, without padding.

    The same examples share the step as before, so the mathematics is the same. Positions restart
    with each example and keep documents apart in every attention that reads them.
    """

    slot = Slot.COLLATE
    fidelity = Fidelity.ROUNDING
    auto = "usual"

    def apply(self, setup: Setup) -> None:
        setup.collate = with_language_counts(collate.packed)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        return context.model.why_not_of(attention.ARCHITECTURES)  # attention separates documents

    def forecast(self, context: JobContext) -> Forecast:
        examples = context.examples
        if not examples.tokens:
            return Forecast()
        mean = examples.tokens / examples.count
        # the worst case: every batch has a longest example
        return Forecast(positions=mean / max(examples.longest, 1))

    def check_effect(self, session: Session) -> EffectCheck:
        positions, tokens = session.progress.positions, session.progress.tokens
        # COMPILE may pad a row at its end; no other technique pads a packed row.
        collator, passes = session.setup.collate, session.progress.micro_batches
        most = collator.bucket - 1 if isinstance(collator, Bucketed) else 0
        filler = most * passes * session.setup.layout.data_size
        effective = positions > 0 and positions - tokens <= filler
        evidence = f"{positions - tokens} of {positions} positions were padding"
        padded = probes.laid_out(session, session.setup.sampler, session.setup.job.collate)
        if padded is None:
            return EffectCheck(effective, evidence)
        has_padding = padded.positions > padded.tokens  # or there was no padding to remove
        return EffectCheck(
            effective and has_padding, f"{evidence}; padded rows have {padded.padding_share:.1%}"
        )
