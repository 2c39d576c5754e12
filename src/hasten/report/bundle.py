"""A bundle: the folder of an experiment, to repeat it elsewhere or later and compare.

- bundle.json: Recipe, plans, design, the raw rounds, versions, machine, stamps of the
  data.
- report.json: The report for readers. It isn't needed to repeat the experiment.

The data isn't copied: a **stamp** (size and SHA-256) identifies its files. A bundle may
be from an untrusted source. Therefore ``bundle.json`` is read up to a limit, and every
value is checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from hasten.errors import InputError
from hasten.foreign_files import parse_json, read_bounded
from hasten.machine.files import write_result
from hasten.measure.ablation import Design, Variant
from hasten.measure.statistics import Effect, Interval, paired_ratio, unpaired_ratio, verdict
from hasten.recipe.yaml_reader import first_complaint
from hasten.report.judgement import idle_techniques

NAME = "bundle.json"
LARGEST = 64 << 20  # bytes of the file


class BundledMeasurement(BaseModel):
    """One variant's tokens per second in each round, and the baseline's in the same rounds."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="forbid")

    rounds: tuple[PositiveFloat, ...] = ()
    baseline_rounds: tuple[PositiveFloat, ...] = ()
    idle: tuple[str, ...] = ()  # techniques without effect
    failed: str | None = None

    @property
    def ratios(self) -> list[float]:
        """Returns ratios to the baseline, round by round."""
        return [a / b for a, b in zip(self.rounds, self.baseline_rounds, strict=False)]


class Bundle(BaseModel):
    """The data for repeating an experiment and comparing the results."""

    model_config = ConfigDict(frozen=True)

    bundle: Literal[1] = 1
    recipe: dict[str, Any]
    plans: dict[str, list[Any]] = Field(min_length=1)
    kinds: dict[str, str]
    design: dict[str, Any]
    measured: dict[str, BundledMeasurement]
    versions: dict[str, Any] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    data: list[dict[str, Any]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _complete(self) -> Bundle:
        if set(self.measured) != set(self.plans):
            raise ValueError("its plans and what was measured don't agree")
        return self

    def to_design(self, rounds: int | None = None) -> Design:
        """Returns the same design, perhaps with another number of rounds, and without a budget.

        Raises:
            InputError: the design has a key or value that this version doesn't know.
        """
        other = sorted(set(self.design) - {f.name for f in fields(Design)})
        if other:
            raise InputError(f"the bundle's design has {other[0]!r}, which this version lacks")
        values = {**self.design, "budget_seconds": None}
        try:
            return Design(**(values | ({"rounds": rounds} if rounds else {})))
        except TypeError as error:
            raise InputError(f"the bundle's design can't be used: {error}") from error


def measurements(variants: Iterable[Variant]) -> dict[str, BundledMeasurement]:
    """Returns the raw rounds of measured variants; the first is the baseline."""
    listed = list(variants)
    base = listed[0]
    return {
        variant.name: BundledMeasurement(
            rounds=tuple(variant.rounds),
            baseline_rounds=tuple(
                () if base.failed else variant.baseline_rounds or base.rounds[: len(variant.rounds)]
            ),
            idle=tuple(idle_techniques(variant)),
            failed=variant.failed,
        )
        for variant in listed
    }


def bundle_of(
    variants: Sequence[Variant],
    design: Design,
    report: Mapping[str, Any],
    data: list[dict[str, Any]],
) -> Bundle:
    """Returns the bundle of a measured experiment."""
    return Bundle(
        recipe=report["recipe"],
        plans={variant.name: variant.plan.to_list() for variant in variants},
        kinds={variant.name: variant.kind for variant in variants},
        design=asdict(design),
        measured=measurements(variants),
        versions=report["versions"],
        hardware=report["hardware"],
        data=data,
    )


def write_bundle(bundle: Bundle, folder: Path) -> None:
    """Writes ``bundle.json`` into a folder, atomically.

    Raises:
        InputError: the place can't be written.
    """
    text = json.dumps(bundle.model_dump(mode="json"), indent=1)
    write_result(folder / NAME, f"{text}\n")


def read_bundle(path: Path) -> Bundle:
    """Reads a bundle from its folder, or from its ``bundle.json``.

    Raises:
        InputError: it can't be read or isn't a bundle.
    """
    if path.is_dir():
        path /= NAME
    what = "bundle, the folder of `hasten speedup --bundle` or of an experiment"
    contents = parse_json(read_bounded(path, LARGEST, what), str(path))
    if not isinstance(contents, dict) or contents.get("bundle") != 1:
        raise InputError(f'{path} is not a bundle of this version: it lacks "bundle": 1')
    try:
        return Bundle(**contents)
    except ValidationError as error:
        raise InputError(f"{path} is damaged: {first_complaint(error)}") from error


def stamp(path: Path) -> dict[str, Any]:
    """Returns path, bytes and SHA-256 of a file or of a folder's files; null if it is missing."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if not all(file.is_file() for file in files):
        return {"path": str(path), "bytes": None, "sha256": None}
    digest, size = hashlib.sha256(), 0
    for file in files:
        if len(files) > 1:
            digest.update(file.relative_to(path).as_posix().encode() + b"\0")
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
    return {"path": str(path), "bytes": size, "sha256": digest.hexdigest()}


# The same experiment at another time: which technique gains less than before.
#
# A technique's gain is a ratio to a baseline of the same rounds. So it can be compared across days
# and even installations, where speeds can't. The two experiments are independent. Their logarithmic
# ratios are compared by Welch's interval (1947), which doesn't assume equal variances.
#
# An interval over rounds doesn't include changes between process starts (memory layout, other
# load). The margin covers these: a technique has lost if its full interval is below 1 - margin.

MARGIN = 0.02
Word = Literal["lost", "gained", "same", "undecided", "not measured"]
WORDS: Mapping[Effect, Word] = {
    "hurt": "lost",
    "helped": "gained",
    "no effect": "same",
    "undecided": "undecided",
}


@dataclass(frozen=True)
class VariantChange:
    """The change of one variant: ratio to the baseline before, now, and now over before."""

    name: str
    verdict: Word
    before: Interval | None = None
    now: Interval | None = None
    ratio: Interval | None = None
    reason: str = ""


def changes(
    before: Mapping[str, BundledMeasurement],
    now: Mapping[str, BundledMeasurement],
    margin: float = MARGIN,
) -> list[VariantChange]:
    """Compares every variant except the baseline, which is the first.

    Args:
        before: the stored rounds by variant.
        now: those of today.
        margin: the share of a gain that may go without being called lost.

    Raises:
        InputError: a margin outside [0, 1).
    """
    if not 0 <= margin < 1:
        raise InputError(f"--tolerance is a share from 0 up to 1, not {margin:g}")
    (base, _), *others = before.items()
    missing = BundledMeasurement(failed="it wasn't measured")
    rows = [_change(name, stored, now.get(name, missing), margin) for name, stored in others]
    without = now[base].failed if base in now else None
    if without is None:
        return rows
    reason = f"the baseline failed: {without}"  # whatever the variant's own result is
    return [replace(c, reason=reason) if c.verdict == "lost" else c for c in rows]


def lost(variant_changes: Sequence[VariantChange]) -> list[str]:
    """Returns the names of the variants that lost."""
    return [change.name for change in variant_changes if change.verdict == "lost"]


def _change(
    name: str, before: BundledMeasurement, now: BundledMeasurement, margin: float
) -> VariantChange:
    if before.failed is not None or not before.ratios:
        reason = f"it had no result then: {before.failed or 'no rounds'}"
        return VariantChange(name, "not measured", now=_span(now), reason=reason)
    then, today = _span(before), _span(now)
    if now.failed is not None or not now.ratios:
        reason = f"it failed: {now.failed or 'no rounds'}"
        return VariantChange(name, "lost", then, reason=reason)
    ratio = unpaired_ratio(before.ratios, now.ratios)
    idle = sorted(set(now.idle) - set(before.idle))
    if idle:
        return VariantChange(name, "lost", then, today, ratio, f"{', '.join(idle)} no longer acts")
    return VariantChange(name, WORDS[verdict(ratio, margin)], then, today, ratio)


def _span(measured: BundledMeasurement) -> Interval | None:
    if measured.failed is not None or not measured.ratios:
        return None
    count = len(measured.ratios)
    return paired_ratio(measured.baseline_rounds[:count], measured.rounds[:count])
