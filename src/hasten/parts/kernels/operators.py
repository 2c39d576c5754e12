"""Kernels as operators of torch: C++ under ``hasten::``, Triton under ``hasten_gpu::``.

A compiled graph keeps an operator whole. A simulated GPU counts it by the function that makes
results without numbers.

Operators belong to a ``torch.library.Library``: torch's dispatcher calls their function directly.
One of ``torch.library.custom_op`` runs Python for autograd in each call, which takes 20 to 40 us,
longer than a small kernel. None of them has gradients of its own. They are called in the forward
and backward pass of a ``torch.autograd.Function``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from hasten.errors import InputError
from hasten.parts.kernels.registry import LEAST_CAPABILITY

P = ParamSpec("P")
R = TypeVar("R")
_libraries: dict[str, torch.library.Library] = {}  # by namespace


def operator(
    name: str, results: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes the decorated function an operator of the same signature.

    Args:
        name: with its namespace.
        results: takes the same arguments, as tensors without memory, and returns results of
            the right shapes and formats.
        mutates: names of the arguments that it writes.

    Returns:
        The decorator, which returns the operator (``torch._ops.OpOverload``).
    """
    namespace, called = name.split("::")
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    library = _libraries[namespace]

    def define(function: Callable[P, R]) -> Callable[P, R]:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        names = list(inspect.signature(function).parameters)
        written = [names.index(name) for name in mutates]

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.is_grad_enabled() and any(
                isinstance(one, Tensor) and one.requires_grad for one in args
            ):
                refuse_second_derivative()
            result = function(*args, **kwargs)
            for index in written:  # autograd then refuses tensors that it saved before
                one = args[index]
                for tensor in one if isinstance(one, list | tuple) else (one,):
                    if isinstance(tensor, Tensor) and not tensor.is_inference():
                        torch.autograd.graph.increment_version(tensor)
            return result

        library.define(called + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(called, run, "CompositeExplicitAutograd")
        torch.library.register_fake(name, results, lib=library)
        made = getattr(getattr(torch.ops, namespace), called).default
        made.__doc__ = function.__doc__
        return cast("Callable[P, R]", made)

    return define


def refuse_second_derivative() -> None:
    """Raises if autograd would take a gradient for a constant in a second derivative.

    Raises:
        InputError: autograd records, as in a backward pass with ``create_graph=True``.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise InputError(
            "hasten's kernels have no second derivative, which create_graph=True needs: leave out "
            "the techniques of layers, attention, experts and loss"
        )


def no_results(*args: Any) -> None:
    """Returns the results of an operator that only writes its arguments."""


def address(tensor: Tensor | None) -> c_void_p:
    """Returns the address of a tensor's numbers for a kernel in C++; null for None."""
    return c_void_p(None if tensor is None else tensor.data_ptr())


def why_no_triton(device: torch.device, what: str, homes: str = "NVIDIA GPUs") -> str:
    """Returns why Triton's kernels can't run on a device, in one sentence; empty if they can.

    Args:
        what: subject and verb of the sentence ("the fused layers are").
        homes: devices that have this code, in Triton or otherwise.
    """
    if device.type != "cuda":
        return f"{what} for {homes}, not for {device.type}"
    if torch.version.hip is not None:  # torch names AMD's GPUs cuda too
        return f"{what} for NVIDIA GPUs: their kernels were never tried on ROCm"
    if importlib.util.find_spec("triton") is None:
        return f"{what} for GPUs with Triton, which isn't installed: pip install triton"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            have, need = (".".join(map(str, c)) for c in (capability, LEAST_CAPABILITY))
            return f"Triton takes compute capability {need} or later, and this GPU has {have}"
    return ""


def launch(
    module: str, kernel: str, programs: tuple[int, ...], x: Tensor, *others: Any, **fixed: Any
) -> None:
    """Runs a kernel on the GPU of ``x``; Triton would take the current one.

    Its module is imported when a kernel runs: Triton may be missing where none does.
    """
    run = getattr(importlib.import_module(module), kernel)[programs]
    device = x.get_device()  # negative: a processor's tensor, for the interpreter
    if device < 0 or device == torch.cuda.current_device():
        run(x, *others, **fixed)
        return
    with torch.cuda.device(device):
        run(x, *others, **fixed)
