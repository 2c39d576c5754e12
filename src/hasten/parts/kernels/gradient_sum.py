"""Sums of a step's gradients in float32 on a GPU: one pass over memory, operator ``add_``.

torch's addition of tensors of two formats reaches two thirds of a GPU's memory rate. It runs
for every weight and every micro-batch of a step after the first. The kernel is in
``rowwise_triton.py``. If it doesn't work on a GPU, it is refused by name. Then torch's addition
runs.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hasten.parts.kernels import adamw
from hasten.parts.kernels.registry import is_refused

NAME = "gradient_sum"  # by which it is refused
BLOCK = 1024  # numbers of a program
FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def fits(total: Tensor, more: Tensor) -> bool:
    """Returns True if the kernel takes both: plain tensors without gaps on one NVIDIA GPU."""
    return (
        total.device.type == "cuda"
        and not (is_traceable_wrapper_subclass(total) or is_traceable_wrapper_subclass(more))
        and total.device == more.device
        and total.shape == more.shape
        and total.is_contiguous()
        and more.is_contiguous()
        and {total.dtype, more.dtype} <= set(FORMATS)
        and not is_refused(NAME)
        and not adamw.why_not(str(total.device))
    )


def float32_sum(total: Tensor, more: Tensor) -> Tensor:
    """``total + more`` in float32; written over ``total`` where that is in float32."""
    out = total if total.dtype == torch.float32 else torch.empty_like(total, dtype=torch.float32)
    add_(out, total, more)
    return out


@custom_op("hasten_gpu::sum_", mutates_args=("out",))
def add_(out: Tensor, total: Tensor, more: Tensor) -> None:
    """Writes ``total + more`` to ``out``, which may be ``total``; all without gaps."""
    kernels = importlib.import_module("hasten.parts.kernels.rowwise_triton")
    if count := out.numel():
        with torch.cuda.device_of(out):  # Triton launches on the current device
            kernels.sum_kernel[(-(-count // BLOCK),)](total, more, out, count, BLOCK=BLOCK)


@add_.register_fake
def _(out: Tensor, total: Tensor, more: Tensor) -> None:
    return None
