"""The DeepSeek family as data: published sizes and small relatives, no download.

A preset is a model's ``config.json`` under a name, without weights and without a
tokenizer. The published ones have the numbers of the files on the hub. Those with
``-tiny`` and ``-small`` have the same architecture at a size that a processor trains in
minutes. ``presets.json`` contains them. Importing this module costs nothing:
transformers is imported when a config is built.

The small relatives keep each architecture's proportions:

- Grouped heads stay grouped.
- Latent attention keeps its low ranks and its split of plain and rotary dimensions.
- A mixture of experts keeps groups, shared experts, a dense first layer, and as much
  active as dense width.

They are trained from scratch, so their positions are plain rotary ones. The published
YaRN scaling belongs to a later stage of training. Without a tokenizer they have the
vocabulary of the embedded corpus and no token ids.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hasten.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Preset:
    """One model's shape: its transformers ``model_type`` and the fields of its config."""

    name: str
    architecture: str  # transformers' model_type: llama, qwen2, deepseek_v2, deepseek_v3
    config: Mapping[str, Any] = field(hash=False, repr=False)
    description: str
    source: str  # source of the numbers


def preset(name: str) -> Preset:
    """Returns the preset of that name; raises InputError with similar names for an unknown one."""
    if name in PRESETS:
        return PRESETS[name]
    advice = near_presets(name) or f"choose from {', '.join(PRESETS)}"
    raise InputError(f"there is no preset named {name!r}: {advice}")


def near_presets(name: str) -> str:
    """Returns ``did you mean x or y?`` for presets of a similar name; empty if there are none."""
    near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else ""


def build_config(
    preset: Preset,
    *,
    vocab_size: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> PreTrainedConfig:
    """Returns a new config of the preset, fitted to a tokenizer by ``with_vocabulary``."""
    from transformers import CONFIG_MAPPING

    return with_vocabulary(
        CONFIG_MAPPING[preset.architecture](**copy.deepcopy(dict(preset.config))),
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
    """Sets the vocabulary and token ids of a tokenizer in the config and returns it.

    None keeps the config's value, with one exception. Another vocabulary size also clears
    the config's own token ids, because they refer to another tokenizer's tokens. Raises
    InputError for an id outside the vocabulary.
    """
    special_tokens = {"bos": bos_token_id, "eos": eos_token_id, "pad": pad_token_id}
    if vocab_size is not None and vocab_size < 1:
        raise InputError(f"a vocabulary of {vocab_size} tokens can't be trained: give at least 1")
    replaced = vocab_size is not None and vocab_size != config.vocab_size
    if replaced:
        config.vocab_size = vocab_size
    for token, token_id in special_tokens.items():
        key = f"{token}_token_id"
        if token_id is not None or replaced:
            setattr(config, key, token_id)
        elif getattr(config, key, None) == -1:  # the first Llama conversions write -1 for none
            setattr(config, key, None)
        token_ids = getattr(config, key, None)
        for one in token_ids if isinstance(token_ids, list | tuple) else [token_ids]:
            if one is not None and not 0 <= one < config.vocab_size:
                raise InputError(
                    f"{key} {one} is outside the vocabulary of {config.vocab_size} tokens: give "
                    "the ids of the tokenizer that the model is trained with"
                )
    return config


def _read() -> Iterator[Preset]:
    """Returns the presets of the file: fields of those that it is ``like``, then its own."""
    configs: dict[str, dict[str, Any]] = {}
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    for name, entry in json.loads(text).items():
        config: dict[str, Any] = {}
        for other in entry["like"]:
            config |= configs[other]
        configs[name] = config | entry["config"]
        if "architecture" in entry:  # other entries only contain common fields
            texts = entry["description"], entry["source"]
            yield Preset(name, entry["architecture"], configs[name], *texts)


PRESETS: Final[Mapping[str, Preset]] = {entry.name: entry for entry in _read()}
