"""The DeepSeek family as data: published sizes and small relatives, buildable without a download.

A preset is a model's ``config.json`` under a name, without weights and without a tokenizer. The
published ones carry the numbers of the files on the hub; ``-tiny`` and ``-small`` have the same
architecture at a size that a processor trains in minutes (the numbers are in ``shapes``). Importing
this module costs nothing: transformers comes in when a config is built.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hasten.errors import InputError
from hasten.models import shapes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Preset:
    """One model's shape: its transformers ``model_type`` and the fields of its config."""

    name: str
    architecture: str  # transformers' model_type: llama, qwen2, deepseek_v2, deepseek_v3
    config: Mapping[str, Any] = field(hash=False, repr=False)
    description: str
    source: str  # where the numbers are from


def preset(name: str) -> Preset:
    """The preset of that name; an unknown name is an InputError with the nearest ones."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(PRESETS)}"
    raise InputError(f"there is no preset named {name!r}: {advice}")


def build_config(
    preset: Preset,
    *,
    vocab_size: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> PreTrainedConfig:
    """A fresh transformers config of the preset, fitted to a tokenizer by ``with_vocabulary``."""
    from transformers import CONFIG_MAPPING

    fields = copy.deepcopy(dict(preset.config))
    config = CONFIG_MAPPING[preset.architecture](**fields)
    return with_vocabulary(
        config,
        vocab_size=vocab_size,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def with_vocabulary(
    config: PreTrainedConfig,
    *,
    vocab_size: int | None,
    bos_token_id: int | None,
    eos_token_id: int | None,
    pad_token_id: int | None,
) -> PreTrainedConfig:
    """The same config, changed in place, with the vocabulary and token ids of a tokenizer.

    None keeps what the config says, except that another vocabulary size also forgets the config's
    own token ids: they number another tokenizer's tokens. Raises InputError for an id outside the
    vocabulary.
    """
    given = {"bos": bos_token_id, "eos": eos_token_id, "pad": pad_token_id}
    if vocab_size is not None and vocab_size < 1:
        raise InputError(f"a vocabulary of {vocab_size} tokens can't be trained: give at least 1")
    replaced = vocab_size is not None and vocab_size != config.vocab_size
    if replaced:
        config.vocab_size = vocab_size
    for token, token_id in given.items():
        if token_id is not None and not 0 <= token_id < config.vocab_size:
            raise InputError(
                f"{token}_token_id {token_id} lies outside the vocabulary of {config.vocab_size} "
                "tokens: give the ids of the tokenizer that the model is trained with"
            )
        if token_id is not None or replaced:
            setattr(config, f"{token}_token_id", token_id)
    return config


_SCALED_DOWN: Final = "the published model's proportions, scaled down for this package"

_ALL: Final = (
    Preset(
        "deepseek-llm-7b",
        "llama",
        shapes.LLM_7B,
        "dense; 6.9 B parameters",
        "config.json of deepseek-ai/deepseek-llm-7b-base",
    ),
    Preset(
        "deepseek-llm-1b",
        "llama",
        shapes.LLM_1B,
        "dense; 1.0 B parameters, a stand-in for one GPU",
        _SCALED_DOWN,
    ),
    Preset(
        "deepseek-llm-small",
        "llama",
        shapes.LLM_SMALL,
        "dense; 19.0 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "deepseek-llm-tiny",
        "llama",
        shapes.LLM_TINY,
        "dense; 3.2 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "deepseek-r1-distill-qwen-7b",
        "qwen2",
        shapes.QWEN_7B,
        "dense, grouped heads; 7.6 B parameters",
        "config.json of deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    ),
    Preset(
        "deepseek-r1-distill-qwen-1.5b",
        "qwen2",
        shapes.QWEN_1_5B,
        "dense, grouped heads; 1.8 B parameters",
        "config.json of deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    ),
    Preset(
        "r1-distill-qwen-small",
        "qwen2",
        shapes.QWEN_SMALL,
        "dense, grouped heads; 17.6 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "r1-distill-qwen-tiny",
        "qwen2",
        shapes.QWEN_TINY,
        "dense, grouped heads; 5.2 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "deepseek-v2-lite",
        "deepseek_v2",
        shapes.V2_LITE,
        "latent attention, experts; 15.7 B parameters",
        "config.json of deepseek-ai/DeepSeek-V2-Lite; arXiv 2405.04434",
    ),
    Preset(
        "v2-lite-small",
        "deepseek_v2",
        shapes.V2_LITE_SMALL,
        "latent attention, experts; 22.7 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "v2-lite-tiny",
        "deepseek_v2",
        shapes.V2_LITE_TINY,
        "latent attention, experts; 5.3 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "deepseek-v3",
        "deepseek_v3",
        shapes.V3,
        "latent attention, experts in groups; 671 B parameters",
        "config.json of deepseek-ai/DeepSeek-V3; arXiv 2412.19437",
    ),
    Preset(
        "v3-small",
        "deepseek_v3",
        shapes.V3_SMALL,
        "latent attention, experts in groups; 21.3 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "v3-tiny",
        "deepseek_v3",
        shapes.V3_TINY,
        "latent attention, experts in groups; 4.7 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
)
PRESETS: Final[Mapping[str, Preset]] = {entry.name: entry for entry in _ALL}
