"""The host as every variant gets it: threads, waiting, allocator; and how busy it is meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hasten.machine import host

SOURCES = Path(__file__).resolve().parents[2] / "src"
# glibc keeps freed memory instead of mapping every large tensor anew (mallopt(3))
KEEPING = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
# What oneDNN (and hasten, which keeps its limit), torch's own kernels and MKL may use
ISAS = {
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "avx512_bf16": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
PACKAGES = ("hasten", "torch", "transformers", "peft", "accelerate", "trl", "lightning", "datasets")


def environment(kind: str, threads: int, isa: str | None = None) -> dict[str, str]:
    """The environment of every variant's process; ``kind`` is glibc or none.

    ``isa`` limits the instruction sets of all libraries alike (:data:`ISAS`).
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    env |= {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": str(SOURCES),  # peers' own environments need not have hasten installed
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if isa is not None:
        env |= ISAS[isa]
    if kind == "glibc":
        env |= KEEPING
    return env


def instruction_sets_used(env: dict[str, str]) -> list[str]:
    """What oneDNN and MKL say that they use, and how hasten's kernels multiply bf16."""
    code = (
        "import torch\n"
        "a = torch.randn(512, 512)\n"
        "torch.mm(a, a), torch.mm(a.bfloat16(), a.bfloat16())\n"
        "from hasten.parts.kernels import products\n"
        "print('hasten multiplies bf16 by', products.unit(torch.bfloat16))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"},
        capture_output=True,
        text=True,
    )
    marks = ("info,cpu,isa", "exec,cpu,matmul", "MKL_VERBOSE oneMKL", "hasten multiplies")
    lines = [line for line in said.stdout.splitlines() if any(mark in line for mark in marks)]
    return [line[:160] for line in lines]


def missing(python: str, packages: Sequence[str]) -> list[str]:
    """Those of the packages that the interpreter can't find."""
    if not packages:
        return []
    code = (
        "import importlib.util as u, sys; print(*[p for p in sys.argv[1:] if not u.find_spec(p)])"
    )
    found = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True)
    return found.stdout.split() if not found.returncode else list(packages)


def versions(python: str) -> dict[str, str]:
    """Versions in the peers' environment, and hasten's from this one."""
    code = (
        "import importlib.metadata as m, sys\n"
        "for p in sys.argv[1:]:\n"
        "    try: print(p, m.version(p))\n"
        "    except m.PackageNotFoundError: pass"
    )
    found = subprocess.run([python, "-c", code, *PACKAGES], capture_output=True, text=True)
    known = dict(line.split() for line in found.stdout.splitlines())
    return {**known, "hasten": metadata.version("hasten"), "python": sys.version.split()[0]}


def description() -> dict[str, Any]:
    """The machine in a phrase and in its parts."""
    found = host.hardware()
    return {
        "short": found.short,
        "instruction_sets": found.instruction_sets,
        "system": found.system,
        "torch_device": host.default_device(),
    }
