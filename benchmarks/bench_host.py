"""What the host's settings do to a training step: seconds and page faults, one setting a row.

    python benchmarks/bench_host.py [--rounds 6]

Every variant is a process of its own, started with its technique's variables, and trains the same
small llama on the same rows. Variants take turns of a few steps, in an order that shifts from round
to round; the others are stopped. Ratios are medians over rounds to the plain variant of the same
round.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from smoke import arguments

from hasten.core.context import JobContext, ModelFacts
from hasten.core.job import Job, Stop
from hasten.core.plan import Plan
from hasten.core.setup import prepare, unsupported_reasons
from hasten.core.step import assemble, training
from hasten.core.technique import Technique
from hasten.machine import environment, host
from hasten.machine.memory import minor_faults
from hasten.techniques.allocator import Allocator

STEPS, WARMUP, BATCH, LENGTH = 3, 3, 4, 256
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 8192,
}
VARIANTS: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "glibc": (Allocator(),),
    "glibc, huge pages": (Allocator(huge_pages=True),),
    "tcmalloc": (Allocator(kind="tcmalloc"),),
    "jemalloc": (Allocator(kind="jemalloc"),),
}


def known() -> JobContext:
    return JobContext(host.hardware(), model=ModelFacts("llama", layers=SHAPE["num_hidden_layers"]))


def variant(name: str) -> None:
    """Train in turns: a line on stdin is an order, a line on stdout its answer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hasten.core.job import with_language_counts
    from hasten.parts.data.collate import padded, tokenized_example
    from hasten.parts.nn.losses import LabelOnlyLoss
    from hasten.parts.optim.weight_average import decayed_groups

    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 8192, (LENGTH,), generator=draw).numpy() for _ in range(BATCH * 8)]
    examples = [tokenized_example(ids, [True] * LENGTH) for ids in rows]
    job = Job(
        model=lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa")),
        loss=lambda model: LabelOnlyLoss(model, chunk=512),
        optimizer=lambda named: torch.optim.AdamW(decayed_groups(named, 0.0), lr=1e-4, fused=True),
        stop=Stop(steps=10**6),
        examples=examples,
        lengths=[LENGTH] * len(examples),
        collate=with_language_counts(padded),
    )
    session = assemble(prepare(job, Plan(VARIANTS[name]), known()))
    steps = training(session)
    for line in sys.stdin:
        before = minor_faults()
        seconds = [next(steps).step_seconds for _ in range(int(line))]
        faults = (minor_faults() - before) / len(seconds)
        print(json.dumps([statistics.median(seconds), faults]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    few = {name: VARIANTS[name] for name in ("plain", "glibc, huge pages")}
    shape = {**SHAPE, "hidden_size": 32, "num_hidden_layers": 1}
    asked = arguments(parser, rounds=2, STEPS=1, WARMUP=1, LENGTH=16, SHAPE=shape, VARIANTS=few)
    if asked.variant:
        variant(asked.variant)
        return
    here = known()
    processes: dict[str, subprocess.Popen[str]] = {}
    for name, techniques in VARIANTS.items():
        reasons = unsupported_reasons(Plan(techniques), here)
        if reasons:
            print(f"left out {name}: {reasons[0]}")
            continue
        processes[name] = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--variant", name],
            env=environment.child_environment(Plan(techniques).environment(here)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        turn(processes[name], WARMUP)  # one at a time, the imports included
    found: dict[str, list[list[float]]] = {name: [] for name in processes}
    names = list(processes)
    for number in range(asked.rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(turn(processes[name], STEPS))
    for process in processes.values():
        process.send_signal(signal.SIGCONT)
        process.communicate()
    blocks = f"{SHAPE['num_hidden_layers']} blocks of {SHAPE['hidden_size']}"
    print(f"llama, {blocks}, {BATCH} x {LENGTH} tokens, {time.strftime('%Y-%m-%d')}")
    print("| setting | ms per step | of plain | page faults per step |\n|---|---|---|---|")
    for name, turns in found.items():
        pairs = zip(turns, found["plain"], strict=True)
        ratio = statistics.median(own[0] / plain[0] for own, plain in pairs)
        seconds, faults = (statistics.median(values) for values in zip(*turns, strict=True))
        print(f"| {name} | {1e3 * seconds:.0f} | {ratio:.2f}× | {faults:,.0f} |")


def turn(process: subprocess.Popen[str], steps: int) -> list[float]:
    """A turn; a process that isn't at its turn is stopped, since its threads may spin."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.send_signal(signal.SIGCONT)
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    answer: list[float] = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGSTOP)
    return answer


if __name__ == "__main__":
    main()
