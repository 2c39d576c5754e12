"""Binds launches of AdamW's kernel as a GPU's would be, and compiles what they ask for; none runs.

Run as a script in a process whose Triton compiles. It prints, of each launch, programs and loads of
16 bytes.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hasten.parts.kernels import adamw, adamw_triton, low_bit

RULE = adamw.AdamWRule(1e-2, 1.0, 0.9, 0.95, 1.0, 1e-8)
FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


class PretendedDriver:
    """Of a GPU's driver, what a compilation asks."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """Takes the kernel's place: compiles for the arguments and doesn't launch."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.seen: list[tuple[int, int]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **fixed: Any) -> None:
            found = self._kernel.warmup(*args, grid=grid, **fixed)
            assert not found.metadata.enable_fp_fusion
            self.seen.append((grid[0], found.asm["ptx"].count("ld.global.v4")))

        return launch


def a_tensor(count: int, moments: str, weight: torch.dtype, copied: bool) -> adamw.TensorUpdate:
    blocks = low_bit.blocks(count)
    kept = blocks * low_bit.BLOCK if moments == "int8" else count
    first, second = (torch.zeros(kept, dtype=FORMATS[moments]) for _ in range(2))
    scales = (torch.zeros(blocks), torch.zeros(blocks)) if moments == "int8" else None
    copy = torch.zeros(count, dtype=torch.bfloat16) if copied else None
    values = torch.zeros(count, dtype=weight), torch.zeros(count, dtype=torch.bfloat16)
    return adamw.TensorUpdate(*values, first, second, RULE, scales, copy, adamw.dice_key(1, 2, 3))


def main() -> list[tuple[int, int]]:
    driver.set_active(PretendedDriver())  # type: ignore[no-untyped-call]
    kernels: Any = adamw_triton
    kernels.adamw_kernel = seen = Compiled(adamw_triton.adamw_kernel)
    for many in (1, 2, 16):
        given = [a_tensor(70_000, "int8", torch.float32, True) for _ in range(many)]
        adamw.update(given, torch.tensor(2.0))
    adamw.update([a_tensor(4096, "float32", torch.float32, True)] * 3)
    adamw.update([a_tensor(4097, "bf16", torch.bfloat16, False)] * 3)
    return seen.seen


if __name__ == "__main__":
    print(json.dumps(main()))
