"""Adapters: on every projection of attention, on nothing else, drawn from the job's seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from covering import covering
from hasten.errors import InputError
from hasten.models import adapters
from hasten.models.adapters import adapted_table, add_lora, lora_targets, merge, parameter_counts
from hasten.models.load import load_model
from hasten.parts.nn.late_weights import read_now
from hasten.techniques.adapter import LoRA
from tiny import language_job, session_of

ATTENTION = {
    "deepseek-llm-tiny": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "r1-distill-qwen-tiny": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "v2-lite-tiny": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "v3-tiny": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
TOKENS = torch.arange(24).reshape(2, 12)


def build(name: str) -> Any:
    return load_model(name, vocab_size=64)


@pytest.mark.parametrize("name", ATTENTION)
def test_auto_finds_every_projection_of_attention_in_every_layer(name: str) -> None:
    expected = {
        f"model.layers.{layer}.self_attn.{projection}"
        for layer in range(4)
        for projection in ATTENTION[name]
    }
    found = lora_targets(build(name), "auto")
    assert set(found) == expected
    assert len(found) == len(expected)
    assert lora_targets(build(name), "attention") == found


@pytest.mark.parametrize("name", ATTENTION)
def test_all_linear_adds_the_dense_and_shared_projections_only(name: str) -> None:
    model = build(name)
    found = Counter(target.split("layers.")[1][2:] for target in lora_targets(model, "all-linear"))
    dense = {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    shared = {f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    moe = name.startswith("v")
    expected = {f"self_attn.{projection}": 4 for projection in ATTENTION[name]}
    expected |= dict.fromkeys(dense, 1 if moe else 4) | {part: 3 for part in shared if moe}
    assert found == expected


def test_a_linear_router_is_not_adapted() -> None:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape, **heads, moe_intermediate_size=8))
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert any(name.endswith("gate") for name in linears)
    assert not any(name.endswith("gate") for name in lora_targets(model, "all-linear"))


def test_listed_targets_are_names_or_consecutive_parts_of_them() -> None:
    model = build("v3-tiny")
    assert lora_targets(model, ["layers.1.self_attn.o_proj"]) == ["model.layers.1.self_attn.o_proj"]
    assert len(lora_targets(model, ["o_proj", "self_attn.o_proj"])) == 4
    assert len(lora_targets(model, ["shared_experts"])) == 9
    assert len(lora_targets(model, ["layers.0"])) == 5 + 3


def test_routed_experts_are_adapted_only_when_experts_are_named() -> None:
    model = build("v3-tiny")
    assert not any(".experts." in name for name in lora_targets(model, ["down_proj", "mlp"]))
    assert len(lora_targets(model, ["experts"])) == 6
    assert lora_targets(model, ["layers.2.mlp.experts.down_proj"]) == [
        "model.layers.2.mlp.experts.down_proj"
    ]


def test_a_target_that_finds_nothing_is_answered_with_what_exists() -> None:
    model = build("v3-tiny")
    with pytest.raises(InputError, match=r"'q_proj' finds nothing.*kv_b_proj, o_proj, q_a_proj"):
        lora_targets(model, ["o_proj", "q_proj"])
    for never in ("lm_head", "gate", "proj"):
        with pytest.raises(InputError, match="finds nothing"):
            lora_targets(model, [never])
    with pytest.raises(
        InputError, match=r"choose from down_proj, experts\.down_proj, experts\.gate"
    ):
        lora_targets(model, ["w1"])
    with pytest.raises(InputError, match="'everything' matches no full name"):
        lora_targets(model, "everything")
    with pytest.raises(InputError, match="the list of targets is empty"):
        lora_targets(model, [])


def test_a_model_without_linear_layers_is_refused() -> None:
    config = GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2)
    for targets in ("auto", "all-linear", ["c_attn"]):
        with pytest.raises(InputError, match="a gpt2 model has no linear layers"):
            lora_targets(GPT2LMHeadModel(config), targets)


@pytest.mark.parametrize(
    ("name", "targets"),
    covering(ATTENTION, ["auto", "all-linear", ["layers.1"], ["layers.0.mlp"]], rounds=2),
    ids=str,
)
def test_a_fresh_adapter_changes_nothing_and_only_its_targets_learn(
    name: str, targets: str | list[str]
) -> None:
    before = build(name)(input_ids=TOKENS).logits
    model = add_lora(build(name), rank=4, alpha=8, targets=targets)
    output = model(input_ids=TOKENS, labels=TOKENS)
    assert torch.equal(output.logits, before)
    output.loss.backward()
    learning = {key for key, p in model.named_parameters() if p.grad is not None}
    assert learning == {key for key, _ in model.named_parameters() if "lora_" in key}
    adapted = {key.split(".lora_")[0] for key in learning}
    assert adapted == {f"base_model.model.{name}" for name in lora_targets(build(name), targets)}


def test_the_seed_decides_the_adapter_and_leaves_other_random_numbers_alone() -> None:
    def drawn(seed: int) -> torch.Tensor:
        model = add_lora(build("v3-tiny"), rank=4, alpha=8, seed=seed)
        return torch.cat([p.flatten() for p in model.parameters() if p.requires_grad])

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = drawn(1)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(first, drawn(1))
    assert not torch.equal(first, drawn(2))


@pytest.mark.parametrize("rslora", [False, True])
def test_merging_adds_the_scaled_product_of_b_and_a(rslora: bool) -> None:
    model = add_lora(build("v2-lite-tiny"), rank=4, alpha=6, targets=["o_proj"], rslora=rslora)
    layer = model.base_model.model.model.layers[1].self_attn.o_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    nn.init.normal_(b)
    scale = 6 / 4**0.5 if rslora else 6 / 4
    expected = layer.base_layer.weight.detach().clone() + scale * (b @ a).detach()
    merged = merge(model)
    torch.testing.assert_close(merged.model.layers[1].self_attn.o_proj.weight, expected)


@pytest.mark.usefixtures("published_presets")
def test_the_table_counts_what_can_be_computed_from_the_shapes() -> None:
    model = add_lora(build("v3-tiny"), rank=4, alpha=8, targets=["q_a_proj", "o_proj", "experts"])
    rows = {row.modules: row for row in adapted_table(model)}
    hidden, q_rank, heads_v, experts, inner = 256, 64, 8 * 32, 16, 96
    expected = {
        "model.layers.*.self_attn.q_a_proj": (4, 4 * 4 * (hidden + q_rank)),
        "model.layers.*.self_attn.o_proj": (4, 4 * 4 * (heads_v + hidden)),
        "model.layers.*.mlp.experts.gate_up_proj": (3, 3 * 4 * experts * (hidden + 2 * inner)),
        "model.layers.*.mlp.experts.down_proj": (3, 3 * 4 * experts * (inner + hidden)),
    }
    assert {name: (row.count, row.parameters) for name, row in rows.items()} == expected
    assert {row.rank for row in rows.values()} == {4}
    trainable, total = parameter_counts(model)
    assert trainable == sum(row.parameters for row in rows.values())
    assert total == trainable + sum(p.numel() for p in build("v3-tiny").parameters())


@pytest.mark.usefixtures("published_presets")
def test_the_table_counts_the_lengths_that_dora_learns() -> None:
    model = add_lora(build("deepseek-llm-tiny"), rank=2, alpha=2, targets=["o_proj"], dora=True)
    (row,) = adapted_table(model)
    assert row.parameters == 4 * (2 * (256 + 256) + 256)
    assert parameter_counts(model)[0] == row.parameters


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_doras_magnitudes_are_the_lengths_of_the_bases_rows(dtype: torch.dtype, late: bool) -> None:
    plain = dict(load_model("v3-tiny", vocab_size=64, dtype=dtype).named_parameters())
    base = load_model("v3-tiny", vocab_size=64, dtype=dtype, late=late)
    model = add_lora(base, rank=2, alpha=2, dora=True)
    read_now(model)
    found = {n: p for n, p in model.named_parameters() if "magnitude" in n}
    assert len(found) == 5 * 4
    for name, lengths in found.items():
        own = name.removeprefix("base_model.model.").partition(".lora_magnitude")[0]
        rows = plain[f"{own}.weight"].double()
        assert lengths.dtype == torch.float32
        torch.testing.assert_close(lengths.double(), rows.norm(dim=1), rtol=1e-6, atol=0)


def test_a_model_without_an_adapter_has_an_empty_table() -> None:
    assert adapted_table(build("deepseek-llm-tiny")) == []


def test_adapters_of_a_half_precision_model_are_float32() -> None:
    base = load_model("v3-tiny", vocab_size=64, dtype=torch.bfloat16)
    model = add_lora(base, rank=2, alpha=2, targets=["o_proj", "experts"])
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert torch.isfinite(model(input_ids=TOKENS, labels=TOKENS).loss)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": 0}, "a LoRA rank of 0"),
        ({"alpha": 0}, "a LoRA alpha of 0"),
        ({"dropout": 1.0}, "a LoRA dropout of 1.0"),
        ({"dropout": 0.1, "targets": "all-linear"}, "neither dropout nor DoRA"),
        ({"dora": True, "targets": ["experts"]}, "neither dropout nor DoRA"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        add_lora(build("v3-tiny"), **({"rank": 2, "alpha": 2} | arguments))


def test_a_second_adapter_is_refused() -> None:
    model = add_lora(build("deepseek-llm-tiny"), rank=2, alpha=2)
    with pytest.raises(InputError, match="carries an adapter already"):
        add_lora(model, rank=2, alpha=2)  # type: ignore[arg-type]


def test_an_adapter_on_other_modules_than_asked_is_refused() -> None:
    model = add_lora(build("v3-tiny"), rank=2, alpha=2, targets=["o_proj"])
    asked = lora_targets(build("v3-tiny"), ["o_proj"])
    adapters._check_adapted(model, asked)
    with pytest.raises(
        InputError, match=r"disagrees on adapting model\.layers\.0\.self_attn\.o_proj"
    ):
        adapters._check_adapted(model, asked[1:])


def test_one_text_is_a_regular_expression_of_whole_names() -> None:
    model = build("v3-tiny")
    names = lora_targets(model, r"model\.layers\.[01]\.self_attn\.o_proj")
    assert names == [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)]
    with pytest.raises(InputError, match="matches no full name"):
        lora_targets(model, "o_proj")  # a whole match, as in peft
    with pytest.raises(InputError, match="a regular expression"):
        lora_targets(model, "(")


def first_matrices(seed: int) -> Tensor:
    model = session_of(language_job(seed=seed), LoRA(rank=4)).model
    found = [p.detach().flatten() for n, p in model.named_parameters() if "lora_A" in n]
    return torch.cat(found)


def test_another_seed_draws_other_adapters_and_the_same_one_the_same() -> None:
    assert torch.equal(first_matrices(3), first_matrices(3))
    assert not torch.equal(first_matrices(3), first_matrices(4))
