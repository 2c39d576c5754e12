"""Compiles every Triton kernel for an H100 and prints how many: it takes no GPU, only Triton.

The interpreter runs a kernel's Python, with all that Python allows; the compiler refuses what isn't
Triton. Run as a script, in a process whose Triton compiles.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hasten.parts.kernels import rowwise_triton

HOPPER = GPUTarget("cuda", 90, 32)
SIZES = ["rows", "n", "each", "count", "by_row", "by_head", "heads", "width", "m"]


def cubin(kernel: Any, number: str, table: str = "fp32", **fixed: Any) -> bytes:
    """A kernel's code where tensors hold ``number``; sizes of 1 are constants, as in a launch."""
    types: dict[str, str] = {}
    for name in kernel.arg_names:
        whole = "fp32" if name in ("eps", "way") else f"*{number}"
        types[name] = "i32" if name in SIZES else whole
    types |= {n: f"*{table}" for n in ("cos", "sin") if n in types}
    types |= {n: "*fp32" for n in ("inverse", "dw") if n in types}
    types |= dict.fromkeys(fixed, "constexpr")
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(kernel, signature=types, constexprs=constants)
    found: bytes = triton.compile(source, target=HOPPER).asm["cubin"]
    return found


def main() -> int:
    k, done = rowwise_triton, []
    for number in ("bf16", "fp32"):
        done.append(cubin(k.norm_kernel, number, BLOCK=4096))
        for past in (True, False):
            done.append(cubin(k.norm_back_kernel, number, PAST=past, BLOCK=4096))
            done.append(cubin(k.norm_back_kernel, number, PAST=past, BLOCK=512, each=1))
        done.append(cubin(k.norm_back_kernel, number, PAST=True, BLOCK=1, each=1, rows=1, n=1))
        for kernel in (k.swiglu_kernel, k.swiglu_back_kernel):
            done.append(cubin(kernel, number, BLOCK=1024))
        for table in {number, "fp32"}:
            for pairs_in, pairs_out, plain in (
                (False, False, 0),
                (True, False, 128),
                (True, True, 128),
            ):
                layout = {"PAIRS_IN": pairs_in, "PAIRS_OUT": pairs_out, "PLAIN": plain}
                done.append(cubin(k.rotate_kernel, number, table, HEADS=16, BLOCK=32, **layout))
                done.append(
                    cubin(k.rotate_kernel, number, table, HEADS=1, BLOCK=32, heads=1, **layout)
                )
    return sum(len(code) > 0 for code in done)


if __name__ == "__main__":
    print(main())
