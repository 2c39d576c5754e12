"""Fused passes over a tensor's rows in Triton, for GPUs: the loops of ``rows.cpp``.

Imported only if Triton is installed, as it is together with torch for CUDA. Each kernel
reads float32, bfloat16 or float16, sums in float32 and rounds its result once.
:mod:`hasten.parts.nn.fused_gpu` calls them.

Triton compiles a kernel again if a whole number becomes 1 or a multiple of 16, or ceases to
be. Counts of rows and numbers vary from step to step, so their kernels ask for none of it
(``do_not_specialize``). Widths and strides don't vary, and loads are wide if they are multiples.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as its own: constexpr, or none.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, w, y, inverse, n, eps, BLOCK: tl.constexpr):
    """Computes one row: ``y = x / sqrt(mean(x ** 2) + eps) * w``, and 1 / that root."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    numbers = tl.load(x + row * n + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)  # loaded during the sum
    one = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / n + eps)
    tl.store(inverse + row, one)
    tl.store(y + row * n + at, (numbers * one * weight).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "each"])
def norm_back_kernel(
    grad,
    x,
    w,
    inverse,
    past,
    dx,
    dw,
    rows,
    n,
    each,
    PAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the gradient of x for ``each`` rows, and their part of w's gradient.

    ``past`` is added to the gradient of x.

    With h = x * inverse and g = grad * w:

        dx = inverse * (g - h * mean(g * h))

        dw = sum grad * h
    """
    first = tl.program_id(0).to(tl.int64) * each
    at = tl.arange(0, BLOCK)
    inside = at < n
    share = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(first, tl.minimum(first + each, rows)):
        offsets = row * n + at
        g = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
        one = tl.load(inverse + row)
        h = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) * one
        share += g * h
        # Read again for each row from the nearest cache; storing it would exceed the registers.
        g *= tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
        gradient = one * (g - h * (tl.sum(g * h, 0) / n))
        if PAST:
            gradient += tl.load(past + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + offsets, gradient.to(dx.dtype.element_ty), mask=inside)
    tl.store(dw + tl.program_id(0).to(tl.int64) * n + at, share, mask=inside)


@triton.jit(do_not_specialize=["count"])
def swiglu_kernel(gate, up, y, count, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Computes ``silu(gate) * up`` for a block; ``count`` is a multiple of ``STEP``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at // STEP * STEP < count  # one condition per STEP numbers, so they are moved together
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (a / (1.0 + tl.exp(-a)) * b).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def swiglu_back_kernel(grad, gate, up, dgate, dup, count, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Computes dup = grad gate s, dgate = grad up s (1 + gate (1 - s)), s = sigmoid(gate).

    ``count`` is a multiple of ``STEP``.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at // STEP * STEP < count
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-a))
    tl.store(dup + at, (g * a * s).to(dup.dtype.element_ty), mask=inside)
    tl.store(dgate + at, (g * b * s * (1.0 + a * (1.0 - s))).to(dgate.dtype.element_ty), inside)


@triton.jit
def rotate_kernel(
    x,
    cos,
    sin,
    y,
    by_row,
    by_head,
    heads,
    width,
    m,
    way,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Rotates the last ``2 * m`` columns of some heads of one row; copies those before.

    The numbers of a pair are adjacent or ``m`` columns apart, as set by ``PAIRS_IN`` and
    ``PAIRS_OUT``.

    ``way`` is 1, or -1 for the backward rotation. ``y`` has no gaps.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    source = x + row * by_row + head * by_head
    target = y + (row * heads + head) * width
    plain = width - 2 * m
    if PLAIN > 0:
        column = tl.arange(0, PLAIN)[None, :]
        inside = (head < heads) & (column < plain)
        tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (pair < m)
    c = tl.load(cos + row * m + pair, mask=pair < m, other=0.0).to(tl.float32)
    s = tl.load(sin + row * m + pair, mask=pair < m, other=0.0).to(tl.float32) * way
    one, other = plain + pair, plain + pair + m
    if PAIRS_IN:
        one, other = plain + 2 * pair, plain + 2 * pair + 1
    a = tl.load(source + one, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + other, mask=inside, other=0.0).to(tl.float32)
    to_one, to_other = plain + pair, plain + pair + m
    if PAIRS_OUT:
        to_one, to_other = plain + 2 * pair, plain + 2 * pair + 1
    tl.store(target + to_one, (a * c - b * s).to(y.dtype.element_ty), mask=inside)
    tl.store(target + to_other, (b * c + a * s).to(y.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(total, more, out, count, BLOCK: tl.constexpr):
    """Writes ``total + more`` for a block in the format of ``out``, which may be ``total``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (a + b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_kernel(logits, labels, losses, n, ignored, BLOCK: tl.constexpr):
    """Computes the loss of one row, and replaces its logits by the loss's gradient.

    A row with the label ``ignored`` has loss and gradient 0; one with a label outside of the
    row has NaN in both.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * n
    label = tl.load(labels + row)
    block = tl.arange(0, BLOCK)
    largest, total, at_label = -float("inf"), 0.0, 0.0
    if label != ignored:
        at_label = float("nan")
        if (label >= 0) & (label < n):
            at_label = tl.load(start + label).to(tl.float32)
        for first in range(0, n, BLOCK):
            inside = first + block < n
            x = tl.load(start + first + block, mask=inside, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(largest, tl.max(x, 0))
            # If all numbers so far are -infinity, a difference to it would be NaN.
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
            largest = higher
        log_sum = largest + tl.log(total)
        tl.store(losses + row, log_sum - at_label)
        log_sum += at_label - at_label  # NaN for a label outside
        for first in range(0, n, BLOCK):
            at = first + block
            x = tl.load(start + at, mask=at < n, other=0.0).to(tl.float32)
            gradient = tl.exp(x - log_sum) - tl.where(at == label, 1.0, 0.0)
            tl.store(start + at, gradient.to(logits.dtype.element_ty), mask=at < n)
    else:
        tl.store(losses + row, 0.0)
        for first in range(0, n, BLOCK):
            at = first + block
            zero = tl.zeros([BLOCK], dtype=logits.dtype.element_ty)
            tl.store(start + at, zero, mask=at < n)
