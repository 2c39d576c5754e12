"""Muon and AdamW in one optimizer, against torch's own two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hasten.parts.optim.muon import MuonAdamW, is_hidden_matrix, muon_groups, orthogonalised
from hasten.parts.optim.weight_average import decayed_groups
from tiny import ARCHITECTURES, tiny_model

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def weights() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"wide": (12, 40), "tall": (40, 12), "experts": (3, 16, 8), "norm.weight": (12,)}
    return {n: nn.Parameter(torch.randn(s, generator=draw)) for n, s in shapes.items()}


def train(optimizer: Any, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()


def both(named: dict[str, nn.Parameter]) -> MuonAdamW:
    groups = muon_groups(decayed_groups(named.items(), 0.1), named.items())
    return MuonAdamW(groups, **SETTINGS)


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 99))
def test_singular_values_come_near_one(rows: int, columns: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=draw)
    before, after = torch.linalg.svdvals(matrix), torch.linalg.svdvals(orthogonalised(matrix))
    large = before > 0.01 * before[0]
    assert bool((after[large] < 1.3).all())
    assert bool((after[large] > 0.3).all())


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalised(torch.zeros(4, 6)).any()


@pytest.mark.parametrize("name", ["wide", "tall"])
def test_matrices_move_as_with_torch_s_muon(name: str) -> None:
    """torch computes the iteration in bf16, so the directions agree to its digits."""
    ours, theirs = weights()[name], weights()[name]
    start = ours.detach().clone()
    train(MuonAdamW([{"params": [ours], "muon": True}], **SETTINGS), [ours], range(5))
    muon = torch.optim.Muon(
        [theirs], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    train(muon, [theirs], range(5))
    assert float((ours - theirs).detach().norm() / (theirs - start).detach().norm()) < 0.02


def test_one_step_is_the_formula_in_float64() -> None:
    weight = weights()["tall"]
    start = weight.detach().double()
    train(MuonAdamW([{"params": [weight], "muon": True}], **SETTINGS), [weight], range(1))
    grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).double()
    x = (0.05 * grad) * 0.95 + 0.05 * grad  # momentum from zero, then Nesterov's look ahead
    x = x.T / x.norm()
    for _ in range(5):
        x = 3.4445 * x + (-4.7750 * x @ x.T + 2.0315 * (x @ x.T) @ (x @ x.T)) @ x
    expected = start * (1 - 1e-2 * 0.1) - 1e-2 * 0.2 * 40**0.5 * x.T
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-4, atol=1e-5)


def test_the_rest_moves_with_the_bits_of_adamw() -> None:
    ours, theirs = weights(), weights()
    optimizer = MuonAdamW([{"params": list(ours.values())}], **SETTINGS)
    train(optimizer, list(ours.values()), range(4))
    train(torch.optim.AdamW(theirs.values(), **SETTINGS), list(theirs.values()), range(4))
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_matrices_are_all_but_embeddings_head_norms_and_biases(architecture: str) -> None:
    model = tiny_model(architecture)
    for name, parameter in model.named_parameters():
        outer = "embed_tokens" in name or "lm_head" in name
        assert is_hidden_matrix(name, parameter) == (not outer and parameter.ndim > 1), name


def phi3() -> nn.Module:
    config = hf.Phi3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, pad_token_id=0
    )
    config.num_attention_heads, config.num_key_value_heads = 8, 2
    torch.manual_seed(0)
    model: nn.Module = hf.Phi3ForCausalLM(config)
    return model


def attention_of_torch() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 48)


Parts = dict[str, Callable[[Tensor], Iterable[Tensor]]]
# As the models' own forward passes read their fused weights, written for their sizes.
PHI3: Parts = {
    "qkv_proj": lambda w: w.split([32, 8, 8]),
    "gate_up_proj": lambda w: w.split([48, 48]),
}
EXPERTS: Parts = {
    "mlp.experts.gate_up_proj": lambda w: (
        half for expert in w for half in (expert[:16], expert[16:])
    ),
    "mlp.experts.down_proj": lambda w: iter(w),
}
V4: Parts = {**EXPERTS, "self_attn.o_a_proj": lambda w: (w[:8], w[8:])}
STORED: dict[str, tuple[Callable[[], nn.Module], Parts]] = {
    "phi3": (phi3, PHI3),
    "attention of torch": (attention_of_torch, {"in_proj": lambda w: (w[:32], w[32:64], w[64:])}),
    "deepseek_v2": (functools.partial(tiny_model, "deepseek_v2"), EXPERTS),
    "deepseek_v3": (functools.partial(tiny_model, "deepseek_v3"), EXPERTS),
    "deepseek_v4": (functools.partial(tiny_model, "deepseek_v4"), V4),
}


def direction(gradient: Tensor) -> Tensor:
    x = gradient / gradient.norm()
    for _ in range(5):
        x = 3.4445 * x + (-4.7750 * x @ x.T + 2.0315 * (x @ x.T) @ (x @ x.T)) @ x
    return 0.2 * max(x.shape) ** 0.5 * x


@pytest.mark.parametrize("model_name", STORED)
def test_each_matrix_of_a_stored_weight_moves_as_if_it_were_stored_apart(model_name: str) -> None:
    """A plain loop in float64 over the matrices that a model's own code reads from its weights."""
    build, parts = STORED[model_name]
    model = build()
    named = [(n, p) for n, p in model.named_parameters() if is_hidden_matrix(n, p)]
    expected = {}
    for i, (name, weight) in enumerate(named):
        draw = torch.Generator().manual_seed(i)
        weight.grad = torch.randn(weight.shape, generator=draw)
        moved, gradient = weight.detach().double(), weight.grad.double()
        split = next((f for part, f in parts.items() if part in name), lambda w: [w])
        for matrix, grad in zip(split(moved), split(gradient), strict=True):
            matrix -= 1e-2 * direction(grad)
        expected[name] = moved
    groups = muon_groups([{"params": [p for _, p in named]}], model.named_parameters())
    assert all(group["muon"] for group in groups)
    MuonAdamW(groups, lr=1e-2, weight_decay=0.0).step()
    for name, weight in named:
        torch.testing.assert_close(weight.detach().double(), expected[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "name",
    [
        *("h.0.attn.c_attn.weight", "layers.0.attention.query_key_value.weight"),
        *("layers.0.mlp.experts.gate_up_proj", "layers.0.mamba.conv1d.weight"),
        "layers.0.mlp.experts.base_layer.lora_A.default.weight",
    ],
)
def test_a_stored_weight_of_unknown_form_is_named_and_stays_with_adamw(name: str) -> None:
    """The experts here are stored (in, out), as those whose gate and up alternate are."""
    plain, fused = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(4, 8, 24))
    fused = nn.Parameter(fused[0]) if "attn" in name or "key" in name or "lora" in name else fused
    named = {"layers.0.o_proj.weight": plain, name: fused}
    if name.endswith("gate_up_proj"):
        named["layers.0.mlp.experts.down_proj"] = nn.Parameter(torch.ones(4, 12, 8))
    with pytest.warns(UserWarning, match=f"muon: {name} holds several matrices in an unknown"):
        groups = muon_groups([{"params": list(named.values())}], named.items())
    moved = {id(p) for group in groups if group["muon"] for p in group["params"]}
    assert {n for n, p in named.items() if id(p) not in moved} == {name}


def test_rate_and_decay_act_on_both_kinds() -> None:
    named = weights()
    optimizer = both(named)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {n: p.detach().clone() for n, p in named.items()}
    train(optimizer, list(named.values()), range(2))
    assert all(torch.equal(named[n], before[n]) for n in named)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.state.clear()
    optimizer.step()
    for name, parameter in named.items():
        factor = 1.0 if name == "norm.weight" else 1 - 0.1 * 0.1
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_a_vector_among_muon_s_matrices_is_refused() -> None:
    vector: Tensor = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="matrices and stacks"):
        MuonAdamW([{"params": [vector], "muon": True}])
    with pytest.raises(ValueError, match="momentum"):
        MuonAdamW([{"params": [vector]}], momentum=1.0)
