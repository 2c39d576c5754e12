"""The FLOP convention against published figures, torch's own counter, and counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hasten.models.adapters import add_lora
from hasten.models.flops import ModelFlops, config_flops, model_flops
from hasten.parts.nn.causal_lm import trunk
from hasten.parts.nn.quantised import Kind
from tiny import ARCHITECTURES, tiny_config, tiny_model

LLAMA_31_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
every = pytest.mark.parametrize("architecture", ARCHITECTURES)


def counted(model: Any, length: int, documents: int) -> float:
    """torch's count of one forward and backward pass; its attention is the whole square.

    Without the product by which older releases of transformers compute the angles of a rotation.
    """
    ids = torch.randint(3, 97, (documents, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    with FlopCounterMode(display=False) as angles:
        trunk(model).rotary_emb(torch.zeros(1, length, 1), torch.arange(length)[None])  # type: ignore[operator]
    return float(counter.get_total_flops() - angles.get_total_flops())


def observable(architecture: str) -> Any:
    """A tiny model whose every product is one that torch's counter sees."""
    model: Any = tiny_model(architecture)
    model.set_attn_implementation("eager")
    if architecture.startswith("deepseek"):
        model.set_experts_implementation("eager")
    return model


def test_llama_31_8b_owes_48_gflop_per_token_in_full_and_32_as_lora() -> None:
    config = hf.LlamaConfig(**LLAMA_31_8B)
    whole = config_flops(config).at(4096)  # by hand: 6 x 7.505 B weights + 3.221 of attention
    assert whole / 1e9 == pytest.approx(6 * 7.5047 + 3.2212, abs=0.001)
    assert whole / 1e9 == pytest.approx(48.3, rel=0.002)
    assert config_flops(config, frozen=True).at(4096) / 1e9 == pytest.approx(32.2, abs=0.05)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
        adapted = add_lora(model, rank=16, alpha=32, targets="all-linear")
    assert model_flops(adapted).at(4096) / 1e9 == pytest.approx(32.4, abs=0.05)


@every
@pytest.mark.parametrize(("length", "documents"), [(24, 2), (7, 5), (64, 1)])
def test_the_count_is_torch_s_but_for_the_half_of_the_square(
    architecture: str, length: int, documents: int
) -> None:
    model = observable(architecture)
    flops = model_flops(model)
    tokens, pairs = length * documents, length * length * documents
    whole_square = flops.per_token * tokens + 2 * flops.per_pair * pairs
    assert counted(model, length, documents) == pytest.approx(whole_square, rel=1e-9)


@every
def test_a_frozen_model_s_weights_cost_two_thirds(architecture: str) -> None:
    model = observable(architecture)
    whole = model_flops(model)
    model.requires_grad_(False)
    frozen = model_flops(model)
    assert frozen.per_token == pytest.approx(whole.per_token * 2 / 3)
    assert frozen.per_pair == pytest.approx(whole.per_pair * 2 / 3)


def test_what_runs_of_a_frozen_model_is_more_by_a_third_of_attention() -> None:
    model = observable("llama")
    whole = model_flops(model)
    model.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_()  # so that the first layer passes back too
    frozen, tokens, pairs = model_flops(model), 2 * 24, 2 * 24 * 24
    runs = frozen.per_token * tokens + 2 * whole.per_pair * pairs
    assert counted(model, 24, 2) == pytest.approx(runs, rel=1e-9)
    assert frozen.per_pair == pytest.approx(whole.per_pair * 2 / 3)


@every
def test_a_config_alone_gives_the_count_of_the_model(architecture: str) -> None:
    assert config_flops(tiny_config(architecture)) == model_flops(tiny_model(architecture))


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_base_in_few_bits_owes_what_the_same_model_unquantised_does(base: Kind) -> None:
    plain, few_bits = (
        model_flops(add_lora(tiny_model("llama"), rank=2, alpha=4, targets="all-linear", base=b))
        for b in (None, base)
    )
    assert few_bits == plain
    assert few_bits.per_token > 0


def test_only_chosen_experts_count_and_their_adapters_likewise() -> None:
    config = tiny_config("deepseek_v3")
    some = config_flops(config).per_token
    config.num_experts_per_tok = config.n_routed_experts
    every_expert = config_flops(config).per_token
    one = 3 * config.hidden_size * config.moe_intermediate_size
    layers = config.num_hidden_layers - config.first_k_dense_replace
    more = config.n_routed_experts - tiny_config("deepseek_v3").num_experts_per_tok
    assert every_expert - some == 6 * one * layers * more
    model: Any = tiny_model("deepseek_v3")
    plain = config_flops(tiny_config("deepseek_v3"), frozen=True).per_token
    adapted = add_lora(model, rank=2, alpha=4, targets=["experts"])
    weights = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    chosen = 2 / 4  # of 4 experts, each with its rows of the adapters' matrices
    assert model_flops(adapted).per_token == plain + 6 * weights * chosen


def test_a_tied_head_counts_once_and_an_untied_embedding_not_at_all() -> None:
    tied, untied = tiny_config("llama"), tiny_config("llama")
    tied.tie_word_embeddings, untied.tie_word_embeddings = True, False
    assert config_flops(tied) == config_flops(untied)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_documents_cost_what_they_cost_apart(lengths: list[int]) -> None:
    flops = ModelFlops(per_token=12.0, per_pair=3.0)
    assert flops.of(lengths) == sum(n * flops.at(n) for n in lengths)
    assert flops.of(lengths) <= sum(lengths) * flops.at(sum(lengths))


def test_what_is_not_counted_is_refused_and_not_guessed() -> None:
    with pytest.raises(ValueError, match="aren't counted, only those of llama"):
        model_flops(nn.Linear(2, 2))
    window = tiny_config("qwen2")
    window.use_sliding_window = True
    with pytest.raises(ValueError, match="sliding window"):
        config_flops(window)
