"""Imported first by the tests: without a GPU, Triton's kernels run as Python, in every process.

Triton reads the variable while it is imported, and Transformers imports it. So does torch's
compiler, which would start processes that import torch, to compile a few small functions.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

NARROW = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def replace_once_a_launch() -> None:
    """Let Triton's interpreter replace the language's functions once for each module of a launch.

    It looks for them at each call of a device function, which takes up to half of a launch.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = (interpreter.tl, interpreter.tl.core)
    launch, replaced = interpreter.GridExecutor.__call__, set[int]()

    @functools.cache
    def modules_of(function: Any) -> frozenset[int]:
        values = function.__globals__.values()
        return frozenset(id(module) for module in language if any(v is module for v in values))

    def launched(self: Any, *given: Any, **named: Any) -> None:
        replaced.clear()
        launch(self, *given, **named)

    def called(self: Any, *given: Any, **named: Any) -> Any:
        if not modules_of(self.fn) <= replaced:
            interpreter._patch_lang(self.fn)
            replaced.update(modules_of(self.fn))
        try:
            return self.rewrite()(*given, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called


def describe_types_once() -> None:
    """Let Triton's interpreter describe each type and shape once, and look for no overflow.

    It builds both anew for each value, which takes a third of its time. A fifth is for sums and
    products of 32 bits, which it computes again in 64: a wrong one is seen in a test's numbers.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    core = interpreter.tl.core
    number_type, block, value = interpreter._get_np_dtype, core.block_type, core.tensor
    describe_block, describe_value = block.__init__, value.__init__
    number_types: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}

    def number_type_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in number_types:
            number_types[name] = number_type(kind)
        return number_types[name]

    def describe_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            describe_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def describe_value_once(self: Any, handle: Any, type: Any) -> None:
        shared = vars(type).get("of_values")
        if shared is None:
            describe_value(self, handle, type)
            shared = type.of_values = {k: v for k, v in vars(self).items() if k != "handle"}
            if isinstance(type, block):
                blocks[type.scalar.name, *type.shape]["of_values"] = shared
        vars(self).update(shared, handle=handle)

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = number_type_of
    block.__init__, value.__init__ = describe_block_once, describe_value_once


def round_as_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter round float32 to nearest even, as PTX's ``cvt.rn`` does.

    Its own conversion to bf16 and float8 cuts, or goes up where a bit is left out; that of bf16 to
    float32 is off for subnormal numbers. Its fused multiply-add rounds the product, too.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    usual = interpreter._convert_float

    def converted(numbers: NDArray[Any], source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) == ("bf16", "fp32"):
            return numbers.astype(np.uint32) << 16
        if source.name != "fp32" or target.name not in NARROW:
            return usual(numbers, source, target, mode)
        wide = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
        kind = torch.uint16 if target.name == "bf16" else torch.uint8
        return wide.to(NARROW[target.name]).view(kind).numpy()

    patch.setattr(interpreter, "_convert_float", converted)

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        # A product of two float32 is exact in float64.
        one, other, third = (t.data.astype(np.float64) for t in (x, y, z))
        return interpreter.TensorHandle((one * other + third).astype(x.data.dtype), x.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_fma", fused)
