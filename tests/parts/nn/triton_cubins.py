"""Compiles every Triton kernel for GPUs that aren't here, and counts what leaves their registers.

The interpreter runs a kernel's Python, with all that Python allows; the compiler refuses what isn't
Triton, and the assembler says what a launch costs. Run as a script in a process whose Triton
compiles, with the compute capabilities: ``80 90``; ``all`` takes every format and layout. With
``accesses``, it also prints how some kernels reach the memory of the first of these GPUs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hasten.parts.kernels import (
    adamw,
    adamw_triton,
    codec_reference,
    codec_triton,
    experts_triton,
    few_bits_triton,
    rowwise_triton,
)
from hasten.parts.nn import experts_gpu, quantised_gpu
from hasten.parts.nn.fused_gpu import BLOCK, LOGITS_BLOCK, ON_A_TILE, STEP, back_warps, warps

WHOLE = ["rows", "n", "each", "count", "by_row", "by_head", "heads", "width", "m"]
WHOLE += ["numbers", "ranks", "codes_stride", "scales_stride", "low", "cap", "most", "key"]
WHOLE += ["tensors", "depth", "filled", "blocks", "ignored"]
SINGLE = ["eps", "way", "share", "factor", "limit", "least"]
FLOATS = [
    "inverse",
    "dw",
    "residual",
    "kept",
    "out",
    "rules",
    "divisor",
    "signed",
    "borders",
    "squared",
]
FLOAT8_FROM = 90  # as the products; earlier GPUs round to fp16 on the way
FLOAT8 = {"data": "*fp8e4nv", "turned": "*fp8e4nv", "scale": "*fp32", "turned_scale": "*fp32"}
FLOAT8 |= {"of_rows": "*i32", "of_columns": "*i32"}
FORMATS = ("bf16", "fp16", "fp32")
ACCESSES = ("swiglu", "swiglu back", "rotate llama", "norm 8192")
WORDS = ("all", "accesses")


class Variant(NamedTuple):
    """A kernel as a launch has it: a format, warps and constants."""

    name: str
    kernel: Any
    number: str
    warps: int
    fixed: dict[str, Any]
    table: str = "fp32"
    types: dict[str, str] | None = None  # of arguments that aren't of the usual ones
    registers: int | None = None  # of a thread, at most


def variants(number: str, every: bool) -> Iterator[Variant]:  # noqa: C901  # a loop for each kernel
    """What training launches; ``every``: edge cases of the launch, too."""
    rows, codec = rowwise_triton, codec_triton
    for width in (4096, 8192, 16384) if every else (8192,):
        yield Variant(f"norm {width}", rows.norm_kernel, number, warps(width), {"BLOCK": width})
        for past in (True, False) if every else (True,):
            fixed = {"PAST": past, "BLOCK": width}
            back = back_warps(width)
            yield Variant(f"norm back {width}", rows.norm_back_kernel, number, back, fixed)
    for name, kernel in (("swiglu", rows.swiglu_kernel), ("swiglu back", rows.swiglu_back_kernel)):
        for step in (STEP, 1) if every else (STEP,):
            yield Variant(name, kernel, number, 4, {"STEP": step, "BLOCK": BLOCK})
    # Llama's heads of 128; a latent attention's query, 64 of 192 columns turned; and its key.
    for name, plain, pairs in (("llama", 0, 64), ("latent", 128, 32), ("latent key", 0, 32)):
        heads = 1 if name == "latent key" else min(32, ON_A_TILE // max(plain, pairs))
        for pairs_in, pairs_out in ((False, False), (True, False), (True, True)):
            if (name == "llama") == pairs_in and not every:
                continue
            fixed = {"PAIRS_IN": pairs_in, "PAIRS_OUT": pairs_out, "PLAIN": plain}
            fixed |= {"HEADS": heads, "BLOCK": pairs, **({"heads": 1} if heads == 1 else {})}
            yield Variant(f"rotate {name}", rows.rotate_kernel, number, 4, fixed)
            if every and number != "fp32":
                yield Variant(f"rotate {name}", rows.rotate_kernel, number, 4, fixed, number)
    of_sum = {"out": "*fp32", "total": "*fp32"}
    yield Variant("sum", rows.sum_kernel, number, 4, {"BLOCK": BLOCK}, types=of_sum)
    fixed = {"BLOCK": LOGITS_BLOCK}
    labels = {"labels": "*i64", "losses": "*fp32"}
    name, of_logits = "cross-entropy", warps(LOGITS_BLOCK)
    yield Variant(name, rows.cross_entropy_kernel, number, of_logits, fixed, types=labels)
    if every:
        fixed = {"PAST": True, "BLOCK": 1, "n": 1}
        yield Variant("norm back of one", rows.norm_back_kernel, number, 1, fixed)
    yield from few_bits_variants(number, every)
    yield from experts_variants(number, every)
    if number == "fp16":  # gradients travel as float32 or bfloat16
        return
    yield from updates(number, every)
    for bits in (8, 4) if every else (8,):
        fixed = {"BITS": bits, "HALF": 128, "REST": True, "KEEP": True, "DICE": True}
        fixed |= {"INFINITY": codec_reference.INFINITE}
        yield Variant(f"encode int{bits}", codec.encode_kernel, number, 1, fixed)
        add = {"BITS": bits, "HALF": 128, "ADD": True}
        yield Variant(f"decode int{bits}", codec.decode_kernel, number, 1, add)


def updates(number: str, every: bool) -> Iterator[Variant]:
    """AdamW's, by the format of gradients: how weights and moments are kept."""
    wide, half = tl.float32, tl.bfloat16
    kept = ("fp32", "bf16", "int8")
    cases = [(0, wide, True, adamw.STEP), (2, wide, True, adamw.STEP)]
    if every:
        ways = ((wide, True), (wide, False), (half, False))
        several = (adamw.STEP, 1) if number == "bf16" else (adamw.STEP,)
        cases = [(m, *way, step) for m in range(3) for way in ways for step in several]
    for moments, weight, copy, step in cases:
        fixed = {"WEIGHT": weight, "GRAD": half if number == "bf16" else wide, "COPY": copy}
        fixed |= {"MOMENTS": moments, "DIVIDED": True, "STEP": step}
        fixed |= {"CHUNK": adamw_triton.CHUNK, "ROWS": adamw_triton.ROWS}
        kernel, name = adamw_triton.adamw_kernel, f"adamw, moments {kept[moments]}"
        yield Variant(name, kernel, number, adamw.WARPS, fixed)


def few_bits_variants(number: str, every: bool) -> Iterator[Variant]:
    """Float8 rounding by rows (also of rows that no block holds) and by tiles; widening."""
    kernels, widen = few_bits_triton, quantised_gpu.WIDEN_BLOCK
    loop = quantised_gpu.LOOP_BLOCK
    for name, width in (("8192", 8192), ("16384", quantised_gpu.WIDEST), ("by blocks", loop)):
        if name == "16384" or every:
            fixed = {"BLOCK": width, "WHOLE": name != "by blocks"}
            kernel = kernels.float8_rows_kernel
            yield Variant(
                f"float8 rows {name}",
                kernel,
                number,
                quantised_gpu.row_warps(width),
                fixed,
                types=FLOAT8,
                registers=quantised_gpu.MAX_REGISTERS_PER_THREAD,
            )
    for rows in (True, False) if every else (True,):
        tile = quantised_gpu.BOTH_TILE if rows else quantised_gpu.COLUMNS_TILE
        for name, kernel, (high, wide, number_of_warps), more in (
            ("largest", kernels.largest_kernel, quantised_gpu.LARGEST_TILE, {}),
            ("tile", kernels.float8_tile_kernel, tile, {"FILLED": True}),
        ):
            fixed = {"ROWS": rows, "HIGH": high, "WIDE": wide} | more
            yield Variant(
                f"float8 {name} {rows}", kernel, number, number_of_warps, fixed, types=FLOAT8
            )
    types = {"scale": "*fp32", "levels": "*fp32", "out": f"*{number}"}
    each = quantised_gpu.NF4_BLOCK
    fixed = {"BYTES": each // 2, "TOGETHER": widen // each}
    byte = {"codes": "*u8"}
    each = quantised_gpu.WARPS
    yield Variant("nf4", kernels.nf4_kernel, number, each, fixed, types=types | byte)
    yield Variant("int8", kernels.int8_kernel, number, each, {"BLOCK": widen}, types=types)


def experts_variants(number: str, every: bool) -> Iterator[Variant]:
    """The passes between the products of experts, with 6 choices of a token."""
    kernels = experts_triton
    launches = [
        ("spread", kernels.spread_kernel, {}),
        ("combine", kernels.combine_kernel, {"EACH": 6, "WEIGHTED": True}),
        ("gate", kernels.gate_kernel, {}),
        ("gate back", kernels.gate_back_kernel, {"INNER": True}),
    ]
    if every:
        launches += [
            ("spread of one choice", kernels.spread_kernel, {"each": 1}),
            ("combine without weights", kernels.combine_kernel, {"EACH": 6, "WEIGHTED": False}),
            ("gate back alone", kernels.gate_back_kernel, {"INNER": False}),
        ]
    types = {"positions": "*i64", "weights": "*fp32", "dweights": "*fp32"}
    for width in (experts_gpu.BLOCK, 64) if every else (experts_gpu.BLOCK,):
        for name, kernel, fixed in launches:
            shape = {**fixed, "BLOCK": width}
            label = f"experts {name} {width}"
            yield Variant(label, kernel, number, warps(width, 8), shape, types=types)


def compiled(variant: Variant, capability: int, aligned: bool = False) -> dict[str, Any]:
    """A kernel's code; sizes of 1 are constants, as in a launch.

    ``aligned``: tensors and all sizes that a launch looks at are multiples of 16.
    """
    kernel, number = variant.kernel, variant.number
    types = dict.fromkeys(kernel.arg_names, f"*{number}")
    types |= {n: "i32" for n in WHOLE if n in types} | {n: "fp32" for n in SINGLE if n in types}
    types |= {n: "*fp32" for n in FLOATS if n in types}
    types |= {n: f"*{variant.table}" for n in ("cos", "sin") if n in types}
    known = {"codes": "*i8", "scales": "*i16", "table": "*i64"}
    known |= dict.fromkeys(("signed_starts", "squared_starts"), "*u8")
    types |= {n: t for n, t in known.items() if n in types}
    types |= {n: t for n, t in (variant.types or {}).items() if n in types}
    types |= dict.fromkeys(variant.fixed, "constexpr")
    constants = {(kernel.arg_names.index(name),): value for name, value in variant.fixed.items()}
    usual = [p for p in kernel.params if aligned and not p.do_not_specialize]
    multiples = [p.num for p in usual if types[p.name].startswith(("*", "i"))]
    attributes = {(number,): [["tt.divisibility", 16]] for number in multiples}
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": variant.warps, "maxnreg": variant.registers}
    made: dict[str, Any] = triton.compile(source, target, options).asm
    if "e4m3x2.f16x2" in made["ptx"]:
        raise ValueError(f"{variant.name} rounds twice on its way to float8")
    return made


def accesses(variant: Variant, capability: int) -> list[str]:
    """How a kernel reads and writes the GPU's memory where sizes are multiples of 16."""
    ptx = compiled(variant, capability, aligned=True)["ptx"]
    return sorted(set(re.findall(r"(?:ld|st)\.global\S*", ptx)))


def in_local_memory(code: bytes) -> int:
    """Bytes of each thread that don't fit its registers, as the driver would set them aside."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", said)
    return int(stack)


def main(capabilities: list[int], every: bool) -> dict[str, int]:
    """Bytes outside of registers, by kernel, format and capability."""
    found: dict[str, int] = {}
    for capability in capabilities:
        for number in FORMATS if every else ("bf16",):
            for variant in variants(number, every):
                if "float8" in variant.name and capability < FLOAT8_FROM:
                    continue
                name = f"{variant.name} {number} sm_{capability}"
                spilled = in_local_memory(compiled(variant, capability)["cubin"])
                found[name] = max(spilled, found.get(name, 0))
    return found


if __name__ == "__main__":
    asked = sys.argv[1:]
    numbers = [int(a) for a in asked if a not in WORDS]
    printed: dict[str, Any] = {"outside": main(numbers, "all" in asked)}
    if "accesses" in asked:
        chosen = (v for v in variants("bf16", False) if v.name in ACCESSES)
        printed["accesses"] = {v.name: accesses(v, numbers[0]) for v in chosen}
    print(json.dumps(printed))
