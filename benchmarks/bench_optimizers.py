"""What compact moments, Muon and a weight average cost and save, beside torch's fused AdamW.

    python benchmarks/bench_optimizers.py

The weights are those of a Llama of 8 blocks; updates alone, with gradients that stand still. Ways
take turns; ratios are medians over rounds to AdamW of the same round. The last column is another
run: the loss of a small teacher's task after the same steps from the same start, over seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from smoke import arguments
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM
from turns import in_turns, ratio, timed

from hasten.parts.optim.compact_adamw import CompactAdamW
from hasten.parts.optim.muon import MuonAdamW, muon_groups
from hasten.parts.optim.weight_average import WeightAverage, decayed_groups

ROUNDS, SEEDS, STEPS, HIDDEN, LAYERS = 5, 5, 300, 256, 8
Named = list[tuple[str, nn.Parameter]]
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95)}


def adamw(named: Named) -> Optimizer:
    return AdamW(decayed_groups(named, 0.1), **SETTINGS, fused=True)


def compact(moments: str) -> Callable[[Named], Optimizer]:
    return lambda named: CompactAdamW(decayed_groups(named, 0.1), **SETTINGS, moments=moments)


def muon(named: Named) -> Optimizer:
    return MuonAdamW(muon_groups(decayed_groups(named, 0.1), named), **SETTINGS)


WAYS: dict[str, Callable[[Named], Optimizer]] = {
    "AdamW, fused": adamw,
    "CompactAdamW, bf16": compact("bf16"),
    "CompactAdamW, int8": compact("int8"),
    "Muon": muon,
}


def llama() -> Named:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=688,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        vocab_size=4096,
    )
    named = list(LlamaForCausalLM(config).named_parameters())
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    return named


def state_bytes(optimizer: Optimizer) -> int:
    states: Iterable[dict[str, Any]] = optimizer.state.values()
    return sum(v.nbytes for s in states for v in s.values() if isinstance(v, Tensor))


def final_loss(build: Callable[[Named], Optimizer], seed: int) -> float:
    """A network that learns another one's outputs; the loss on fresh inputs."""
    torch.manual_seed(seed)
    teacher, student = (
        nn.Sequential(
            nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8)
        )
        for _ in range(2)
    )
    optimizer = build(list(student.named_parameters()))
    for _ in range(STEPS):
        x = torch.randn(128, 32)
        (student(x) - teacher(x).detach()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    x = torch.randn(4096, 32)
    with torch.no_grad():
        return float((student(x) - teacher(x)).square().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser, ROUNDS=1, SEEDS=1, STEPS=10, HIDDEN=32, LAYERS=1)
    models = {name: llama() for name in WAYS}
    optimizers = {name: build(models[name]) for name, build in WAYS.items()}
    average, weights = WeightAverage(), [p for _, p in models["AdamW, fused"]]
    updates: dict[str, Callable[[], Any]] = {n: o.step for n, o in optimizers.items()}
    updates["WeightAverage alone"] = lambda: average.after_update(weights)
    seconds = in_turns({n: partial(timed, update) for n, update in updates.items()}, ROUNDS)
    count = sum(p.numel() for p in weights)
    print(
        f"{count / 1e6:.1f} M weights, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"| way | bytes per weight | ms per update | of AdamW | loss after {STEPS} steps |")
    print("|---|---|---|---|---|")
    for name, taken in seconds.items():
        kept = state_bytes(optimizers[name]) if name in optimizers else average.state_bytes
        losses = [final_loss(WAYS[name], seed) for seed in range(SEEDS)] if name in WAYS else []
        quality = f"{statistics.mean(losses):.5f}" if losses else "-"
        print(
            f"| {name} | {kept / count:.2f} | {1e3 * statistics.median(taken):.0f} | "
            f"{ratio(taken, seconds['AdamW, fused']):.1f}× | {quality} |"
        )


if __name__ == "__main__":
    main()
