"""The GPU's experts against float64, in Triton's interpreter where there is no GPU.

The grouped product is torch's own of the device: on a processor it takes bf16 as a GPU's does.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from covering import covering
from fused_models import EXAMPLES, check_half, experts_layer, model_of, outcome
from hasten.parts.data.collate import packed
from hasten.parts.kernels import registry
from hasten.parts.nn import experts_gpu, fused_experts
from hasten.techniques.experts import ExpertsImplementation
from host_waits import HostWaits
from interpreted_triton import round_as_a_gpu
from tiny import COMMON, MLA, examples, job_context, language_job, run, session_of, tiny_model
from triton_marks import DEVICE, far, needs_triton, on_gpu
from triton_marks import draw as drawn

pytestmark = [*on_gpu, needs_triton]
BF16 = torch.bfloat16
EXPERTS, WIDE, INNER = 4, 40, 24
# A rounding of 2^-9 at each of 4 steps, in the mean of all numbers.
BOUND = 1.5e-2
DWEIGHTS = 2  # the number of the routing weights' gradient among the results
ROUNDING = {torch.float32: 2e-6, BF16: 2**-8, torch.float16: 2**-11}
dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
few = settings(max_examples=8)


@pytest.fixture(autouse=True)
def _on_gpu_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the GPU's code for a processor's tensors, rounded as a GPU rounds."""
    if DEVICE == "cpu":
        round_as_a_gpu(monkeypatch)
        monkeypatch.setattr(fused_experts, "on_gpu", lambda x: True)
        monkeypatch.setattr(experts_gpu, "fits", experts_gpu.takes)


draw = partial(drawn, dtype=BF16)


def loops(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One token and one choice after the other."""
    tokens = []
    for token, (chosen, shares) in enumerate(zip(index.tolist(), weights, strict=True)):
        total = torch.zeros_like(x[token])
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            total = total + share * (down[expert] @ (F.silu(gate) * up))
        tokens.append(total)
    return torch.stack(tokens)


def weights_of_experts(count: int = EXPERTS) -> list[Tensor]:
    return [draw(count, 2 * INNER, WIDE) * 0.2, draw(count, WIDE, INNER) * 0.2]


def passed(compute: Any, index: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Output and all gradients."""
    x, weights, gate_up, down = (t.clone().requires_grad_() for t in tensors)
    out = compute(x, index, weights, gate_up, down)
    out.backward(draw(*out.shape, seed=5).to(out.dtype))
    return [out.detach(), *(t.grad for t in (x, weights, gate_up, down))]  # type: ignore[misc]


def compare(index: Tensor, dtype: torch.dtype = torch.float32, count: int = EXPERTS) -> None:
    """The GPU's experts and loops in float64; ``dtype`` is that of the routing weights."""
    index = index.to(DEVICE)
    weights = draw(*index.shape, dtype=dtype).abs()
    tensors = [draw(len(index), WIDE), weights, *weights_of_experts(count)]
    found = passed(experts_gpu.run, index, tensors)
    expected = passed(loops, index, [t.double() for t in tensors])
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == [tensors[0], *tensors][number].dtype
        # A routing weight's gradient is a sum of terms of about 1, and may come out near 0.
        least = 2 * other.numel() ** 0.5 if number == DWEIGHTS else 1e-10
        assert (one.double() - other).norm() <= BOUND * max(other.norm().item(), least)


def choices(tokens: int, each: int, count: int = EXPERTS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=generator)[:each] for _ in range(tokens)])


@pytest.mark.parametrize(
    ("index", "weights"),
    [
        (choices(9, 4), torch.float32),  # all experts
        (choices(11, 2).to(torch.int32), torch.float32),
        (choices(9, 2), BF16),
    ],
)
def test_results_and_gradients_are_those_of_loops_in_float64(
    index: Tensor, weights: torch.dtype
) -> None:
    compare(index, weights)


def test_more_experts_than_a_byte_counts_are_sorted_too() -> None:
    compare(torch.tensor([[299, 0], [256, 255], [299, 1]]), count=300)


@few
@given(
    tokens=st.integers(1, 12),
    each=st.integers(1, 3),
    used=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_any_number_of_tokens_and_any_load(tokens: int, each: int, used: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    compare(torch.randint(0, used, (tokens, each), generator=generator))


def test_an_expert_that_no_token_chose_gets_a_zero_gradient() -> None:
    index = choices(9, 2, 3).to(DEVICE)  # never the fourth
    tensors = [draw(9, WIDE), draw(9, 2).abs(), *weights_of_experts()]
    *_, dgate_up, ddown = passed(experts_gpu.run, index, tensors)
    assert not dgate_up[3].any()
    assert not ddown[3].any()


def test_the_same_bits_come_again() -> None:
    index = choices(12, 2).to(DEVICE)
    tensors = [draw(12, WIDE), draw(12, 2).abs(), *weights_of_experts()]
    one, other = (passed(experts_gpu.run, index, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# The passes.


def positions_of(tokens: int, each: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens * each, generator=generator).view(tokens, each).to(DEVICE)


sizes = given(tokens=st.integers(1, 9), each=st.integers(1, 4), n=st.integers(1, 70))


@dtypes
@few
@sizes
def test_a_combined_row_is_the_weighted_sum_of_its_pairs(
    dtype: torch.dtype, tokens: int, each: int, n: int
) -> None:
    x, positions = draw(tokens * each, n, dtype=dtype), positions_of(tokens, each)
    weights = draw(tokens, each, dtype=torch.float32)
    wide = x.double()[positions]
    bound = 2 * ROUNDING[dtype]
    found = experts_gpu.combine(x, positions, weights)
    assert far(found, (wide * weights.double().unsqueeze(2)).sum(1)) <= bound
    assert far(experts_gpu.combine(x, positions, None), wide.sum(1)) <= bound


@dtypes
@few
@sizes
def test_a_row_is_spread_to_its_pairs_and_their_sum_is_the_gradient(
    dtype: torch.dtype, tokens: int, each: int, n: int
) -> None:
    x, positions = draw(tokens, n, dtype=dtype), positions_of(tokens, each)
    found = experts_gpu.spread(x, positions)
    assert torch.equal(found[positions], x.unsqueeze(1).expand(-1, each, -1))
    turned = x.mT.contiguous().mT  # the same numbers, lying the other way
    assert torch.equal(experts_gpu.spread(turned, positions), found)


def plain_gate(x: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """Each row's activation times the weight of its pair."""
    gate, up = x.chunk(2, dim=1)
    of_rows = torch.empty_like(weights.flatten()).scatter(0, positions.flatten(), weights.flatten())
    return F.silu(gate) * up * of_rows.unsqueeze(1)


@few
@sizes
@pytest.mark.parametrize(("inner", "dtype"), covering([False, True], ROUNDING), ids=str)
def test_a_gate_and_its_gradients(
    inner: bool, dtype: torch.dtype, tokens: int, each: int, n: int
) -> None:
    x, positions = draw(tokens * each, 2 * n, dtype=dtype), positions_of(tokens, each)
    weights, grad = draw(tokens, each, dtype=torch.float32), draw(tokens * each, n, dtype=dtype)
    bound = 3 * ROUNDING[dtype]
    wide, shares = x.double().requires_grad_(), weights.double().requires_grad_()
    weighted = plain_gate(wide, positions, shares)
    ones = torch.ones_like(weights)
    assert far(experts_gpu.gate(x), plain_gate(x.double(), positions, ones.double())) <= bound
    dx, dweights, h = experts_gpu.gate_backward(grad, x, positions, weights, inner)
    expected = torch.autograd.grad(weighted, (wide, shares), grad.double())
    assert far(dx, expected[0]) <= bound
    assert far(dweights, expected[1]) <= 1e-5  # a sum in float32, which is never rounded to less
    if inner:
        assert far(h, weighted.detach()) <= bound
    else:
        assert not h.numel()


def test_rows_wider_than_a_program_are_read_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_gpu, "BLOCK", 16)
    compare(choices(6, 2))


def test_no_tokens_are_no_work() -> None:
    nothing = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    x = draw(0, 8)
    assert experts_gpu.spread(x, nothing).shape == (0, 8)
    assert experts_gpu.combine(x, nothing, None).shape == (0, 8)
    assert experts_gpu.gate(x).shape == (0, 4)
    assert not experts_gpu.takes(x, draw(2, 16, 8), draw(2, 8, 8))


def test_operators_pass_torchs_own_checks() -> None:
    x, positions, weights = draw(6, 8), positions_of(3, 2), draw(3, 2, dtype=torch.float32)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (experts_gpu.spread, (draw(3, 8), positions)),
        (experts_gpu.combine, (x, positions, weights)),
        (experts_gpu.combine, (x, positions, None)),
        (experts_gpu.gate, (x,)),
        (experts_gpu.gate_backward, (draw(6, 4), x, positions, weights, True)),
        (experts_gpu.gate_backward, (draw(6, 4), x, positions, weights, False)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


# A layer, and a model.


def layer(dtype: torch.dtype = BF16) -> Any:
    return experts_layer("deepseek_v3").to(DEVICE, dtype)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Binds the GPU's code to the layers of a module."""
    monkeypatch.setattr(experts_gpu, "why_not", lambda device: "")
    return lambda module: fused_experts.fuse_experts(nn.ModuleList([module]), "cuda")


def layer_inputs(module: Any, tokens: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    x = draw(tokens, module.gate_up_proj.shape[2])
    return x, choices(tokens, 2).to(DEVICE), draw(tokens, 2, dtype=torch.float32).abs()


def test_frozen_experts_store_no_tokens_and_make_no_weight_gradient(bound: Any) -> None:
    module = layer().requires_grad_(False)
    bound(module)
    x, index, weights = layer_inputs(module)
    out = module(x.requires_grad_(), index, weights.requires_grad_())
    stored = out.grad_fn.saved_tensors
    assert stored[0] is None
    wide = 2 * module.down_proj.shape[2]
    assert max(t.numel() for t in stored[4:] if t is not None) == index.numel() * wide
    out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert module.down_proj.grad is None


def test_the_host_never_waits(bound: Any) -> None:
    module = layer()
    bound(module)
    x, index, weights = layer_inputs(module)
    x.requires_grad_()
    with HostWaits([x, index, weights, *module.parameters()]) as waits:
        module(x, index, weights).sum().backward()
    assert waits.places == []


def test_autocast_rounds_tokens_and_weights(bound: Any) -> None:
    module = layer(torch.float32)
    half = copy.deepcopy(module).bfloat16()
    bound(module)
    bound(half)
    x, index, weights = layer_inputs(module)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = module(x.float(), index, weights)
    assert found.dtype == torch.float32
    assert torch.equal(found, half(x, index, weights).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_formats_go_through_the_layers_own_code(dtype: torch.dtype, bound: Any) -> None:
    module = layer(dtype)
    module.config._experts_implementation = "eager"
    x, index, weights = layer_inputs(module)
    x, weights = x.to(dtype), weights.to(dtype)
    plain = module(x, index, weights)
    bound(module)
    assert torch.equal(module(x, index, weights), plain)


@pytest.mark.parametrize("kernel", [experts_gpu.ROUTED, experts_gpu.PRODUCT])
def test_a_refused_kernel_leaves_the_layer_to_its_own_code(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    device = torch.device("cuda")
    tensors = [torch.empty(2, 8, device="meta", dtype=BF16)] * 3
    monkeypatch.setattr(torch.Tensor, "device", property(lambda tensor: device))
    monkeypatch.setattr(experts_gpu, "takes", lambda *tensors: True)
    assert experts_gpu.fits(*tensors)
    registry.refuse(kernel, "wrong")
    try:
        assert not experts_gpu.fits(*tensors)
    finally:
        registry.allow_all()


def test_what_keeps_them_from_a_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "for processors and NVIDIA GPUs, not for mps" in experts_gpu.why_not("mps")
    monkeypatch.setattr(experts_gpu.fused_gpu, "why_not", lambda device: "")
    assert experts_gpu.why_not("cuda") == fused_experts.why_not("cuda:0") == ""
    monkeypatch.delattr(F, "grouped_mm")
    assert "grouped_mm, which this torch lacks" in experts_gpu.why_not("cuda")
    with pytest.raises(ValueError, match="can't be fused here"):
        fused_experts.fuse_experts(nn.ModuleList([layer()]), "cuda")


ODD = {
    "another format": lambda x, a, b: (x.float(), a, b),
    "a side of no whole 16 bytes": lambda x, a, b: (x[:, :12], a[:, :, :12], b[:, :12]),
    "an address within 16 bytes": lambda x, a, b: (x, _shifted(a), b),
    "a matrix that lies the other way": lambda x, a, b: (x, a, b.mT.contiguous().mT),
}


def _shifted(t: Tensor) -> Tensor:
    moved = t.new_empty(t.numel() + 1)[1:].view_as(t)
    return moved.copy_(t)


def test_tensors_that_the_product_does_not_take_are_refused() -> None:
    x, (gate_up, down) = draw(5, WIDE), weights_of_experts()
    assert experts_gpu.takes(x, gate_up, down)
    for name, change in ODD.items():
        assert not experts_gpu.takes(*change(x, gate_up, down)), name


def test_a_compiled_layer_keeps_them_in_one_graph(bound: Any) -> None:
    module = layer()
    bound(module)
    inputs = layer_inputs(module)
    expected = module(*inputs)
    compiled: Any = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="the job is a processor's")
def test_the_technique_is_for_gpus_too_and_says_what_ran(bound: Any) -> None:
    """In float32 the fused code is bound, and the layer's own runs."""
    technique = ExpertsImplementation(kind="fused")
    for dtype in (BF16, torch.float32):
        model, data = partial(tiny_model, "deepseek_v3", dtype=dtype), examples(4, longest=6)
        job = language_job(model, data=data, steps=1, batch=2)
        on_cuda = replace(job_context(job, "deepseek_v3"), device="cuda")
        assert technique.unsupported_reasons(on_cuda) == ()
        session = session_of(job, technique, architecture="deepseek_v3")
        run(session)
        found = technique.check_effect(session)
        assert found.effective == (dtype is BF16), found.evidence
        assert ("calls of hasten_gpu::expert" in found.evidence) == found.effective


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_whole_model_trains_by_them(bound: Any) -> None:
    """No further from float64 than the model that computes its experts one by one, in bf16."""
    plain, fused = (model_of("deepseek_v2", BF16).to(DEVICE) for _ in range(2))
    wide = model_of("deepseek_v2", torch.float64).to(DEVICE)
    assert COMMON["hidden_size"] % 8 == 0
    assert MLA["moe_intermediate_size"] % 8 == 0, "or the product would refuse them"
    fused_experts.fuse_experts(fused, "cuda")
    assert fused_experts.fused(fused) == 1
    few_records = packed(sorted(EXAMPLES, key=lambda r: r.length)[:2])
    batch = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in few_records.items()}
    check_half(outcome(fused, batch), outcome(plain, batch), outcome(wide, batch))
