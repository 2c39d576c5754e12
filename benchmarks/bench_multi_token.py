"""What modules for tokens further ahead cost: a pass with none, one and two of them, by model.

    python benchmarks/bench_multi_token.py [--threads 1] [--rounds 5] [--model v3-small]

All depths take turns on the same packed row, every token trained; a ratio is the median over rounds
to depth 0 of the same round. Expected is what ``multi_token_prediction`` forecasts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from smoke import arguments
from transformers import AutoModelForCausalLM

from hasten.core.context import JobContext, ModelFacts
from hasten.machine import host
from hasten.models.presets import build_config, preset
from hasten.parts.data.collate import packed, tokenized_example
from hasten.parts.nn.losses import LabelOnlyLoss
from hasten.parts.nn.multi_token import MultiToken, minimise_too
from hasten.techniques.objective import MultiTokenPrediction

VOCABULARY, EXAMPLES, LENGTH = 4096, 4, 256
DEPTHS = (0, 1, 2)


def loss_of_depth(model: str, depth: int) -> Any:
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(build_config(preset(model), vocab_size=VOCABULARY))
    loss_of = LabelOnlyLoss(built)
    if depth:
        minimise_too(loss_of, MultiToken(built, depth))
    return loss_of.train()


def once(loss_of: Any, batch: dict[str, Any]) -> float:
    began = time.perf_counter()
    loss, count = loss_of(**batch)
    (loss / count).backward()
    took = time.perf_counter() - began
    loss_of.zero_grad(set_to_none=True)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="v3-small")
    given = arguments(parser, rounds=1, model="v3-tiny", VOCABULARY=64, EXAMPLES=2, LENGTH=16)
    torch.set_num_threads(given.threads)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (EXAMPLES, LENGTH), generator=draw)
    batch = packed([tokenized_example(row.numpy()) for row in ids])
    losses = {depth: loss_of_depth(given.model, depth) for depth in DEPTHS}
    taken: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for turn in range(given.rounds + 1):
        for depth, loss_of in losses.items():
            seconds = once(loss_of, batch)
            if turn:  # the first round warms up
                taken[depth].append(seconds)
    config = losses[0].model.config
    size = sum(p.numel() for p in losses[0].model.parameters())
    model = ModelFacts(
        *(config.model_type, size, config.hidden_size, config.num_hidden_layers, VOCABULARY)
    )
    known = JobContext(host.hardware(), model=model)
    print(f"{given.model}, {size / 1e6:.1f} M weights, {EXAMPLES} examples of {LENGTH} tokens")
    print("| depth | ms | of depth 0 | expected |")
    print("|---|---|---|---|")
    for depth, found in taken.items():
        ratio = statistics.median(a / b for a, b in zip(found, taken[0], strict=True))
        told = MultiTokenPrediction(depth).forecast(known).flops if depth else 1.0
        middle = 1e3 * statistics.median(found)
        print(f"| {depth} | {middle:.0f} | {ratio:.2f}× | {told:.2f}× |")


if __name__ == "__main__":
    main()
