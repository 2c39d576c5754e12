"""Float32 sums of a step's gradients on a GPU: one pass over memory, operator ``sum_``.

torch's addition of tensors of two formats reaches two thirds of a GPU's memory rate. It runs
for every weight and every micro-batch of a step after the first. The kernel is in
``rowwise_triton.py``. If it doesn't work on a GPU, it is refused by name. Then torch's addition
runs, as it does for small tensors, where the call on the host takes longer than the sum.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hasten.parts.kernels.operators import launch, no_results, operator, why_no_triton
from hasten.parts.kernels.registry import is_refused

NAME = "gradient_sum"  # name by which it is refused
BLOCK = 1024  # numbers of a program
FEWEST = 1 << 24  # numbers: on an H200 the kernel then saves 20 us, the cost of its call
FORMATS = frozenset((torch.float32, torch.bfloat16, torch.float16))


@functools.cache
def why_not(device: str) -> str:
    """Returns why the kernel can't run on a device, in one sentence; empty if it can."""
    return why_no_triton(torch.device(device), "the sum of gradients is")


def fits(total: Tensor, more: Tensor) -> bool:
    """Returns True if the kernel supports both: large contiguous tensors on one NVIDIA GPU."""
    return (
        total.device.type == "cuda"
        and total.numel() >= FEWEST
        and not (is_traceable_wrapper_subclass(total) or is_traceable_wrapper_subclass(more))
        and (total.device, total.shape) == (more.device, more.shape)
        and total.is_contiguous()
        and more.is_contiguous()
        and {total.dtype, more.dtype} <= FORMATS
        and not is_refused(NAME)
        and not why_not(str(total.device))
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
        kernels, programs = "hasten.parts.kernels.rowwise_triton", (-(-count // BLOCK),)
        launch(kernels, "sum_kernel", programs, total, more, out, count, BLOCK=BLOCK)
