"""The processor's own kernels against torch's, and what waiting for a lost core costs.

    python benchmarks/bench_cpu.py products     GFLOP/s of a core, in turns, cold caches
    python benchmarks/bench_cpu.py attention    forward and backward over documents of new lengths
    python benchmarks/bench_cpu.py growth       peak memory over steps of new lengths
    python benchmarks/bench_cpu.py waiting      tokens/s beside busy processes, by how threads wait

``products`` and ``attention`` count CPU seconds of one thread, so that other processes count
little; each round takes every way in turn, and the table has the medians. ``growth`` and
``waiting`` train a small Llama in a process of its own each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from smoke import arguments
from turns import in_turns, timed

from hasten.core.health import BusyMachine
from hasten.machine import environment, host
from hasten.parts.kernels import products
from hasten.parts.nn import fused_functions

SHAPES = ((6288, 384, 1152), (6288, 384, 2048), (6288, 1024, 384), (500, 384, 16384))
DOCUMENTS = ((55, 90, 117, 160, 230, 390, 967), (64,) * 20, (1024,), (2048,))
HEADS, WIDTH = 6, 64
WAITING: dict[str, dict[str, str]] = {
    "as the library does": {},
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "1,000 turns": {"GOMP_SPINCOUNT": "1000"},
    "10,000 turns": {"GOMP_SPINCOUNT": "10000"},
    "10,000 turns, sooner asleep beside others": environment.BRIEF_WAITING,  # as in a training
    "one thread": {"OMP_NUM_THREADS": "1"},
}
BUSY = (0, 1, 3)
MODEL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 4096}
TOKENS, STEPS = 2048, 30
FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16}


def medians(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of CPU time of each way, in turns."""
    timed_ways = {name: partial(timed, act, time.process_time) for name, act in ways.items()}
    seconds = in_turns(timed_ways, rounds)
    return {name: statistics.median(values) for name, values in seconds.items()}


def bench_products(rounds: int) -> None:
    print("| rows, in, out | product | float32 torch | own | bf16 torch | own |")
    print("|---|---|--:|--:|--:|--:|")
    for rows, wide, out in SHAPES:
        x, weight, grad = (torch.randn(*s) for s in ((rows, wide), (out, wide), (rows, out)))
        for kind, a, b, a_turned, b_turned in (
            ("forward", x, weight, False, True),
            ("input's gradient", grad, weight, False, False),
            ("weight's gradient", grad, x, True, False),
        ):
            ways: dict[str, Callable[[], object]] = {}
            for name, dtype in FORMATS.items():
                one, two = a.to(dtype), b.to(dtype)
                left, right = one.t() if a_turned else one, two.t() if b_turned else two
                ways[f"{name} torch"] = partial(torch.matmul, left, right)
                ways[f"{name} own"] = partial(products.product, one, two, a_turned, b_turned)
            found = medians(ways, rounds)
            rates = [2 * rows * wide * out / seconds / 1e9 for seconds in found.values()]
            print(
                f"| {rows}, {wide}, {out} | {kind} | "
                + " | ".join(f"{r:.0f}" for r in rates)
                + " |",
                flush=True,
            )


def attention_of_torch(q: Any, k: Any, v: Any, lengths: tuple[int, ...]) -> torch.Tensor:
    pieces = zip(*(t.transpose(0, 1)[None].split(lengths, 2) for t in (q, k, v)), strict=True)
    out = [F.scaled_dot_product_attention(*document, is_causal=True) for document in pieces]
    return torch.cat(out, 2)[0].transpose(0, 1)


def attention_of_hasten(q: Any, k: Any, v: Any, lengths: tuple[int, ...]) -> torch.Tensor:
    starts = tuple(itertools.accumulate(lengths, initial=0))
    return fused_functions.attend(q, k, v, starts, q.shape[-1] ** -0.5)


def bench_attention(rounds: int) -> None:
    print("| documents | format | torch, ms | own, ms | times as fast |\n|---|---|--:|--:|--:|")
    more = itertools.count()

    def once(attention: Any, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
        new = tuple(length + next(more) % 7 for length in lengths)
        q, k, v = (torch.randn(sum(new), HEADS, WIDTH).to(dtype).requires_grad_() for _ in range(3))
        attention(q, k, v, new).sum().backward()

    for lengths in DOCUMENTS:
        for name, dtype in FORMATS.items():
            found = medians(
                {
                    "torch": partial(once, attention_of_torch, lengths, dtype),
                    "own": partial(once, attention_of_hasten, lengths, dtype),
                },
                rounds,
            )
            one, two = found["torch"], found["own"]
            what = f"{len(lengths)} of {min(lengths)} to {max(lengths)} tokens"
            print(
                f"| {what} | {name} | {1e3 * one:.1f} | {1e3 * two:.1f} | {one / two:.2f} |",
                flush=True,
            )


def small_model(dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from hasten.parts.nn.attention import use_document_attention
    from hasten.parts.nn.fused_layers import fuse_layers
    from hasten.parts.nn.losses import LabelOnlyLoss

    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, num_attention_heads=4, use_cache=False)
    model: Any = LlamaForCausalLM(config).to(dtype)
    use_document_attention(model)
    fuse_layers(model)
    return LabelOnlyLoss(model).train()


def train(dtype: torch.dtype, steps: int, new_lengths: bool, looks: bool) -> dict[str, Any]:
    """Trains the small model; tokens/s after three steps, and peak memory along the way.

    Where it ``looks``, idle threads sleep sooner beside busy processes, as in a training.
    """
    loss_of = small_model(dtype)
    machine = BusyMachine(print)
    optimizer = torch.optim.AdamW(loss_of.parameters(), lr=1e-4, fused=dtype == torch.float32)
    draw = torch.Generator().manual_seed(0)
    peaks, began, counted = [], 0.0, 0
    for step in range(steps):
        lengths: tuple[int, ...] = (300, 500, 200, 700, 348)
        if new_lengths and not step:
            lengths = (159,) * 6  # the most tokens, so that no later step needs more for them
        elif new_lengths:
            lengths = tuple(int(n) for n in torch.randint(20, 160, (6,), generator=draw))
        tokens = sum(lengths)
        if step == 3:
            began = time.perf_counter()
        ids = torch.randint(MODEL["vocab_size"], (1, tokens), generator=draw)
        loss, count = loss_of(
            labels=ids,
            input_ids=ids,
            document_lengths=lengths,
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        )
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        if looks:
            machine.look()
        counted += tokens if step >= 3 else 0
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return {"tokens_per_second": counted / (time.perf_counter() - began), "peaks": peaks}


def in_process(name: str, steps: int, variables: dict[str, str], *switches: str) -> dict[str, Any]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, __file__, "train", "--format", name, "--steps", str(steps)]
    done = subprocess.run(
        [*command, *switches],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def bench_growth(steps: int) -> None:
    print(
        "| format | after a tenth of the steps, MB | at the end, MB | growth |\n|---|--:|--:|--:|"
    )
    for name in FORMATS:
        variables = {**environment.defaults({}), "OMP_NUM_THREADS": "1"}  # as commands have them
        peaks = in_process(name, steps, variables, "--new-lengths")["peaks"]
        early, late = peaks[max(len(peaks) // 10, 1)] / 1024, peaks[-1] / 1024
        print(f"| {name} | {early:.0f} | {late:.0f} | {late / early - 1:+.1%} |", flush=True)


def bench_waiting(rounds: int, name_of_format: str) -> None:
    rates: dict[tuple[int, str], list[float]] = {}
    for number in range(rounds):
        for busy in BUSY:
            others = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)
            ]
            try:
                for name, variables in WAITING.items():
                    looks = ["--looks"] if variables is environment.BRIEF_WAITING else []
                    found = in_process(name_of_format, STEPS, variables, *looks)
                    rates.setdefault((busy, name), []).append(found["tokens_per_second"])
                    print(
                        f"round {number + 1}, {busy} busy, {name}: {rates[busy, name][-1]:.0f}",
                        file=sys.stderr,
                        flush=True,
                    )
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    print(
        "| idle threads wait | "
        + " | ".join(f"{b} busy" for b in BUSY)
        + " | share of quiet |\n|---|"
        + "--:|" * (len(BUSY) + 1)
    )
    for name in WAITING:
        row = [statistics.median(rates[busy, name]) for busy in BUSY]
        shares = ", ".join(f"{r / row[0]:.2f}" for r in row[1:])
        print(f"| {name} | " + " | ".join(f"{r:.0f}" for r in row) + f" | {shares} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("products", "attention", "growth", "waiting", "train")
    parser.add_argument("part", choices=parts, nargs="?", default="products")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000, help="of growth")
    parser.add_argument("--format", choices=FORMATS, default="float32", help="of waiting")
    parser.add_argument("--new-lengths", action="store_true", help="of train")
    parser.add_argument("--looks", action="store_true", help="of train")
    chosen = arguments(
        parser,
        rounds=1,
        steps=4,
        SHAPES=((70, 64, 96),),
        DOCUMENTS=((30, 40),),
        TOKENS=64,
        MODEL={**MODEL, "hidden_size": 64, "num_hidden_layers": 1},
    )
    if chosen.part == "train":
        found = train(FORMATS[chosen.format], chosen.steps, chosen.new_lengths, chosen.looks)
        print(json.dumps(found))
        return
    units = ", ".join(f"{name} by {products.unit(dtype)}" for name, dtype in FORMATS.items())
    print(f"{host.hardware().short}; {units}; torch {torch.__version__}\n")
    if chosen.part in ("products", "attention"):
        torch.set_num_threads(1)
    if chosen.part == "products" or chosen.smoke:
        bench_products(chosen.rounds)
    if chosen.part == "attention" or chosen.smoke:
        bench_attention(chosen.rounds)
    if chosen.part == "growth" or chosen.smoke:
        bench_growth(chosen.steps)
    if chosen.part == "waiting":
        bench_waiting(chosen.rounds, chosen.format)


if __name__ == "__main__":
    main()
