"""ATTENTION: how attention is computed and documents are kept apart."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique
from hasten.parts.kernels import registry
from hasten.parts.nn import attention, compressed_attention, kernel_variants
from hasten.parts.nn.causal_lm import causal_lm
from hasten.techniques import probes

CALLS = ("aten::_scaled_dot_product", "aten::_safe_softmax")  # second: heads of two widths
KERNEL = "hasten::document_attention"
VARLEN = ("torch_attn::_varlen_attn", "aten::_flash_attention_forward")


@dataclass(frozen=True)
class DocumentAttention(Technique):
    """Causal attention within each document: no work between the examples of a packed row.

    On rows that aren't packed it is plain causal attention. DeepSeek-V4's windows and compressed
    keys stay within documents too.
    """

    slot = Slot.ATTENTION
    fidelity = Fidelity.ROUNDING
    auto = "usual"

    def apply(self, setup: Setup) -> None:
        def select(model: nn.Module) -> None:
            attention.use_document_attention(causal_lm(model))

        setup.attention = select

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        if context.model.sliding_window:
            return (f"this {context.model.architecture} attends through a sliding window",)
        other = attention.why_not_over(context.model.attention or attention.USUAL[0])
        if other:
            return (other,)
        return context.model.why_not_of(attention.ARCHITECTURES) or registry.faults(
            context.device, kernel_variants.ATTENTION
        )

    def check_effect(self, session: Session) -> EffectCheck:
        config = causal_lm(session.model).config
        ours = attention.by_documents(config)
        batch = probes.few_examples(session) if ours else None
        if batch is None:
            return EffectCheck(ours, f"the model's attention is {config._attn_implementation}")
        operators = probes.operators_of(session, batch)
        calls, kernel = probes.count(operators, *CALLS), probes.count(operators, KERNEL, *VARLEN)
        layers = max(session.setup.context.model.layers, 1)
        evidence = f"{calls + kernel} calls of attention in {layers} layers over some examples"
        documents = len(batch.inputs.get("document_lengths", ()))
        if windows := probes.count(operators, compressed_attention.WINDOW):
            evidence = f"{windows} calls of attention in {layers} layers for {documents} documents"
            return EffectCheck(documents > 1, evidence)
        if kernel:
            how = f", {kernel} of them by a kernel for whole rows of documents"
        elif calls > layers:
            how = ", one for each document"
        elif documents > 1 and len(set(batch.inputs["document_lengths"])) == 1:
            how = f", each for {documents} documents of one length"
        else:
            return EffectCheck(False, f"{evidence}: each row is one document")
        return EffectCheck(True, evidence + how)
