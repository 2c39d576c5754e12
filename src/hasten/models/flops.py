"""Model FLOPs: conventional cost of a forward and backward pass, from the model.

MFU is comparable across tools only if all count the same. So this is the usual count,
and not that of the kernels that run (PaLM, arXiv:2204.02311, appendix B):

- weights: 2 FLOPs per weight of a matrix product and token forward, twice that
  backward. The input embedding is a look-up. Of routed experts, the chosen ones count.
- attention: scores and values, forward and twice that backward. Half the square counts
  because it is causal. It uses the sum of squared document lengths, so packed documents
  count as separate ones.
- frozen: a frozen weight, in int8 and nf4 too, needs no gradient of its own: 4 FLOPs
  instead of 6. Attention is reduced in the same proportion, as published LoRA figures
  are (two thirds of the full model). But attention has no weights and saves nothing. So
  the executed attention work is more by a third: 3 % for a LoRA on an 8 B model at
  4,096 tokens.
- not counted: recomputation, padding, norms, softmax, rotary embedding, the optimizer.
  The head counts on all tokens, though some losses skip tokens without a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.parts.nn.quantised import QuantisedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CONVENTION = (
    "model FLOPs of tokens: weights without the input embedding, active experts, causal attention "
    "within documents. No recomputation, no padding. Frozen weights: 4 FLOPs instead of 6, "
    "attention in proportion"
)
ARCHITECTURES = ("llama", "qwen2", "deepseek_v2", "deepseek_v3")  # counted by the tests


@dataclass(frozen=True)
class ModelFlops:
    """Training FLOPs of a model: ``per_token``, and ``per_pair`` of the sum of squared lengths."""

    per_token: float
    per_pair: float

    def of(self, lengths: Iterable[int]) -> float:
        """Returns the FLOPs of one forward and backward pass over documents of these lengths."""
        sizes = list(lengths)
        return self.per_token * sum(sizes) + self.per_pair * sum(n * n for n in sizes)

    def at(self, length: int) -> float:
        """Returns the FLOPs per token if every document has this length."""
        return self.per_token + self.per_pair * length


def model_flops(model: nn.Module) -> ModelFlops:
    """Counts the FLOPs of a Hugging Face causal language model.

    Adapters are included and frozen weights are taken into account.

    Raises:
        ValueError: an architecture or an attention that isn't counted.
    """
    config: Any = getattr(model, "config", None)
    _check(config)
    active = trained = 0.0
    for numbers, share, learns in _weights(model, config):
        active += numbers * share
        trained += numbers * share * learns
    if not active:
        raise ValueError("the model has no weights with a known number of FLOPs")
    share = trained / active
    # Dimensions of queries and values over all heads and layers.
    heads = config.num_attention_heads
    if config.model_type.startswith("deepseek"):  # latent attention, computed at full width
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        width = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    # 2 FLOPs, half the square, forward and twice that backward
    pair = 3 * int(config.num_hidden_layers * heads * width)
    return ModelFlops(per_token=4 * active + 2 * trained, per_pair=pair * (2 + share) / 3)


def config_flops(config: PreTrainedConfig, frozen: bool = False) -> ModelFlops:
    """Counts a config's FLOPs, trained in full or with all weights frozen, without memory."""
    from transformers import AutoModelForCausalLM

    _check(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.requires_grad_(not frozen)
    return model_flops(model)


def _check(config: Any) -> None:
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"the FLOPs of the architecture {kind!r} aren't counted, only those of "
            f"{', '.join(ARCHITECTURES)}"
        )
    if getattr(config, "use_sliding_window", False):
        raise ValueError("the FLOPs of attention within a sliding window aren't counted")


def _weights(model: nn.Module, config: Any) -> Iterator[tuple[int, float, bool]]:
    """Yields each matrix's numbers, the share of tokens that use it, and True if it is trained.

    A tied head is counted as the head: embeddings are passed over by their module's kind. A frozen
    weight in few bits is no parameter, and counts as what it was: it is widened for its products.
    """
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    # peft adapts a fused expert tensor with a ``ParamWrapper``: its LoRA matrices combine those of
    # all routed experts.
    adapters: dict[int, int] = {}
    for module in model.modules():
        experts = getattr(module, "num_experts", 0)
        if type(module).__name__ == "ParamWrapper" and isinstance(experts, int) and experts > 1:
            for part in ("lora_A", "lora_B"):
                adapters |= {id(w): experts for w in getattr(module, part).parameters()}
    weight_ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        if isinstance(module, QuantisedLinear):
            yield module.in_features * module.out_features, 1.0, False
        for weight in module.parameters(recurse=False):
            # norms and biases are sums, not products
            if weight.ndim < 2 or id(weight) in weight_ids:
                continue
            weight_ids.add(id(weight))
            experts = weight.shape[0] if weight.ndim == 3 else adapters.get(id(weight), 0)
            share = chosen / experts if experts else 1.0
            yield weight.numel(), share, weight.requires_grad
