"""LOSS: how head and loss are computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import (
    Claim,
    EffectCheck,
    Fidelity,
    Forecast,
    LiveSetting,
    Technique,
    knob,
)
from hasten.errors import InputError, as_input_error
from hasten.parts.kernels import registry
from hasten.parts.nn import kernel_variants
from hasten.parts.nn.causal_lm import causal_lm
from hasten.parts.nn.losses import (
    LabelOnlyLoss,
    WholeLogitsLoss,
    chunk_bytes,
    chunk_bytes_on,
    chunk_rows,
)
from hasten.parts.nn.preference import OnePassPreferenceLoss, PreferenceLoss
from hasten.techniques import batch

SOURCE = "the articles' graph optimisation and kernel fusion together: +7 % speed"
GRAPH_AND_KERNELS = (Claim("tokens_per_second", 1.07, SOURCE),)


@dataclass(frozen=True)
class LabelledTokenLoss(Technique):
    """Computes only trained tokens' logits, in chunks; gradients are formed in the forward pass."""

    slot = Slot.LOSS
    fidelity = Fidelity.ROUNDING
    auto = "usual"
    claims = GRAPH_AND_KERNELS
    chunk: int | str = knob(
        "auto",
        "rows of logits that exist at once; auto: as many as 64 MiB or 1/64 of a GPU hold",
        low=128,
        high=8192,
        log=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        chunk_rows(self.chunk, 1)  # raises ValueError

    def apply(self, setup: Setup) -> None:
        """Builds the job's own loss and wraps its model and the terms that it adds."""
        usual = setup.loss

        def loss_of(model: nn.Module) -> nn.Module:
            full_loss = usual(model) if usual else None
            if not isinstance(full_loss, WholeLogitsLoss | PreferenceLoss):
                raise InputError(
                    "labelled_token_loss takes the place of a loss over a language model's logits, "
                    f"and this job's loss is {type(full_loss).__name__}; leave it out"
                )
            vocabulary = causal_lm(full_loss.model).config.vocab_size
            rows = chunk_rows(self.chunk, vocabulary, chunk_bytes_on(setup.job.device))
            with as_input_error(self.name(), "; leave it out"):
                if isinstance(full_loss, PreferenceLoss):
                    return OnePassPreferenceLoss(full_loss.model, full_loss.objective, rows)
                return LabelOnlyLoss(full_loss.model, rows, full_loss.terms)

        setup.loss = loss_of

    def live_settings(self, session: Session) -> tuple[LiveSetting, ...]:
        """Chunks of fewer rows, and of twice as many if their logits fit twice."""
        loss = session.loss_module
        if (
            not isinstance(loss, LabelOnlyLoss | OnePassPreferenceLoss)
            or not session.setup.layout.replicated
        ):
            return ()
        rows, width = loss.chunk, 4 * max(session.setup.context.model.vocabulary, 1)
        values = [v for v in (rows // 4, rows // 2) if v >= 64]
        more = [2 * rows] if batch.fits(session, 2 * rows * width) else []

        def change(chunk: int) -> None:
            loss.chunk = chunk

        name = f"{self.name()}.chunk"
        return (LiveSetting(name, (*values, rows, *more), lambda: loss.chunk, change),)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        if not context.model.head_reason:
            return registry.faults(context.device, kernel_variants.LOSSES)
        return (
            f"the loss of {context.model.architecture} is not only its head and cross-entropy: "
            f"{context.model.head_reason}",
        )

    def rows(self, context: JobContext) -> int:
        """Returns the most rows of logits that exist at once on the job's device."""
        gpus = context.hardware.accelerators if context.on_gpu else ()
        size = chunk_bytes(min((gpu.memory_bytes for gpu in gpus), default=0))
        return chunk_rows(self.chunk, max(context.model.vocabulary, 1), size)

    def forecast(self, context: JobContext) -> Forecast:
        longest, share = context.examples.longest, context.examples.trained_share
        # bytes of one row in float32
        saved = 4 * context.model.vocabulary * (longest - self.rows(context))
        head = context.model.vocabulary * context.model.hidden_size
        trunk = max(context.model.parameters - head * (1 if context.model.tied_head else 2), 1)
        head_share = head / (head + trunk)  # share of the model's matrix work
        return Forecast(flops=1 - (1 - share) * head_share, resident_bytes=min(-saved, 0))

    def check_effect(self, session: Session) -> EffectCheck:
        loss, rows, positions = session.loss_module, 0, 0
        if isinstance(loss, LabelOnlyLoss | OnePassPreferenceLoss):
            rows, positions = loss.largest_logits, loss.largest_positions
        evidence = f"at most {rows} rows of logits at once, of {positions} positions"
        if session.setup.job.device == "cpu":  # elsewhere nothing counts logits
            without = max(session.progress.positions - session.progress.trained_tokens, 0)
            evidence += f"; none for {without} positions without label"
        # With preference pairs, a shared position may have several labels.
        of_pairs = isinstance(loss, OnePassPreferenceLoss)
        return EffectCheck(effective=rows > 0 and (of_pairs or rows < positions), evidence=evidence)
