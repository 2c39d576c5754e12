"""GPU form of :mod:`hasten.parts.nn.fused_functions`: torch's norm, other kernels in Triton.

torch has the plain norm in one kernel each way since 2.9. It doesn't have three other
operations, for which there are Triton kernels
(:mod:`hasten.parts.kernels.rowwise_triton`):

- the norm with the residual's gradient in one pass;
- the gated SiLU;
- rotary embedding of some columns, with pairs in either layout (MLA).

Triton comes with torch for CUDA. The Triton passes are torch operators under
``hasten_gpu::`` with the signatures of :mod:`hasten.parts.kernels.rowwise`. So compiled
graphs keep them whole, and one autograd function serves processor and GPU.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hasten.machine.lazy_torch import constant_in_graphs
from hasten.parts.kernels.operators import launch, operator, why_no_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 16_384  # numbers of a row in one program of a norm; more would exceed its registers
BLOCK = 1024  # numbers of one program without rows
STEP = 8  # numbers that are moved together if all sizes are multiples of it
PROGRAMS = 1024  # most programs of a backward norm: each writes a row of partial sums
ON_A_TILE = 4096  # numbers of a program that rotates heads
CROSS_ENTROPY = "cross_entropy"  # name of the kernel in the registry
LOGITS_BLOCK = 8192  # numbers of a row of logits that a program reads at once
_launch = functools.partial(launch, "hasten.parts.kernels.rowwise_triton")


def why_not(device: str) -> str:
    """Returns why these operations can't run on a device, in one sentence; empty if they can."""
    homes = "processors and NVIDIA GPUs"
    return why_no_triton(torch.device(device), "the fused layers are", homes)


@constant_in_graphs  # a graph stores the answer, not its computation
def has_kernels(device: str) -> bool:
    """Returns True if Triton's kernels run on a device."""
    return _asked(device)


@functools.cache
def _asked(device: str) -> bool:
    return not why_not(device)


def fits(*tensors: Tensor) -> bool:
    """Returns True if these operations take the tensors: one supported format, on one GPU."""
    one = tensors[0]
    alike = all(t.dtype == one.dtype and t.device == one.device for t in tensors)
    norm = any(t.ndim == 1 for t in tensors)  # a norm has its weight among them and full rows
    narrow = not norm or one.shape[-1] <= WIDEST
    return alike and narrow and one.dtype in DTYPES and one.device.type == "cuda"


@operator(
    "hasten_gpu::rms_norm",
    lambda x, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns ``x`` (..., n) / its root mean square x ``weight`` (n,); also 1 / that root."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    n, block = _row(x)
    if x.numel():
        shape = {"BLOCK": block, "num_warps": warps(block)}
        _launch("norm_kernel", (inverse.numel(),), x, weight, y, inverse, n, eps, **shape)
    return y, inverse


@operator(
    "hasten_gpu::rms_norm_backward",
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
    n, block = _row(x)
    rows = inverse.numel()
    each = max(1, -(-rows // PROGRAMS))
    programs = -(-rows // each)
    dx, dw = torch.empty_like(x), x.new_empty((programs, n), dtype=torch.float32)
    if x.numel():
        tensors = (grad, x, weight, inverse, x if past is None else past, dx, dw)
        shape = {"PAST": past is not None, "BLOCK": block, "num_warps": back_warps(block)}
        _launch("norm_back_kernel", (programs,), *tensors, rows, n, each, **shape)
    return dx, dw.sum(0)


@operator("hasten_gpu::swiglu", lambda gate, up: gate.new_empty(gate.shape))
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns ``silu(gate) * up``, all of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    count = y.numel()
    if count:
        _launch("swiglu_kernel", (-(-count // BLOCK),), gate, up, y, count, **_blocks(count))
    return y


@operator(
    "hasten_gpu::swiglu_backward",
    lambda grad, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gradients of ``gate`` and ``up``."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    count = gate.numel()
    if count:
        tensors = (grad, gate, up, dgate, dup)
        _launch("swiglu_back_kernel", (-(-count // BLOCK),), *tensors, count, **_blocks(count))
    return dgate, dup


@operator("hasten_gpu::rotate", lambda x, *_: x.new_empty(x.shape))
def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, pairs_in: bool, pairs_out: bool, back: bool
) -> Tensor:
    """Rotates the last ``2 * m`` columns of ``x`` (T, heads, width) and copies the others.

    As :func:`hasten.parts.kernels.rowwise.rotate` has it.
    """
    tables_fit = cos.shape == sin.shape and cos.dtype == sin.dtype and cos.shape[0] == x.shape[0]
    if not tables_fit or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"tables {tuple(cos.shape)} and {tuple(sin.shape)} can't turn {tuple(x.shape)}"
        )
    if x.stride(-1) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    rows, heads, width = x.shape
    m = cos.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    block, plain = power(m), power(width - 2 * m) if width > 2 * m else 0
    together = min(power(heads), max(1, ON_A_TILE // max(block, plain)))
    sizes = (x.stride(0), x.stride(1), heads, width, m, -1.0 if back else 1.0)
    layout = {"PAIRS_IN": pairs_in, "PAIRS_OUT": pairs_out}
    shape = {"HEADS": together, "BLOCK": block, "PLAIN": plain}
    programs = (rows, -(-heads // together))
    _launch("rotate_kernel", programs, x, cos, sin, y, *sizes, **layout, **shape)
    return y


@operator(
    "hasten_gpu::cross_entropy_",
    lambda logits, labels, ignored: logits.new_empty(labels.shape, dtype=torch.float32),
    mutates=("logits",),
)
def cross_entropy_(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Returns each row's loss in float32; ``logits`` (rows, n) become the sum's gradient.

    A row with the label ``ignored`` has loss and gradient 0. The host doesn't wait for the
    labels, so any other label outside of the vocabulary makes both NaN.
    """
    if not logits.is_contiguous():
        raise ValueError("the logits must be contiguous; they are overwritten")
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(f"{len(logits)} rows need so many int64 labels, not {labels.shape}")
    rows, n = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    if logits.numel():
        block = min(power(n), LOGITS_BLOCK)
        shape = {"BLOCK": block, "num_warps": warps(block)}
        tensors = logits, labels.contiguous(), losses
        _launch("cross_entropy_kernel", (rows,), *tensors, n, ignored, **shape)
    return losses


def _row(x: Tensor) -> tuple[int, int]:
    """Returns the length of a row, and of the block that holds it."""
    return x.shape[-1], power(x.shape[-1])


def _blocks(count: int) -> dict[str, int]:
    return {"STEP": 1 if count % STEP else STEP, "BLOCK": BLOCK}


def power(n: int) -> int:
    """Returns the smallest power of two that isn't below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def warps(block: int, each: int = 32, most: int = 16) -> int:
    """Returns warps such that each of their 32 lanes has about ``each`` numbers of a row.

    A lane that reads 32 has several loads on their way at once, and a sum over few warps waits
    less: of rows of 4096 in bf16 an H100's processor then reads 64 KB at once, with 8 a lane 32.
    """
    return min(max(block // (32 * each), 1), most)


def back_warps(block: int) -> int:
    """Returns the warps of a backward norm, which holds five rows at once."""
    return warps(block, 4, 32)
