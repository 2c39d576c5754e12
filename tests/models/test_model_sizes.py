"""Architectures: sizes as transformers' own models have them, FLOPs as the meter counts them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    DeepseekV32Config,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from covering import covering
from hasten.errors import InputError
from hasten.models.architecture import Architecture
from hasten.models.flops import config_flops
from hasten.models.memory import routed_weights
from hasten.models.presets import PRESETS, build_config, preset

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}


def counted(config: object) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tokens", [2048, 4096, 40_000])
def test_products_of_v3_2_s_attention_are_those_of_a_loop_over_queries(tokens: int) -> None:
    config = DeepseekV32Config()
    model = Architecture.from_config(config.to_dict())
    dense = gathered = scored = 0
    for query in range(tokens):
        keys, chosen = query + 0.5, min(query + 0.5, config.index_topk)
        dense += config.num_attention_heads * keys * (128 + 64 + 128)
        gathered += config.num_attention_heads * chosen * (512 + 64 + 512)
        scored += config.index_n_heads * keys * config.index_head_dim
    sparse = min(dense, gathered) + scored / 3  # no gradients
    products = sparse if tokens > config.index_topk else dense
    flops = model.attention_flops(tokens, tokens) / model.layers
    assert flops == pytest.approx(2 * products, rel=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_parameters_of_transformers_model(name: str) -> None:
    assert Architecture.from_config(name).parameters() == counted(build_config(preset(name)))


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LlamaConfig(**{k: v for k, v in LLAMA_8B.items() if k != "model_type"}), 8.03e9),
        (Qwen3Config(num_hidden_layers=3, tie_word_embeddings=True), None),
        (Qwen3MoeConfig(num_hidden_layers=2, num_experts=8), None),
        (DeepseekV32Config(num_hidden_layers=5), None),
        (DeepseekV4Config(num_hidden_layers=6), None),
        (DeepseekV4Config(num_hidden_layers=3, compress_ratios=[0, 4, 128], hc_mult=2), None),
    ],
    ids=["llama-3.1-8b", "qwen3", "qwen3-moe", "v3.2", "v4", "v4-three-kinds"],
)
def test_other_families_are_counted_as_exactly(config: object, published: float | None) -> None:
    fields = config.to_dict()  # type: ignore[attr-defined]
    found = Architecture.from_config(fields).parameters()
    # The gate of transformers' Qwen3 MoE normalises nothing; all else is a matrix or a norm.
    assert found == counted(config)
    assert published is None or found == pytest.approx(published, rel=0.001)


def test_v4_flash_has_13_billion_active_and_sees_near_keys_and_compressed_far_ones() -> None:
    model = Architecture.from_config(DeepseekV4Config().to_dict())
    assert model.parameters() == counted(DeepseekV4Config()) == pytest.approx(284e9, rel=0.002)
    assert model.active_parameters() == pytest.approx(13e9, rel=0.1)
    length, rates = 8192, {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    kinds = DeepseekV4Config().layer_types
    seen = 0.0
    for place in range(length):  # a plain count over places and layers
        near = min(place + 0.5, 128)
        far = {kind: (place + 0.5) / rate for kind, rate in rates.items()}
        far["compressed_sparse_attention"] = min(far["compressed_sparse_attention"], 512)
        seen += sum(near + far[kind] for kind in kinds) / len(kinds)
    assert model.keys(length) == pytest.approx(seen / length, rel=1e-3)


def test_a_v4_config_that_contradicts_itself_is_one_sentence() -> None:
    fields = DeepseekV4Config(num_hidden_layers=2).to_dict()
    with pytest.raises(InputError, match="the config can't be read"):
        Architecture.from_config({**fields, "layer_types": ["no such attention"] * 2})


def test_v3_has_671_billion_parameters_of_which_37_are_active() -> None:
    model = Architecture.from_config("deepseek-v3")
    assert model.parameters() == pytest.approx(671e9, rel=0.001)
    assert model.active_parameters() == pytest.approx(37e9, rel=0.02)
    assert model.latent is not None
    assert model.moe is not None
    assert model.moe.groups == 4  # of eight: a token's experts lie in so many
    lite = Architecture.from_config("deepseek-v2-lite").moe
    assert lite is not None
    assert lite.groups == 0


@pytest.mark.parametrize(
    ("name", "length"), covering([n for n in PRESETS if not n.endswith("-small")], [128, 4096])
)
def test_training_flops_are_those_that_the_meter_counts(name: str, length: int) -> None:
    model = Architecture.from_config(name)
    reference = config_flops(build_config(preset(name))).at(length)
    assert model.training_flops(1, length) == pytest.approx(reference, rel=1e-9)


def test_a_config_is_read_from_a_file_and_from_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    assert Architecture.from_config(path) == Architecture.from_config(tmp_path)
    assert Architecture.from_config(str(path)).parameters() == 8_030_261_248


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    fields = {key: value for key, value in LLAMA_8B.items() if key != field}
    with pytest.raises(InputError, match=field):
        Architecture.from_config(fields)


@pytest.mark.parametrize("value", [0, -1, "many", 3.5, True])
def test_a_size_that_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"num_hidden_layers|layers"):
        Architecture.from_config({**LLAMA_8B, "num_hidden_layers": value})


def test_an_unknown_name_offers_near_ones_and_a_missing_file_its_path() -> None:
    with pytest.raises(InputError, match="deepseek-v3"):
        Architecture.from_config("deepseek-v33")
    with pytest.raises(InputError, match="nowhere"):
        Architecture.from_config("nowhere/config.json")


def keys_one_by_one(sequence: int, window: int) -> float:
    """Half the square, as the convention counts it, cut to the window: a plain loop."""
    return sum(min(position + 0.5, window) for position in range(sequence)) / sequence


@given(st.integers(1, 300), st.integers(1, 400))
def test_a_window_sees_the_keys_that_a_plain_count_finds(sequence: int, window: int) -> None:
    model = dataclasses.replace(Architecture.from_config(LLAMA_8B), window=window)
    assert model.keys(sequence) == pytest.approx(
        keys_one_by_one(sequence, window), rel=0.3 / window
    )
    assert model.keys(sequence) <= sequence / 2


@pytest.mark.parametrize("windowed", [0, 3, 5, 6])
def test_keys_are_the_mean_over_the_layers_that_the_config_lists(windowed: int) -> None:
    """As Gemma 3 has it: five layers of six see a window, the sixth sees all."""
    kinds = ["sliding_attention"] * windowed + ["full_attention"] * (6 - windowed)
    fields = {**LLAMA_8B, "sliding_window": 1024, "layer_types": kinds}
    near = Architecture.from_config({**LLAMA_8B, "sliding_window": 1024}).keys(32768)
    expected = (windowed * near + (6 - windowed) * 32768 / 2) / 6
    assert Architecture.from_config(fields).keys(32768) == pytest.approx(expected)


def test_operators_add_up_to_twice_the_active_weights_and_attention() -> None:
    model = Architecture.from_config("deepseek-v2-lite")
    tokens, length = 1000, 2048
    flops = sum(o.flops for o in model.operators(tokens, length))
    matrices = sum(m.parameters // m.copies * m.chosen for m in model.matrices())
    assert flops == 2 * tokens * matrices + model.attention_flops(tokens, length)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_the_share_of_routed_experts_is_known_from_the_outer_sizes(name: str) -> None:
    one = Architecture.from_config(name)
    found = routed_weights(one.parameters(), one.hidden, one.layers, one.vocabulary, one.tied)
    assert found == pytest.approx(one.expert_parameters(), rel=0.05)


def test_a_model_smaller_than_its_embeddings_has_no_routed_expert() -> None:
    assert routed_weights(1000, 64, 2, 100) == 0
    assert routed_weights(10**6, 64, 2, 100, tied=True) > routed_weights(10**6, 64, 2, 100)
