"""AdamW in one launch: bit for bit its reference, which is held to float64; in the interpreter.

The interpreter runs the kernel's Python on a processor where no GPU is. Optimizers take the kernel
for a processor's tensors here, so that both ways can be compared.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covering import covering
from hasten.parts.kernels import adamw, low_bit, registry
from hasten.parts.kernels.adamw import TensorUpdate, dice_key, rule_of
from hasten.parts.optim import fused_adamw
from hasten.parts.optim.compact_adamw import CompactAdamW
from hasten.parts.optim.fused_adamw import FusedAdamW
from hasten.parts.optim.master_weights import MasterWeights
from triton_marks import DEVICE, needs_triton, on_gpu

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FORMATS = (torch.float32, torch.bfloat16)
SIZES = (1, 256, 257, 1032)
MOMENTS = ("bf16", "int8")
formats = pytest.mark.parametrize("moments", MOMENTS)


pytestmark = [
    needs_triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities
    *on_gpu,
]


@pytest.fixture(autouse=True)
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Processors take the kernel, too."""
    monkeypatch.setattr(adamw, "_why_no_triton", lambda device: "")
    yield monkeypatch
    registry.allow_all()


def drawn(count: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=draw)


def a_tensor(
    count: int, weight: torch.dtype, grad: torch.dtype, moments: Any, copied: bool, seed: int
) -> TensorUpdate:
    """An update in its third step; moments of all sizes, some zero."""
    w, g, m, v = (drawn(count, 4 * seed + i) for i in range(4))
    m, v = 0.1 * m * w**4, (0.1 * v).square() * g**6
    g[::7] = v[::7] = 0
    scales = None
    if moments == "int8":
        m, one = low_bit.quantised_signed(m)
        v, other = low_bit.quantised_squares(
            v, torch.arange(count, dtype=torch.int32) * 977 % 2**16
        )
        scales = one.to(DEVICE), other.to(DEVICE)
    else:
        m, v = m.to(moments), v.to(moments)
    copied_to = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE) if copied else None
    tensors = (w.to(DEVICE, weight), g.to(DEVICE, grad), m.to(DEVICE), v.to(DEVICE))
    return TensorUpdate(*tensors, rule_of(SETTINGS, 3), scales, copied_to, dice_key(5, seed, 3))


def tensors_of(one: TensorUpdate) -> list[Tensor]:
    found = [one.weight, one.first, one.second, *(one.scales or ())]
    return found if one.copy is None else [*found, one.copy]


CASES = [
    (weight, grad, moments, copied)
    for weight, grad, moments, copied in itertools.product(
        FORMATS, FORMATS, (*FORMATS, "int8"), (False, True)
    )
    if not (copied and weight is torch.bfloat16)
]


@pytest.mark.parametrize(
    ("case", "divided"),
    [(case, number // 2 % 2 == 1) for number, case in enumerate(CASES)],
    ids=str,
)
def test_the_kernel_has_the_bits_of_its_reference(case: Any, divided: bool) -> None:
    """Several tensors of a launch, ragged and aligned, every format of weights and moments."""
    given = [a_tensor(n, *case, seed) for seed, n in enumerate(SIZES)]
    expected = copy.deepcopy(given)
    divisor = torch.tensor(3.0, device=DEVICE) if divided else None
    adamw.update(given, divisor)
    for one, other in zip(given, expected, strict=True):
        adamw.reference_update(other, divisor)
        for a, b in zip(tensors_of(one), tensors_of(other), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("moments", [torch.float32, "int8"])
def test_a_tensor_of_several_programs_is_moved_to_its_end(
    moments: Any, by_kernel: pytest.MonkeyPatch
) -> None:
    from hasten.parts.kernels import adamw_triton

    by_kernel.setattr(adamw_triton, "CHUNK", 2048)  # two tiles
    sizes = (2 * adamw_triton.CHUNK + 264, 300, adamw_triton.CHUNK)
    given = [a_tensor(n, *FORMATS, moments, False, seed) for seed, n in enumerate(sizes)]
    expected = copy.deepcopy(given)
    adamw.update(given)
    for one, other in zip(given, expected, strict=True):
        adamw.reference_update(other)
        assert all(map(torch.equal, tensors_of(one), tensors_of(other)))


@pytest.mark.parametrize("moments", [*FORMATS, "int8"])
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_gradient_that_is_no_number_shows_and_stays_in_its_tensor(
    moments: Any, wrong: float
) -> None:
    given = [a_tensor(1000, torch.float32, torch.float32, moments, True, seed) for seed in (0, 1)]
    given[0].grad[300] = wrong
    expected = copy.deepcopy(given)
    adamw.update(given)
    for one, other in zip(given, expected, strict=True):
        adamw.reference_update(other)
        for a, b in zip(tensors_of(one), tensors_of(other), strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert not given[0].weight[300].isfinite()
    assert given[1].weight.isfinite().all()


@pytest.mark.parametrize("grad", FORMATS)
def test_the_reference_moves_as_float64_does(grad: torch.dtype) -> None:
    one = a_tensor(5000, torch.float32, grad, torch.float32, True, 1)
    g, w, m, v = (t.double() for t in (one.grad / 4.0, one.weight, one.first, one.second))
    (beta1, beta2), rate, eps = SETTINGS["betas"], SETTINGS["lr"], SETTINGS["eps"]
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
    w = w * (1 - rate * SETTINGS["weight_decay"])
    w -= rate * (m / (1 - beta1**3)) / ((v / (1 - beta2**3)).sqrt() + eps)
    adamw.reference_update(one, torch.tensor(4.0, device=DEVICE))
    for found, true, near in ((one.weight, w, 2e-6), (one.first, m, 1e-6), (one.second, v, 1e-30)):
        torch.testing.assert_close(found.double(), true, rtol=3e-6, atol=near)
    assert one.copy is not None
    assert torch.equal(one.copy, one.weight.bfloat16())


def test_places_are_found_beside_every_border() -> None:
    """Values of the tables, borders between them, and the float32 numbers next to each."""
    from parts.optim.adamw_places import places

    cpu = torch.device("cpu")
    signed, squared = low_bit.signed_table(cpu), low_bit.squared_table(cpu)
    borders = low_bit.signed_borders(cpu)
    edges = torch.cat([signed, squared, -squared, borders])
    edges = torch.cat([edges, *(edges.nextafter(torch.tensor(v)) for v in (-2.0, 2.0))]).clamp(
        -1, 1
    )
    draw = torch.Generator().manual_seed(0)
    size = 10 ** (-12 * torch.rand(2**14 - len(edges), generator=draw))
    shares = torch.cat([edges, size * torch.randn(len(size), generator=draw).sign()])
    dice = torch.randint(0, 2**16, (len(shares),), generator=draw, dtype=torch.int32)
    found = [t.cpu() for t in places(shares.to(DEVICE), dice.to(DEVICE))]
    assert torch.equal(found[0].long(), torch.bucketize(shares, borders))
    above = torch.bucketize(shares.abs(), squared).clamp(1, 255)
    low, high = squared[above - 1], squared[above]
    expected = above - 1 + (dice < (shares.abs() - low) / (high - low) * 65536)
    assert torch.equal(found[1].long(), expected.maximum((shares != 0).long()))


def test_dice_are_those_of_seed_tensor_and_step() -> None:
    keys = {dice_key(seed, place, step) for seed in (0, 1) for place in (0, 1) for step in (1, 2)}
    assert len(keys) == 8
    drawn_at = torch.stack([adamw.hashes(1 << 14, key) & 0xFFFF for key in sorted(keys)])
    counts = torch.stack([torch.bincount(d >> 12, minlength=16) for d in drawn_at]).double()
    expected = (1 << 14) / 16
    assert float(((counts - expected) ** 2 / expected).sum(1).max()) < 45  # chi-square, 15 degrees
    together = torch.corrcoef(drawn_at.double())
    assert float((together - torch.eye(8)).abs().max()) < 0.05
    for lag in (1, 2, 256):
        pair = torch.stack([drawn_at[0, lag:], drawn_at[0, :-lag]]).double()
        assert float(torch.corrcoef(pair)[0, 1].abs()) < 0.05


# Optimizers that take it.


def steps(optimizer: Any, weights: list[nn.Parameter], count: int, first: int = 0) -> list[Tensor]:
    for step in range(first, first + count):
        for place, weight in enumerate(weights):
            grad = drawn(weight.numel(), 100 * step + place).view(weight.shape)
            weight.grad = grad.to(weight.device, weight.dtype)
        optimizer.step()
    return [w.detach().clone() for w in weights]


def some_weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    shapes = ((40, 40), (16, 64), (33,), (5, 7))
    values = (drawn(torch.Size(s).numel(), i).view(s) for i, s in enumerate(shapes))
    return [nn.Parameter(v.to(DEVICE, dtype)) for v in values]


@pytest.mark.parametrize(("moments", "dtype"), covering(MOMENTS, FORMATS), ids=str)
def test_compact_adamw_follows_its_own_way_without_a_kernel(
    moments: str, dtype: torch.dtype, by_kernel: pytest.MonkeyPatch
) -> None:
    """Within the rounding of moments, and of weights where they are bf16."""
    start = some_weights(dtype)
    found = steps(CompactAdamW(start, moments=moments, **SETTINGS), start, 5)
    by_kernel.setattr(CompactAdamW, "_by_kernel", lambda *_: False)
    again = some_weights(dtype)
    expected = steps(CompactAdamW(again, moments=moments, **SETTINGS), again, 5)
    for one, other, begin in zip(found, expected, some_weights(dtype), strict=True):
        path = float((other - begin.detach()).float().norm())
        apart = float((one - other).float().norm())
        bound = {"bf16": 0.01, "int8": 0.06}[moments] + 0.3 * (dtype is torch.bfloat16)
        assert 0 <= apart / path < bound


@formats
def test_a_run_goes_on_where_the_kernel_is_missing(moments: str) -> None:
    """The state is the same: a run begun with the kernel goes on without it, and back."""
    weights = some_weights()
    optimizer = CompactAdamW(weights, moments=moments, **SETTINGS)
    steps(optimizer, weights, 2)
    before = {k: (v.shape, v.dtype) for k, v in optimizer.state[weights[0]].items() if k != "step"}
    registry.refuse(adamw.COMPACT, "wrong")
    registry.refuse(adamw.PLAIN, "wrong")
    found = steps(optimizer, weights, 2, first=2)
    after = {k: (v.shape, v.dtype) for k, v in optimizer.state[weights[0]].items() if k != "step"}
    assert before == after
    assert all(t.isfinite().all() for t in found)


@pytest.mark.parametrize("kernel", [True, False])
def test_updates_too_small_for_bf16_are_right_in_the_mean(
    kernel: bool, by_kernel: pytest.MonkeyPatch
) -> None:
    """A tenth of a step of bf16 each; rounded to the nearest, no weight would ever move."""
    if not kernel:
        by_kernel.setattr(CompactAdamW, "_by_kernel", lambda *_: False)
    weight = nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16, device=DEVICE))
    rate = 2**-7 / 10
    optimizer = CompactAdamW([weight], lr=rate, weight_decay=0.0, moments="bf16")
    for _ in range(20):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
    moved = weight.detach().double() - 1
    spread = float(moved.std()) / 32
    assert abs(float(moved.mean()) - 20 * rate) < 5 * spread
    assert float(moved.max()) > 0


def test_the_launches_of_a_step_do_not_grow_with_its_tensors(
    by_kernel: pytest.MonkeyPatch,
) -> None:
    launches: list[int] = []
    usual = adamw._launch

    def counted(table: Any, *more: Any) -> None:
        launches.append(len(table[0]))
        usual(table, *more)

    by_kernel.setattr(adamw, "_launch", counted)
    for count in (2, 9):
        launches.clear()
        weights = [nn.Parameter(torch.ones(16, 16, device=DEVICE)) for _ in range(count)]
        steps(CompactAdamW(weights, moments="int8", **SETTINGS), weights, 1)
        assert launches == [count]


def test_odd_strides_and_other_formats_go_the_usual_way() -> None:
    turned = nn.Parameter(torch.ones(7, 5, device=DEVICE).t())
    double = nn.Parameter(torch.ones(4, 4, dtype=torch.float64, device=DEVICE))
    empty = nn.Parameter(torch.ones(0, 5, device=DEVICE))
    steps(CompactAdamW([turned, double, empty], **SETTINGS), [turned, double, empty], 1)
    assert float(turned.detach().min()) != 1
    assert float(double.detach().min()) != 1


def test_one_pass_moves_as_torch_does_and_divides_once() -> None:
    start = some_weights()
    optimizer = FusedAdamW(start, **SETTINGS)
    optimizer.grad_scale = torch.tensor(4.0, device=DEVICE)
    found = steps(optimizer, start, 1)
    wide = [nn.Parameter(w.detach().double()) for w in some_weights()]
    for place, weight in enumerate(wide):
        weight.grad = drawn(weight.numel(), place).view(weight.shape).to(DEVICE).double() / 4
    torch.optim.AdamW(wide, **SETTINGS).step()
    for one, other in zip(found, wide, strict=True):
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-5, atol=1e-6)
    assert not hasattr(optimizer, "grad_scale")


def test_transposed_weights_take_their_own_gradients() -> None:
    """By the kernel and by its reference, which runs in its place."""
    whole = a_tensor(12 * 16, torch.float32, torch.bfloat16, torch.float32, True, 0)
    assert whole.copy is not None
    tensors = (*whole[:4], whole.copy)
    turned = [t.view(12, 16).t().contiguous().t() for t in tensors]
    given = [
        TensorUpdate(*turned[:4], whole.rule, copy=turned[4]),
        TensorUpdate(*(t.clone() for t in turned[:4]), whole.rule, copy=turned[4].clone()),
    ]
    adamw.reference_update(whole)
    adamw.update(given[:1])
    adamw.reference_update(given[1])
    for one in given:
        assert one.copy is not None
        assert torch.equal(one.weight.reshape(-1), whole.weight)
        assert torch.equal(one.copy.reshape(-1), whole.copy)


@pytest.mark.skipif(bool(fused_adamw.why_not("cpu")), reason="no C++ compiler")
@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_of_one_pass_goes_on_on_the_other_kind_of_device(
    first: bool, by_kernel: pytest.MonkeyPatch
) -> None:
    """The kernel after the processor's loop, and the other way round."""

    def run(kernel: bool, weights: list[nn.Parameter], state: Any, begin: int) -> Any:
        by_kernel.setattr(adamw, "takes", lambda *given: kernel)
        optimizer = FusedAdamW(weights, **SETTINGS)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        return steps(optimizer, weights, 3, begin), optimizer.state_dict()

    whole = some_weights()
    _, state = run(False, whole, None, 0)
    expected, _ = run(False, whole, state, 3)
    parts = some_weights()
    _, state = run(first, parts, None, 0)
    found, _ = run(not first, parts, state, 3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def a_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 16).to(DEVICE)


def lent_formats(masters: MasterWeights) -> set[torch.dtype]:
    return {p.grad.dtype for p in masters.parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [FusedAdamW, CompactAdamW])
def test_masters_lend_their_bf16_gradients_and_get_their_copies_written(kind: Any) -> None:
    model, masters, x = a_model(), MasterWeights(), drawn(16 * 24).view(16, 24).to(DEVICE)
    masters.prepare(model)
    optimizer = kind(model.parameters(), **SETTINGS)
    masters.attach_optimizer(optimizer)
    assert optimizer._step_supports_amp_scaling
    for _ in range(3):
        model(x).square().mean().backward()
        masters.accumulate_gradients()
        assert lent_formats(masters) == {torch.bfloat16}
        optimizer.step()
        masters.update_model_weights()
        for master in masters.parameters():
            master.grad = None
    for working, master in zip(model.parameters(), masters.parameters(), strict=True):
        assert torch.equal(working, master.bfloat16())


def test_without_the_kernel_compact_adamw_takes_float32_gradients(
    by_kernel: pytest.MonkeyPatch,
) -> None:
    by_kernel.setattr(CompactAdamW, "_by_kernel", lambda *_: False)
    model, masters = a_model(), MasterWeights()
    masters.prepare(model)
    optimizer = CompactAdamW(model.parameters(), **SETTINGS)
    masters.attach_optimizer(optimizer)
    assert not optimizer._step_supports_amp_scaling
    model(torch.ones(2, 24, device=DEVICE)).sum().backward()
    masters.accumulate_gradients()
    assert lent_formats(masters) == {torch.float32}


@pytest.mark.parametrize("kind", [FusedAdamW, CompactAdamW])
def test_a_step_whose_scaled_gradients_overflow_is_left_out(kind: Any) -> None:
    """torch's scaler leaves that to optimizers which divide gradients themselves."""
    weight = nn.Parameter(torch.ones(4, 4, device=DEVICE))
    optimizer, scaler = kind([weight], **SETTINGS), torch.amp.GradScaler(DEVICE, init_scale=4.0)
    before = weight.detach().clone()
    for wrong in (float("inf"), 0.0):
        scaler.scale((weight * (4.0 + wrong)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before) == bool(wrong)
        optimizer.zero_grad()
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    weight.grad = torch.ones_like(weight)
    optimizer.step()  # without the scaler, which took its attributes away
    assert weight.isfinite().all()


def test_numbers_in_another_order_are_refused() -> None:
    one = a_tensor(12, torch.float32, torch.float32, torch.float32, False, 0)
    turned = [t.view(3, 4) for t in (one.weight, one.grad, one.first, one.second)]
    turned[1] = turned[1].t().contiguous().t()
    with pytest.raises(ValueError, match="in the same order"):
        adamw.update([TensorUpdate(*turned, one.rule)])


def test_torch_knows_what_the_operator_changes() -> None:
    one = a_tensor(8, torch.float32, torch.float32, torch.float32, True, 0)
    assert one.copy is not None
    lists = [[one.weight], [one.grad], [one.first], [one.second], [], [one.copy]]
    numbers = [0.1, 0.9, 0.1, 0.9, 0.1, 1.0, 1e-8]
    operator: Any = adamw.adamw_
    torch.library.opcheck(
        operator,
        (*lists, numbers, [0], None),
        test_utils=("test_schema", "test_faketensor"),
    )
