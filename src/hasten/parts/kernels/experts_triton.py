"""Passes over the rows of routed experts in Triton, for GPUs: the loops of ``experts.cpp``.

Imported only if Triton is installed, as it is together with torch for CUDA. A pair is a
token and one of its choices. Pairs are numbered token by token. ``positions`` has the
row of each pair once all rows are sorted by expert. Each kernel sums in float32 and
rounds its result once. No kernel adds to memory that another program writes, so results
have the same bits each time. No argument is a number of rows: it differs in every step,
and Triton would compile for it again. :mod:`hasten.parts.nn.experts_gpu` calls them.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as its own: constexpr, or none.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread_kernel(x, positions, y, n, each, BLOCK: tl.constexpr):
    """Copies a block of a token's row to the row of one of its pairs.

    The programs of a token run next to each other, so its row is read from memory once.
    """
    pair = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    numbers = tl.load(x + pair // each * n + at, mask=inside)
    tl.store(y + tl.load(positions + pair) * n + at, numbers, mask=inside)


@triton.jit
def combine_kernel(
    x, positions, weights, y, n, WEIGHTED: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums a token's pairs, times their weights, for a block of its row."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in range(EACH):
        pair = token * EACH + choice
        row = tl.load(positions + pair)
        numbers = tl.load(x + row * n + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            numbers *= tl.load(weights + pair).to(tl.float32)
        total += numbers
    tl.store(y + token * n + at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(x, y, m, BLOCK: tl.constexpr):
    """Computes ``silu(gate) * up`` for a block of a row; ``x`` has gate and up side by side."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < m
    a = tl.load(x + row * 2 * m + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * 2 * m + m + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * m + at, (a / (1.0 + tl.exp(-a)) * b).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gate_back_kernel(
    grad,
    x,
    positions,
    weights,
    dx,
    dweights,
    h,
    m,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes gradients of one pair: of gate and up, and of the weight of its result.

    ``grad`` is the gradient of the activation for a weight of 1. With ``INNER``, the
    activation times the weight is written to ``h``.

    With s = sigmoid(gate), w the weight and g = w * grad:

        dgate = g up s (1 + gate (1 - s)), dup = g gate s

        dw = sum grad gate s up
    """
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(positions + pair)
    w = tl.load(weights + pair).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, m, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < m
        g = tl.load(grad + row * m + at, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(x + row * 2 * m + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + row * 2 * m + m + at, mask=inside, other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-a))
        total += g * (a * s * b)
        if INNER:
            tl.store(h + row * m + at, (w * a * s * b).to(h.dtype.element_ty), mask=inside)
        g *= w
        dgate = g * b * s * (1.0 + a * (1.0 - s))
        tl.store(dx + row * 2 * m + at, dgate.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + row * 2 * m + m + at, (g * a * s).to(dx.dtype.element_ty), mask=inside)
    tl.store(dweights + pair, tl.sum(total, 0).to(dweights.dtype.element_ty))
