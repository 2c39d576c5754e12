"""Float8 rounding and widening on a GPU have the bits of torch's operators.

In Triton's interpreter where no GPU is; it is told to round as a GPU does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from hasten.parts.kernels import registry
from hasten.parts.nn import fused_gpu, quantised, quantised_gpu
from hasten.parts.nn.quantised import (
    E4M3,
    KINDS,
    Float8Layers,
    Float8Weight,
    Kind,
    QuantisedLinear,
    Rounding,
    linear,
    quantise,
)
from hasten.parts.nn.recompute import BlockRecompute, _mark_first_pass
from interpreted_triton import round_as_a_gpu
from triton_marks import DEVICE, draw, needs_triton, on_gpu

E5M2 = torch.float8_e5m2
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
HARDWARE = Rounding("rowwise", emulate=False)


# torch 2.11's processors multiply float8 by one scale alone.
has_row_scales = DEVICE != "cpu" or Version(torch.__version__) >= Version("2.12")
pytestmark = [
    needs_triton,
    pytest.mark.skipif(not has_row_scales, reason="needs torch 2.12 on a processor"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # NaN, on purpose
    *on_gpu,
]


@pytest.fixture(autouse=True, scope="module")
def _rounds_as_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            round_as_a_gpu(patch)
        yield


@pytest.fixture
def on_gpu_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor's tensors go the GPU's way."""
    if DEVICE == "cpu":
        runs = lambda kernel, x: not registry.is_refused(kernel)  # noqa: E731
        monkeypatch.setattr(quantised_gpu, "_runs", runs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each operator ran."""
    found: Counter[str] = Counter()

    def counted(name: str, true: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            found[name] += 1
            return true(*given)

        return run

    for name in ("float8_rows", "float8_columns", "float8_both", "widen_nf4", "widen_int8"):
        monkeypatch.setattr(quantised_gpu, name, counted(name, getattr(quantised_gpu, name)))
    return found


def same(found: Tensor, expected: Tensor) -> None:
    """The same numbers; NaN is NaN, whatever its sign and payload."""
    assert found.dtype == expected.dtype
    one, other = (t.cpu().float() for t in (found, expected))
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def check_rounding(x: Tensor, kind: torch.dtype) -> None:
    """All three operators on a matrix, against ``quantise`` of it and of its transpose."""
    rows, columns = x.shape
    straight = quantise(x.cpu(), (1, columns), kind)
    turned = quantise(x.cpu().t(), (1, rows), kind)
    both = quantised_gpu.float8_both(x, kind)
    for data, scale in (quantised_gpu.float8_rows(x, kind), both[:2]):
        same(data, straight.data)
        same(scale, straight.scale)
        assert data.is_contiguous()
    for data, scale in (quantised_gpu.float8_columns(x, kind), both[2:]):
        assert data.shape == (columns, -(-rows // 16) * 16)
        same(data[:, :rows], turned.data)
        same(scale, turned.scale)
        assert not data.view(torch.uint8)[:, rows:].any(), "filled up with zeros"


@settings(max_examples=6)
@given(
    rows=st.integers(1, 80),
    columns=st.integers(1, 140),  # more than one tile of any kind
    dtype=st.sampled_from(FORMATS),
    kind=st.sampled_from([E4M3, E5M2]),
    spread=st.sampled_from([0.0, 4.0]),
    power=st.integers(-44, 36),
    seed=st.integers(0, 10**6),
)
def test_rounding_has_the_bits_of_torchs_operators(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    kind: torch.dtype,
    spread: float,
    power: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp(spread * torch.randn(rows, columns, generator=generator)) * 10.0**power
    check_rounding(x.clamp(-3e38, 3e38).to(DEVICE, dtype), kind)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_zeros_infinities_and_nan_are_rounded_alike(dtype: torch.dtype, kind: torch.dtype) -> None:
    x = draw(18, 70, dtype=dtype)
    x[3] = 0.0
    x[:, 5] = 0.0
    x[7, 8], x[16, 9], x[17, 66] = torch.inf, -torch.inf, torch.nan
    check_rounding(x, kind)
    data, _ = quantised_gpu.float8_rows(x, kind)
    assert data.float()[[7, 16, 17]].isnan().any(1).all()
    assert not data.float()[3].any()


def test_numbers_between_two_float8_go_to_the_even_one() -> None:
    """Every finite e4m3 number and every middle of two, under a scale of 1."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    codes = codes[codes.isfinite()].unique()
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat((codes, middles)).to(DEVICE).unsqueeze(0)  # the largest is 448
    data, scale = quantised_gpu.float8_rows(x, E4M3)
    assert scale.item() == 1.0
    same(data, x.cpu().to(E4M3))


@pytest.mark.parametrize(
    ("kind", "powers"), [(E4M3, (0, -110)), (E5M2, (-70, 100))], ids=["e4m3", "e5m2"]
)
def test_quotients_of_all_mantissas_have_the_bits_of_a_division(
    kind: torch.dtype, powers: tuple[int, int]
) -> None:
    """All pairs of two bf16 mantissas; the bits, so that a zero keeps its sign, too."""
    mantissas = 1 + torch.arange(128) / 128
    for power in powers:
        largest = (2 * mantissas * 2.0**power).unsqueeze(1)
        columns = torch.cat([mantissas * 2.0 ** (power - down) for down in (0, 8, 18)])
        columns = torch.cat((columns, -columns, torch.tensor([0.0, -0.0])))
        x = torch.cat((largest, columns.expand(128, -1)), 1).bfloat16()
        data, scale = quantised_gpu.float8_rows(x.to(DEVICE), kind)
        expected = quantise(x, (1, x.shape[1]), kind)
        assert torch.equal(data.cpu().view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(scale.cpu(), expected.scale)


@pytest.mark.parametrize("group", [3, pytest.param(8, marks=pytest.mark.long)])
def test_tiles_come_in_groups_that_need_not_be_full(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_gpu, "GROUP", group)
    for name, tile in (("LARGEST", (16, 32, 1)), ("COLUMNS", (32, 16, 1)), ("BOTH", (16, 16, 1))):
        monkeypatch.setattr(quantised_gpu, f"{name}_TILE", tile)
    for rows, columns in ((1, 1), (16, 40), (48, 20), (49, 20)):
        x = draw(rows, columns, dtype=torch.bfloat16)
        x[-1, 0] = 50.0
        check_rounding(x, E4M3)


def test_a_row_that_no_block_holds_is_read_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_gpu, "WIDEST", 64)
    monkeypatch.setattr(quantised_gpu, "LOOP_BLOCK", 32)
    for columns in (64, 65, 100):
        x = draw(3, columns)
        x[0, -1], x[1, 40] = 50.0, torch.nan
        check_rounding(x, E4M3)


def test_rows_may_lie_apart_and_a_transpose_is_taken() -> None:
    wide = draw(40, 80)
    check_rounding(wide[:, 7:50], E4M3)
    check_rounding(wide.t(), E4M3)
    check_rounding(draw(1, 48).expand(20, 48), E4M3)


def test_operators_keep_their_schemas_and_shapes() -> None:
    x = draw(5, 32)
    checks = ("test_schema", "test_faketensor")
    for name in ("float8_rows", "float8_columns", "float8_both"):
        torch.library.opcheck(getattr(quantised_gpu, name), (x, E4M3), test_utils=checks)
    codes, scale = quantised.to_nf4(x)
    levels = torch.tensor(quantised.NF4_LEVELS, device=DEVICE)
    given = codes, scale, levels, 5, 32, torch.bfloat16
    torch.library.opcheck(quantised_gpu.widen_nf4, given, test_utils=checks)
    given = *quantised.to_int8(x), torch.bfloat16
    torch.library.opcheck(quantised_gpu.widen_int8, given, test_utils=checks)


@pytest.mark.parametrize("tokens", [16, 37, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("on_gpu_code")
def test_a_layer_and_its_gradients_are_those_of_the_eager_way(
    tokens: int, dtype: torch.dtype, calls: Counter[str]
) -> None:
    dy, given = draw(2, tokens, 48, dtype=dtype), (draw(2, tokens, 96, dtype=dtype), draw(48, 96))
    found = []
    for refuses in (True, False):
        if refuses:
            registry.refuse(quantised_gpu.FLOAT8, "wrong")
        try:
            x, weight = (t.clone().requires_grad_() for t in given)
            y = linear(x, weight, None, HARDWARE)
            found.append((y, *torch.autograd.grad(y, (x, weight), dy)))
        finally:
            registry.allow_all()
        if refuses:
            assert not calls, "what is refused isn't run"
    for one, other in zip(*found, strict=True):
        same(one, other)
    # Input and dy both ways; the weight by rows in the one pass, by columns in the other.
    assert calls == {"float8_both": 2, "float8_rows": 1, "float8_columns": 1}


def stack(learns: bool = True) -> nn.ModuleDict:
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(32, 48, bias=False) for name in ("q", "k", "v")})
    return net.to(DEVICE).requires_grad_(learns)


@pytest.mark.usefixtures("on_gpu_code")
def test_layers_of_one_input_round_it_once(calls: Counter[str]) -> None:
    net, layers = stack(), Float8Layers()
    layers.attach(net)
    x = draw(20, 32).requires_grad_()
    first = [layer(x) for layer in net.values()]
    assert calls == {"float8_both": 1, "float8_rows": 3}
    with torch.no_grad():
        x.mul_(2)  # written to in place: rounded again
    again = [layer(x) for layer in net.values()]
    assert calls["float8_both"] == 2
    for one, other in zip(first, again, strict=True):
        same(other, 2 * one.detach())
    other = x.detach().clone()
    net["q"](other)
    assert calls["float8_both"] == 3
    found = layers._last._rounded_input
    assert found is not None
    del other
    assert layers._last._rounded_input is None, "it isn't kept longer than its input"


@pytest.mark.usefixtures("on_gpu_code")
def test_a_frozen_weight_takes_its_input_by_rows_alone(calls: Counter[str]) -> None:
    net, layers = stack(learns=False), Float8Layers()
    layers.attach(net)
    x = draw(20, 32).requires_grad_()
    net["q"](x).sum().backward()
    # Forward input and weight, backward dy; and the weight by columns.
    assert calls == {"float8_rows": 3, "float8_columns": 1}
    calls.clear()
    with torch.no_grad():
        net["k"].weight.requires_grad_()
        net["k"](x)
    assert calls == {"float8_rows": 1}, "the input is known, and no gradient is wanted"
    net["v"].weight.requires_grad_()
    net["v"](x)
    assert calls["float8_both"] == 1, "this gradient takes the input by columns"


class Block(nn.Module):
    """Two layers of one input, and one that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 32), nn.Linear(16, 32)
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.q(x) * self.k(x))
        return y


def block_gradients(way: str, keep: bool, calls: Counter[str]) -> list[Tensor]:
    """Result and gradients of two blocks, recomputed in some way; ``calls`` are of forward."""
    torch.manual_seed(0)
    net, layers = nn.Sequential(Block(), Block()).to(DEVICE), Float8Layers()
    layers.attach(net)
    layers.keep_weights(keep)
    if way == "hasten":
        BlockRecompute()(net)
    x = draw(7, 16).requires_grad_()
    calls.clear()
    y = checkpoint(net, x, use_reentrant=False) if way == "torch" else net(x)
    assert isinstance(y, Tensor)
    forward = Counter(calls)
    found = torch.autograd.grad(y.square().sum(), (x, *net.parameters()))
    calls.clear()
    calls.update(forward)
    return [y, *found]


@pytest.mark.usefixtures("on_gpu_code")
def test_recomputation_gives_the_same_gradients(calls: Counter[str]) -> None:
    expected = block_gradients("none", keep=False, calls=calls)
    assert calls == {"float8_both": 4, "float8_rows": 6}, "two inputs and three weights each"
    for way, keep in (("torch", False), ("hasten", False), ("hasten", True)):
        for one, other in zip(block_gradients(way, keep, calls), expected, strict=True):
            same(one, other)
        if way == "hasten":  # the first pass is for its result alone
            kept = {"float8_rows": 4, "float8_both": 6}
            assert calls == (kept if keep else {"float8_rows": 4 + 6})


@pytest.mark.usefixtures("on_gpu_code")
def test_what_a_first_pass_left_out_gives_no_gradient() -> None:
    """Should a backward pass ever read it, torch's product refuses it; and its scales are NaN."""
    layer = nn.Linear(32, 48, bias=False).to(DEVICE)
    y = _mark_first_pass(lambda x: linear(x, layer.weight, None, HARDWARE))(draw(20, 32))
    with pytest.raises((ValueError, RuntimeError)):
        y.sum().backward()
    data, scale = quantised_gpu.empty_columns(draw(20, 32), E4M3)
    assert (data.shape, scale.shape) == ((32, 32), (32, 1))
    assert scale.isnan().all()


@pytest.mark.usefixtures("on_gpu_code")
def test_a_compiled_graph_keeps_the_operators_whole() -> None:
    net, layers = stack(), Float8Layers()
    layers.attach(net)
    few_bits = QuantisedLinear(nn.Linear(48, 16), "nf4").to(DEVICE)

    def run(x: Tensor) -> Tensor:
        assert isinstance(fused_gpu.has_kernels(DEVICE), bool)
        y: Tensor = few_bits(net["q"](x) * net["k"](x))
        return y

    graphs: list[Any] = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled: Any = torch.compile(run, backend=aot_autograd(fw_compiler=kept), fullgraph=True)
    x = draw(20, 32).requires_grad_()
    given = x, net["q"].weight, net["k"].weight
    expected, found = run(x), compiled(x)
    same(found, expected)
    slopes = [torch.autograd.grad(y.sum(), given) for y in (found, expected)]
    for one, other in zip(*slopes, strict=True):
        same(one, other)
    named = Counter(str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert named["hasten_gpu.widen_nf4.default"] == 2, "forward and backward"
    assert named["hasten_gpu.float8_both.default"] == 4, "two inputs and two gradients"


# Ways in which a weight changes, and how a kept one hears of it.

CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "an operator in place": lambda layer: layer.weight.detach().mul_(2),
    "an optimizer's step": lambda layer: _step(layer),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": 2 * layer.weight.detach()}),
    "another memory": lambda layer: setattr(layer.weight, "data", 2 * layer.weight.detach()),
    "another parameter": lambda layer: setattr(
        layer, "weight", nn.Parameter(2 * layer.weight.detach())
    ),
}


def _step(layer: nn.Linear) -> None:
    layer.weight.grad = -layer.weight.detach()
    torch.optim.SGD([layer.weight], lr=1.0).step()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("on_gpu_code")
@torch.no_grad()
def test_a_kept_weight_is_rounded_again_when_it_changes(change: str, calls: Counter[str]) -> None:
    layer = nn.Linear(32, 48, bias=False).to(DEVICE)
    kept = Float8Weight(HARDWARE)
    kept.kept = True
    before = kept.by_rows(layer.weight)
    assert kept.by_rows(layer.weight) is before
    turned = kept.by_columns(layer.weight.detach())  # as it comes out of a graph
    assert calls == {"float8_both": 1}
    CHANGES[change](layer)
    after = kept.by_rows(layer.weight)
    same(after.scale, 2 * before.scale)
    same(kept.by_columns(layer.weight).scale, 2 * turned.scale)
    assert calls == {"float8_both": 2}


@pytest.mark.usefixtures("on_gpu_code")
@torch.no_grad()
def test_what_isnt_kept_is_rounded_each_time_and_what_is_dropped_is_gone() -> None:
    layer = nn.Linear(32, 48, bias=False).to(DEVICE)
    weight = Float8Weight(HARDWARE)
    before = weight.by_rows(layer.weight)
    layer.weight.data.mul_(2)  # no version tells of it
    same(weight.by_rows(layer.weight).scale, 2 * before.scale)
    weight.kept = True
    weight.by_rows(layer.weight)
    layer.weight.data.mul_(2)
    weight.drop()
    same(weight.by_rows(layer.weight).scale, 4 * before.scale)


# Widening.


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 90),
    dtype=st.sampled_from(FORMATS),
    power=st.integers(-6, 3),
)
def test_widening_has_the_bits_of_torchs_operators(
    kind: Kind, rows: int, columns: int, dtype: torch.dtype, power: int
) -> None:
    weight = draw(rows, columns).cpu() * 10.0**power
    if kind == "int8":
        codes, scale = quantised.to_int8(weight)
        found = quantised_gpu.widen_int8(codes.to(DEVICE), scale.to(DEVICE), dtype)
        expected = quantised.from_int8(codes, scale)
    else:
        codes, scale = quantised.to_nf4(weight)
        levels = torch.tensor(quantised.NF4_LEVELS, device=DEVICE)
        given = codes.to(DEVICE), scale.to(DEVICE), levels
        found = quantised_gpu.widen_nf4(*given, rows, columns, dtype)
        expected = quantised.from_nf4(codes, scale, (rows, columns))
    same(found, expected.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("on_gpu_code")
def test_a_quantised_layer_widens_in_one_pass_unless_that_is_refused(
    kind: Kind, calls: Counter[str]
) -> None:
    layer = QuantisedLinear(nn.Linear(70, 33), kind).to(DEVICE)
    x = draw(5, 70, dtype=torch.bfloat16).requires_grad_()
    y = layer(x)
    dy = draw(5, 33, dtype=torch.bfloat16)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert calls == {f"widen_{kind}": 2}
    registry.refuse(quantised_gpu.WIDENING, "wrong")
    try:
        eager = layer(x)
        same(eager, y)
        same(torch.autograd.grad(eager, x, dy)[0], dx)
    finally:
        registry.allow_all()
    assert calls == {f"widen_{kind}": 2}
