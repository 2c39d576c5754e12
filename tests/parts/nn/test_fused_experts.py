"""Fused experts against the layer's own code in float64: results, every gradient, odd loads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fused_models import experts_layer
from hasten.parts.kernels import experts, rowwise
from hasten.parts.nn import fused_experts
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.experts import ExpertsImplementation
from tiny import language_job, run, session_of, tiny_model

pytestmark = pytest.mark.skipif(rowwise.library().library is None, reason=rowwise.library().reason)
BOUNDS = {
    torch.float32: 1e-5,
    torch.bfloat16: 1.5e-2,
}  # bf16: a rounding of 2^-8 at each of 4 steps
formats = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
architectures = pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3"])


def passed(module: Any, x: Tensor, index: Tensor, weights: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients of tokens, weights of the choice, and both matrices."""
    module.zero_grad()
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = module(x, index, weights)
    out.backward(grad.to(out.dtype))
    return [out.detach(), x.grad, weights.grad, module.gate_up_proj.grad, module.down_proj.grad]


def both(architecture: str, dtype: torch.dtype, index: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What the fused layer and the float64 one give for the same numbers."""
    fused = experts_layer(architecture).to(dtype)
    exact = copy.deepcopy(fused).double()
    exact.config._experts_implementation = "eager"  # the grouped product has no float64
    assert fused_experts.fuse_experts(nn.ModuleList([fused])) == 1
    x = torch.randn(len(index), fused.gate_up_proj.shape[2]).to(dtype)
    weights, grad = torch.rand(index.shape), torch.randn_like(x)
    found = passed(fused, x, index, weights, grad)
    return found, passed(exact, x.double(), index, weights.double(), grad)


def choices(tokens: int, count: int) -> Tensor:
    return torch.stack([torch.randperm(count)[:2] for _ in range(tokens)])


def check(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= bound * other.norm() + 1e-12


@formats
@architectures
def test_results_and_gradients_are_those_of_float64(architecture: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(*both(architecture, dtype, choices(90, 4)), BOUNDS[dtype])


@formats
def test_an_expert_that_nobody_chose_gets_a_zero_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    found, expected = both("deepseek_v3", dtype, choices(40, 3))  # never the fourth
    check(found, expected, BOUNDS[dtype])
    assert not found[3][3].any()
    assert not found[4][3].any()


@settings(max_examples=25)
@given(st.integers(1, 70), st.integers(1, 4), st.integers(0, 10**6))
def test_any_number_of_tokens_and_any_load(tokens: int, used: int, seed: int) -> None:
    torch.manual_seed(seed)
    index = torch.randint(0, used, (tokens, 2))  # a token may choose an expert twice
    check(*both("deepseek_v2", torch.bfloat16, index), 2.5e-2)


def test_frozen_experts_make_no_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experts_layer("deepseek_v3").requires_grad_(False)
    fused_experts.fuse_experts(nn.ModuleList([module]))
    monkeypatch.setattr(experts, "gradients_", lambda *a: pytest.fail("a gradient nobody wants"))
    x = torch.randn(20, module.gate_up_proj.shape[2], requires_grad=True)
    module(x, choices(20, 4), torch.rand(20, 2)).sum().backward()
    assert x.grad is not None
    assert module.down_proj.grad is None


def test_numbers_the_kernels_do_not_take_go_through_the_layers_own_code() -> None:
    module = experts_layer("deepseek_v3").double()
    module.config._experts_implementation = "eager"
    index, weights = choices(9, 4), torch.rand(9, 2).double()
    x = torch.randn(9, module.gate_up_proj.shape[2]).double()
    plain = module(x, index, weights)
    fused_experts.fuse_experts(nn.ModuleList([module]))
    assert torch.equal(module(x, index, weights), plain)


def test_a_model_without_experts_is_refused_and_another_instance_left_alone() -> None:
    with pytest.raises(ValueError, match="no experts"):
        fused_experts.fuse_experts(nn.Linear(2, 2))
    one, other = tiny_model("deepseek_v3"), tiny_model("deepseek_v3")
    names = list(one.state_dict())
    fused_experts.fuse_experts(one)
    assert fused_experts.fused(one) == 1
    assert fused_experts.fused(other) == 0
    assert list(one.state_dict()) == names


ODD = {
    "a row too many": [0, 3, 7],
    "not in order": [0, 5, 3],
    "rows of nobody": [0, 3, 5],
    "rows before the first": [1, 3, 6],
    "an expert that is not there": [0, 3, 6, 6],
    "an expert left out": [0, 6],
}


@pytest.mark.parametrize("starts", ODD.values(), ids=ODD.keys())
def test_starts_that_do_not_fit_rows_and_experts_are_refused(starts: list[int]) -> None:
    x, weights = torch.zeros(6, 4).bfloat16(), torch.zeros(2, 8, 4).bfloat16()
    with pytest.raises(ValueError, match="don't belong"):
        experts.products(x, weights, starts, True)
    with pytest.raises(ValueError, match="don't belong"):
        experts.gradients_(weights, torch.zeros(6, 8).bfloat16(), x, starts)


@formats
def test_matrices_that_lie_the_other_way_give_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, grad, starts = torch.randn(6, 4).to(dtype), torch.randn(6, 5).to(dtype), [0, 2, 6]
    weights = torch.randn(2, 4, 5).to(dtype)
    turned = experts.products(x, weights.mT, starts, True)
    torch.testing.assert_close(turned, experts.products(x, weights, starts, False))
    straight, across = torch.empty(2, 5, 4, dtype=dtype), torch.empty(2, 4, 5, dtype=dtype).mT
    for out in (straight, across):
        experts.gradients_(out, grad, x, starts)
    torch.testing.assert_close(across, straight)


@pytest.mark.parametrize("weighted", [True, False])
def test_combined_rows_and_their_gradients_are_plain_sums(weighted: bool) -> None:
    torch.manual_seed(0)
    x, places = torch.randn(12, 7), torch.randperm(12).view(6, 2)
    weights = torch.rand(6, 2)
    found = experts.combine(x, places, weights if weighted else None)
    by = weights.unsqueeze(-1) if weighted else 1.0
    torch.testing.assert_close(found, (x[places] * by).sum(1))
    sources = torch.empty(12, dtype=torch.int64)
    sources[places.flatten()] = torch.arange(6).repeat_interleave(2)
    spread = torch.empty(12)
    spread[places.flatten()] = weights.flatten()
    dx, dw = experts.combine_backward(found, x, sources, spread)
    torch.testing.assert_close(dx, found[sources] * spread.unsqueeze(1))
    torch.testing.assert_close(dw, (found[sources] * x).sum(1))


@pytest.mark.parametrize("name", ["products", "gradients_", "combine", "combine_backward"])
def test_registered_operators_pass_torch_s_own_checks(name: str) -> None:
    x, places = torch.randn(6, 4), torch.randperm(6).view(3, 2)
    turned = x.mT.contiguous().mT  # the same numbers, lying the other way
    given: dict[str, tuple[Any, ...]] = {
        "products": (x, torch.randn(2, 5, 4), [0, 2, 6], True),
        "gradients_": (torch.empty(2, 5, 4), torch.randn(6, 5), x, [0, 2, 6]),
        "combine": (x, places, torch.rand(3, 2)),
        "combine_backward": (torch.randn(3, 4), turned, places.flatten() // 2, torch.rand(6)),
    }
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(experts, name), given[name], test_utils=checks)


@pytest.mark.parametrize(
    "technique",
    [
        ActivationCheckpointing(),
        ActivationCheckpointing(segments=2),
        ActivationCheckpointing(budget=0.5),
    ],
)
def test_experts_under_recompute_learn_the_same(technique: ActivationCheckpointing) -> None:
    fused = ExpertsImplementation(kind="fused")
    job = language_job(lambda: tiny_model("deepseek_v3"), steps=3)
    plain = run(session_of(job, fused, architecture="deepseek_v3"))
    found = run(session_of(job, fused, technique, architecture="deepseek_v3"))
    assert [m.loss for m in found] == pytest.approx([m.loss for m in plain], rel=1e-5)
