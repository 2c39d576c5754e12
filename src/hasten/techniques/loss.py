"""LOSS: how head and loss are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hasten.core.facts import Facts
from hasten.core.session import Session
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Claim, Fidelity, Forecast, Proof, Technique, knob
from hasten.parts.hugging_face import causal_lm
from hasten.parts.losses import LabelOnlyHead, LabelOnlyLoss

# Architectures whose logits are head x hidden state: no soft-capping, no scaling, no bias.
PLAIN_HEADS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")


@dataclass(frozen=True)
class LabelledTokenLoss(Technique):
    """Logits for trained tokens alone, a chunk at a time, gradients formed in the forward pass."""

    slot = Slot.LOSS
    chunk: int = knob(1024, "rows of logits that exist at once", low=128, high=8192, log=True)

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}; it must be at least 1")

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    @property
    def claims(self) -> tuple[Claim, ...]:
        source = "the articles' graph optimisation and kernel fusion together: +7 % speed"
        return (Claim("tokens_per_second", 1.07, source),)

    def apply(self, setup: Setup) -> None:
        setup.loss = partial(LabelOnlyLoss, chunk=self.chunk)

    def obstacles(self, facts: Facts) -> tuple[str, ...]:
        if facts.model.architecture in PLAIN_HEADS:
            return ()
        return (
            f"the head of {facts.model.architecture} isn't known to be a linear layer and no more; "
            f"it is for {', '.join(PLAIN_HEADS)}",
        )

    def forecast(self, facts: Facts) -> Forecast:
        longest, share = facts.records.longest, facts.records.trained_share
        saved = 4 * facts.model.vocabulary * (longest - self.chunk)  # bytes, one row of float32
        return Forecast(flops=1 - (1 - share) * _head_share(facts), resident_bytes=min(-saved, 0))

    def probe(self, session: Session) -> Proof:
        head = causal_lm(session.model).lm_head
        rows = head.largest_logits if isinstance(head, LabelOnlyHead) else 0
        whole = session.progress.slots - session.progress.trained_tokens
        return Proof(
            acted=0 < rows <= self.chunk,
            evidence=f"at most {rows} rows of logits at once; none for {whole} slots without label",
        )


def _head_share(facts: Facts) -> float:
    """Part of the model's matrix work that the head is."""
    head = facts.model.vocabulary * facts.model.hidden_size
    trunk = max(facts.model.parameters - head * (1 if facts.model.tied_head else 2), 1)
    return head / (head + trunk)
