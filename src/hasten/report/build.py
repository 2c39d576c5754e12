"""Builds the report as a dictionary: variants, verification, ledger and prices.

Verdicts and ratios come from ``judgement``, claims from ``claims``. This module
arranges them under the keys that docs/reference/metrics.md describes. `experiment_report`
adds the cost, the claims of a published plan, and the bundle.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hasten.measure.ablation import Design, Variant
from hasten.measure.experiment import Measured
from hasten.measure.recipe_experiment import ExperimentSubject
from hasten.measure.statistics import spread
from hasten.recipe.peak_flops import mfu_words
from hasten.recipe.prepared_data import data_files
from hasten.recipe.preset_plans import preset_of
from hasten.report.bundle import bundle_of, stamp, write_bundle
from hasten.report.claims import claims_of, preset_claims
from hasten.report.conclusions import fastest_of_equal_quality
from hasten.report.cost import cost_of_experiment
from hasten.report.judgement import (
    NOT_MEASURED,
    Judgement,
    Verification,
    interaction_of,
    judge_variants,
    last_loss,
    noise_of,
    quality,
    ratio_to,
    rebuilt_of,
)
from hasten.report.schema import SCHEMA

FEWEST_STEPS = 8  # fewest steps with meaningful 5th and 95th percentiles


def report_of(
    variants: Sequence[Variant],
    *,
    title: str,
    command: str,
    hardware: Mapping[str, Any],
    versions: Mapping[str, str],
    recipe: Mapping[str, Any],
    mfu: str | None = None,
    design: Mapping[str, Any] | None = None,
    invariance: Sequence[Mapping[str, Any]] | None = None,
    verification: Verification | None = None,
    cost: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the report as in ``docs/reference/metrics.md``; the first variant is the baseline.

    Args:
        variants: as measured; the last one is the result that the head of the page names.
        mfu: what the variants' MFU refers to and counts.
        design: how the experiment was run, as ``report.design``.
        invariance: what the self-test before the run found, as ``report.invariance``.
        verification: the proofs of equal quality, as ``report.verification``; the variants of a
            technique that is worse there are worse, however fast they are.
        cost: ``report.cost``.
    """
    base, final = variants[0], variants[-1]
    judgements = judge_variants(variants, verification or ())
    rows = [_variant(a, base, judgement) for a, judgement in zip(variants, judgements, strict=True)]
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "title": title,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "variants": rows,
        "claims": claims_of(final.plan, rows),
        "quality": quality(final, base, verification or ()),
        "noise": noise_of(variants),
        "interaction": interaction_of(variants),
        "design": None if design is None else dict(design),
        "invariance": None if invariance is None else [dict(entry) for entry in invariance],
        "verification": None if verification is None else [dict(entry) for entry in verification],
        "samples": [
            {**s, "variant": variant.name} for variant in (base, final) for s in variant.samples
        ],
        "hardware": dict(hardware),
        "versions": dict(versions),
        "recipe": dict(recipe),
        "seed": recipe["seed"],
        "cost": None if cost is None else dict(cost),
        "mfu": mfu,
    }
    best = fastest_of_equal_quality(report)
    return report | {"fastest": None if best is None else best["name"]}


def _variant(variant: Variant, base: Variant, judgement: Judgement) -> dict[str, Any]:
    seconds = [s["step_seconds"] for s in variant.steps]
    positions, tokens = (sum(s[k] for s in variant.steps) for k in ("positions", "tokens"))
    ratio = ratio_to(variant, base)
    measured, variance = variant.failed is None and variant.rounds, variant.process_variance
    row: dict[str, Any] = {
        "name": variant.name,
        "kind": variant.kind,
        "techniques": [str(t) for t in variant.plan],
        "tokens_per_second": spread(variant.rounds).summary() if measured else NOT_MEASURED,
        "ratio": NOT_MEASURED if ratio is None else ratio.summary(),
        **vars(judgement),
        "effect": NOT_MEASURED if judgement.effect is None else judgement.effect.summary(),
        "rebuilt": rebuilt_of(variant, base),
        "process_variance": variance and asdict(variance),
        # A failed variant's use so far doesn't show what it needs.
        "peak_memory_bytes": variant.peak_memory_bytes if variant.failed is None else None,
        "eval_loss": last_loss(variant),
        "metrics": (variant.metrics or None) if variant.failed is None else None,
        "eval_curve": [list(point) for point in variant.eval_data],
        "loss_curve": [list(point) for point in variant.losses],
        "rounds": variant.rounds,
        "beside": variant.baseline_rounds or None,
        "foreign_load": variant.foreign_load or None,
        "warmup": variant.warmup or None,
        "padding_share": 1 - tokens / positions if positions else None,
        "mfu": _mfu(variant),
        "ledger": variant.ledger,
        "startup_seconds": {
            k: variant.startup_seconds.get(k) for k in ("imports", "data", "model")
        },
        "effective": variant.effective
        or [
            {"technique": t.name(), "effective": None, "evidence": variant.unfinished}
            for t in (variant.plan if variant.unfinished is not None else ())
        ],
    }
    if variant is base and ratio is not None:
        row["ratio"] = {"median": 1.0, "low": 1.0, "high": 1.0}
    if len(seconds) > 1:
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        row["step_seconds"] = {"p50": cuts[49], "p99": cuts[98]}
    if measured and len(seconds) >= FEWEST_STEPS:
        rates = [s["tokens"] / s["step_seconds"] for s in variant.steps if s["step_seconds"]]
        cuts = statistics.quantiles(rates, n=20, method="inclusive")
        row["throughput_spread"] = (cuts[18] - cuts[0]) / 2 / statistics.median(rates)
    return row


def _mfu(variant: Variant) -> float | None:
    """Averages over all measured steps, weighed by time; None if any step's MFU is unknown."""
    weighted = [(step.get("mfu"), step["step_seconds"]) for step in variant.steps]
    if variant.failed is not None or not weighted or any(share is None for share, _ in weighted):
        return None
    return float(sum(share * s for share, s in weighted) / sum(s for _, s in weighted))


def experiment_report(
    subject: ExperimentSubject,
    measured: Measured,
    design: Design,
    title: str,
    command: str,
    further: Mapping[str, Any],
    earlier_seconds: float = 0.0,
) -> dict[str, Any]:
    """Returns an experiment's report; ``bundle.json`` is written into its folder.

    ``further`` are more arguments of `report_of` (verification, invariance, cost),
    ``earlier_seconds`` of the experiments that led to this one: their cost is a part of its own.
    """
    recipe, context = subject.recipe, subject.context
    examples = subject.data.example_stats if subject.data else context.examples
    epoch = {"epoch_tokens": examples.tokens, "epoch_examples": examples.count}
    report = report_of(
        measured.variants,
        title=title,
        command=command,
        hardware={**asdict(context.hardware), "device": context.device},
        versions=context.versions,
        recipe=recipe.model_dump(mode="json"),
        mfu=mfu_words(recipe, context),
        design=measured.design | epoch | ({"ranks": recipe.nproc} if recipe.nproc > 1 else {}),
        **further,
    )
    joules = {a.name: a.joules_per_token for a in measured.variants if a.failed is None}
    source = subject.meter.source
    cost = cost_of_experiment(
        report, recipe.price, context.world.size, joules, source, earlier_seconds
    )
    if cost is not None:
        report["cost"] = {**cost, **(report["cost"] or {})}
    if (preset := preset_of(recipe.plan, recipe.nproc)) is not None:
        report["claims"] = [*report["claims"], *preset_claims(preset, report)]
    stamps = [stamp(path) for path in data_files(recipe)]
    write_bundle(bundle_of(measured.variants, design, report, stamps), Path(recipe.output))
    return report
