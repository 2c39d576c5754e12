"""Reads an ``Architecture`` from the fields of a Hugging Face config, whoever's names they bear."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.models.architecture import Architecture, Experts, Latent, load_json
from hasten.models.presets import PRESETS, preset

# The planner's word -> the names it goes by in configs (llama first, then GPT-2, BLOOM, MPT).
_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
}
# Architectures with one plain MLP four times as wide as the model, input and output tied.
_PLAIN = ("gpt2", "bloom", "mpt", "gpt_neox", "opt", "gptj")
_QKV_BIAS = ("qwen2", "qwen2_moe")
_QK_NORM = ("qwen3", "qwen3_moe")


def read_config(source: Mapping[str, Any] | str | Path) -> Architecture:
    """``Architecture.from_config``: fields, a file, a folder, or a preset's name."""
    if isinstance(source, Mapping):
        return _read(source, str(source.get("name") or source.get("_name_or_path") or "model"))
    if str(source) in PRESETS:
        found = preset(str(source))
        return _read({"model_type": found.architecture, **found.config}, found.name)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        if isinstance(source, Path) or "/" in source or path.suffix == ".json":
            raise InputError(f"there is no config at {path}: name a config.json, or its folder")
        preset(str(source))  # raises, with the nearest names
    fields = load_json(path)
    if not isinstance(fields, Mapping):
        raise InputError(f"{path} holds no config: a JSON object of fields is needed")
    return _read(fields, path.parent.name or path.stem)


def _read(fields: Mapping[str, Any], name: str) -> Architecture:
    text = fields.get("text_config")  # models that also see keep their language part apart
    if isinstance(text, Mapping):
        fields = {**fields, **text}
    kind = str(fields.get("model_type", ""))
    plain = kind in _PLAIN
    layers, hidden, heads = (_need(fields, word, name) for word in ("layers", "hidden", "heads"))
    vocabulary = _need(fields, "vocabulary", name)
    moe = _experts(fields, name)
    ffn = 4 * hidden if plain and not _have(fields, "ffn") else 0
    if not ffn:
        ffn = moe.width if moe and not _have(fields, "ffn") else _need(fields, "ffn", name)
    if not fields.get("head_dim") and hidden % heads:
        raise InputError(
            f"{name}: hidden_size {hidden} can't be shared by {heads} heads: give head_dim"
        )
    window, every = _window(fields)
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_number(fields, "num_key_value_heads", name, heads),
        head_dim=_number(fields, "head_dim", name, max(1, hidden // heads)),
        ffn=ffn,
        vocabulary=vocabulary,
        gated=not plain,
        tied=bool(fields.get("tie_word_embeddings", plain)),
        latent=_latent(fields, name),
        moe=moe,
        window=window,
        window_every=every,
        qkv_bias=kind in _QKV_BIAS,
        qk_norm=kind in _QK_NORM,
    )


def _latent(fields: Mapping[str, Any], name: str) -> Latent | None:
    if not fields.get("kv_lora_rank"):
        return None
    return Latent(
        q_rank=_number(fields, "q_lora_rank", name, 0),
        kv_rank=_number(fields, "kv_lora_rank", name),
        nope=_number(fields, "qk_nope_head_dim", name),
        rope=_number(fields, "qk_rope_head_dim", name),
        value=_number(fields, "v_head_dim", name),
    )


def _experts(fields: Mapping[str, Any], name: str) -> Experts | None:
    if not _have(fields, "experts"):
        return None
    count = _need(fields, "experts", name)
    if count < 2:
        return None
    fallback = _need(fields, "ffn", name) if _have(fields, "ffn") else None
    width = _number(fields, "moe_intermediate_size", name, fallback)
    shared = _number(fields, "n_shared_experts", name, 0) * width
    active = _number(fields, "num_experts_per_tok", name)
    if not 1 <= active <= count:
        raise InputError(
            f"{name}: num_experts_per_tok is {active}; it must lie between 1 and {count} experts"
        )
    return Experts(
        count=count,
        active=active,
        width=width,
        shared_width=_number(fields, "shared_expert_intermediate_size", name, shared),
        dense_layers=_number(fields, "first_k_dense_replace", name, 0),
        groups=_reached_groups(fields, name),
    )


def _reached_groups(fields: Mapping[str, Any], name: str) -> int:
    """Node-limited routing (arXiv 2412.19437, section 2.1.2): groups that a token may go to."""
    groups, chosen = (_number(fields, key, name, 1) for key in ("n_group", "topk_group"))
    return chosen if 0 < chosen < groups else 0


def _window(fields: Mapping[str, Any]) -> tuple[int, float]:
    """Keys of a sliding window, and all layers over those that have it; (0, 1): none has."""
    window = fields.get("sliding_window")
    if not window or fields.get("use_sliding_window") is False:
        return 0, 1
    kinds = fields.get("layer_types") or ("sliding_attention",)
    windowed = sum(kind == "sliding_attention" for kind in kinds)
    return (int(window), len(kinds) / windowed) if windowed else (0, 1)


def _have(fields: Mapping[str, Any], word: str) -> bool:
    return any(fields.get(name) for name in _NAMES[word])


def _need(fields: Mapping[str, Any], word: str, name: str) -> int:
    for key in _NAMES[word]:
        if fields.get(key) is not None:
            return _number(fields, key, name)
    raise InputError(
        f"{name}: the config says nothing of {_NAMES[word][0]}, without which no step can be "
        "predicted: add the field"
    )


def _number(fields: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None:
        if default is None:
            raise InputError(f"{name}: the config lacks {key}: add the field")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{name}: {key} is {value!r}; it must be a whole number")
    return value
