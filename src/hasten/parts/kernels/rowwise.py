"""Fused passes over the rows of a tensor, as torch operators on the processor.

Each takes float32 or bfloat16, sums in float32 and rounds its result once. They are registered with
torch under ``hasten::`` with the shapes of their results, so that compiled graphs keep them whole.
``rows.cpp`` holds the loops.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hasten.parts.kernels.build import LoadedLibrary, build_library
from hasten.parts.kernels.operators import address, launch, no_results, operator, why_no_triton
from hasten.parts.kernels.registry import is_refused

DTYPES = (torch.float32, torch.bfloat16)
WORTH_THREADS = 32_768  # numbers below which one thread ends before a second wakes up


def library() -> LoadedLibrary:
    """Returns the compiled loops, or the reason why there are none."""
    return build_library("rows", "experts")


def fits(*tensors: Tensor) -> bool:
    """Returns True if these loops take the tensors: a supported format, on the processor."""
    first = tensors[0].dtype
    return first in DTYPES and all(t.dtype == first and t.device.type == "cpu" for t in tensors)


def call(name: str, count: int, *arguments: Any) -> Any:
    """Runs one loop over ``count`` numbers, on several threads if that is faster."""
    threads = torch.get_num_threads() if count >= WORTH_THREADS else 1
    return library().function(name)(*arguments, c_int(threads))


def _half(tensor: Tensor) -> c_int:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"the kernels take float32 and bfloat16, not {tensor.dtype}")
    return c_int(tensor.dtype == torch.bfloat16)


@operator(
    "hasten::rms_norm",
    lambda x, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns ``x`` (..., n) / its root mean square x ``weight`` (n,); also 1 / that root."""
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(f"a weight {_told(weight)} is none for rows {_told(x)}")
    x, weight = x.contiguous(), weight.contiguous()
    y, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    n = x.shape[-1]
    sizes = (c_int64(inverse.numel()), c_int64(n), c_float(eps), _half(x))
    call(
        "rows_rms_norm",
        x.numel(),
        address(x),
        address(weight),
        address(y),
        address(inverse),
        *sizes,
    )
    return y, inverse


@operator(
    "hasten::rms_norm_backward",
    lambda grad, x, weight, inverse, past: (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape, dtype=torch.float32),
    ),
)
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, past: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns gradients of ``x``, with ``past`` added, and of ``weight``, in float32."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    past = None if past is None else past.contiguous()
    n = x.shape[-1]
    dx, dw = torch.empty_like(x), x.new_zeros((torch.get_num_threads(), n), dtype=torch.float32)
    tensors = (address(t) for t in (grad, x, weight, inverse, past, dx, dw))
    sizes = (c_int64(inverse.numel()), c_int64(n), _half(x))
    call("rows_rms_norm_backward", x.numel(), *tensors, *sizes)
    return dx, dw.sum(0)


@operator("hasten::swiglu", lambda gate, up: gate.new_empty(gate.shape))
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns ``silu(gate) * up``, all of one shape (Shazeer, arXiv:2002.05202)."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"a gate {_told(gate)} is none for {_told(up)}")
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    tensors = (address(t) for t in (gate, up, y))
    call("rows_swiglu", y.numel(), *tensors, c_int64(y.numel()), _half(gate))
    return y


@operator(
    "hasten::swiglu_backward",
    lambda grad, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gradients of ``gate`` and ``up``."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    tensors = (address(t) for t in (grad, gate, up, dgate, dup))
    call("rows_swiglu_backward", gate.numel(), *tensors, c_int64(gate.numel()), _half(gate))
    return dgate, dup


@operator("hasten::rotate", lambda x, *_: x.new_empty(x.shape))
def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, pairs_in: bool, pairs_out: bool, back: bool
) -> Tensor:
    """Rotates the last ``2 * m`` columns of ``x`` (T, heads, width).

    The other columns are copied. ``cos``, ``sin`` (T, m). The numbers of a pair are
    adjacent or ``m`` columns apart, as set by ``pairs_in`` and ``pairs_out``.

    ``back`` rotates the other way: this is the gradient, with input and output swapped.
    """
    tables_fit = cos.shape == sin.shape and cos.dtype == sin.dtype and len(cos) == len(x)
    if not tables_fit or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"tables {_told(cos)} and {_told(sin)} can't turn {_told(x)}")
    if x.stride(-1) != 1:
        x = x.contiguous()
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    rows, heads, width = x.shape
    y = x.new_empty(x.shape)
    strides = (c_int64(x.stride(0)), c_int64(x.stride(1)))
    sizes = (rows, heads, width, width - 2 * cos.shape[-1])
    way = (c_float(-1 if back else 1), c_int(pairs_in + 2 * pairs_out), _half(x), _half(cos))
    tables = (address(cos), address(sin), c_int64(cos.stride(0)), address(y))
    call(
        "rows_rotate", x.numel(), address(x), *strides, *tables, *(c_int64(s) for s in sizes), *way
    )
    return y


@operator(
    "hasten::cross_entropy_",
    lambda logits, labels: logits.new_empty(labels.shape, dtype=torch.float32),
    mutates=("logits",),
)
def cross_entropy_(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns each row's loss in float32; ``logits`` (rows, n) become the sum's gradient."""
    if not logits.is_contiguous():
        raise ValueError("the logits must be contiguous; they are overwritten")
    n = logits.shape[-1]
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(f"{len(logits)} rows need so many int64 labels, not {labels.shape}")
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= n):
        raise IndexError(f"a label is outside the vocabulary of {n}")
    losses = logits.new_empty(len(labels), dtype=torch.float32)
    sizes = (c_int64(len(labels)), c_int64(n), _half(logits))
    labels = labels.contiguous()
    tensors = (address(t) for t in (logits, labels, losses))
    call("rows_cross_entropy", logits.numel(), *tensors, *sizes)
    return losses


def adamw_(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, copy: Tensor | None, rule: Any
) -> None:
    """Updates float32 ``weight`` and moments in place by AdamW; see ``rows.cpp`` for ``rule``.

    ``grad`` may be float32 or bfloat16; ``copy``, where given, gets the new weight in bfloat16.
    """
    check_alike(weight, *(t for t in (grad, first, second, copy) if t is not None))
    numbers = (ctypes.c_double * 7)(*rule)
    tensors = (address(t) for t in (grad, weight, first, second, copy))
    call("rows_adamw", weight.numel(), *tensors, c_int64(weight.numel()), numbers, _half(grad))


def check_alike(weight: Tensor, *others: Tensor) -> None:
    """Raises ValueError if tensors differ in shape or order of numbers, or have gaps.

    A loop over plain memory would mix up their numbers.
    """
    sides = zip(weight.shape, weight.stride(), strict=True)
    if weight.numel() and sum((n - 1) * step for n, step in sides) + 1 != weight.numel():
        raise ValueError("the numbers of the tensor must lie in memory without gaps")
    if not is_alike(weight, *others):
        raise ValueError("weight, gradient and moments must lie in memory in the same order")


def is_alike(first: Tensor, *others: Tensor) -> bool:
    """Returns True if tensors have one shape and one order of numbers in memory."""
    return all(t.shape == first.shape and _order(t) == _order(first) for t in others)


def _told(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype}"


def _order(tensor: Tensor) -> list[int]:
    """Returns the strides that matter: that of a side of 1 doesn't."""
    return [step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


# Float32 sums of a step's gradients on a GPU: one pass over memory, operator ``sum_``.
#
# torch's addition of tensors of two formats reaches two thirds of a GPU's memory rate. It runs
# for every weight and every micro-batch of a step after the first. The kernel is in
# ``rowwise_triton.py``. If it doesn't work on a GPU, it is refused by name. Then torch's addition
# runs, as it does for small tensors, where the call on the host takes longer than the sum.

SUM = "gradient_sum"  # name by which it is refused
SUM_BLOCK = 1024  # numbers of a program
SUM_FEWEST = 1 << 24  # numbers: on an H200 the kernel then saves 20 us, the cost of its call
SUM_FORMATS = frozenset((torch.float32, torch.bfloat16, torch.float16))


@functools.cache
def why_no_sum(device: str) -> str:
    """Returns why the kernel can't run on a device, in one sentence; empty if it can."""
    return why_no_triton(torch.device(device), "the sum of gradients is")


def sum_fits(total: Tensor, more: Tensor) -> bool:
    """Returns True if the kernel supports both: large contiguous tensors on one NVIDIA GPU."""
    return (
        total.device.type == "cuda"
        and total.numel() >= SUM_FEWEST
        and not (is_traceable_wrapper_subclass(total) or is_traceable_wrapper_subclass(more))
        and (total.device, total.shape) == (more.device, more.shape)
        and total.is_contiguous()
        and more.is_contiguous()
        and {total.dtype, more.dtype} <= SUM_FORMATS
        and not is_refused(SUM)
        and not why_no_sum(str(total.device))
    )


def float32_sum(total: Tensor, more: Tensor) -> Tensor:
    """Returns ``total + more`` in float32, written over ``total`` if that is float32."""
    out = total if total.dtype == torch.float32 else torch.empty_like(total, dtype=torch.float32)
    sum_(out, total, more)
    return out


@operator("hasten_gpu::sum_", no_results, mutates=("out",))
def sum_(out: Tensor, total: Tensor, more: Tensor) -> None:
    """Writes ``total + more`` to ``out``, which may be ``total``; all without gaps."""
    if count := out.numel():
        kernels, programs = "hasten.parts.kernels.rowwise_triton", (-(-count // SUM_BLOCK),)
        launch(kernels, "sum_kernel", programs, total, more, out, count, BLOCK=SUM_BLOCK)
