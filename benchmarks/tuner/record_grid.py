"""Records grid.json: every point of a small space of plans, measured in interleaved rounds.

    python benchmarks/tuner/record_grid.py benchmarks/tuner/grid.json

A tiny job (two blocks of 128, batch 8, records of at most 96 tokens of Python's library) is built
once for every plan. Plans sit in blocks of 24, each with a baseline of its own; in a round
every plan of a block does STEPS steps on the same examples, in an order drawn anew. What is kept of
a round is the ratio of tokens per second to the block's baseline, by this process's processor time:
others used the machine meanwhile, and by the wall's clock rounds varied by 20 to 50 %. All of it
runs in one process with one thread, so techniques that act on a whole process have no place here.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare
from hasten.core.step import assemble, training
from hasten.recipe.build import context_of, job_of
from hasten.recipe.prepared_data import prepare_data
from hasten.recipe.schema import recipe_from
from hasten.techniques import CATALOGUE
from hasten.tune.space import plan_space

TUNED = (
    *("packed", "fused_layers", "labelled_token_loss"),
    *("autocast", "bf16_master_weights", "gradient_accumulation"),
)
BOUNDS = {
    "gradient_accumulation.micro_batch_size": (1, 8),
    "gradient_accumulation.micro_batch_tokens": (1, 0),  # cut by examples alone
    "labelled_token_loss.chunk": (1, 0),
}
ROUNDS, STEPS, WARMUP, BLOCK = 6, 2, 2, 24


def small_model(seed: int, vocabulary: int) -> torch.nn.Module:
    import transformers as hf

    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    model = hf.AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("sdpa")
    return model


def main(out: Path) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_from(
            {
                "model": "deepseek-llm-tiny",
                "dataset": "stdlib",
                "eval_data": 16,
                "vocabulary": 1024,
                "max_examples": 300,
                "cutoff_len": 96,
                "max_steps": 1000,
                "global_batch_size": 8,
                "learning_rate": 1e-3,
                "output": folder,
            },
            "grid",
        )
        data = prepare_data(recipe, Path(folder) / "data")
        context = context_of(recipe, data)
        shape = replace(context.model, parameters=10**6, hidden_size=128, layers=2, vocabulary=1024)
        context = replace(context, model=shape)
        found = plan_space(CATALOGUE, Plan(), context, BOUNDS, only=TUNED)
        points = found.space.points()
        print(f"{len(points)} points", flush=True)

        def session(point: tuple[int, ...]) -> Session:
            plan = found.plan(point)
            job = job_of(recipe, data, context, plan)
            model = partial(small_model, 0, len(data.tokenizer))
            return assemble(prepare(replace(job, model=model), plan, context, Path(folder)))

        for rows in measured(points, session, found.space.start):
            for row in rows:
                row["expected"] = round(found.gain(tuple(row["point"])), 5)
                row["settings"] = found.space.settings(tuple(row["point"]))
            write(out, found.space.dimensions, rows, context, time.monotonic() - began)


def measured(points: list[Any], build: Any, start: Any) -> Iterator[list[dict[str, Any]]]:
    order = random.Random(0)
    shuffled = order.sample(points, len(points))
    rows = []
    for number in range(0, len(shuffled), BLOCK):
        block = shuffled[number : number + BLOCK]
        alive = {place: training(build(p)) for place, p in enumerate([start, *block])}
        for steps in alive.values():
            rate(steps, WARMUP)
        rounds: list[list[float]] = [[] for _ in block]
        for _ in range(ROUNDS):
            speeds = {k: rate(alive[k], STEPS) for k in order.sample(list(alive), len(alive))}
            for place in range(len(block)):
                rounds[place].append(round(speeds[place + 1] / speeds[0], 4))
        rows += [{"point": list(p), "ratios": r} for p, r in zip(block, rounds, strict=True)]
        print(f"{len(rows)}/{len(points)}", flush=True)
        yield rows


def rate(steps: Any, count: int) -> float:
    """Tokens per second of processor time: what others do with the machine isn't in it."""
    found: list[float] = []
    for _ in range(count):
        before = time.process_time()
        tokens: int = next(steps).tokens
        found.append(tokens / (time.process_time() - before))
    return statistics.median(found)


def write(out: Path, dimensions: Any, rows: Any, known: Any, seconds: float) -> None:
    best = max(rows, key=lambda row: statistics.median(row["ratios"]))
    spreads = [statistics.stdev(r["ratios"]) / statistics.mean(r["ratios"]) for r in rows]
    head = {
        "what": "tokens per second of processor time over the baseline's, by round",
        "machine": f"{known.hardware.short}, 1 thread, shared with others",
        "versions": dict(known.versions),
        "recorded": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds),
        "rounds": ROUNDS,
        "relative_spread_of_a_round": round(statistics.median(spreads), 4),
        "best": {"settings": best["settings"], "ratio": statistics.median(best["ratios"])},
        "dimensions": [
            {"name": d.name, "values": list(d.values), "ordered": d.ordered, "needs": d.needs}
            for d in dimensions
        ],
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    text = json.dumps(head, indent=1)[:-2] + f',\n "points": [\n  {lines}\n ]\n}}\n'
    out.write_text(text)
    print(json.dumps(head["best"]), head["relative_spread_of_a_round"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/tuner/grid.json"))
