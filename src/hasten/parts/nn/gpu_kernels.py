"""GPU kernels that can be refused by name: small inputs, references, replacements.

Tests run them in Triton's interpreter. On a GPU a child process (this module) runs them before the
first step (:mod:`hasten.parts.kernels.registry`). References are plain PyTorch in float64 on the
processor, those of :mod:`hasten.parts.nn.kernel_variants` where there is one; codecs have to give
the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.parts.data.collate import IGNORED
from hasten.parts.kernels import adamw, codec_gpu, codec_reference, low_bit, registry, rowwise
from hasten.parts.kernels.registry import (
    LEAST_CAPABILITY,
    GpuKernel,
    Operation,
    Pairs,
    Sizes,
    compare,
    moved,
)
from hasten.parts.nn import attention, experts_gpu, fused_gpu, quantised, quantised_gpu
from hasten.parts.nn.kernel_variants import (
    ADAMW,
    ATTENTION,
    EPS,
    EXPERTS,
    GATES,
    LOSSES,
    NORMS,
    NORMS_BESIDE,
    ROUTED,
    STEPS,
    UPDATES,
    attend_as_trained,
    gradients,
    norm,
    rotated,
    torch_norm,
    torch_update,
    update,
)

FLOAT8_CAPABILITY = (9, 0)  # compute capability required by float8 products with scales by row
# Largest tested sides of an expert: more than one block of columns, no powers of two.
WIDEST_EXPERT = (2560, 1408)
DIVISOR = 4.0  # divisor of gradients, as in clipping
# Allowed difference: the result's own rounding, and that of a few sums in float32.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
HALF = (torch.bfloat16, torch.float16)
Check = Callable[[Sizes, torch.dtype, torch.device], Pairs]


def _draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _checked(operation: Operation, run: Callable[..., Any], *more: Any) -> Check:
    """Returns a check of a kernel with an operation's inputs (plus ``more``) and reference."""

    def check(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
        inputs = (*operation.inputs(sizes, torch.Generator().manual_seed(0)), *more)
        return compare(run, operation.reference, inputs, dtype, device)

    return check


def _norm(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    y, inverse = fused_gpu.rms_norm(x, weight, EPS)
    return y, *fused_gpu.rms_norm_backward(grad, x, weight, inverse, None)


def _norm_beside(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    y, inverse = fused_gpu.rms_norm(x, weight, EPS)
    return y + x, *fused_gpu.rms_norm_backward(grad, x, weight, inverse, grad)


def _norms(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks a norm, its gradients without and with a residual, and a row with an infinity."""
    yield from _checked(NORMS, _norm)(sizes, dtype, device)
    yield from _checked(NORMS_BESIDE, _norm_beside)(sizes, dtype, device)
    x, weight, _ = NORMS.inputs(sizes, torch.Generator().manual_seed(0))
    x[1, 3] = torch.inf
    run = lambda x, weight: (fused_gpu.rms_norm(x, weight, EPS)[0],)  # noqa: E731
    yield from compare(run, lambda *args: (norm(*args),), (x, weight), dtype, device)


def _swiglu(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return fused_gpu.swiglu(gate, up), *fused_gpu.swiglu_backward(grad, gate, up)


def _rotate(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks full and partial rotary heads, pairs in all layouts, forward and backward."""
    m = sizes.head // 2
    angle = _draw(1, sizes.rows, m)
    for plain in (0, 2 * sizes.head):
        x = _draw(0, sizes.rows, sizes.heads, plain + 2 * m + 3)
        for pairs_in, pairs_out in ((False, False), (False, True), (True, False), (True, True)):
            back = pairs_out and not pairs_in

            def run(x: Tensor, cos: Tensor, sin: Tensor, *layout: bool) -> tuple[Tensor, ...]:
                return (fused_gpu.rotate(x[..., 3:], cos, sin, *layout),)

            def true(x: Tensor, cos: Tensor, sin: Tensor, *layout: bool) -> tuple[Tensor, ...]:
                *pairs, back = layout
                return (rotated(x[..., 3:], cos, -sin if back else sin, *pairs),)

            inputs = (x, angle.cos(), angle.sin(), pairs_in, pairs_out, back)
            yield from compare(run, true, inputs, dtype, device)


def _cross_entropy(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks rows of several blocks, the last not full, with unlabelled rows."""
    n = 2 * fused_gpu.LOGITS_BLOCK + 77
    logits = 3 * _draw(0, sizes.rows, n)
    logits[2, : fused_gpu.LOGITS_BLOCK + 5] = -torch.inf
    labels = torch.arange(sizes.rows) * 997 % 77 + n - 77
    labels[1] = IGNORED

    def run(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return fused_gpu.cross_entropy_(logits, labels, IGNORED), logits

    yield from compare(run, LOSSES.reference, (logits, labels), dtype, device)


def _codec(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks codes and errors, rounded to nearest and at random; and decoding."""
    block, count = 256, 5 * 256 - 3  # the last block isn't full
    flat = _draw(0, count, dtype=dtype).to(device) * 10
    for bits in (8, 4):
        for seed in (None, 7):
            outputs = []
            for way, x in ((codec_gpu, flat), (codec_reference, flat.cpu())):
                codes = torch.zeros(5 * block * bits // 8, dtype=torch.uint8, device=x.device)
                scales = torch.zeros(5, dtype=torch.int16, device=x.device)
                residual = torch.full((count,), 0.01, device=x.device)
                residual_out, mean = torch.zeros_like(residual), torch.zeros_like(residual)
                way.encode(x, residual, residual_out, codes, scales, block, bits, seed)
                several = codes.repeat(3, 1), scales.repeat(3, 1)
                way.decode(*several, mean, block, bits, 1 / 3, False)
                outputs.append((codes, scales, residual_out, mean))
            yield from zip(*outputs, strict=True)


def _varlen(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks two documents in a row, grouped keys; and latent attention with narrower values."""
    run = gradients(attend_as_trained, learning=3)
    head = sizes.head * 3 // 2
    for each in (sizes, replace(sizes, groups=sizes.heads, head=head, value=sizes.head)):
        yield from _checked(ATTENTION, run)(each, dtype, device)


def _scaled_mm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    side = quantised.SIDE
    inner, out = (-(-n // side) * side for n in (sizes.hidden, sizes.between))
    a = _draw(0, sizes.rows, inner, dtype=dtype).to(device)
    b = _draw(1, out, inner, dtype=dtype).to(device)
    on_device = [quantised.quantise(t.cpu(), (1, inner)) for t in (a, b)]
    one, other = (
        quantised.Float8Blocks(q.data.to(device), q.scale.to(device), q.block) for q in on_device
    )
    emulate = device.type == "cpu"  # the same product in float32 if the hardware has none
    product = quantised.Rounding("rowwise", emulate).product(one, other, dtype)
    wide_a, wide_b = (quantised.dequantise(q).double() for q in on_device)
    yield product, wide_a @ wide_b.t()


def _float8_rounding(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks rounding by rows, columns and both; rows of zeros, tiny numbers, an infinity."""
    for n in (sizes.hidden, sizes.between + 3):
        x = _draw(0, sizes.rows, n, dtype=dtype).to(device)
        x[0], x[2, 1] = 0.0, torch.inf
        x[3] *= torch.finfo(dtype).tiny
        for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
            straight = quantised.quantise(x.cpu(), (1, n), kind)
            transposed = quantised.quantise(x.cpu().t(), (1, sizes.rows), kind)
            both = quantised_gpu.float8_both(x, kind)
            for rounded, scale in (quantised_gpu.float8_rows(x, kind), both[:2]):
                yield rounded.float(), straight.data.float()
                yield scale, straight.scale
            for rounded, scale in (quantised_gpu.float8_columns(x, kind), both[2:]):
                yield rounded[:, : sizes.rows].float(), transposed.data.float()
                yield rounded[:, sizes.rows :].float(), torch.zeros(n, -sizes.rows % quantised.SIDE)
                yield scale, transposed.scale


def _widening(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks both formats of a frozen weight; the last block of nf4 isn't full."""
    rows, columns = sizes.rows, sizes.hidden + 1
    weight = _draw(0, rows, columns)
    codes, scale = quantised.to_int8(weight)
    widened = quantised_gpu.widen_int8(codes.to(device), scale.to(device), dtype)
    yield widened, quantised.from_int8(codes, scale).to(dtype)
    codes, scale = quantised.to_nf4(weight)
    levels = torch.tensor(quantised.NF4_LEVELS, device=device)
    arguments = codes.to(device), scale.to(device), levels
    widened = quantised_gpu.widen_nf4(*arguments, rows, columns, dtype)
    yield widened, quantised.from_nf4(codes, scale, (rows, columns)).to(dtype)


def _grouped_mm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks three experts, of which the second has no token."""
    side = quantised.SIDE
    inner, out = (-(-n // side) * side for n in (sizes.hidden, sizes.hidden // 2))
    ends = (3, 3, sizes.rows)
    grouped = getattr(F, "grouped_mm")  # noqa: B009  # torch's stubs don't have it

    def run(x: Tensor, weight: Tensor) -> Tensor:
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        product: Tensor = grouped(x, weight, offs=offsets)
        return product

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        starts = (0, *ends[:-1])
        rows = [x[a:b] @ w for a, b, w in zip(starts, ends, weight, strict=True)]
        return torch.cat(rows)

    shapes = ((sizes.rows, inner), (len(ends), inner, out), (sizes.rows, out))
    inputs = tuple(_draw(seed, *shape) for seed, shape in enumerate(shapes))
    yield from compare(gradients(run), gradients(plain), inputs, dtype, device)


def _routed_experts(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks experts without tokens (second, fourth), and tokens that choose the third twice."""
    step = experts_gpu.ALIGNMENT // dtype.itemsize
    sides = zip((sizes.hidden, sizes.hidden * 11 // 16), WIDEST_EXPERT, strict=True)
    wide, inner = (-(-min(side, most) // step) * step for side, most in sides)
    first = torch.where(torch.arange(sizes.rows) % 3 == 0, 2, 0)
    index = torch.stack((first, torch.full_like(first, 2)), dim=1)
    weights = torch.rand(index.shape, generator=torch.Generator().manual_seed(0))
    gate_up = _draw(1, EXPERTS, 2 * inner, wide) * wide**-0.5
    down = _draw(2, EXPERTS, wide, inner) * inner**-0.5
    inputs = _draw(3, sizes.rows, wide), weights, gate_up, down, index, _draw(4, sizes.rows, wide)

    def run(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, index: Tensor) -> Tensor:
        return experts_gpu.run(x, index, weights.float(), gate_up, down)

    yield from compare(gradients(run, learning=4), ROUTED.reference, inputs, dtype, device)


def _update_counts(sizes: Sizes) -> tuple[int, ...]:
    """Returns sizes of tensors: some fill no block, and the last has an odd size."""
    return sizes.rows * sizes.hidden, sizes.hidden, sizes.hidden * 2 + 3


def _gradient_sum(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks a gradient added to one in its own format, and to a sum in float32."""
    for count in _update_counts(sizes):
        total, more = (_draw(seed, count, dtype=dtype) for seed in range(2))
        for start in (total, total.float()):
            added = rowwise.float32_sum(start.clone().to(device), more.to(device))
            yield added, start.double() + more.double()


def _adamw_plain(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks several tensors, float32 moments, gradients in ``dtype``, the weights' bf16 copy."""
    updates = []
    for count in _update_counts(sizes):
        weight, grad, first, second = (_draw(seed, count) for seed in range(4))
        rule, copy = adamw.rule_of(ADAMW, STEPS), torch.zeros(count, dtype=torch.bfloat16)
        tensors = weight, grad.to(dtype), first, second.square()
        updates.append(adamw.TensorUpdate(*tensors, rule, copy=copy))
    on_device = moved(updates, device)
    adamw.update(on_device, torch.tensor(DIVISOR, device=device))
    for one, start in zip(on_device, updates, strict=True):
        weight, grad, first, second = (t.double() for t in start[:4])
        expected = update(weight, grad, first, second, DIVISOR)
        yield from zip((one.weight, one.first, one.second), expected, strict=True)
        yield one.copy, one.weight.cpu().bfloat16()


def _adamw_compact(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Checks a step with moments in few bits, with equal random bits and state.

    Of weights the changes are compared, in learning rates. Few codes may differ, because a number
    near the middle of two codes may be rounded to either.
    """
    divisor = torch.tensor(DIVISOR)
    for eight in (False, True):
        updates = [_compact(n, dtype, eight, key) for key, n in enumerate(_update_counts(sizes))]
        on_device = moved(updates, device)
        before = [one.weight.float() for one in updates]
        adamw.update(on_device, divisor.to(device))
        for one in updates:
            adamw.reference_update(one, divisor)
        for start, updated, expected in zip(before, moved(on_device, "cpu"), updates, strict=True):
            if dtype is torch.bfloat16:
                yield from _compared_with_share(updated.weight, expected.weight)
            else:
                moves = [(one.weight - start) / ADAMW["lr"] for one in (updated, expected)]
                yield moves[0], moves[1]
            for pair in zip(_moments(updated), _moments(expected), strict=True):
                yield from _compared_with_share(*pair)


def _compared_with_share(one: Tensor, other: Tensor) -> Pairs:
    """Yields both tensors as a pair, and the share of different numbers next to zero."""
    yield one, other
    same = (one == other) | (one.isnan() & other.isnan())
    yield (~same).float().mean(), torch.zeros(())


def _compact(count: int, dtype: torch.dtype, eight: bool, key: int) -> adamw.TensorUpdate:
    """Returns a weight, a gradient with an infinity, and moments after some steps."""
    weight, grad, first, second = (_draw(seed, count) for seed in range(4))
    grad[count // 2] = torch.inf
    second = second.square()
    rule, scales = adamw.rule_of(ADAMW, 5), None
    if eight:
        dice = low_bit.noise(count, torch.Generator().manual_seed(key))
        first, one = low_bit.quantised_signed(first)
        second, other = low_bit.quantised_squares(second, dice)
        scales = one, other
    else:
        first, second = first.bfloat16(), second.bfloat16()
    key = adamw.dice_key(1, key, 5)
    return adamw.TensorUpdate(weight.to(dtype), grad, first, second, rule, scales, None, key)


def _moments(one: adamw.TensorUpdate) -> list[Tensor]:
    """Returns both moments of the state in float32."""
    codes = one.first, one.second
    if one.scales is None:
        return [each.float() for each in codes]
    count, cpu = one.weight.numel(), torch.device("cpu")
    tables = low_bit.signed_table(cpu), low_bit.squared_table(cpu)
    each = zip(codes, one.scales, tables, strict=True)
    return [low_bit.values_of(*arguments, count) for arguments in each]


def _from(capability: tuple[int, int]) -> Callable[[str], str]:
    def why_not(device: str) -> str:
        if torch.device(device).type != "cuda" or torch.version.hip is not None:
            return "it is for NVIDIA GPUs"
        actual = torch.cuda.get_device_capability(torch.device(device))
        have, need = (".".join(map(str, c)) for c in (actual, capability))
        return "" if actual >= capability else f"it takes compute capability {need}, and has {have}"

    return why_not


def _times(factor: float, *formats: torch.dtype) -> dict[torch.dtype, float]:
    return {dtype: factor * ROUNDING[dtype] for dtype in formats or ROUNDING}


registry.register(
    GpuKernel(
        "rms_norm",
        _norms,
        _times(3),
        "torch's norm and an addition run, which read and write a layer's input once more",
        fused_gpu.why_not,
    ),
    GpuKernel(
        "swiglu",
        _checked(GATES, _swiglu),
        _times(3),
        "torch's silu and product run, which move 5 numbers for 3",
        fused_gpu.why_not,
    ),
    GpuKernel(
        "rotate",
        _rotate,
        _times(3),
        "the model's own rotary embedding runs, in about 6 operators for 1",
        fused_gpu.why_not,
    ),
    GpuKernel(
        fused_gpu.CROSS_ENTROPY,
        _cross_entropy,
        _times(3),
        "torch's operators run, about 12 for 1, which move 10 times the bytes",
        fused_gpu.why_not,
    ),
    GpuKernel(
        "codec",
        _codec,
        {torch.float32: 0.0, torch.bfloat16: 0.0},
        "torch's operators make the codes, in about 20 for 1",
        fused_gpu.why_not,
    ),
    GpuKernel(
        "plain_norm",
        _checked(NORMS, gradients(torch_norm)),
        _times(4),
        "the model's own norm runs, in about 6 operators for 1",
        _from((0, 0)),
    ),
    GpuKernel(
        attention.VARLEN,
        _varlen,
        _times(6, *HALF),
        "torch's attention runs once for each document of a row",
        lambda device: (
            _from(LEAST_CAPABILITY)(device) or ("" if attention._varlen() else "torch has none")
        ),
    ),
    GpuKernel(
        quantised.SCALED_MM,
        _scaled_mm,
        _times(2, torch.bfloat16),
        "products run in bf16, at half the speed that float8 can have",
        _from(FLOAT8_CAPABILITY),
    ),
    GpuKernel(
        quantised_gpu.FLOAT8,
        _float8_rounding,
        dict.fromkeys(ROUNDING, 0.0),
        "torch's operators run, about 9 for 1, which move 10 times the bytes",
        lambda device: fused_gpu.why_not(device) or _from(FLOAT8_CAPABILITY)(device),
    ),
    GpuKernel(
        quantised_gpu.WIDENING,
        _widening,
        dict.fromkeys(ROUNDING, 0.0),
        "torch's operators run, about 8 for 1, which move 5 times the bytes",
        fused_gpu.why_not,
    ),
    GpuKernel(
        "grouped_mm",
        _grouped_mm,
        _times(2, torch.bfloat16),
        "experts run one after the other",
        _from(LEAST_CAPABILITY),
    ),
    GpuKernel(
        rowwise.SUM,
        _gradient_sum,
        dict.fromkeys(ROUNDING, ROUNDING[torch.float32]),
        "torch's addition runs, at two thirds of the speed",
        rowwise.why_no_sum,
    ),
    GpuKernel(
        experts_gpu.ROUTED,
        _routed_experts,
        _times(5, torch.bfloat16),
        "the experts' own code runs, which moves about 4 times the bytes between its products",
        experts_gpu.why_not,
    ),
    GpuKernel(
        "fused_adamw",
        _checked(UPDATES, torch_update, DIVISOR),
        _times(3, torch.float32, torch.bfloat16),
        "torch's AdamW for lists of tensors runs, which moves about twice the bytes",
        _from((0, 0)),
    ),
    GpuKernel(
        adamw.PLAIN,
        _adamw_plain,
        _times(3, torch.float32, torch.bfloat16),
        "torch's operators run, in about 20 for 1 and with 5 times the bytes",
        adamw.why_not,
    ),
    GpuKernel(
        adamw.COMPACT,
        _adamw_compact,
        dict.fromkeys((torch.float32, torch.bfloat16), 0.015),  # a step of the tables is 0.014
        "torch's operators run, in about 60 for 1 and with 27 times the bytes",
        adamw.why_not,
    ),
)


if __name__ == "__main__":
    registry.main(sys.argv[1:])
