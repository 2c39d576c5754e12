"""LAYERS: which code computes norm, rotary embedding, activation, linear layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique
from hasten.machine.gain import Gain
from hasten.parts.kernels import registry
from hasten.parts.nn import fused_layers, kernel_variants
from hasten.parts.nn.causal_lm import causal_lm
from hasten.parts.nn.kernel_variants import GATES, NORMS, NORMS_BESIDE, PASS, PRODUCTS, ROTARY
from hasten.techniques import probes
from hasten.techniques.loss import GRAPH_AND_KERNELS

OPERATORS = ("hasten::rms_norm", "hasten::swiglu", "hasten::rotate")
KERNELS = (PRODUCTS, NORMS, NORMS_BESIDE, GATES, ROTARY, PASS)


@dataclass(frozen=True)
class FusedLayers(Technique):
    """Norms, rotary embedding, gated MLPs and linear layers on fused kernels.

    On a processor they are C++, compiled once for this machine; with AMX, linear layers in bf16
    too. On a GPU they are torch's and hasten's own in Triton, and linear layers stay torch's.
    Modules keep their classes, parameters and names; only this model's ``forward`` changes.
    """

    slot = Slot.LAYERS
    fidelity = Fidelity.ROUNDING
    auto = "usual"
    claims = GRAPH_AND_KERNELS

    def apply(self, setup: Setup) -> None:
        def fuse(model: nn.Module) -> None:
            fused_layers.fuse_layers(causal_lm(model), setup.job.device)

        setup.layers = fuse

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        if reasons := context.model.why_not_of(fused_layers.ARCHITECTURES):
            return reasons
        reason = fused_layers.why_not(context.device)
        return (reason,) if reason else registry.faults(context.device, *KERNELS)

    def forecast(self, context: JobContext) -> Forecast:
        # A norm, a rotary embedding, a gate: one pass over memory each instead of four.
        return Forecast(bytes=0.6)

    def gain(self, context: JobContext) -> Gain | None:
        return kernel_variants.layers_gain(context.device)

    def check_effect(self, session: Session) -> EffectCheck:
        bound = fused_layers.fused(causal_lm(session.model))
        listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(bound.items()))
        evidence = f"fused code runs {listed or 'nothing'}"
        # Bound code passes unsupported tensors to the layer's own code, so count what ran. On a GPU
        # the plain norm is torch's and isn't counted, so bound layers are counted instead.
        operators = (
            probes.operators(session) if bound and session.setup.job.device == "cpu" else None
        )
        if operators is None:
            return EffectCheck(bool(bound), evidence)
        ran = probes.count(operators, *OPERATORS)
        return EffectCheck(
            ran > 0, f"{evidence}; {ran} of its kernels ran in one pass over some examples"
        )
