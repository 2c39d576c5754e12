"""Triton's kernels as operators of torch under ``hasten_gpu::``: where they run, and the launch.

An operator of ``torch.library.custom_op`` runs Python for autograd in each call. That takes 25
to 40 us on the host, longer than a small kernel takes. An operator of a
``torch.library.Library`` goes from torch's dispatcher straight to its function.

So these operators have no gradients of their own, and write none of their arguments. They are
called in the forward and backward pass of a ``torch.autograd.Function``. A compiled graph keeps
them whole. A simulated GPU counts them by the function that makes results without numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from hasten.parts.kernels.registry import LEAST_CAPABILITY

P = ParamSpec("P")
R = TypeVar("R")
NAMESPACE: Final = "hasten_gpu"
DEVICES: Final = ("CUDA", "CPU")  # Triton's interpreter runs kernels on a processor's tensors
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def gpu_operator(
    results: Callable[..., Any],
    name: str = "",
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes the decorated function an operator of the same signature.

    Args:
        results: takes the same arguments, as tensors without memory, and returns results of
            the right shapes and formats.
        name: of the operator; the default is the function's.

    Returns:
        The decorator, which returns the operator (``torch._ops.OpOverload``).
    """

    def define(function: Callable[P, R]) -> Callable[P, R]:
        called = name or function.__name__
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(called + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in DEVICES:
            _LIBRARY.impl(called, function, device)
        torch.library.register_fake(f"{NAMESPACE}::{called}", results, lib=_LIBRARY)
        operator = getattr(getattr(torch.ops, NAMESPACE), called).default
        operator.__doc__ = function.__doc__
        return cast("Callable[P, R]", operator)

    return define


def why_no_triton(device: torch.device, what: str, homes: str = "NVIDIA GPUs") -> str:
    """Why Triton's kernels can't run on a device, in one sentence; empty when they can.

    Args:
        what: subject and verb of the sentence ("the fused layers are").
        homes: devices that have this code, in Triton or otherwise.
    """
    if device.type != "cuda":
        return f"{what} for {homes}, not for {device.type}"
    if torch.version.hip is not None:  # torch calls AMD's GPUs cuda, too
        return f"{what} for NVIDIA GPUs: their kernels were never tried on ROCm"
    if importlib.util.find_spec("triton") is None:
        return f"{what} for GPUs with Triton, which isn't installed: pip install triton"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            have, need = (".".join(map(str, c)) for c in (capability, LEAST_CAPABILITY))
            return f"Triton takes compute capability {need} or later, and this GPU has {have}"
    return ""


def launch(kernel: Any, programs: tuple[int, ...], x: Tensor, *others: Any, **fixed: Any) -> None:
    """Run a kernel on the GPU of ``x``, its first argument; Triton would take the current one."""
    device = x.get_device()  # below 0: a processor's tensor, for the interpreter
    if device < 0 or device == torch.cuda.current_device():
        kernel[programs](x, *others, **fixed)
        return
    with torch.cuda.device(device):
        kernel[programs](x, *others, **fixed)
