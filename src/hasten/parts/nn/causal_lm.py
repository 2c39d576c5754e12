"""Parts of a Hugging Face causal language model: trunk, head, experts, trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

# Modules that choose keys for attention and return their indices, which have no gradient.
INDEXERS = ("DeepseekV32Indexer", "DeepseekV4Indexer")
INDEXER = "indexer"  # name of such a module in an attention
# Modules that do nothing if every example is shorter than what they compress to one key.
COMPRESSORS = ("DeepseekV4HCACompressor", "DeepseekV4CSACompressor")

CACHES = ("past_key_values", "cache")  # Transformers' argument, before 5.24 and since


def causal_lm(model: nn.Module) -> Any:
    """Returns the model inside a PEFT wrapper; its layers already contain the adapters.

    A reward model has a ``score`` instead of an ``lm_head``.

    Raises:
        ValueError: not a causal language model.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    has_head = hasattr(inner, "lm_head") or hasattr(inner, "score")
    if not hasattr(inner, "base_model_prefix") or not has_head:
        raise ValueError(
            f"{type(inner).__name__} is not a Hugging Face causal language model with an lm_head"
        )
    return inner


def trunk(model: nn.Module) -> nn.Module:
    """Returns the decoder that maps token ids to hidden states.

    Raises:
        ValueError: not a causal language model, or the decoder has no name.
    """
    inner = causal_lm(model)
    decoder: nn.Module | None = getattr(inner, inner.base_model_prefix, None)
    if decoder is None:
        raise ValueError(f"{type(inner).__name__} doesn't name its decoder")
    return decoder


def callable_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that user code may call: outer model, inner model, its decoder."""
    try:
        return [model, causal_lm(model), trunk(model)]
    except ValueError:
        return [model]


def routed_experts(config: Any) -> int:
    """Returns the number of routed experts of a layer, for any name in a config; 0 without any."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")  # DeepSeek's first
    return next((int(count) for name in names if (count := getattr(config, name, None))), 0)


def freeze_indexers(model: nn.Module) -> int:
    """Freezes the weights that transformers never trains; returns the number of such modules.

    DeepSeek trains its indexers by a loss of their own (arXiv:2512.02556), which transformers
    doesn't have: they stay as they were loaded. DDP would wait for their gradients.
    """
    indexers = [module for module in model.modules() if type(module).__name__ in INDEXERS]
    for module in indexers:
        module.requires_grad_(False)
    return len(indexers)


def is_indexer(name: str) -> bool:
    """Returns True for the full name of an indexer, or of a weight of one."""
    return INDEXER in name.split(".")


def may_rest(model: nn.Module) -> bool:
    """Returns True if trained weights may have no gradient in a step with short examples."""
    return any(type(module).__name__ in COMPRESSORS for module in model.modules())


def holds_cache(arguments: Mapping[str, Any]) -> bool:
    """Returns True if a model, layer or attention is called with a key-value cache."""
    return any(is_cache(name, value) for name, value in arguments.items())


def is_cache(name: str, value: Any) -> bool:
    """Returns True if an argument is a cache: also by its methods, because names may change."""
    return value is not None and (name in CACHES or hasattr(value, "get_seq_length"))
