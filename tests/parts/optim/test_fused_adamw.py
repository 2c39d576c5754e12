"""FusedAdamW against float64 and torch's AdamW; clipping, copies, state, and where it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hasten.parts.kernels import rowwise
from hasten.parts.optim.fused_adamw import FusedAdamW
from hasten.parts.optim.master_weights import MasterWeights

pytestmark = pytest.mark.skipif(rowwise.library().library is None, reason=rowwise.library().reason)
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gradients(shape: tuple[int, ...], steps: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for _ in range(steps)]


def moved(kind: Any, start: Tensor, grads: list[Tensor], **changes: Any) -> Tensor:
    weight = nn.Parameter(start.clone())
    optimizer = kind([weight], **{**SETTINGS, **changes})
    for grad in grads:
        weight.grad = grad.to(weight.dtype)
        optimizer.step()
    return weight.detach()


@given(st.integers(1, 4000), st.integers(1, 5), st.sampled_from([0.0, 0.1]))
def test_weights_move_as_torch_moves_them_in_float64(size: int, steps: int, decay: float) -> None:
    start, grads = torch.linspace(-2, 2, size), gradients((size,), steps, size)
    found = moved(FusedAdamW, start, grads, weight_decay=decay)
    true = moved(torch.optim.AdamW, start.double(), grads, weight_decay=decay)
    torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_divided_by_the_scale_once() -> None:
    start, (grad,) = torch.ones(100), gradients((100,), 1)
    weight = nn.Parameter(start.clone())
    optimizer = FusedAdamW([weight], **SETTINGS)
    for divisor in (4.0, None):
        weight.grad = grad.clone()
        optimizer.grad_scale = None if divisor is None else torch.tensor(divisor)
        optimizer.step()
    true = moved(torch.optim.AdamW, start.double(), [grad / 4, grad])
    torch.testing.assert_close(weight.detach().double(), true, rtol=1e-5, atol=1e-6)


def test_a_transposed_weight_takes_its_own_gradient() -> None:
    start, (grad,) = torch.randn(6, 9).t(), gradients((9, 6), 1)
    found = nn.Parameter(start.clone(memory_format=torch.preserve_format))
    assert not found.is_contiguous()
    found.grad = grad
    FusedAdamW([found], **SETTINGS).step()
    torch.testing.assert_close(found.detach(), moved(torch.optim.AdamW, start.clone(), [grad]))


def test_a_gradient_that_is_no_number_is_not_hidden() -> None:
    weight = nn.Parameter(torch.ones(40))
    weight.grad = torch.full((40,), float("nan"))
    FusedAdamW([weight]).step()
    assert weight.isnan().all()


def test_masters_lend_their_bf16_gradients_and_get_their_copies_written() -> None:
    torch.manual_seed(0)
    x, models = torch.randn(16, 24), [nn.Linear(24, 8), nn.Linear(24, 8)]
    models[1].load_state_dict(models[0].state_dict())
    for model, kind in zip(models, (FusedAdamW, torch.optim.AdamW), strict=True):
        masters = MasterWeights()
        masters.prepare(model)
        optimizer = kind(model.parameters(), **SETTINGS)
        masters.attach_optimizer(optimizer)
        for _ in range(4):
            model(x).square().mean().backward()
            masters.accumulate_gradients()
            half = {p.grad.dtype for p in masters.parameters() if p.grad is not None}
            assert half == {torch.bfloat16 if kind is FusedAdamW else torch.float32}
            optimizer.step()
            masters.update_model_weights()
            for p in masters.parameters():
                p.grad = None
        for working, master in zip(model.parameters(), masters.parameters(), strict=True):
            assert torch.equal(working, master.to(torch.bfloat16))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


def test_copies_in_fp16_are_left_to_the_masters() -> None:
    model, masters = nn.Linear(4, 1, bias=False), MasterWeights(torch.float16)
    masters.prepare(model)
    optimizer = FusedAdamW(model.parameters(), **SETTINGS)
    masters.attach_optimizer(optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    masters.accumulate_gradients()
    optimizer.step()
    masters.update_model_weights()
    (master,) = masters.parameters()
    assert torch.equal(model.weight, master.to(torch.float16))


def test_gradients_of_two_micro_batches_add_up_in_float32() -> None:
    model, masters = nn.Linear(4, 1, bias=False), MasterWeights()
    masters.prepare(model)
    masters.attach_optimizer(FusedAdamW(model.parameters()))
    for scale in (256.0, 1.0):  # their bf16 sum would be 256
        model.weight.grad = torch.full_like(model.weight, scale)
        masters.accumulate_gradients()
    (master,) = masters.parameters()
    assert master.grad is not None
    assert torch.equal(master.grad, torch.full((1, 4), 257.0))


def test_published_after_a_restore_without_a_step() -> None:
    model, masters = nn.Linear(4, 1, bias=False), MasterWeights()
    masters.prepare(model)
    masters.attach_optimizer(FusedAdamW(model.parameters()))
    masters.parameters()[0].data.fill_(3.0)
    masters.update_model_weights()
    assert torch.equal(model.weight, torch.full((1, 4), 3.0, dtype=torch.bfloat16))


def test_weights_it_can_t_move_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="float32 weights"):
        FusedAdamW([weight]).step()
