"""Writes a model as one GGUF file, the form that llama.cpp loads, and reads it back.

The file has the tensors under llama.cpp's names, the numbers of the config, and the tokenizer.
Four architectures are supported: llama, qwen2, qwen3 and deepseek2 (DeepSeek-V2 and V3). Anything
that llama.cpp would compute in another way is refused in one sentence.

(1) `check_convertible` refuses what the format can't hold. (2) Each weight becomes one or two
tensors by a `TensorRule`. (3) Header, metadata and tensors are written one after the other, so
that memory holds the model and one converted tensor. (4) `read_gguf` inverts the rules.

The names and keys are those of the GGUF specification (ggml-org/ggml, docs/gguf.md) and of the
``gguf`` package. The form of a tensor is that of llama.cpp's loaders (src/models/*.cpp).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from hasten.errors import InputError, pip_install
from hasten.models.save import stored_template

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

GGUFType = Literal["f16", "q8_0"]
ARCHITECTURES: Final = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
# llama.cpp takes deepseek2 models with these numbers of layers for V2-Lite, with full-rank queries
# (src/models/deepseek2.cpp, is_lite).
LAYERS_WITHOUT_QUERY_RANK: Final = (26, 27)
LATENT_EPS: Final = 1e-6  # default of transformers' DeepseekV2RMSNorm and V3's
FLOAT16_LARGEST: Final = 65504.0
# Patterns of the splits of a tokenizer.json -> llama.cpp's name of the same splitting
# (src/llama-vocab.cpp). Only the beginning of a pattern is compared, because one lists 700 letters.
_LETTERS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER_TEXT: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: Final[Mapping[tuple[str, ...], str]] = {
    (): "gpt-2",  # byte-level splitting with its own pattern
    (rf"{_LETTERS}|\p{{N}}{{1,3}}|{_OTHER_TEXT}",): "llama-bpe",
    (rf"{_LETTERS}|\p{{N}}|{_OTHER_TEXT}",): "qwen2",
    (
        "[\r\n]",
        r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
    ): "deepseek-llm",
    ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"): "deepseek-coder",
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+",
    ): "deepseek-v3",
}
_WITH_DIGITS: Final = frozenset({"deepseek-llm", "deepseek-coder"})  # each digit separately


@dataclass(frozen=True)
class TensorRule:
    """Conversion of one weight of the model into tensors of the file, and back."""

    source: str  # name in the model's state
    targets: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]] = lambda weight: (weight,)
    join: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]
    is_exact: bool = False  # stored in float32: vectors, routers


def check_convertible(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Refuses a model or tokenizer that a GGUF file can't hold.

    Returns a sentence for each difference that remains.

    Raises:
        InputError: the ``gguf`` package is missing, or llama.cpp computes the architecture, its
            rotary scaling, its choice of experts or the tokenizer in another way.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"--to gguf needs the package gguf, which isn't installed: {pip_install('gguf')}"
        ) from error
    config = model.config
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise InputError(
            f"a {kind} model has no GGUF form here (supported: {', '.join(ARCHITECTURES)}): "
            "export it without --to gguf"
        )
    for reason in _differences(config):
        raise InputError(f"llama.cpp would compute another model: {reason}")
    pre_tokenizer(tokenizer)
    if not _content(tokenizer)["model"].get("merges"):
        raise InputError("the tokenizer has no merges, and only byte-level BPE has a GGUF form")
    names = {rule.source for rule in tensor_rules(config)}
    if strange := sorted(set(model.state_dict()) - names):
        raise InputError(
            f"the model has the weight {strange[0]}, which has no place in a GGUF file of a "
            f"{kind} model: export it without --to gguf"
        )
    remaining = []
    if "NFC" in normalizers(tokenizer):
        remaining.append(
            "the tokenizer composes accents (NFC) and llama.cpp doesn't: text with accents as "
            "characters of their own has other tokens there"
        )
    if unwritten := _further_ends(model, tokenizer)[2:]:
        tokens = ", ".join(map(str, tokenizer.convert_ids_to_tokens(unwritten)))
        remaining.append(f"a GGUF file has three end tokens at most: {tokens} is left out")
    if ARCHITECTURES[kind] == "deepseek2" and config.rms_norm_eps != LATENT_EPS:
        remaining.append(
            f"the norms of latent vectors add {LATENT_EPS:g} and llama.cpp adds rms_norm_eps, "
            f"{config.rms_norm_eps:g}, there too: logits differ slightly"
        )
    return remaining


def _differences(config: PreTrainedConfig) -> Iterator[str]:
    """Returns features of a config that llama.cpp's graph of the architecture lacks."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    scaling = rope.get("rope_type", "default")
    is_latent = ARCHITECTURES[config.model_type] == "deepseek2"
    kinds = ("default", "yarn", *(() if is_latent else ("linear",)))
    kinds += ("llama3",) if config.model_type == "llama" else ()
    if scaling not in kinds:
        yield f"rope_type is {scaling!r}, and supported are {', '.join(kinds)}"
    yield from _rotary_differences(rope, is_latent)
    if config.hidden_act != "silu":
        yield f"hidden_act is {config.hidden_act!r}, and supported is silu"
    required = {"mlp_bias": False, "use_sliding_window": False}
    if is_latent:
        required |= {"attention_bias": False, "rope_interleave": True}
        if not config.n_shared_experts:
            yield f"n_shared_experts is {config.n_shared_experts}"
    for key, supported in required.items():
        if bool(getattr(config, key, supported)) != supported:
            yield f"{key} is {str(not supported).lower()}"
    layers = config.num_hidden_layers
    if is_latent and config.q_lora_rank and layers in LAYERS_WITHOUT_QUERY_RANK:
        yield f"q_lora_rank is {config.q_lora_rank}, and a model of {layers} layers has none there"
    # With groups llama.cpp takes the sum of the best two experts, V2 the best one.
    in_groups = getattr(config, "topk_method", None) == "group_limited_greedy"
    if config.model_type == "deepseek_v2" and in_groups and (config.n_group or 1) > 1:
        yield f"topk_method is {config.topk_method!r}, and supported is greedy"


# llama.cpp's graphs have these fixed values; a file can't set others.
_ROTARY: Final = {"partial_rotary_factor": 1, "beta_fast": 32, "beta_slow": 1, "truncate": True}


def _rotary_differences(rope: Mapping[str, Any], is_latent: bool) -> Iterator[str]:
    for key, supported in _ROTARY.items():
        if rope.get(key) not in (None, supported):
            yield f"{key} is {rope[key]}, and supported is {supported}"
    if is_latent and rope.get("rope_type") == "yarn":
        # llama.cpp multiplies scores by a factor of mscale_all_dim, sines and cosines by 1.
        scales = rope.get("mscale"), rope.get("mscale_all_dim")
        if scales[0] != scales[1] or not scales[0] or rope.get("attention_factor") is not None:
            yield "yarn is supported with equal mscale and mscale_all_dim alone"


def tensor_rules(config: PreTrainedConfig) -> list[TensorRule]:
    """Returns one rule for each weight of a model with this config."""
    rules = [
        TensorRule("model.embed_tokens.weight", ("token_embd.weight",)),
        TensorRule("model.norm.weight", ("output_norm.weight",), is_exact=True),
    ]
    # Tied: llama.cpp uses the embedding if there is no output tensor.
    tied = bool(config.tie_word_embeddings)
    rules.append(TensorRule("lm_head.weight", () if tied else ("output.weight",)))
    is_latent = ARCHITECTURES[config.model_type] == "deepseek2"
    for layer in range(config.num_hidden_layers):
        block, prefix = f"blk.{layer}.", f"model.layers.{layer}."
        norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
        layer_rules = [
            *(TensorRule(f"{n}.weight", (f"{t}.weight",), is_exact=True) for n, t in norms.items()),
            *(_latent_attention(config) if is_latent else _attention(config)),
            *(_experts() if is_latent and layer >= _dense_layers(config) else _dense("mlp.", "")),
        ]
        for rule in layer_rules:
            targets = tuple(block + target for target in rule.targets)
            rules.append(replace(rule, source=prefix + rule.source, targets=targets))
    return rules


def _attention(config: PreTrainedConfig) -> Iterator[TensorRule]:
    """Returns the rules of grouped attention; llama's queries and keys are permuted.

    transformers rotates the first half of a head against the second. The llama graph of llama.cpp
    rotates each even row against the next one. Its graphs of qwen2 and qwen3 rotate halves.
    """
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    counts = {"q": heads, "k": groups, "v": 0} if config.model_type == "llama" else {}
    for letter in "qkv":
        for part in ("weight", "bias"):
            count = counts.get(letter, 0)
            source, target = f"self_attn.{letter}_proj.{part}", f"attn_{letter}.{part}"
            rule = TensorRule(source, (target,), is_exact=part == "bias")
            if count:
                rule = replace(rule, split=_interleaving(count), join=_halving(count))
            yield rule
    for part in ("weight", "bias"):
        yield TensorRule(
            f"self_attn.o_proj.{part}", (f"attn_output.{part}",), is_exact=part == "bias"
        )
    for letter in "qk" if config.model_type == "qwen3" else "":
        norm = f"{letter}_norm.weight"
        yield TensorRule(f"self_attn.{norm}", (f"attn_{norm}",), is_exact=True)


def _interleaving(heads: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def split(weight: Tensor) -> tuple[Tensor, ...]:
        halves = weight.unflatten(0, (heads, 2, -1))  # head, half, pair
        return (halves.transpose(1, 2).flatten(0, 2),)

    return split


def _halving(heads: int) -> Callable[[Sequence[Tensor]], Tensor]:
    def join(tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    return join


def _latent_attention(config: PreTrainedConfig) -> Iterator[TensorRule]:
    """Returns the rules of latent attention; kv_b is split into keys and values.

    A key of a head is W_k c for the latent vector c, so q . W_k c = (W_k^T q) . c: llama.cpp stores
    W_k transposed, as (heads, rank, nope), and W_v as (heads, value, rank).
    """
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    nope, value = config.qk_nope_head_dim, config.v_head_dim

    def split(weight: Tensor) -> tuple[Tensor, ...]:
        keys, values = weight.view(heads, nope + value, rank).split([nope, value], dim=1)
        return keys.transpose(1, 2).contiguous(), values.contiguous()

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[0].transpose(1, 2), tensors[1]], dim=1).reshape(-1, rank)

    names = {"q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b"}
    names = (names if config.q_lora_rank else {"q_proj": "attn_q"}) | {
        "kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "o_proj": "attn_output",
    }
    for name, target in names.items():
        yield TensorRule(f"self_attn.{name}.weight", (f"{target}.weight",))
    yield TensorRule(
        "self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), split, join
    )
    norms = {"q_a_layernorm": "attn_q_a_norm"} if config.q_lora_rank else {}
    for name, target in (norms | {"kv_a_layernorm": "attn_kv_a_norm"}).items():
        yield TensorRule(f"self_attn.{name}.weight", (f"{target}.weight",), is_exact=True)


def _dense(prefix: str, suffix: str) -> Iterator[TensorRule]:
    for name in ("gate", "up", "down"):
        yield TensorRule(f"{prefix}{name}_proj.weight", (f"ffn_{name}{suffix}.weight",))


def _experts() -> Iterator[TensorRule]:
    """Returns the rules of routed experts: one stacked tensor each of gates, ups and downs."""
    yield TensorRule(
        "mlp.experts.gate_up_proj",
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        lambda weight: tuple(half.contiguous() for half in weight.chunk(2, dim=1)),
        lambda tensors: torch.cat(list(tensors), dim=1),
    )
    yield TensorRule("mlp.experts.down_proj", ("ffn_down_exps.weight",))
    yield TensorRule("mlp.gate.weight", ("ffn_gate_inp.weight",), is_exact=True)
    yield TensorRule("mlp.gate.e_score_correction_bias", ("exp_probs_b.bias",), is_exact=True)
    yield from _dense("mlp.shared_experts.", "_shexp")


def _dense_layers(config: PreTrainedConfig) -> int:
    """Returns how many first layers have no experts; transformers 5 lists each layer's type."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds:
        return sum(kind == "dense" for kind in kinds)
    return int(config.first_k_dense_replace)


# Writing and reading


def write_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
    kind: GGUFType,
    name: str,
) -> None:
    """Writes the model and its tokenizer as one file.

    Matrices are stored in ``kind``, vectors and routers in float32. A matrix with rows that
    aren't full blocks of 32 numbers is stored in float16 in a q8_0 file, too.

    Raises:
        InputError: a weight is larger than float16 can hold.
        OSError: the file can't be written.
    """
    import gguf

    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config.model_type])
    import gguf

    heads = config.num_attention_heads
    writer.add_name(name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    types = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
    writer.add_file_type(types[kind])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if ARCHITECTURES[config.model_type] == "deepseek2":
        _add_latent(writer, config)
    else:
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_dimension_count(size)
    _add_rope(writer, config)
    _add_tokenizer(writer, tokenizer, config.vocab_size, _further_ends(model, tokenizer))
    entries: list[tuple[Tensor, Any]] = []
    for rule in tensor_rules(config):
        if rule.source not in state or not rule.targets:
            continue
        parts = rule.split(state[rule.source].detach())
        for target, part in zip(rule.targets, parts, strict=True):
            number = _number_type(part, kind, rule.is_exact)
            if number.name == "F16" and not bool((part.abs() <= FLOAT16_LARGEST).all()):
                raise InputError(
                    f"{rule.source} has values that float16 can't hold: export without --to gguf, "
                    "in float32 or bfloat16"
                )
            entries.append((part, number))
            _announce(writer, target, part, number)
    if (factors := _llama3_factors(config)) is not None:
        entries.append((factors, gguf.GGMLQuantizationType.F32))
        _announce(writer, "rope_freqs.weight", *entries[-1])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for part, number in entries:
            writer.write_tensor_data(gguf.quants.quantize(part.float().numpy(), number))
    finally:
        writer.close()


def _number_type(tensor: Tensor, kind: GGUFType, is_exact: bool) -> Any:
    from gguf import GGMLQuantizationType

    if is_exact or tensor.dim() < 2:
        return GGMLQuantizationType.F32
    if kind == "q8_0" and tensor.shape[-1] % 32 == 0:
        return GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.F16


def _announce(writer: Any, name: str, tensor: Tensor, number: Any) -> None:
    from gguf import quant_shape_to_byte_shape

    shape: tuple[int, ...] = tuple(tensor.shape)
    kinds = {"F32": np.float32, "F16": np.float16}
    dtype = np.dtype(kinds.get(number.name, np.uint8))
    if number.name not in kinds:
        shape = tuple(quant_shape_to_byte_shape(shape, number))
    writer.add_tensor_info(name, shape, dtype, math.prod(shape) * dtype.itemsize, number)


def read_gguf(file: Path, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Reads a file's weights in float32 under the names of transformers, tied ones once.

    Raises:
        InputError: a tensor that the config requires is missing.
    """
    from gguf import GGUFReader, quants

    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    state = {}
    for rule in tensor_rules(config):
        parts = []
        for target in rule.targets:
            if target in tensors:
                tensor = tensors[target]
                values = quants.dequantize(tensor.data, tensor.tensor_type)
                parts.append(torch.from_numpy(np.array(values, dtype=np.float32)))
        if parts:
            state[rule.source] = rule.join(parts)
    return state


# The numbers of the config


def _add_latent(writer: Any, config: PreTrainedConfig) -> None:
    """Adds latent attention as attention of one key and value head in the latent space."""
    import gguf

    rope, rank = config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config.q_lora_rank or 0)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + rope)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(_dense_layers(config))
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_weights_scale(float(config.routed_scaling_factor))
    sigmoid = config.model_type == "deepseek_v3"
    # transformers' V2 never normalises, whatever its config has; V3 as its config has.
    writer.add_expert_weights_norm(sigmoid and bool(config.norm_topk_prob))
    gating = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SIGMOID if sigmoid else gating.SOFTMAX)
    if (groups := getattr(config, "n_group", None) or 1) > 1 and sigmoid:
        writer.add_expert_group_count(groups)
        writer.add_expert_group_used_count(config.topk_group)


def _add_rope(writer: Any, config: PreTrainedConfig) -> None:
    import gguf
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(getattr(config, "rope_parameters", None) or {})
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "yarn":
        first = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(int(first))
        if ARCHITECTURES[config.model_type] == "deepseek2":
            # llama.cpp's deepseek2 loader divides by 0.1 again (TAG_DEEPSEEK2_YARN_LOG_MUL_FIX).
            writer.add_rope_scaling_yarn_log_mul(0.1 * float(rope["mscale_all_dim"]))
        else:
            # llama.cpp multiplies this by the factor of the paper (arXiv 2309.00071, section 3.4).
            usual = 0.1 * math.log(float(rope["factor"])) + 1
            attention = float(ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))[1])
            writer.add_rope_scaling_attn_factors(attention / usual)


def _llama3_factors(config: PreTrainedConfig) -> Tensor | None:
    """Returns the divisors of rotary frequencies of Llama 3.1; None for other scalings.

    The model card of Llama 3.1: long wavelengths are divided by ``factor``, short ones not at all,
    those between by a mixture.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type") != "llama3":
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    lengths = 2 * math.pi * float(rope["rope_theta"]) ** exponents
    low, high, factor = (rope[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = rope["original_max_position_embeddings"] / lengths
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - share) / factor + share)


# The tokenizer


def pre_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns llama.cpp's name of the tokenizer's rules for splitting a text before merging.

    Raises:
        InputError: they aren't among those that are recognised.
    """
    content = _content(tokenizer)
    model, splitting = content["model"], content.get("pre_tokenizer") or {}
    steps = splitting.get("pretokenizers", [splitting])
    kinds = [step.get("type") for step in steps]
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    is_byte_level = (
        model.get("type") == "BPE"
        and len(levels) == 1
        and not model.get("byte_fallback")
        and not levels[0].get("add_prefix_space")
        and levels[0].get("use_regex", True) == (not patterns)
        and set(kinds) <= {"Split", "ByteLevel", "Digits"}
    )
    for rules, name in PRE_TOKENIZERS.items() if is_byte_level else ():
        same = len(rules) == len(patterns) and all(map(str.startswith, patterns, rules))
        digits = ("Digits" in kinds) == (name in _WITH_DIGITS)
        # llama.cpp looks words up before it merges, for llama-bpe only.
        if same and digits and bool(model.get("ignore_merges")) == (name == "llama-bpe"):
            return name
    raise InputError(
        "the tokenizer splits text by rules that aren't recognised for GGUF (supported: byte-level "
        f"BPE of {', '.join(PRE_TOKENIZERS.values())}): export without --to gguf"
    )


def normalizers(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns how the tokenizer changes a text before it is split: nothing, or NFC.

    Raises:
        InputError: it changes it in another way, or an added token takes spaces around it.
    """
    content = _content(tokenizer)
    step = content.get("normalizer") or {"type": "Sequence", "normalizers": []}
    kinds = [one["type"] for one in step.get("normalizers", [step])]
    if strange := sorted(set(kinds) - {"NFC"}):
        raise InputError(
            f"the tokenizer changes text by {strange[0]}, which llama.cpp doesn't: export without "
            "--to gguf"
        )
    for token in content["added_tokens"]:
        if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            raise InputError(
                f"the added token {token['content']!r} includes spaces around it or is for whole "
                "words alone, which llama.cpp doesn't support: export without --to gguf"
            )
    return kinds


def _content(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return content


def _further_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens besides the tokenizer's eos that end generation; the last added first."""
    ends = model.generation_config.eos_token_id
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return [end for end in reversed(listed) if end != tokenizer.eos_token_id]


def _add_tokenizer(
    writer: Any, tokenizer: PreTrainedTokenizerBase, rows: int, further_ends: Sequence[int]
) -> None:
    """Adds tokens, merges and special tokens; rows of the embedding without a token are unused."""
    from gguf import TokenType

    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    texts, types = [], []
    for number in range(rows):
        texts.append(tokens.get(number, f"[PAD{number}]"))
        kind = TokenType.NORMAL if number in tokens else TokenType.UNUSED
        if number in added:
            kind = TokenType.CONTROL if added[number].special else TokenType.USER_DEFINED
        types.append(kind)
    pairs = _content(tokenizer)["model"]["merges"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(tokenizer))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(ids[-1] == tokenizer.eos_token_id)
    for add, special in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if special is not None:
            add(special)
    # llama.cpp stops at these too.
    adders = (writer.add_eot_token_id, writer.add_eom_token_id)
    for add, end in zip(adders, further_ends, strict=False):
        add(end)
    if template := stored_template(tokenizer):
        writer.add_chat_template(template)
