"""The reference of MFU: the rate of a recipe's ``ceiling``, and the model's FLOPs.

``auto`` uses the vendor's figure for a GPU with a known name. On a processor it uses
nothing, because no datasheet has a matrix rate. ``measure`` takes two seconds before
the first step. It stores the result in the run's folder for ranks, variants and later
runs. Any other value is a file that ``hasten env --bench -o`` wrote on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from hasten.core.context import JobContext
from hasten.core.timing import Meter
from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.machine.accelerators import datasheet
from hasten.machine.benchmark import MachineRates, measure
from hasten.machine.files import write_result
from hasten.models.flops import CONVENTION, model_flops
from hasten.recipe.schema import Recipe

SECONDS = 2.0
LARGEST_FILE = 1 << 20  # bytes
RATES_FILE = "ceiling.json"


@dataclass(frozen=True)
class PeakFlops:
    """FLOP/s of one device, and where the figure comes from."""

    rate: float
    source: str


def resolve_ceiling(
    recipe: Recipe, context: JobContext, tell: Callable[[str], None] = lambda text: None
) -> None:
    """Reads the recipe's ceiling file, or measures the ceiling, before the training.

    Raises:
        InputError: the file can't be used.
    """
    if recipe.ceiling == "measure":
        if context.world.size == 1 and _stored_rates(recipe, context) is None:
            tell(f"measuring this machine's matrix products for MFU, about {SECONDS:.0f} s")
            rates = measure(
                device=context.device,
                device_name=device_name(context),
                dtypes=("bf16",) if context.on_gpu else ("bf16", "fp32"),
                seconds=SECONDS,
                memory_bytes=context.hardware.memory_limit_bytes,
            )
            write_rates(rates, Path(recipe.output) / "data" / RATES_FILE)
    elif recipe.ceiling != "auto":
        read_rates(Path(recipe.ceiling), context)


def meter_of(recipe: Recipe, context: JobContext, model: nn.Module) -> Meter:
    """Returns the run's meter; values are missing for an unsupported model or without a ceiling."""
    try:
        flops = model_flops(model)
    except ValueError:
        return Meter()
    ceiling, devices = ceiling_of(recipe, context), _devices(recipe, context)
    if ceiling is None or not devices:
        return Meter(flops.per_token, flops.per_pair, convention=CONVENTION)
    many = f"{devices} x " if devices > 1 else ""
    return Meter(
        per_token=flops.per_token,
        per_pair=flops.per_pair,
        ceiling=devices * ceiling.rate,
        source=many + ceiling.source,
        convention=CONVENTION,
    )


def ceiling_of(recipe: Recipe, context: JobContext) -> PeakFlops | None:
    """Returns one device's ceiling by the recipe's setting; None if it is unknown."""
    if recipe.ceiling == "auto":
        row = datasheet(device_name(context)) if context.on_gpu else None
        if row is None:
            return None
        return PeakFlops(row.peak16, f"{_tera(row.peak16)}, datasheet of {row.name}: {row.source}")
    if recipe.ceiling == "measure":
        rates = _stored_rates(recipe, context)
    else:
        rates = read_rates(Path(recipe.ceiling), context)
    best = rates.best() if rates else None
    if rates is None or best is None:
        return None
    threads = "" if context.on_gpu else f", threads: {rates.threads}"
    source = f"{best.dtype} {best.what}{threads}, {rates.measured_at[:10]}"
    return PeakFlops(best.best, f"{_tera(best.best)}, measured: {source}")


def mfu_words(recipe: Recipe, context: JobContext) -> str | None:
    """Returns a sentence with the meaning of this recipe's MFU; None without a ceiling."""
    ceiling = ceiling_of(recipe, context)
    return f"MFU of {ceiling.source}; {CONVENTION}" if ceiling else None


def device_name(context: JobContext) -> str:
    """Returns the name of the training device from its driver or the system."""
    if not context.on_gpu:
        return context.hardware.cpu
    gpus = context.hardware.accelerators
    index = int(context.device.partition(":")[2] or 0)
    return gpus[index].name if index < len(gpus) else context.device


def read_rates(path: Path, context: JobContext) -> MachineRates:
    """Reads a file of ``hasten env --bench -o`` for this training device.

    Raises:
        InputError: no such file, not such a file, or measured on another device.
    """
    advice = "write one here with `hasten env --bench -o FILE`"
    try:
        rates = MachineRates.from_dict(read_json_object(path, "measurement", LARGEST_FILE))
    except ValueError as error:
        raise InputError(f"ceiling: {path} can't be used: {error}; {advice}") from error
    training_device = device_name(context)
    if rates.device_name != training_device or (rates.device == "cpu") == context.on_gpu:
        raise InputError(
            f"ceiling: {path} was measured on {rates.device_name or rates.device} and here "
            f"{training_device} trains; {advice}"
        )
    return rates


def _stored_rates(recipe: Recipe, context: JobContext) -> MachineRates | None:
    """Returns rates that an earlier process stored in the run's folder, if for this device."""
    try:
        return read_rates(Path(recipe.output) / "data" / RATES_FILE, context)
    except InputError:
        return None


def write_rates(rates: MachineRates, path: Path) -> None:
    write_result(path, json.dumps(rates.to_dict(), indent=1) + "\n")


def _devices(recipe: Recipe, context: JobContext) -> int:
    """Returns the number of devices for the ceiling; 0: processors of unmeasured machines."""
    if context.on_gpu:
        return context.world.size
    return 1 if context.world.size in (1, recipe.nproc) else 0


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.4g} TFLOP/s"
