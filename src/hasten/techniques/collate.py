"""COLLATE: how examples become one tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.context import JobContext
from hasten.core.job import with_language_counts
from hasten.core.setup import Session, Setup, leave_model
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, setting
from hasten.parts.data import collate
from hasten.parts.data.pairs import PreferencePair, packed_pairs, shared_share
from hasten.parts.nn import attention, compressed_attention
from hasten.techniques import probes
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.compile import Bucketed

WORTH = 0.1  # share of the tokens from which prompts are laid out once
SAMPLED = 64  # pairs of which that share is measured


@dataclass(frozen=True)
class Packed(Technique):
    """Lays the examples of a micro-batch end to end in one row, without padding.

    The same examples share the step as before, so the mathematics is the same. Positions restart
    with each example and keep documents apart in every attention that reads them. DeepSeek-V4's
    doesn't, so there document_attention is part of it. The tokens with which both answers of a
    preference pair begin can be laid out once.
    """

    slot = Slot.COLLATE
    fidelity = Fidelity.ROUNDING
    auto = "usual"
    shared_prompt: bool | str = setting(
        "auto",
        "preference pairs: lay a prompt out once for both answers, which needs document_attention; "
        "auto: if that saves over a tenth of the tokens",
        only=("auto", True, False),
    )

    @property
    def least_share(self) -> float:
        """Returns the share of the tokens from which a common prompt is laid out once."""
        return {"auto": WORTH, True: 0.0, False: math.inf}[self.shared_prompt]

    def apply(self, setup: Setup) -> None:
        job = setup.job
        if setup.context.model.architecture == compressed_attention.ARCHITECTURE:
            DocumentAttention().apply(setup)
        if job.unit != "pairs":
            setup.collate = with_language_counts(collate.packed)
            return

        @functools.cache  # called at the first batch, when ATTENTION is decided
        def shared() -> bool:
            if self.shared_prompt != "auto":
                return bool(self.shared_prompt)
            sample = range(0, len(job.examples), max(len(job.examples) // SAMPLED, 1))
            separates = setup.context.model.architecture in attention.SHARES_PROMPTS
            return (
                separates
                and setup.attention is not leave_model
                and shared_share([job.examples[i] for i in sample]) > WORTH
            )

        def lay_out(pairs: Sequence[PreferencePair], **settings: Any) -> dict[str, Any]:
            return packed_pairs(pairs, shared(), **settings)

        setup.collate = job.with_counts(lay_out)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        model = context.model
        if model.architecture == compressed_attention.ARCHITECTURE:
            return DocumentAttention().unsupported_reasons(context)
        return model.why_not_of(attention.ARCHITECTURES)  # attention separates documents

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
        evidence = f"{max(positions - tokens, 0)} of {positions} positions were padding"
        if positions < tokens:
            evidence += f", {tokens - positions} tokens of prompts shared the positions of others"
        padded = probes.laid_out(session, session.setup.sampler, session.setup.job.collate)
        if padded is None:
            return EffectCheck(effective, evidence)
        # Otherwise there was nothing to remove.
        has_padding = padded.positions > padded.tokens or positions < tokens
        return EffectCheck(
            effective and has_padding, f"{evidence}; padded rows have {padded.padding_share:.1%}"
        )
