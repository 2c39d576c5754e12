"""CompactAdamW against float64 and torch's AdamW; its memory, its rounding, its state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.parts.optim import compact_adamw
from hasten.parts.optim.compact_adamw import CompactAdamW

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
formats = pytest.mark.parametrize("moments", ["bf16", "int8"])


def gradients(shape: tuple[int, ...], steps: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    size = torch.rand(shape, generator=draw) + 0.1
    return [size * torch.randn(shape, generator=draw) for _ in range(steps)]


def moved(optimizer: Any, weight: nn.Parameter, grads: list[Tensor]) -> Tensor:
    for grad in grads:
        weight.grad = grad.to(weight.dtype)
        optimizer.step()
    return weight.detach().clone()


def float64_loop(start: Tensor, grads: list[Tensor]) -> Tensor:
    """AdamW as its paper writes it, one weight at a time in Python's floats."""
    lr, (b1, b2), eps, decay = (SETTINGS[k] for k in ("lr", "betas", "eps", "weight_decay"))
    found = []
    for i, x in enumerate(start.double().flatten().tolist()):
        m = v = 0.0
        for t, grad in enumerate(grads, start=1):
            g = float(grad.flatten()[i])
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            width = math.sqrt(v / (1 - b2**t)) + eps
            x -= lr * decay * x + lr * (m / (1 - b1**t)) / width
        found.append(x)
    return torch.tensor(found, dtype=torch.float64).view_as(start)


@formats
def test_vectors_move_as_in_float64(moments: str) -> None:
    start, grads = torch.linspace(-2, 2, 33), gradients((33,), 20)
    weight = nn.Parameter(start.clone())
    found = moved(CompactAdamW([weight], moments=moments, **SETTINGS), weight, grads)
    torch.testing.assert_close(found.double(), float64_loop(start, grads), rtol=2e-6, atol=2e-6)


@formats
def test_the_first_step_of_a_matrix_is_adamw_s_own(moments: str) -> None:
    start = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))  # 1.4 chunks
    grads = gradients((300, 300), 1)
    one, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    found = moved(CompactAdamW([one], moments=moments, **SETTINGS), one, grads)
    expected = moved(torch.optim.AdamW([other], **SETTINGS), other, grads)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@formats
def test_a_matrix_follows_adamw_within_the_rounding_of_its_moments(moments: str) -> None:
    start, grads = torch.randn(64, 70), gradients((64, 70), 40)
    one, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    found = moved(CompactAdamW([one], moments=moments, **SETTINGS), one, grads)
    expected = moved(torch.optim.AdamW([other], **SETTINGS), other, grads)
    path = (expected - start).norm()
    assert 0 < float((found - expected).norm() / path) < {"bf16": 0.01, "int8": 0.04}[moments]


@formats
def test_a_slow_second_moment_does_not_stand_still(moments: str) -> None:
    """At beta2 = 0.999 one step moves it by 1/1000, less than either format's own step."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = CompactAdamW([weight], lr=0.0, betas=(0.9, 0.999), moments=moments)
    weight.grad = torch.ones_like(weight)
    for _ in range(200):
        optimizer.step()
    expected = 1 - 0.999**200
    part = slice(0, weight.numel())
    _, second = compact_adamw._moments(optimizer.state[weight], part)
    assert abs(float(second.mean()) / expected - 1) < 0.02


@formats
def test_a_weight_beside_one_with_a_huge_gradient_takes_steps_of_the_usual_size(
    moments: str,
) -> None:
    weight = nn.Parameter(torch.zeros(4, 256))
    optimizer = CompactAdamW([weight], lr=1e-2, weight_decay=0.0, moments=moments)
    scale = torch.logspace(-8, 0, 256).expand(4, 256)
    for grad in gradients((4, 256), 30):
        before = weight.detach().clone()
        weight.grad = scale * grad
        optimizer.step()
        assert float((weight.detach() - before).abs().max()) < 0.1


@formats
def test_learning_rate_and_decay_of_each_group_act(moments: str) -> None:
    still, shrinking = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    groups = [
        {"params": [still], "lr": 0.0},
        {"params": [shrinking], "weight_decay": 0.5, "lr": 0.1},
    ]
    optimizer = CompactAdamW(groups, moments=moments)
    for weight in (still, shrinking):
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(still, torch.ones(8, 8))
    torch.testing.assert_close(shrinking.detach(), torch.full((8, 8), 0.95))
    optimizer.param_groups[1]["lr"] = 0.0
    optimizer.step()
    torch.testing.assert_close(shrinking.detach(), torch.full((8, 8), 0.95))


def test_the_seed_decides_the_rounding() -> None:
    start, grads = torch.randn(40, 40), gradients((40, 40), 5)
    found = []
    for seed in (0, 0, 1):
        weight = nn.Parameter(start.clone())
        found.append(moved(CompactAdamW([weight], seed=seed, **SETTINGS), weight, grads))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(("moments", "each"), [("bf16", 4.0), ("int8", 2 + 8 / 256)])
def test_the_state_of_a_matrix_takes_so_many_bytes_per_weight(moments: str, each: float) -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.ones_like(weight)
    optimizer = CompactAdamW([weight], moments=moments)
    optimizer.step()
    kept = sum(v.nbytes for v in optimizer.state[weight].values() if isinstance(v, Tensor))
    assert kept == each * 64 * 64


@formats
def test_odd_strides_odd_sizes_empty_and_bf16_weights_are_taken(moments: str) -> None:
    turned = nn.Parameter(torch.ones(7, 5).t())
    empty = nn.Parameter(torch.ones(0, 5))
    half = nn.Parameter(torch.ones(3, 3, dtype=torch.bfloat16))
    unused = nn.Parameter(torch.ones(3, 3))
    optimizer = CompactAdamW([turned, empty, half, unused], moments=moments, lr=0.1)
    for weight in (turned, empty, half):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert float(turned.detach().max()) < 0.95
    assert float(half.detach().max()) < 0.95
    assert not optimizer.state[unused]


def test_a_state_of_another_format_is_refused() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    weight.grad = torch.ones_like(weight)
    saved = CompactAdamW([weight], moments="int8")
    saved.step()
    with pytest.raises(ValueError, match="the setting that wrote it"):
        CompactAdamW([weight], moments="bf16").load_state_dict(saved.state_dict())
