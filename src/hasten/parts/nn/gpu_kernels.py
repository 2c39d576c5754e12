"""Each GPU kernel on small inputs, and what it should give: one table for tests and first use.

Tests run the table in Triton's interpreter. On a GPU, a child process runs it before the first step
(:mod:`hasten.recipe.gpu_check`), since a kernel that writes outside its memory takes its process
along. References are plain PyTorch in float64 on the processor; codecs have to give the same bits.

    python -m hasten.parts.nn.gpu_kernels '{"kernels": ["swiglu"], "device": "cuda:0"}'

prints a line of JSON when a kernel begins and one with its verdict.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.parts.kernels import adamw, adamw_reference, codec_reference, low_bit
from hasten.parts.kernels.refused import LEAST_CAPABILITY
from hasten.parts.nn import attention, fused_gpu, quantised, quantised_gpu

EPS = 1e-6
FLOAT8_CAPABILITY = (9, 0)  # of products by rows
# A result is off by its own rounding, and by that of a few sums in float32.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sizes:
    """Widths at which kernels are tried: block sizes and registers go by them.

    Args:
        hidden: of the model, ``between`` of its MLP, ``head`` of one of ``heads`` heads of queries;
            keys have ``groups`` of them.
        rows: odd, so that no block of rows is full.
    """

    hidden: int = 512
    between: int = 1376
    heads: int = 8
    groups: int = 2
    head: int = 64
    rows: int = 37


@dataclass(frozen=True)
class Verdict:
    """What was found out about a kernel; ``why`` is empty where it may be used."""

    kernel: str
    why: str = ""
    repeats: bool = True  # it gave the same bits twice

    @property
    def good(self) -> bool:
        """Whether it may be used."""
        return not self.why


Pairs = Iterator[tuple[Tensor, Tensor]]  # what a kernel gave, and the truth


@dataclass(frozen=True)
class GpuKernel:
    """One row of the table.

    Args:
        name: by which it is refused (:mod:`hasten.parts.kernels.refused`).
        run: its results beside the truth, for sizes, a format and a device.
        bounds: how far a result may be off, by format, as a part of the largest; 0: not a bit.
        instead: what runs in its place, and what that costs.
        missing: why there is nothing to try on a device; empty where there is.
    """

    name: str
    run: Callable[[Sizes, torch.dtype, torch.device], Pairs]
    bounds: dict[torch.dtype, float]
    instead: str
    missing: Callable[[str], str]


def checked_kernel(kernel: GpuKernel, sizes: Sizes, device: str) -> Verdict:
    """Run a kernel twice in each of its formats and compare; errors are verdicts, too."""
    repeats = True
    for dtype, bound in kernel.bounds.items():
        name = str(dtype).removeprefix("torch.")
        try:
            pairs = list(kernel.run(sizes, dtype, torch.device(device)))
            again = [found for found, _ in kernel.run(sizes, dtype, torch.device(device))]
        except Exception as error:  # whatever a compiler, a driver or a kernel says
            first = (str(error).strip().splitlines() or [""])[0]
            return Verdict(kernel.name, f"{name}: {type(error).__name__}: {first[:160]}")
        for found, expected in pairs:
            if wrong := _difference(found, expected, bound):
                return Verdict(kernel.name, f"{name}: {wrong}")
        repeats &= all(_same_bits(a, b) for (a, _), b in zip(pairs, again, strict=True))
    return Verdict(kernel.name, repeats=repeats)


def _difference(found: Tensor, expected: Tensor, bound: float) -> str:
    """What is wrong with a result; empty where nothing is."""
    if found.shape != expected.shape:
        return f"a result of shape {tuple(found.shape)} in the place of {tuple(expected.shape)}"
    one, other = found.detach().cpu().double(), expected.detach().cpu().double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        count = int((one.isfinite() != other.isfinite()).sum())
        return f"{count} of {one.numel()} numbers are infinite or NaN where they shouldn't be"
    one, other = (t.where(t.isfinite(), 0.0) for t in (one, other))
    largest = other.abs().max().clamp_min(0.5).item() if other.numel() else 1.0
    off = (one - other).abs().max().item() / largest if other.numel() else 0.0
    return f"off by {off:.2g} of the largest number, at most {bound:.2g}" if off > bound else ""


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


# What each kernel is given, and the truth.


def _draw(seed: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(device, dtype)


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The same numbers in float64 on the processor, to differentiate by."""
    return [t.detach().cpu().double().requires_grad_() for t in tensors]


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _norm_beside(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """A norm, its gradient with that of the residual and without; and a row with an infinity."""
    draw = {"dtype": dtype, "device": device}
    n = sizes.hidden
    x, grad, past = (_draw(seed, sizes.rows, n, **draw) for seed in range(3))
    weight = _draw(3, n, **draw)
    y, inverse = fused_gpu.rms_norm(x, weight, EPS)
    wide_x, wide_weight = _wide(x, weight)
    expected = _plain_norm(wide_x, wide_weight)
    yield y, expected
    dx, dw = torch.autograd.grad(expected, (wide_x, wide_weight), grad.cpu().double())
    for beside in (None, past):
        found = fused_gpu.rms_norm_backward(grad, x, weight, inverse, beside)
        yield found[0], dx if beside is None else dx + past.cpu().double()
        yield found[1], dw
    spoilt = x.clone()
    spoilt[1, 3] = torch.inf
    yield fused_gpu.rms_norm(spoilt, weight, EPS)[0], _plain_norm(*_wide(spoilt, weight))


def _by_autograd(
    run: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor
) -> Pairs:
    """A differentiable function against a plain one: result and gradients."""
    near = [t.clone().requires_grad_() for t in tensors]
    wide = _wide(*tensors)
    out, expected = run(*near), plain(*wide)
    yield out, expected
    grad = _draw(9, *out.shape, dtype=out.dtype, device=out.device)
    yield from zip(
        torch.autograd.grad(out, near, grad),
        torch.autograd.grad(expected, wide, grad.cpu().double()),
        strict=True,
    )


def _whole_norm(run: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def pairs(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
        x = _draw(0, sizes.rows, sizes.hidden, dtype=dtype, device=device)
        weight = _draw(1, sizes.hidden, dtype=dtype, device=device)
        return _by_autograd(run, _plain_norm, x, weight)

    return pairs


def _liger_norm(x: Tensor, weight: Tensor) -> Tensor:
    found = fused_gpu.liger()
    assert found is not None  # or it is missing
    y: Tensor = found.norm.apply(x, weight, EPS, 0.0, "gemma", False)
    return y


def _swiglu(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    gate, up, grad = (
        _draw(seed, sizes.rows, sizes.between, dtype=dtype, device=device) for seed in range(3)
    )
    wide = _wide(gate, up)
    expected = F.silu(wide[0]) * wide[1]
    yield fused_gpu.swiglu(gate, up), expected
    slopes = torch.autograd.grad(expected, wide, grad.cpu().double())
    yield from zip(fused_gpu.swiglu_backward(grad, gate, up), slopes, strict=True)


def _liger_swiglu(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    found = fused_gpu.liger()
    assert found is not None  # or it is missing
    gate, up = (
        _draw(seed, sizes.rows, sizes.between, dtype=dtype, device=device) for seed in (0, 1)
    )
    return _by_autograd(found.silu_mul.apply, lambda a, b: F.silu(a) * b, gate, up)


def _rotate(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Whole heads and the last columns of wider ones, pairs in all layouts, there and back."""
    m = sizes.head // 2
    angle = _draw(1, sizes.rows, m, dtype=torch.float32, device=device)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    for plain in (0, 2 * sizes.head):
        shape = sizes.rows, sizes.heads, plain + 2 * m + 3
        x = _draw(0, *shape, dtype=dtype, device=device)[..., 3:]
        for pairs_in, pairs_out in ((False, False), (False, True), (True, False), (True, True)):
            back = pairs_out and not pairs_in
            found = fused_gpu.rotate(x, cos, sin, pairs_in, pairs_out, back)
            wide_x, wide_cos, wide_sin = _wide(x, cos, -sin if back else sin)
            yield found, _turned(wide_x, wide_cos, wide_sin, pairs_in, pairs_out)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, pairs_in: bool, pairs_out: bool) -> Tensor:
    m = cos.shape[-1]
    plain, turned = x.split([x.shape[-1] - 2 * m, 2 * m], dim=-1)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if pairs_in else turned.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    both = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack(both, -1).flatten(-2) if pairs_out else torch.cat(both, -1)
    return torch.cat((plain, joined), -1)


def _codec(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Codes and what they leave out, rounded to the nearest and by chance; and back."""
    from hasten.parts.kernels import codec_triton

    block, count = 256, 5 * 256 - 3  # the last block isn't full
    flat = _draw(0, count, dtype=dtype, device=device) * 10
    for bits in (8, 4):
        for seed in (None, 7):
            found = []
            for way, x in ((codec_triton, flat), (codec_reference, flat.cpu())):
                codes = torch.zeros(5 * block * bits // 8, dtype=torch.uint8, device=x.device)
                scales = torch.zeros(5, dtype=torch.int16, device=x.device)
                rest = torch.full((count,), 0.01, device=x.device)
                kept, mean = torch.zeros_like(rest), torch.zeros_like(rest)
                way.encode(x, rest, kept, codes, scales, block, bits, seed)
                several = codes.repeat(3, 1), scales.repeat(3, 1)
                way.decode(*several, mean, block, bits, 1 / 3, False)
                found.append((codes, scales, kept, mean))
            yield from zip(*found, strict=True)


def _varlen(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Two documents in a row, keys in groups; and latent attention, its values narrower."""
    first = sizes.rows * 4 // 7
    where = torch.tensor([0, first, sizes.rows], dtype=torch.int32, device=device)
    call: dict[str, Any] = {"document_lengths": (first, sizes.rows - first), "boundaries": where}

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention.attend(nn.Identity(), query, key, value, None, **call)[0]

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attended(query, key, value, first)

    for groups, wide in ((sizes.groups, sizes.head), (sizes.heads, sizes.head * 3 // 2)):
        shapes = ((sizes.heads, wide), (groups, wide), (groups, sizes.head))
        tensors = [
            _draw(seed, 1, heads, sizes.rows, width, dtype=dtype, device=device)
            for seed, (heads, width) in enumerate(shapes)
        ]
        yield from _by_autograd(run, plain, *tensors)


def _attended(query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    """Attention by its definition, (1, T, heads, d); a second document begins at ``first``."""
    repeated = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeated, dim=1) for t in (key, value))
    place = torch.arange(query.shape[2])
    second = place >= first
    sees = (second[:, None] == second) & (place[:, None] >= place)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    out = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value
    return out.transpose(1, 2)


def _scaled_mm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    side = quantised.SIDE
    inner, out = (-(-n // side) * side for n in (sizes.hidden, sizes.between))
    a = _draw(0, sizes.rows, inner, dtype=dtype, device=device)
    b = _draw(1, out, inner, dtype=dtype, device=device)
    near = [quantised.quantise(t.cpu(), (1, inner)) for t in (a, b)]
    one, other = (
        quantised.Float8Blocks(q.data.to(device), q.scale.to(device), q.block) for q in near
    )
    emulate = device.type == "cpu"  # the same product, for where there is none of the hardware's
    found = quantised.Rounding("rowwise", emulate).product(one, other, dtype)
    wide_a, wide_b = (quantised.dequantise(q).double() for q in near)
    yield found, wide_a @ wide_b.t()


def _float8_rounding(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """By rows, by columns and by both; rows of zeros, of tiny numbers, and one with an infinity."""
    for n in (sizes.hidden, sizes.between + 3):
        x = _draw(0, sizes.rows, n, dtype=dtype, device=device)
        x[0], x[2, 1] = 0.0, torch.inf
        x[3] *= torch.finfo(dtype).tiny
        for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
            straight = quantised.quantise(x.cpu(), (1, n), kind)
            turned = quantised.quantise(x.cpu().t(), (1, sizes.rows), kind)
            both = quantised_gpu.float8_both(x, kind)
            for found, scale in (quantised_gpu.float8_rows(x, kind), both[:2]):
                yield found.float(), straight.data.float()
                yield scale, straight.scale
            for found, scale in (quantised_gpu.float8_columns(x, kind), both[2:]):
                yield found[:, : sizes.rows].float(), turned.data.float()
                yield found[:, sizes.rows :].float(), torch.zeros(n, -sizes.rows % quantised.SIDE)
                yield scale, turned.scale


def _widening(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Both formats of a frozen weight; the last block of nf4 isn't full."""
    rows, columns = sizes.rows, sizes.hidden + 1
    weight = _draw(0, rows, columns, dtype=torch.float32, device=torch.device("cpu"))
    codes, scale = quantised.to_int8(weight)
    found = quantised_gpu.widen_int8(codes.to(device), scale.to(device), dtype)
    yield found, quantised.from_int8(codes, scale).to(dtype)
    codes, scale = quantised.to_nf4(weight)
    levels = torch.tensor(quantised.NF4_LEVELS, device=device)
    given = codes.to(device), scale.to(device), levels
    found = quantised_gpu.widen_nf4(*given, rows, columns, dtype)
    yield found, quantised.from_nf4(codes, scale, (rows, columns)).to(dtype)


def _grouped_mm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Three experts, of which the second has no token."""
    side = quantised.SIDE
    inner, out = (-(-n // side) * side for n in (sizes.hidden, sizes.hidden // 2))
    ends = (3, 3, sizes.rows)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        starts = (0, *ends[:-1])
        rows = [x[a:b] @ w for a, b, w in zip(starts, ends, weight, strict=True)]
        return torch.cat(rows)

    x = _draw(0, sizes.rows, inner, dtype=dtype, device=device)
    weight = _draw(1, len(ends), inner, out, dtype=dtype, device=device)
    grouped = getattr(F, "grouped_mm")  # noqa: B009  # torch's stubs don't have it
    return _by_autograd(lambda x, w: grouped(x, w, offs=offsets), plain, x, weight)


ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
DIVISOR = 4.0  # of gradients, as clipping asks for


def _fused_adamw(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Two steps of torch's, the gradients divided on the way."""
    weight = _draw(0, sizes.rows, sizes.hidden, dtype=dtype, device=device)
    grads = [_draw(seed, sizes.rows, sizes.hidden, dtype=dtype, device=device) for seed in (1, 2)]
    parameter = nn.Parameter(weight.clone())
    optimizer: Any = torch.optim.AdamW([parameter], **ADAMW, fused=True)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.grad_scale = torch.tensor(DIVISOR, device=device)
        optimizer.step()
    yield parameter, _adamw_truth(weight, grads)[0]


def _adamw_truth(weight: Tensor, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A weight and its moments after as many steps, in float64."""
    rate, (beta1, beta2), eps, decay = (ADAMW[k] for k in ("lr", "betas", "eps", "weight_decay"))
    truth = weight.cpu().double()
    first, second = torch.zeros_like(truth), torch.zeros_like(truth)
    for step, grad in enumerate(grads, start=1):
        given = grad.cpu().double() / DIVISOR
        first = beta1 * first + (1 - beta1) * given
        second = beta2 * second + (1 - beta2) * given.square()
        size = (second / (1 - beta2**step)).sqrt() + eps
        truth = truth * (1 - rate * decay) - rate * first / (1 - beta1**step) / size
    return truth, first, second


def _update_counts(sizes: Sizes) -> tuple[int, ...]:
    """A matrix, whose numbers fill no block, and one whose addresses are odd."""
    return sizes.rows * sizes.hidden, sizes.hidden, sizes.hidden * 2 + 3


def _adamw_plain(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """Two steps with float32 moments, gradients in ``dtype``, and the weights' copy in bf16."""
    divisor = torch.tensor(DIVISOR, device=device)
    counts = _update_counts(sizes)
    weights = [_draw(0, n, dtype=torch.float32, device=device) for n in counts]
    grads = [[_draw(step, n, dtype=dtype, device=device) for n in counts] for step in (1, 2)]
    moved = [
        (w.clone(), torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w).bfloat16())
        for w in weights
    ]
    for step, given in enumerate(grads, start=1):
        rule = adamw.rule_of(ADAMW, step)
        adamw.update(
            [
                adamw.TensorUpdate(weight, grad, first, second, rule, copy=copy)
                for (weight, first, second, copy), grad in zip(moved, given, strict=True)
            ],
            divisor,
        )
    for weight, found, *of_it in zip(weights, moved, *grads, strict=True):
        yield from zip(found, _adamw_truth(weight, of_it), strict=False)
        yield found[3], found[0].cpu().bfloat16()


def _adamw_compact(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
    """A step with moments in few bits, by the same dice, from the same state; weights in ``dtype``.

    Weights are compared by how far they moved, in learning rates. A number between two of few bits
    may go to the other one, but hardly any does.
    """
    divisor = torch.tensor(DIVISOR)
    for eight in (False, True):
        given = [_compact(n, dtype, eight, key) for key, n in enumerate(_update_counts(sizes))]
        near = [_on(one, device) for one in given]
        before = [one.weight.float() for one in given]
        adamw.update(near, divisor.to(device))
        for one in given:
            adamw_reference.update(one, divisor)
        for start, found, expected in zip(before, near, given, strict=True):
            if dtype is torch.bfloat16:
                yield from _few_differ(found.weight.cpu(), expected.weight)
            else:
                moves = [(one.weight.cpu() - start) / ADAMW["lr"] for one in (found, expected)]
                yield moves[0], moves[1]
            for pair in zip(_moments(found), _moments(expected), strict=True):
                yield from _few_differ(*pair)


def _few_differ(one: Tensor, other: Tensor) -> Pairs:
    """Both, and which share of their numbers isn't the same."""
    yield one, other
    same = (one == other) | (one.isnan() & other.isnan())
    yield (~same).float().mean(), torch.zeros(())


def _compact(count: int, dtype: torch.dtype, eight: bool, key: int) -> adamw.TensorUpdate:
    """A weight, a gradient with an infinity, and moments that have seen some steps."""
    cpu = torch.device("cpu")
    weight, grad, first, second = (
        _draw(seed, count, dtype=torch.float32, device=cpu) for seed in range(4)
    )
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


def _on(one: adamw.TensorUpdate, device: torch.device) -> adamw.TensorUpdate:
    weight, grad, first, second = (t.to(device, copy=True) for t in one[:4])
    scales = None
    if one.scales is not None:
        scales = one.scales[0].to(device, copy=True), one.scales[1].to(device, copy=True)
    return adamw.TensorUpdate(weight, grad, first, second, one.rule, scales, None, one.key)


def _moments(one: adamw.TensorUpdate) -> tuple[Tensor, Tensor]:
    """What the state says of both moments, on the processor."""
    first, second = one.first.cpu(), one.second.cpu()
    if one.scales is None:
        return first.float(), second.float()
    count, cpu = one.weight.numel(), torch.device("cpu")
    scales = [scale.cpu() for scale in one.scales]
    return (
        low_bit.values_of(first, scales[0], low_bit.signed_table(cpu), count),
        low_bit.values_of(second, scales[1], low_bit.squared_table(cpu), count),
    )


# The table.


def _from(capability: tuple[int, int]) -> Callable[[str], str]:
    def missing(device: str) -> str:
        if torch.device(device).type != "cuda" or torch.version.hip is not None:
            return "it is for NVIDIA GPUs"
        found = torch.cuda.get_device_capability(torch.device(device))
        have, need = (".".join(map(str, c)) for c in (found, capability))
        return "" if found >= capability else f"it takes compute capability {need}, and has {have}"

    return missing


def _no_liger(device: str) -> str:
    return fused_gpu.why_not(device) or ("" if fused_gpu.liger() else "Liger isn't installed")


def _no_varlen(device: str) -> str:
    return _from(LEAST_CAPABILITY)(device) or ("" if attention._varlen() else "torch has none")


def _times(factor: float, *formats: torch.dtype) -> dict[torch.dtype, float]:
    return {dtype: factor * ROUNDING[dtype] for dtype in formats or ROUNDING}


KERNELS = (
    GpuKernel(
        "rms_norm",
        _norm_beside,
        _times(3),
        "torch's norm and an addition run, which read and write a layer's input once more",
        fused_gpu.why_not,
    ),
    GpuKernel(
        "swiglu",
        _swiglu,
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
        "codec",
        _codec,
        {torch.float32: 0.0, torch.bfloat16: 0.0},
        "torch's operators make the codes, in about 20 for 1",
        fused_gpu.why_not,
    ),
    GpuKernel(
        "plain_norm",
        _whole_norm(lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)),
        _times(4),
        "the model's own norm runs, in about 6 operators for 1",
        _from((0, 0)),
    ),
    GpuKernel("liger_norm", _whole_norm(_liger_norm), _times(4), "torch's norm runs", _no_liger),
    GpuKernel("liger_swiglu", _liger_swiglu, _times(4), "hasten's own kernel runs", _no_liger),
    GpuKernel(
        attention.VARLEN,
        _varlen,
        _times(6, *HALF),
        "torch's attention runs once for each document of a row",
        _no_varlen,
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
        "fused_adamw",
        _fused_adamw,
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


def kernel_named(name: str) -> GpuKernel:
    """A row of the table."""
    return next(kernel for kernel in KERNELS if kernel.name == name)


def names_on(device: str) -> list[str]:
    """The kernels that there are to try on a device."""
    return [kernel.name for kernel in KERNELS if not kernel.missing(device)]


def main(arguments: Sequence[str]) -> None:
    """The life of the child process."""
    asked = json.loads(arguments[0])
    sizes = Sizes(**asked.get("sizes", {}))
    device = asked["device"]
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    for name in asked["kernels"]:
        print(json.dumps({"begins": name}), flush=True)
        print(json.dumps(asdict(checked_kernel(kernel_named(name), sizes, device))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
