"""What of a Hugging Face causal language model is asked for: trunk, head, number of experts."""

from __future__ import annotations

from typing import Any

from torch import nn


def causal_lm(model: nn.Module) -> Any:
    """The model itself inside a PEFT wrapper; its layers already hold the adapters.

    Raises:
        ValueError: not a causal language model.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(inner, "base_model_prefix") or not hasattr(inner, "lm_head"):
        raise ValueError(
            f"{type(inner).__name__} is not a Hugging Face causal language model with an lm_head"
        )
    return inner


def trunk(model: nn.Module) -> nn.Module:
    """The decoder that maps token ids to hidden states."""
    inner = causal_lm(model)
    found: nn.Module = getattr(inner, inner.base_model_prefix)
    return found


def routed_experts(config: Any) -> int:
    """How many routed experts a layer has, whatever a model's config calls them; 0 without any."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")  # DeepSeek's first
    return next((int(found) for name in names if (found := getattr(config, name, None))), 0)
