"""The articles' four switches, and what each gains here: what they said beside what is measured.

    python benchmarks/bench_article.py --folder /tmp/article --ranks 2 --budget 15m
    python benchmarks/bench_article.py --folder /tmp/article --ranks 1 --dataset gsm8k_train.jsonl

Each switch alone, and all together, against the baseline on the same ranks: an experiment as
``hasten speedup --plan article --arms alone`` makes it, with its record, so that a second start
goes on. On one rank the row of gradient compression says why it is missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hasten.cli.terminal import Display
from hasten.measure.ablation import Design
from hasten.recipe.schema import Recipe
from hasten.recipe.yaml_reader import read_duration
from hasten.report.page import render_markdown, write_report
from hasten.report.speedup import ablate

ROUNDS, STEPS, BUILDS = 12, 2, 2
COLUMNS = ("technique", "metric", "claimed", "measured", "verdict")


def recipe_of(given: argparse.Namespace) -> Recipe:
    return Recipe(
        model=given.model,
        dataset=given.dataset,
        held_out=32,
        max_records=given.records,
        cutoff_len=512,
        vocabulary=2000,
        max_steps=100,
        global_batch_size=16,
        learning_rate=1e-3,
        nproc=given.ranks,
        output=str(given.folder / f"ranks-{given.ranks}"),
        plan="article",
        on_obstacle="skip",
    )


def claims_table(report: dict[str, Any]) -> str:
    rows = [list(COLUMNS), *([str(row[name]) for name in COLUMNS] for row in report["claims"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", default="15m")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", default="deepseek-llm-tiny")
    parser.add_argument("--dataset", default="stdlib")
    parser.add_argument("--records", type=int, default=2000)
    given = parser.parse_args()
    recipe = recipe_of(given)
    design = Design(
        rounds=given.rounds,
        steps=STEPS,
        warmup=2,
        longest_warmup=8,
        builds=BUILDS,
        noise=True,
        foreign_load=0.25,
        budget_seconds=read_duration(given.budget),
    )
    title = f"The articles' switches on {given.ranks} rank(s)"
    with Display() as display:
        report = ablate(recipe, "alone", design=design, title=title, audience=display)
    print(render_markdown(report))
    print(claims_table(report))
    print(f"\nreport: {write_report(report, Path(recipe.output))}")


if __name__ == "__main__":
    main()
