"""What padding costs: padded, budgeted, length-grouped and packed batches of three data sets.

One process per variant, taking turns, the same examples in the same order (length_grouped: its
own), a fresh model each, real tokens per second, eval loss at equal tokens.

    HASTEN_TEST_DATA=FOLDER python benchmarks/bench_batching.py [--rounds 6] [--steps 3]

FOLDER holds gsm8k_train.jsonl and alpaca_en_demo.json; without it only the embedded corpus is run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from smoke import arguments

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.measure.ablation import Design, Variant
from hasten.measure.experiment import experiment_context, measure_variants
from hasten.measure.recipe_experiment import prepared, recipe_worker
from hasten.measure.statistics import paired_ratio
from hasten.measure.workers import WorkerPool
from hasten.progress import SilentProgress
from hasten.recipe.schema import Recipe
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.sampler import LengthGrouped

VARIANTS: dict[str, tuple[Technique, ...]] = {
    "padded": (),
    "budgeted": (GradientAccumulation(micro_batch_tokens=2048),),
    "length_grouped": (LengthGrouped(),),
    "packed": (Packed(), DocumentAttention()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="examples per step")
    parser.add_argument("--cutoff", type=int, default=1024, help="tokens of an example, at most")
    parser.add_argument("--examples", type=int, help="of a data set, at most")
    chosen = arguments(parser, rounds=2, steps=1, batch=8, cutoff=64, examples=200)
    design = Design(rounds=chosen.rounds, steps=chosen.steps, warmup=2, evaluations=1)
    print("| data | batches | tokens/s | against padded | padding | eval loss |")
    print("|---|---|---|---|---|---|")
    for name, dataset in datasets().items():
        with tempfile.TemporaryDirectory() as folder:
            for row in measured(name, dataset, Path(folder), design, chosen):
                print(row, flush=True)


def datasets() -> dict[str, str]:
    """What there is on this machine."""
    found = {"standard library": "stdlib"}
    folder = os.environ.get("HASTEN_TEST_DATA")
    if folder:
        found["gsm8k"] = str(Path(folder) / "gsm8k_train.jsonl")
        found["alpaca"] = str(Path(folder) / "alpaca_en_demo.json")
    return found


def measured(
    name: str, dataset: str, folder: Path, design: Design, chosen: argparse.Namespace
) -> list[str]:
    """A row of the table for each variant."""
    recipe = Recipe(
        model="deepseek-llm-tiny",
        dataset=dataset,
        eval_data=48,
        cutoff_len=chosen.cutoff,
        max_examples=chosen.examples,
        max_steps=design.steps_in_all,
        global_batch_size=chosen.batch,
        learning_rate=2e-3,
        warmup_steps=4,
        output=str(folder),
    )
    subject = prepared(recipe, SilentProgress())
    path = folder / "data" / "variants.yaml"
    path.write_text(recipe.to_yaml())
    plans = {variant: Plan(techniques) for variant, techniques in VARIANTS.items()}
    with WorkerPool(folder / "data", subject.context.device) as pool:
        at = experiment_context(pool, lambda name: recipe_worker(subject, path, plans[name]))
        variants = measure_variants(at, plans, design).variants
    return [_row(name, variant, variants[0]) for variant in variants]


def _row(name: str, variant: Variant, padded: Variant) -> str:
    if variant.failed:
        return f"| {name} | {variant.name} | failed: {variant.failed} | | | |"
    ratio = paired_ratio(padded.rounds, variant.rounds)
    positions = sum(step["positions"] for step in variant.steps)
    tokens = sum(step["tokens"] for step in variant.steps)
    median = sorted(variant.rounds)[len(variant.rounds) // 2]
    return (
        f"| {name} | {variant.name} | {median:,.0f} | {ratio.median:.2f}x "
        f"[{ratio.low:.2f}, {ratio.high:.2f}] | {1 - tokens / positions:.1%} | "
        f"{variant.eval_data[-1][1]:.4f} |"
    )


if __name__ == "__main__":
    main()
