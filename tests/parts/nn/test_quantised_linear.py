"""A quantised linear layer: rounding keeps its bound, dx is exact, and dW is never made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.parts.nn.quantised import (
    KINDS,
    NF4_BLOCK,
    NF4_LEVELS,
    Kind,
    QuantisedLinear,
    from_int8,
    from_nf4,
    quantise_linears,
    rounded,
    to_int8,
    to_nf4,
)

kinds = pytest.mark.parametrize("kind", KINDS)


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(-30, 30), st.integers(0, 10**6))
def test_int8_is_off_by_half_a_step_at_most(rows: int, columns: int, power: int, seed: int) -> None:
    weight = matrix(rows, columns, seed) * 10.0**power
    codes, scale = to_int8(weight)
    error = (from_int8(codes, scale).double() - weight.double()).abs()
    assert bool((error <= scale.double() * 0.5 * (1 + 1e-4)).all())


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(-30, 30), st.integers(0, 10**6))
def test_nf4_takes_the_nearest_level_of_each_block(
    rows: int, columns: int, power: int, seed: int
) -> None:
    weight = matrix(rows, columns, seed) * 10.0**power
    codes, scale = to_nf4(weight)
    assert codes.numel() == -(-weight.numel() // NF4_BLOCK) * NF4_BLOCK // 2
    found = from_nf4(codes, scale, (rows, columns)).double()
    own = scale.double().repeat_interleave(NF4_BLOCK).flatten()[: weight.numel()]
    own = own.view(rows, columns)
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float64)
    nearest = (weight.double()[..., None] - own[..., None] * levels).abs().amin(-1)
    error = (found - weight.double()).abs()
    assert bool((error <= nearest + 1e-6 * own).all())


@kinds
def test_zeros_stay_zeros_and_rounding_twice_is_rounding_once(kind: Kind) -> None:
    assert not rounded(torch.zeros(3, 70), kind).any()
    once = rounded(matrix(8, 70, 0), kind)
    torch.testing.assert_close(rounded(once, kind), once, rtol=1e-6, atol=1e-7)


@kinds
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_backward_are_those_of_the_widened_weight(kind: Kind, bias: bool) -> None:
    plain = nn.Linear(70, 33, bias=bias)
    layer = QuantisedLinear(plain, kind)
    plain.weight.data = layer.widened()
    x = torch.randn(2, 5, 70, requires_grad=True)
    y, expected = layer(x), plain(x)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    (dx,), (wanted,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(dx, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


class Products(TorchDispatchMode):
    """Counts matrix products by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes.append(tuple(found.shape))
        return found


@kinds
def test_no_product_of_the_weights_shape_is_ever_made(kind: Kind) -> None:
    x = torch.randn(7, 70, requires_grad=True)
    with Products() as plain:
        nn.Linear(70, 33)(x).sum().backward()
    with Products() as frozen:
        QuantisedLinear(nn.Linear(70, 33), kind)(x).sum().backward()
    assert sorted(plain.shapes) == [(7, 33), (7, 70), (33, 70)]
    assert sorted(frozen.shapes) == [(7, 33), (7, 70)]


@kinds
def test_it_rests_in_few_bits_and_its_state_goes_round(kind: Kind) -> None:
    layer = QuantisedLinear(nn.Linear(128, 64), kind)
    assert not list(layer.parameters())
    bits = 8 * (layer.codes.nbytes + layer.scale.nbytes) / (128 * 64)
    assert bits == {"int8": 8 + 32 / 128, "nf4": 4 + 32 / 64}[kind]
    other = QuantisedLinear(nn.Linear(128, 64), kind)
    other.load_state_dict(layer.state_dict())
    assert other.widened().equal(layer.widened())


def test_only_named_linear_layers_of_finite_weights_are_quantised() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.ReLU())
    quantise_linears(net, ["1.0"], "int8")
    assert [type(m) for m in (net[0], net[1][0])] == [nn.Linear, QuantisedLinear]  # type: ignore[index]
    with pytest.raises(ValueError, match="2 is a ReLU"):
        quantise_linears(net, ["2"], "int8")
    with pytest.raises(ValueError, match="supported: int8 and nf4"):
        QuantisedLinear(nn.Linear(2, 2), "int4")  # type: ignore[arg-type]
    layer = nn.Linear(2, 2)
    layer.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="isn't finite"):
        QuantisedLinear(layer, "nf4")


def test_levels_are_sent_to_the_device_once_and_are_no_part_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = QuantisedLinear(nn.Linear(40, 30), "nf4")
    assert "levels" not in layer.state_dict()
    expected = from_nf4(layer.codes, layer.scale, (30, 40))
    monkeypatch.setattr(torch, "tensor", lambda *a, **b: pytest.fail("a copy in each product"))
    assert torch.equal(layer.widened(), expected)
    layer(matrix(3, 40, 0).requires_grad_()).sum().backward()
