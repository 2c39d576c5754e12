"""ROUTING: balances tokens over experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from hasten.core.context import JobContext
from hasten.core.job import MicroBatch, Routing
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.step import forward_of
from hasten.core.technique import EffectCheck, Fidelity, Technique, knob
from hasten.errors import InputError, as_input_error
from hasten.parts.nn.causal_lm import causal_lm
from hasten.parts.nn.router_balance import (
    BIASED,
    FILLER,
    UNBIASED,
    RouterBalance,
    load_ratios,
    sequence_ids,
)


@dataclass(frozen=True)
class BalancedRouting(Technique):
    """Balances the experts' loads: a bias follows them (V3), a loss on each sequence (V2, V3).

    With both settings at 0 nothing is changed and the loads are only counted and shown.
    """

    slot = Slot.ROUTING
    speed: float = knob(
        0.001, "how far a router's bias moves after each update; 0: it stays", low=0.0, high=0.01
    )
    sequence_loss: float = knob(
        0.0001, "weight of the balance loss of each sequence; 0: none", low=0.0, high=0.01
    )

    def __post_init__(self) -> None:
        for name, value in (("speed", self.speed), ("sequence_loss", self.sequence_loss)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; give 0 or a small number, for example 0.001")

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.LOSSY if self.speed or self.sequence_loss else Fidelity.EXACT

    def apply(self, setup: Setup) -> None:
        if setup.job.unit == "pairs" and self.sequence_loss:
            raise InputError(
                "balanced_routing: sequence_loss is a mean over trained tokens, and this job's "
                "loss is one over pairs; give sequence_loss: 0"
            )
        setup.routing = RouterBalancing(self.speed, self.sequence_loss, setup.routing)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        architecture = context.model.architecture
        reasons = context.model.why_not_of((*BIASED, *UNBIASED), needs_experts=True)
        if not reasons and architecture in UNBIASED and self.speed:
            return (
                f"the routers of {architecture} have no bias to move; give speed: 0 and a "
                "sequence_loss (0.003 in its paper)",
            )
        return reasons

    def check_effect(self, session: Session) -> EffectCheck:
        routing = session.setup.routing
        balance = routing.balance if isinstance(routing, RouterBalancing) else None
        if balance is None or balance.last is None:
            return EffectCheck(False, "no load was counted")
        ratios = load_ratios(balance.last)
        return EffectCheck(
            balance.updates > 0,
            f"busiest expert / mean load in the last step: {float(ratios.mean()):.2f} over "
            f"{len(ratios)} layers, {float(ratios.max()):.2f} in the worst; biases moved "
            f"{balance.updates if self.speed else 0} times",
        )


class RealTokens(Routing):
    """Restricts a loss of the model's routers to positions with tokens.

    Rows are padded without a mask: attention needs none, and the routers choose for filler too.
    """

    def forward(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        labels = micro_batch.inputs["labels"]
        real = (_sequences(micro_batch) != FILLER).to(labels.device, non_blocking=True)
        loss, count = module(**micro_batch.inputs, real_tokens=real)
        return loss, count

    def load_ratio(self) -> float | None:
        return None


class RouterBalancing:
    """Connects a run's RouterBalance to slot ROUTING.

    ``passes`` runs the forward passes that are watched; None: they are run as they are.
    """

    def __init__(self, speed: float, sequence_loss: float, passes: Routing | None) -> None:
        self.speed, self.sequence_loss, self.passes = speed, sequence_loss, passes
        self.balance: RouterBalance | None = None

    def prepare(self, model: nn.Module) -> None:
        inner = causal_lm(model)
        with as_input_error("balanced_routing"):
            self.balance = RouterBalance(inner, self.speed, self.sequence_loss)
        if self.speed and not all(r.weight.requires_grad for r in self.balance.routers):
            raise InputError(
                "balanced_routing: the routers don't learn here, and an adapter's files have no "
                "place for their biases; give speed: 0, or train all weights"
            )

    def forward(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        balance = self.balance
        if balance is None or not module.training:
            return forward_of(self.passes, module, micro_batch)
        labels = micro_batch.inputs["labels"]
        with balance.watching(_sequences(micro_batch)):
            loss, count = forward_of(self.passes, module, micro_batch)
        return loss + balance.loss(labels), count

    def after_update(self, total: Callable[[Tensor], Tensor]) -> None:
        if self.balance is not None:
            self.balance.after_update(total)

    def discard(self) -> None:
        if self.balance is not None:
            self.balance.discard()

    def load_ratio(self) -> float | None:
        if self.balance is None or self.balance.last is None:
            return None
        return float(load_ratios(self.balance.last).mean())


def _sequences(micro_batch: MicroBatch) -> Tensor:
    """Returns the positions of the examples; all positions are padding on a rank without any.

    Filler may follow the last example of a packed row, as a document or without one.
    """
    shape = micro_batch.inputs["input_ids"].shape
    if not micro_batch.counts.tokens:
        return sequence_ids([0] * shape[0], shape)
    packed = micro_batch.inputs.get("document_lengths")
    if packed is None:
        lengths = [row.length for r in micro_batch.examples for row in r.rows if row.length]
        return sequence_ids([*lengths, *[0] * (shape[0] - len(lengths))], shape)  # rows of padding
    rows = sum(row.length > 0 for example in micro_batch.examples for row in example.rows)
    return sequence_ids(packed[:rows], shape)
