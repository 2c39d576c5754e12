"""Transformers' three ways through the experts of a layer: seconds of a forward and backward pass.

    python benchmarks/bench_experts.py [--threads 1] [--rounds 5] [--without batched_mm]

Ways take turns on the same model and tokens; a ratio is the median over rounds to Transformers'
default, ``grouped_mm``, of the same round. Then what balancing costs: the pass with the loads
counted and the balance loss added, against the pass without.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from smoke import arguments
from transformers import AutoModelForCausalLM
from turns import in_turns, ratio, timed

from hasten.models.presets import build_config, preset
from hasten.parts.nn.losses import LabelOnlyLoss
from hasten.parts.nn.router_balance import RouterBalance, sequence_ids

KINDS = ("grouped_mm", "eager", "batched_mm")
ROWS, LENGTH, VOCABULARY = 4, 256, 4096
BALANCED = "grouped_mm, balanced"


def passes(name: str, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    config = build_config(preset(name), vocab_size=VOCABULARY)
    model: Any = AutoModelForCausalLM.from_config(config).to(dtype)
    model.set_attn_implementation("sdpa")
    loss_of = LabelOnlyLoss(model).train()
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH))
    where = sequence_ids([LENGTH] * ROWS, ids.shape)

    def once(kind: str, balance: bool = False) -> None:
        model.set_experts_implementation(kind)
        if not balance:
            loss_of(input_ids=ids, labels=ids)[0].backward()
        else:
            speed = 0.001 if "v3" in name else 0.0
            watched = RouterBalance(model, speed, sequence_loss=1e-4)
            with watched.watching(where):
                loss, _ = loss_of(input_ids=ids, labels=ids)
            (loss + watched.loss(ids)).backward()
            watched.after_update()
            watched.remove()
        model.zero_grad(set_to_none=True)

    found: dict[str, Callable[[], None]] = {k: partial(once, k) for k in KINDS}
    return {**found, BALANCED: lambda: once("grouped_mm", balance=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", choices=KINDS[1:], help="leave this way out")
    given = arguments(parser, rounds=1, ROWS=1, LENGTH=16, VOCABULARY=64)
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, {given.threads} threads, {ROWS * LENGTH} tokens a pass")
    print("| preset | format | way | ms | of grouped_mm |")
    print("|---|---|---|---|---|")
    for name in ("v2-lite-tiny", "v3-tiny"):
        for dtype in (torch.float32, torch.bfloat16):
            ways = passes(name, dtype)
            ways.pop(given.without, None)
            timed_ways = {way: partial(timed, act) for way, act in ways.items()}
            taken = in_turns(timed_ways, given.rounds)
            for way, seconds in taken.items():
                print(
                    f"| {name} | {str(dtype).removeprefix('torch.')} | {way} | "
                    f"{1e3 * statistics.median(seconds):.0f} | "
                    f"{ratio(seconds, taken['grouped_mm']):.2f}× |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
