"""Whether ``plan: auto`` finds the best plan: its choice against the best row of a cumulative.

    python benchmarks/bench_auto.py [--budget 3m] [--rounds 8] [--change KEY=VALUE] [RECIPE ...]
    python benchmarks/bench_auto.py --planted 3 [--budget 3m] [--change KEY=VALUE]

For each recipe: plans are compared again; the techniques of the first plan are measured as a
cumulative; then the choice, the best row of the cumulative, the whole first plan (which a forecast
alone would take) and the job without techniques take turns. Printed are the choice, the best row,
ratios with their intervals, and the time of the search with its share of an hour's training.

Planted: so many choices on a job of some milliseconds a step, with three techniques beside those of
the catalogue that keep every bit: one costs 20 %, one does nothing, one gains 10 %. The first two
are to be dropped, the third is to be taken.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from smoke import arguments

from hasten.core.plan import Plan
from hasten.machine.locks import one_measurement
from hasten.measure.ablation import Design
from hasten.measure.choose import choose
from hasten.measure.recipe_experiment import measured, prepared
from hasten.measure.statistics import paired_ratio
from hasten.progress import SilentProgress
from hasten.recipe.schema import Recipe, load_recipe
from hasten.recipe.shorthands import catalogue

STEPS = 100_000  # of the planted job: its races never reach its end
EXAMPLE = str(Path(__file__).parents[1] / "examples" / "stdlib_tiny.yaml")
PATHS = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parents[1] / place) for place in ("tests", "tests/common")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipes", nargs="*", default=[EXAMPLE])
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--change", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--planted", type=int, default=0, metavar="RUNS")
    small = ["max_examples=200", "cutoff_len=64", "global_batch_size=4"]
    asked = arguments(parser, budget="30s", rounds=3, change=small)
    if asked.planted:
        _planted(asked)
        return
    heads = (
        *("recipe", "chosen", "best row", "chosen over best row", "chosen over first plan"),
        *("first plan over best row", "first plan over no technique", "search", "of an hour"),
    )
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for path in asked.recipes:
        with tempfile.TemporaryDirectory() as folder:
            recipe = _recipe(asked, path, folder)
            print(_row(Path(path).stem, recipe, asked.rounds, Path(folder)), flush=True)


def _recipe(asked: argparse.Namespace, path: str, folder: str, plan: str = "plan=auto") -> Recipe:
    changes = [plan, *asked.change, f"output={folder}/out"]
    return load_recipe(Path(path), [*changes, f"auto_budget={asked.budget}"])


def _planted(asked: argparse.Namespace) -> None:
    """A table of choices with planted techniques: what became of each, and its measured speed."""
    sys.path += PATHS
    os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)  # of the workers, which train with them
    from verdicts.job import resolved_recipe
    from verdicts.planted_auto import PLANTED

    names = {kind.name(): kind.auto == "try" for kind in PLANTED}  # and whether it is to be taken
    print(f"| run | {' | '.join(names)} | right | search |")
    print("|---" * (len(names) + 3) + "|")
    for run in range(1, asked.planted + 1):
        with tempfile.TemporaryDirectory() as folder, one_measurement(_waits):
            path = str(resolved_recipe(Path(folder), STEPS))
            recipe = _recipe(asked, path, folder, "plan={auto: {fidelity: exact}}")
            place = Path(folder) / "choices"
            choice = choose(
                recipe,
                SilentProgress(),
                fresh=True,
                more=PLANTED,
                folder=place,
                job="verdicts.planted_auto:job",
            )
        ratios = {row.name: row.ratio for row in choice.rows if row.ratio is not None}
        cells, right = [], 0
        for name, wanted in names.items():
            taken = name in choice.entries
            right += taken == wanted
            change = next((n for n in ratios if name in n.split()), None)
            speed = "not compared" if change is None else f"{change} {_interval(ratios[change])}"
            cells.append(f"{'taken' if taken else 'dropped'} ({speed})")
        row = (str(run), *cells, f"{right} of {len(names)}", f"{choice.seconds:.0f} s")
        print(f"| {' | '.join(row)} |", flush=True)


def _waits(text: str) -> None:
    print(text, file=sys.stderr)


def _interval(ratio: dict[str, float | None]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _row(name: str, recipe: Recipe, rounds: int, folder: Path) -> str:
    silent = SilentProgress()
    choice = choose(recipe, silent, fresh=True, folder=folder / "choices")
    subject = prepared(recipe, silent, ranks=True)  # with the techniques of the first plan
    plan = subject.plan
    chosen = Plan.from_list(choice.entries, catalogue())
    design = Design(rounds=max(rounds // 2, 3), steps=3, warmup=2, longest_warmup=6, evaluations=0)
    cumulative = measured(subject, plan.cumulative(), {}, design, True, silent).variants
    best = max(
        (variant for variant in cumulative if variant.rounds),
        key=lambda variant: (
            paired_ratio(variant.baseline_rounds, variant.rounds).median
            if variant.baseline_rounds
            else 1.0
        ),
    )
    final = Design(rounds=rounds, steps=3, warmup=2, longest_warmup=6, evaluations=0)
    plans = {"none": Plan(), "best": best.plan, "chosen": chosen, "first plan": plan}
    variants = {
        variant.name: variant
        for variant in measured(subject, plans, {}, final, True, silent).variants
    }
    ratios = [
        _said(variants, *pair)
        for pair in (
            ("best", "chosen"),
            ("first plan", "chosen"),
            ("best", "first plan"),
            ("none", "first plan"),
        )
    ]
    search = (f"{choice.seconds:.0f} s", f"{choice.seconds / 3600:.1%}")
    cells = (name, str(chosen), best.name, *ratios, *search)
    return f"| {' | '.join(cells)} |"


def _said(variants: dict[str, Any], base: str, other: str) -> str:
    if variants[base].plan == variants[other].plan:
        return "the same plan"
    ratio = paired_ratio(variants[base].rounds, variants[other].rounds)
    return f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


if __name__ == "__main__":
    main()
