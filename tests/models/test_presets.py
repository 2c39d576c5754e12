"""Presets: published sizes, faithful small relatives, configs that fit a tokenizer."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hasten.errors import InputError
from hasten.models.load import load_model
from hasten.models.presets import PRESETS, Preset, build_config, preset

pytestmark = pytest.mark.usefixtures("published_presets")

TINY = [name for name in PRESETS if name.endswith("-tiny")]
SMALL = [name for name in PRESETS if name.endswith("-small")]

# Parameter counts as their authors publish them.
PUBLISHED = {
    "deepseek-llm-7b": 6.91e9,
    "deepseek-r1-distill-qwen-1.5b": 1.78e9,
    "deepseek-r1-distill-qwen-7b": 7.62e9,
    "deepseek-v2-lite": 15.7e9,
    "deepseek-v3": 671e9,
}


def parameters_beside_embeddings(entry: Preset) -> tuple[int, int]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_config(entry))
    total = sum(p.numel() for p in model.parameters())
    return total, total - 2 * model.config.vocab_size * model.config.hidden_size


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_published_preset_has_the_published_number_of_parameters(name: str, count: float) -> None:
    total, _ = parameters_beside_embeddings(preset(name))
    assert total == pytest.approx(count, rel=0.005)


def test_the_preset_for_one_gpu_has_about_a_billion_parameters() -> None:
    total, _ = parameters_beside_embeddings(preset("deepseek-llm-1b"))
    assert total == pytest.approx(1e9, rel=0.05)


@pytest.mark.parametrize("name", TINY + SMALL)
def test_small_presets_are_small_and_say_how_small(name: str) -> None:
    entry = preset(name)
    _, beside = parameters_beside_embeddings(entry)
    low, high = (2e6, 6e6) if name in TINY else (15e6, 25e6)
    assert low <= beside <= high
    assert f"{beside / 1e6:.1f} M" in entry.description


def test_small_relatives_keep_the_structure_of_their_published_model() -> None:
    for name in ("r1-distill-qwen-tiny", "r1-distill-qwen-small"):
        assert 1 < PRESETS[name].config["num_key_value_heads"] < 8
        assert PRESETS[name].config["num_attention_heads"] >= 8
    for name in ("v2-lite-tiny", "v2-lite-small", "v3-tiny", "v3-small"):
        shape = PRESETS[name].config
        heads = shape["num_attention_heads"]
        assert shape["qk_nope_head_dim"] == 2 * shape["qk_rope_head_dim"]
        assert shape["kv_lora_rank"] < heads * shape["v_head_dim"]
        active = shape["num_experts_per_tok"] + shape["n_shared_experts"]
        assert shape["intermediate_size"] == active * shape["moe_intermediate_size"]
        assert shape["first_k_dense_replace"] == 1
        assert (shape["q_lora_rank"] is None) == name.startswith("v2")
        assert (shape["n_group"] > shape["topk_group"]) == name.startswith("v3")


def test_every_key_of_a_preset_is_a_field_of_its_config() -> None:
    for entry in PRESETS.values():
        built = build_config(entry).to_dict()
        for key, value in entry.config.items():
            assert key in built, (entry.name, key)
            if not isinstance(value, dict):
                assert built[key] == value, (entry.name, key)


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_preset_learns_with_either_attention_and_to_the_same_loss(name: str) -> None:
    tokens = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))
    losses = {}
    for attention in ("sdpa", "eager"):
        model = load_model(name, vocab_size=128)
        model.set_attn_implementation(attention)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = model(input_ids=tokens, labels=tokens).loss
        first.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        second = model(input_ids=tokens, labels=tokens).loss
        assert second < first
        losses[attention] = torch.stack([first, second]).detach()
    torch.testing.assert_close(losses["sdpa"], losses["eager"], rtol=1e-4, atol=1e-4)


def test_changing_a_built_config_leaves_the_preset_alone() -> None:
    config = build_config(preset("v3-tiny"))
    config.hidden_size = 1
    config.rope_parameters["rope_theta"] = 1.0
    again = build_config(preset("v3-tiny"))
    assert (again.hidden_size, again.rope_parameters["rope_theta"]) == (256, 10000.0)


def test_another_vocabulary_forgets_the_token_ids_of_the_published_one() -> None:
    config = build_config(preset("deepseek-llm-7b"), vocab_size=300, eos_token_id=1)
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (300, None, 1)
    published = build_config(preset("deepseek-llm-7b"))
    assert (published.bos_token_id, published.eos_token_id) == (100000, 100001)


def test_a_token_outside_the_vocabulary_is_rejected() -> None:
    with pytest.raises(InputError, match="eos_token_id 300 is outside the vocabulary of 300"):
        build_config(preset("v3-tiny"), vocab_size=300, eos_token_id=300)
    with pytest.raises(InputError, match="a vocabulary of 0 tokens"):
        build_config(preset("v3-tiny"), vocab_size=0)


def test_importing_the_presets_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, hasten.models.presets\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'peft')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
