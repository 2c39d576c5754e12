"""EXPERTS: which code multiplies tokens with their experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique, knob
from hasten.errors import as_input_error
from hasten.parts.kernels import registry
from hasten.parts.nn import fused_experts, kernel_variants
from hasten.parts.nn.causal_lm import causal_lm
from hasten.techniques import probes

KINDS = ("fused", "eager", "batched_mm", "grouped_mm")
FUSED = ("deepseek_v2", "deepseek_v3", "deepseek_v32")  # runs on hasten's kernels
# Operators that show which kind ran, the most reliable first: on a GPU, fused experts have grouped
# products too, and MLA has batched products.
SIGNS = {
    "fused": ("hasten::expert", "hasten_gpu::expert"),
    "grouped_mm": ("aten::_grouped_mm",),
    "eager": ("aten::index_add_",),
    "batched_mm": ("aten::bmm",),
}
ARCHITECTURES = (*FUSED, "qwen3_moe")


@dataclass(frozen=True)
class ExpertsImplementation(Technique):
    """One of four implementations of a layer's experts, on this model instance.

    ``fused`` is hasten's own. On a processor, all experts run in one call of kernels,
    without compilation for each shape. On an NVIDIA GPU in bf16, torch's grouped products
    multiply all experts. Triton kernels between them move each token's row once. Other
    formats on a GPU run through Transformers' code. The others are Transformers' three.
    With ``eager``, experts run one by one. With ``grouped_mm``, Transformers' own default,
    tokens are sorted by expert and all groups are multiplied in one call. With
    ``batched_mm``, an expert's weights are copied for every token.
    """

    slot = Slot.EXPERTS
    fidelity = Fidelity.ROUNDING
    auto = "usual"
    kind: str = knob("fused", "fused, eager, grouped_mm or batched_mm", only=KINDS)

    def apply(self, setup: Setup) -> None:
        def select(model: nn.Module) -> None:
            with as_input_error(self.name()):
                if self.kind == "fused":
                    fused_experts.fuse_experts(causal_lm(model), setup.job.device)
                else:
                    causal_lm(model).set_experts_implementation(self.kind)

        setup.experts = select

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        proven = FUSED if self.kind == "fused" else ARCHITECTURES
        reasons = context.model.why_not_of(proven, needs_experts=True)
        if reasons or self.kind != "fused":
            return reasons
        reason = fused_experts.why_not(context.device)
        if reason or context.on_gpu:  # a GPU kernel's refusal names its reason, and other code runs
            return (reason,) if reason else ()
        return registry.faults(context.device, kernel_variants.ROUTED)

    def check_effect(self, session: Session) -> EffectCheck:
        model = causal_lm(session.model)
        layers = fused_experts.fused(model)
        chosen = "fused" if layers else str(model.config._experts_implementation)
        # Bound code passes unsupported tensors to the layer's own code, so count what ran.
        probed = session.setup.job.device == "cpu" or bool(layers)
        operators = probes.operators(session) if probed else None
        if operators is None:
            return EffectCheck(
                chosen == self.kind, f"the model's experts are computed by {chosen} code"
            )
        signs = ((kind, sign) for kind, each in SIGNS.items() for sign in each)
        counted = (pair for pair in signs if probes.count(operators, pair[1]))
        ran, sign = next(counted, ("other", "operators that aren't known here"))
        return EffectCheck(
            chosen == ran == self.kind,
            f"the model's experts ran as {ran} in one pass over some examples, by "
            f"{probes.count(operators, sign)} calls of {sign}",
        )
