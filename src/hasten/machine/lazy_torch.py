"""Checks and decorators for torch's DTensor, FSDP2 and compiler without importing them.

Their imports take 1 to 3 s. Commands without a model (``report``, ``keys``, ``launch``)
don't need them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeGuard, TypeVar

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

P = ParamSpec("P")
R = TypeVar("R")


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Returns True for a DTensor; don't call it in compiled code."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp_module(module: object) -> TypeGuard[FSDPModule]:
    """Returns True for a module with its own ``fully_shard`` call."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function as `torch.compiler.assume_constant_result`: a graph stores its answer."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Applies `torch.compiler.disable`, importing the compiler at the first call."""
    disabled: Callable[P, R] = torch._disable_dynamo(function)
    return disabled
