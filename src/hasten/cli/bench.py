"""``hasten bench``: the ceilings of this machine, which MFU and other speeds are judged against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hasten.cli.arguments import writable
from hasten.cli.display import Display
from hasten.core import facts
from hasten.core.facts import Facts
from hasten.errors import InputError
from hasten.machine.accelerators import datasheet
from hasten.machine.benchmark import MachineRates, ProductRate, checked_dtypes, measure
from hasten.recipe.peak_flops import device_name, write_rates

LONGEST = 600.0  # seconds


def bench(device: str, dtypes: Sequence[str] | None, seconds: float, json_out: Path | None) -> None:
    """Measure, print the tables, write the file."""
    known = _on(device, facts.seen_at_start())
    if not 1 <= seconds <= LONGEST:
        raise InputError(f"--seconds is {seconds:g}; give 1 to {LONGEST:g}")
    try:
        formats = checked_dtypes(known.device, dtypes)
    except ValueError as error:
        raise InputError(f"--dtype: {error}") from error
    writable("--json", json_out)
    with Display() as display:
        rates = measure(
            known.device,
            device_name(known),
            formats,
            seconds,
            known.hardware.memory_limit_bytes,
            display.show,
        )
    show(rates)
    if json_out is not None:
        write_rates(rates, json_out)
        print(f"written: {json_out} (in a recipe: `ceiling: {json_out}`)")


def show(rates: MachineRates) -> None:
    """The rates as tables, the best of each format against the datasheet where there is one."""
    console = Console(highlight=False, soft_wrap=True)
    threads = f", threads: {rates.threads}" if rates.device == "cpu" else ""
    console.print(
        f"{rates.device_name or rates.device}{threads}, torch {rates.torch}, {rates.measured_at}",
        markup=False,
    )
    table = Table("product", "format", "best TFLOP/s", "median", "repeats")
    for product in rates.products:
        crown = " *" if product is rates.best([product.dtype]) else ""
        figures = f"{product.best / 1e12:.4g}{crown}", f"{product.median / 1e12:.4g}"
        table.add_row(_shape(product), product.dtype, *figures, str(product.repeats))
    console.print(table)
    copies = Table("memory", "best GB/s", "median", "repeats")
    for copy in rates.copies:
        figures = f"{copy.best / 1e9:.4g}", f"{copy.median / 1e9:.4g}"
        copies.add_row(copy.way, *figures, str(copy.repeats))
    console.print(copies)
    for line in rates.skipped:
        console.print(f"not measured: {line}", markup=False)
    for line in conclusions(rates):
        console.print(line, markup=False)


def conclusions(rates: MachineRates) -> list[str]:
    """The ceiling in a line, and how it stands to what the maker says."""
    best = rates.best()
    lines = []
    if best is not None:
        lines.append(f"ceiling {best.best / 1e12:.4g} TFLOP/s ({best.dtype}, {_shape(best)})")
    row = datasheet(rates.device_name) if rates.device != "cpu" else None
    bf16 = rates.best(["bf16"])
    if row is not None:
        share = f", of which {bf16.best / row.bf16:.0%} was reached" if bf16 else ""
        lines.append(
            f"datasheet {row.bf16 / 1e12:.4g} TFLOP/s in bf16{share}, memory "
            f"{row.memory / 1e9:.4g} GB/s ({row.name}: {row.source})"
        )
    return lines


def _shape(product: ProductRate) -> str:
    return f"{product.m}x{product.k} by {product.k}x{product.n}"


def _on(device: str, here: Facts) -> Facts:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device is {device!r}; give auto, cpu or cuda")
    if device == "cuda" and not here.hardware.accelerators:
        raise InputError("--device: this machine has no CUDA device; give auto or cpu")
    return replace(here, device="cpu") if device == "cpu" else here
