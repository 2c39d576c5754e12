"""What recomputation keeps and what it costs: saved bytes, seconds of a step, by what is kept.

    python benchmarks/bench_activation_checkpointing.py

Ways take turns, step by step; ratios are medians over rounds to the plain step of the same round.
The last way is not part of hasten: torch's selective checkpointing, which keeps the outputs of
matrix products and attention and recomputes the elementwise rest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from smoke import arguments
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from turns import in_turns, ratio

from hasten.parts.nn.losses import LabelOnlyLoss
from hasten.parts.nn.recompute import BlockRecompute, decoder_blocks

ROUNDS, BATCH, LENGTH = 7, 4, 256
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 4096,
}
aten = torch.ops.aten
PRODUCTS = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default),
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "every block": {},
    "segments=4": {"segments": 4},
    "budget=0.75": {"budget": 0.75},
    "budget=0.5": {"budget": 0.5},
    "budget=0.25": {"budget": 0.25},
}


def built() -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa"))
    return LabelOnlyLoss(model, chunk=512).train()


def product_keeper(module: nn.Module, kept: list[int]) -> None:
    """Bind selective checkpointing to every block; ``kept`` gets the bytes of what stays."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        save = op in PRODUCTS
        if save and not context.is_recompute:
            kept.append(_output_bytes(op, args))
        choice = torch_checkpoint.CheckpointPolicy
        return choice.MUST_SAVE if save else choice.PREFER_RECOMPUTE

    contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    for block in decoder_blocks(module):
        block.forward = partial(_selective, block.forward, contexts, kept)


def _selective(forward: Any, contexts: Any, kept: list[int], hidden: Any, **kwargs: Any) -> Any:
    kept.append(hidden.nbytes)
    return torch_checkpoint.checkpoint(
        forward, hidden, use_reentrant=False, context_fn=contexts, **kwargs
    )


def _output_bytes(op: Any, args: Any) -> int:
    if op is aten.mm.default:
        return int(args[0].shape[0] * args[1].shape[1] * args[0].element_size())
    return int(args[0].nbytes)  # attention: an output like its queries


def step(module: nn.Module, inputs: dict[str, Any]) -> float:
    began = time.perf_counter()
    loss, _ = module(**inputs)
    loss.backward()
    module.zero_grad()
    return time.perf_counter() - began


def main() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 4}
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser, ROUNDS=1, BATCH=2, LENGTH=32, SHAPE={**SHAPE, **small})
    ids = torch.randint(0, 4096, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    steps: dict[str, Callable[[], float]] = {}
    saved: dict[str, int] = {}
    for name, settings in WAYS.items():
        module = built()
        recompute = BlockRecompute(**(settings or {}))
        recompute(module)
        if settings is None:
            recompute.remove()
        steps[name] = partial(step, module, inputs)
        steps[name]()  # a budget is planned in the first pass
        saved[name] = recompute.saved_bytes(partial(module, **inputs), module)
    module, kept = built(), list[int]()
    product_keeper(module, kept)
    name = "torch, products kept"
    steps[name] = partial(step, module, inputs)
    bare = built()
    for block in decoder_blocks(bare):
        block.forward = lambda hidden, **kwargs: hidden
    head = BlockRecompute().saved_bytes(lambda: bare(**inputs), bare)
    module(**inputs)
    saved[name] = head + sum(kept)
    seconds = in_turns(steps, ROUNDS)
    blocks = f"{SHAPE['num_hidden_layers']} blocks of {SHAPE['hidden_size']}"
    print(f"llama, {blocks}, {BATCH} x {LENGTH} tokens, torch {torch.__version__}")
    print("| way | saved MB | of plain | ms per step | of plain |\n|---|---|---|---|---|")
    for name, taken in seconds.items():
        share = saved[name] / saved["plain"]
        print(
            f"| {name} | {saved[name] / 1e6:.1f} | {share:.2f}× | "
            f"{1e3 * statistics.median(taken):.0f} | {ratio(taken, seconds['plain']):.2f}× |"
        )


if __name__ == "__main__":
    main()
