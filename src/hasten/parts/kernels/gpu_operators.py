"""Defines operators of torch under ``hasten_gpu::`` with little host time for each call.

``torch.library.custom_op`` runs some Python of its own for autograd in each call, 25 to 40 us
on the host. That is longer than a small kernel takes. An operator of a ``torch.library.Library``
goes from torch's dispatcher straight to its function.

So these operators have no gradients of their own, and write none of their arguments. They are
called in the forward and backward pass of a ``torch.autograd.Function``. A compiled graph keeps
them whole. A simulated GPU counts them by the function that makes results without numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch

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
