"""How far processes of one program lie apart, as started by default and with other memory.

Copies of one plan, half of them with glibc's defaults and half with memory that is kept in huge
pages, take turns and are built anew several times. Within a kind, what neither the copy nor the
build explains is the process variance of a process, and the noise of its rounds besides.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten.core.plan import Plan
from hasten.machine import memory
from hasten.measure.ablation import Design, Kind, Variant
from hasten.measure.experiment import experiment_context, measure_variants
from hasten.measure.workers import WorkerPool, WorkerSpec
from hasten.techniques.allocator import TUNABLE, Allocator
from measure.planted import BASELINE
from verdicts.job import WARM_UP, resolved_recipe
from verdicts.planted_trial import worker
from verdicts.record import ENVIRON

STEADY = {**ENVIRON, **memory.keeping(), "GLIBC_TUNABLES": TUNABLE}
COPIES = 3
DEFAULT, KEPT = "glibc's defaults", "kept, in huge pages"


@dataclass(frozen=True)
class Spread:
    """Standard deviations of log speed: of a process, of one of its rounds; and the step."""

    process: float
    round: float
    step_seconds: float


def spreads(builds: int, rounds: int, steps: int) -> dict[str, Spread]:
    """By what the copies were started with; so many rounds in each of so many builds."""
    plain = Plan(BASELINE)
    kinds = {DEFAULT: plain, KEPT: Plan((Allocator(huge_pages=True), *BASELINE))}
    plans = {f"{kind} {n}": plan for n in range(COPIES) for kind, plan in kinds.items()}
    roles: dict[str, Kind] = dict.fromkeys(plans, "other")
    roles[next(iter(plans))] = "baseline"
    design = Design(builds * rounds, steps, WARM_UP, evaluations=1, builds=builds)
    with tempfile.TemporaryDirectory() as place:
        recipe = resolved_recipe(Path(place), design.steps_in_all)
        with WorkerPool(Path(place)) as pool:

            def spec(name: str) -> WorkerSpec:
                environ = ENVIRON if plans[name] == plain else STEADY
                return worker(recipe, plans[name], environ)

            at = experiment_context(pool, spec)
            variants = measure_variants(at, plans, design, kinds=roles).variants
    for variant in variants:
        if variant.failed is not None:
            raise RuntimeError(f"{variant.name}: {variant.failed}")
    return {kind: _spread([a for a in variants if a.name.startswith(kind)]) for kind in kinds}


def _spread(copies: Sequence[Variant]) -> Spread:
    """What copies and builds (or rounds) don't explain, of means of builds and of single rounds."""
    means, left, degrees = [], 0.0, 0
    per_build = Counter(copies[0].builds)
    for build, rounds in per_build.items():
        logs = [_of_build(copy, build) for copy in copies]
        means.append([statistics.fmean(values) for values in logs])
        left += _unexplained(logs)
        degrees += (len(copies) - 1) * (rounds - 1)
    of_round = left / degrees
    of_build = _unexplained(means) / ((len(means) - 1) * (len(copies) - 1))
    process = max(of_build - of_round / statistics.harmonic_mean(per_build.values()), 0.0)
    seconds = [s["step_seconds"] for copy in copies for s in copy.steps]
    return Spread(math.sqrt(process), math.sqrt(of_round), statistics.median(seconds))


def _of_build(copy: Variant, build: int) -> list[float]:
    pairs = zip(copy.rounds, copy.builds, strict=True)
    return [math.log(speed) for speed, number in pairs if number == build]


def _unexplained(rows: Sequence[Sequence[float]]) -> float:
    """Sum of squares of a two-way table, less its rows' and columns' means."""
    of_row = [statistics.fmean(row) for row in rows]
    of_column = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    whole = statistics.fmean(of_row)
    return sum(
        (value - of_row[i] - of_column[k] + whole) ** 2
        for i, row in enumerate(rows)
        for k, value in enumerate(row)
    )
