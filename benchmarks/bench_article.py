"""The articles' four switches, and what each gains here: what they said beside what is measured.

    python benchmarks/bench_article.py --folder /tmp/article --ranks 2 --budget 15m
    python benchmarks/bench_article.py --folder /tmp/article --ranks 1 --dataset gsm8k_train.jsonl

Each switch alone, and all together, against the baseline on the same ranks: an experiment as
``hasten speedup plan=article --design single`` makes it, with its example, so that a second start
goes on. On one rank the row of gradient compression says why it is missing.

    python benchmarks/bench_article.py --folder /tmp/article --beside-auto --budget 6m

measures three plans in the same rounds: none, the articles' switches together, and what
``plan: auto`` chooses on this job. It prints each figure of the articles with what both give.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from smoke import arguments

from hasten.core.plan import Plan
from hasten.measure.ablation import Design, Kind, Variant
from hasten.measure.choose import choose
from hasten.measure.recipe_experiment import measured, prepared
from hasten.progress import Display
from hasten.recipe.preset_plans import preset
from hasten.recipe.schema import AutoPlan, Recipe
from hasten.recipe.yaml_reader import read_duration
from hasten.report.build import report_of
from hasten.report.claims import preset_claims
from hasten.report.cost import cost_of_experiment
from hasten.report.page import render_markdown, write_report
from hasten.report.speedup import ablate
from hasten.techniques import CATALOGUE

ROUNDS, STEPS, BUILDS = 12, 2, 2
COLUMNS = ("technique", "metric", "claimed", "measured", "verdict")
NONE, ARTICLE, AUTO = "no techniques", "the articles' switches", "plan: auto"
WHOLE = "the whole plan"


def recipe_of(given: argparse.Namespace) -> Recipe:
    return Recipe(
        model=given.model,
        dataset=given.dataset,
        eval_data=32,
        max_examples=given.examples,
        cutoff_len=given.cutoff,
        vocabulary=2000,
        max_steps=100,
        global_batch_size=given.batch,
        learning_rate=1e-3,
        nproc=given.ranks,
        output=str(given.folder / f"ranks-{given.ranks}"),
        plan="article",
        on_obstacle="skip",
        auto_budget=given.auto_budget,
        price={"currency": "CNY", "per_device_hour": 0.6},
    )


def claims_table(report: dict[str, Any]) -> str:
    rows = [list(COLUMNS), *([str(row[name]) for name in COLUMNS] for row in report["claims"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in lines)


def three_plans(recipe: Recipe, design: Design, display: Display) -> None:
    """Measure the plans side by side and print a row for each figure of the articles."""
    subject = prepared(recipe, display, ranks=True)
    open_plan = {"plan": [], "auto_plan": AutoPlan()}
    choice = choose(recipe.model_copy(update=open_plan), display)
    plans = {NONE: Plan(), ARTICLE: subject.plan, AUTO: Plan.from_list(choice.entries, CATALOGUE)}
    kinds: dict[str, Kind] = {NONE: "baseline", ARTICLE: "other", AUTO: "other"}
    found = measured(subject, plans, kinds, replace(design, noise=False), False, display)
    assert subject.data is not None
    examples = subject.data.example_stats
    known = {"epoch_tokens": examples.tokens, "epoch_examples": examples.count}
    base, *others = found.variants
    columns = [_figures(subject, base, variant, found.design | known) for variant in others]
    print(f"\n{choice.sentence}")
    for variant in others:
        print(
            f"{variant.name}: {variant.plan}; effective: {variant.effective}; failed: "
            f"{variant.failed}"
        )
    print(f"\n| what the articles say | {ARTICLE} | | {AUTO} | |")
    print("|---|---|---|---|---|")
    for rows in zip(*columns, strict=True):
        cells = [cell for row in rows for cell in (row["measured"], row["verdict"])]
        print(f"| {rows[0]['claimed']} | {' | '.join(cells)} |")


def _figures(
    subject: Any, base: Variant, variant: Variant, design: dict[str, Any]
) -> Sequence[dict[str, str]]:
    """The preset's rows on the whole plan, with this variant in the place of it."""
    price, ranks = subject.recipe.price, subject.recipe.nproc
    report = report_of(
        [base, variant],
        title=variant.name,
        command="benchmarks/bench_article.py",
        hardware={**asdict(subject.context.hardware), "device": subject.context.device},
        versions={},
        recipe=subject.recipe.model_dump(mode="json"),
        design=design | {"ranks": ranks},
    )
    report["cost"] = cost_of_experiment(report, price, ranks)
    rows = preset_claims(preset("article", ranks), report)
    return [row for row in rows if row["technique"].startswith(WHOLE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required="--smoke" not in sys.argv)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a turn")
    parser.add_argument("--budget", default="15m")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", default="deepseek-llm-tiny")
    parser.add_argument("--dataset", default="stdlib")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--builds", type=int, default=BUILDS)
    parser.add_argument("--cutoff", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--beside-auto", action="store_true")
    parser.add_argument("--auto-budget", default="2m")
    given = arguments(
        parser,
        folder=Path("article"),
        ranks=1,
        budget="10m",
        rounds=2,
        steps=1,
        builds=1,
        examples=80,
        cutoff=64,
        batch=4,
        auto_budget="1m",
    )
    recipe = recipe_of(given)
    design = Design(
        rounds=given.rounds,
        steps=given.steps,
        warmup=2,
        longest_warmup=8,
        builds=given.builds,
        noise=True,
        foreign_load=0.25,
        budget_seconds=read_duration(given.budget),
    )
    if given.beside_auto:
        with Display() as display:
            three_plans(recipe, design, display)
        return
    title = f"The articles' switches on {given.ranks} rank(s)"
    with Display() as display:
        report = ablate(recipe, "single", design=design, title=title, audience=display)
    print(render_markdown(report))
    print(claims_table(report))
    print(f"\nreport: {write_report(report, Path(recipe.output))}")


if __name__ == "__main__":
    main()
