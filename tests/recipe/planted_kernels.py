"""The child process of a first contact, with faults planted into its kernels.

    python planted_kernels.py PLAN.json '{"kernels": [...], "device": "cpu"}'

PLAN.json says by name of an operator what happens there, and in which file each start is noted.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import torch

from hasten.parts.kernels import registry
from hasten.parts.nn import fused_gpu, gpu_kernels  # noqa: F401  # registers them


def planted(fault: str, true: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with its fault."""

    calls = itertools.count()

    def run(*given: Any) -> Any:
        if fault == "wrong":
            return true(*given) * 1.1
        if fault == "nan":
            out = true(*given).clone()
            out.view(-1)[0] = torch.nan
            return out
        if fault == "differs each time":
            return true(*given) * (1 + 1e-6 * next(calls))
        if fault == "does not compile":
            raise RuntimeError("PTXAS error: Internal Triton PTX codegen error\nptxas fatal")
        if fault == "hangs":
            time.sleep(600)
        if fault == "takes its process along":
            print("an illegal memory access was encountered", file=sys.stderr, flush=True)
            os.abort()
        raise ValueError(fault)

    return run


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text())
    with Path(plan["starts"]).open("a") as starts:
        starts.write(sys.argv[2] + "\n")
    if plan.get("does not start"):
        sys.exit("CUDA driver version is insufficient")
    for name, fault in plan["faults"].items():
        setattr(fused_gpu, name, planted(fault, getattr(fused_gpu, name)))
    print("a library says hello")
    registry.main(sys.argv[2:])
