"""Float8 and quantised linear layers: rounding keeps its bound, products are right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.parts.nn.quantised import (
    E4M3,
    KINDS,
    NF4_BLOCK,
    NF4_LEVELS,
    Float8Blocks,
    Float8Layers,
    Kind,
    QuantisedLinear,
    Recipe,
    Rounding,
    dequantise,
    from_int8,
    from_nf4,
    linear,
    quantise,
    quantise_linears,
    rounded,
    to_int8,
    to_nf4,
)

# Half a unit in the last place: of normal numbers, relative; of the smallest ones, in scales.
BOUNDS = {E4M3: (2**-4, 2**-10), torch.float8_e5m2: (2**-3, 2**-17)}
# Of a product of random numbers: about the root of two rounded inputs' mean square errors.
PRODUCT_BOUND = 0.05
SUMMAND_BOUND = 2 * 2**-4 + 2**-8  # of a product of two numbers, each off by 2**-4 at most
EMULATED = Rounding("rowwise", emulate=True)
recipes = pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])


def scales(q: Float8Blocks, shape: torch.Size) -> torch.Tensor:
    rows, columns = q.block
    wide = q.scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


@given(
    st.integers(1, 40),
    st.integers(1, 300),
    st.sampled_from([(1, 128), (128, 128), (1, 300), (3, 7)]),
    st.sampled_from(list(BOUNDS)),
    st.integers(-36, 36),
    st.integers(0, 10**6),
)
def test_no_number_is_off_by_more_than_half_a_unit_in_the_last_place(
    rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype, power: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=draw)
    x = x * torch.exp(4 * torch.randn(rows, columns, generator=draw)) * 10.0**power
    x = x.clamp(-3e38, 3e38)
    q = quantise(x, block, dtype)
    assert q.data.dtype == dtype
    assert q.data.shape == x.shape
    relative, absolute = BOUNDS[dtype]
    error = (dequantise(q).double() - x.double()).abs()
    bound = torch.maximum(relative * x.double().abs(), absolute * scales(q, x.shape).double())
    assert bool((error <= bound * (1 + 1e-5)).all())


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen() -> None:
    assert not dequantise(quantise(torch.zeros(3, 5), (1, 5))).any()
    x = torch.ones(2, 256)
    x[0, 3], x[1, 130] = torch.inf, torch.nan
    found = dequantise(quantise(x, (1, 128)))
    assert found.isnan().any(1).tolist() == [True, True]
    assert found[0, 128:].equal(torch.ones(128))


def test_an_outlier_harms_its_block_alone() -> None:
    x = torch.rand(1, 256) + 0.5
    x[0, 0] = 1e6
    fine = (dequantise(quantise(x, (1, 128))) - x).abs()
    rough = (dequantise(quantise(x, (1, 256))) - x).abs()
    assert fine[0, 128:].max() < 0.1
    assert rough[0, 128:].max() > 0.4


@recipes
@settings(max_examples=25)
@given(st.integers(1, 70), st.integers(1, 20), st.integers(1, 20), st.integers(0, 10**6))
def test_a_linear_layer_and_its_gradients_agree_with_float64(
    recipe: Recipe, tokens: int, inside: int, outside: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, tokens, 16 * inside, generator=draw, requires_grad=True)
    weight = torch.randn(16 * outside, 16 * inside, generator=draw, requires_grad=True)
    bias = torch.randn(16 * outside, generator=draw)
    dy = torch.randn(2, tokens, 16 * outside, generator=draw)
    y = linear(x, weight, bias, Rounding(recipe, emulate=True))
    exact = nn.functional.linear(x.double(), weight.double(), bias.double())
    a, w, d = (t.detach().double().abs().flatten(0, -2) for t in (x, weight, dy))
    sizes = a @ w.t(), d @ w, d.t() @ a  # of the summands, which may cancel in the sum
    for found, expected, size in zip(
        (y, *torch.autograd.grad(y, (x, weight), dy)),
        (exact, *torch.autograd.grad(exact, (x, weight), dy.double())),
        sizes,
        strict=True,
    ):
        error = (found.double() - expected).abs().reshape(size.shape)
        assert bool((error <= SUMMAND_BOUND * size + 1e-3).all())
        assert error.norm() / size.norm() < 2 * PRODUCT_BOUND


@recipes
def test_the_recipes_differ_from_each_other_where_there_are_outliers(recipe: Recipe) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512), torch.randn(32, 512)
    x[:, 5] *= 1e6
    exact = (x[:, 128:] @ weight[:, 128:].t()).double()
    weight = torch.cat([torch.zeros(32, 128), weight[:, 128:]], 1)
    found = linear(x, weight, None, Rounding(recipe, emulate=True))
    error = (found.double() - exact).norm() / exact.norm()
    assert (error < PRODUCT_BOUND) == (recipe == "blockwise")


@pytest.mark.parametrize(("rows", "summed"), [(24, 48), (7, 48), (32, 37), (1, 16)])
def test_torchs_own_product_agrees_with_the_emulation(rows: int, summed: int) -> None:
    """On a processor too, where torch computes it in software: the same call as on a GPU."""
    torch.manual_seed(0)
    a, b = torch.randn(rows, summed), torch.randn(64, summed)
    near = quantise(a, (1, summed)), quantise(b, (1, summed))
    emulated = EMULATED.product(*near, torch.float32)
    try:
        found = Rounding("rowwise", emulate=False).product(*near, torch.float32)
    except RuntimeError as error:
        if "only supports per-tensor scaling" not in str(error):
            raise
        pytest.skip("this torch scales whole tensors alone on a processor")
    assert (found - emulated).norm() / emulated.norm() < 4e-3  # it returns bf16


def test_a_frozen_weight_gets_no_gradient_and_a_half_precision_input_keeps_its_format() -> None:
    x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(16, 32)
    y = linear(x, weight, None, EMULATED)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x.float(), weight, None, EMULATED).dtype == torch.bfloat16


def test_heads_routers_and_unsuitable_sides_stay_wide_and_all_is_given_back() -> None:
    net = nn.ModuleDict({"proj": nn.Linear(32, 16), "lm_head": nn.Linear(16, 32)})
    net["gate"], net["odd"] = nn.Linear(16, 16), nn.Linear(16, 12)
    plain = net["proj"](torch.ones(2, 32))
    layers = Float8Layers(emulate=True)
    layers.attach(net)
    assert (layers.names, layers.left) == (["proj"], ["odd"])
    assert not net["proj"](torch.ones(2, 32)).equal(plain)
    layers.detach()
    assert net["proj"](torch.ones(2, 32)).equal(plain)
    assert "forward" not in vars(net["proj"])


def test_a_head_with_an_adapter_around_it_stays_wide_too() -> None:
    adapted = nn.ModuleDict({"base_layer": nn.Linear(16, 32)})
    net = nn.ModuleDict({"proj": nn.Linear(32, 16), "lm_head": adapted})
    layers = Float8Layers(emulate=True)
    layers.attach(net)
    assert layers.names == ["proj"]


kinds = pytest.mark.parametrize("kind", KINDS)


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 40), st.integers(1, 90), st.integers(-30, 30), st.integers(0, 10**6))
def test_int8_is_off_by_half_a_step_at_most(rows: int, columns: int, power: int, seed: int) -> None:
    weight = matrix(rows, columns, seed) * 10.0**power
    codes, scale = to_int8(weight)
    error = (from_int8(codes, scale).double() - weight.double()).abs()
    assert bool((error <= scale.double() * 0.5 * (1 + 1e-4)).all())


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
