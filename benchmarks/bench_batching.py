"""What padding costs: padded, budgeted, length-grouped and packed batches of three data sets.

One process per variant, taking turns, the same examples in the same order (length_grouped: its
own), a fresh model each, real tokens per second, eval loss at equal tokens.

    HASTEN_TEST_DATA=FOLDER python benchmarks/bench_batching.py [--rounds 6] [--steps 3]

FOLDER holds gsm8k_train.jsonl and alpaca_en_demo.json; without it only the embedded corpus is run.

    python benchmarks/bench_batching.py --v4 [--rounds 6]

Instead, CPU time of passes of a narrow DeepSeek-V4, padded and packed; both take turns.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smoke import arguments

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.measure.ablation import Design, Variant
from hasten.measure.experiment import experiment_context, measure_variants
from hasten.measure.recipe_experiment import prepared, recipe_worker
from hasten.measure.statistics import paired_ratio
from hasten.measure.workers import WorkerPool
from hasten.models.load import take_own_attention
from hasten.parts.data import collate
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.causal_lm import freeze_indexers
from hasten.parts.nn.losses import WholeLogitsLoss
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
    parser.add_argument("--v4", action="store_true", help="passes of a narrow DeepSeek-V4 alone")
    chosen = arguments(parser, rounds=2, steps=1, batch=8, cutoff=64, examples=200, V4_LONGEST=(9,))
    if chosen.v4 or chosen.smoke:
        v4_passes(chosen.rounds, chosen.batch)
    if chosen.v4:
        return
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


# DeepSeek-V4, whose documents run one by one in its own attention.

V4_LONGEST = (60, 300)  # tokens of the longest example
V4 = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "sliding_window": 64,
    "num_attention_heads": 8,
    "head_dim": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 128,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 32,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
    "layer_types": 2
    * ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
}


def v4_passes(rounds: int, batch: int) -> None:
    """Prints tokens per CPU second of a forward and backward pass, padded and packed."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    model: Any = DeepseekV4ForCausalLM(DeepseekV4Config(**V4))
    take_own_attention(model)
    freeze_indexers(model)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(torch.randint(0, 8, table.shape))
    apart = copy.deepcopy(model)
    use_document_attention(apart)
    ways = {"padded": (model, collate.padded), "packed": (apart, collate.packed)}
    print("| longest | padding | padded: tokens/CPU s | packed | packed / padded |")
    print("|---|---|---|---|---|")
    for longest in V4_LONGEST:
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        padding = []
        for number in range(-1, rounds):
            draw = np.random.default_rng(number + 1)
            sizes = draw.integers(4, longest + 1, batch)
            rows = [collate.tokenized_example(draw.integers(3, 2000, n)) for n in sizes]
            losses = []
            for way, (trained, lay_out) in ways.items():
                loss_of = WholeLogitsLoss(trained).train()
                began = time.process_time()
                total, count = loss_of(**lay_out(rows))
                (total / count).backward()
                speeds[way].append(sizes.sum() / (time.process_time() - began))
                losses.append(float(total.detach() / count))
            assert abs(losses[0] - losses[1]) < 1e-4 * losses[0], losses
            padding.append(1 - sizes.sum() / (sizes.max() * batch))
        medians = {way: statistics.median(found[1:]) for way, found in speeds.items()}
        ratios = sorted(b / a for a, b in zip(*(s[1:] for s in speeds.values()), strict=True))
        print(
            f"| {longest} | {statistics.mean(padding[1:]):.0%} | {medians['padded']:,.0f} | "
            f"{medians['packed']:,.0f} | {statistics.median(ratios):.2f}x "
            f"[{ratios[0]:.2f}, {ratios[-1]:.2f}] |",
            flush=True,
        )


if __name__ == "__main__":
    main()
