"""Head and loss of a language model in four ways: seconds and memory, by vocabulary.

    python benchmarks/bench_losses.py [--threads 1] [--rounds 3]

The ways take turns on the same hidden states and labels; a ratio is the median over rounds to the
whole logits of the same round. Memory is what a way adds to the process at its highest, each in a
process of its own. ``linear_cross_entropy`` is torch's own chunked function, with the options that
torch chooses and with hasten's number of rows.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from smoke import arguments
from torch import Tensor
from turns import in_turns, ratio

from hasten.machine import host, processes
from hasten.parts.nn.losses import chunk_rows, label_only_cross_entropy, whole_cross_entropy

ROWS, WIDTH = 1024, 512
VOCABULARIES = (16_384, 102_400, 129_280)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return whole_cross_entropy(F.linear(hidden, weight), labels)


def torch_chunked(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None) -> Tensor:
    rows = chunk if chunk is None else chunk_rows("auto", len(weight)) if chunk < 1 else chunk
    options = (
        torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        if rows
        else (torch.nn.LinearCrossEntropyOptions())
    )
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


WAYS: dict[str, Loss] = {
    "whole logits": whole,
    "hasten, chunk=auto": label_only_cross_entropy,
    "hasten, chunk=1024": partial(label_only_cross_entropy, chunk=1024),
    "linear_cross_entropy": partial(torch_chunked, chunk=None),
    "linear_cross_entropy, rows of auto": partial(torch_chunked, chunk=0),
}
if not hasattr(F, "linear_cross_entropy"):
    WAYS = {name: way for name, way in WAYS.items() if not name.startswith("linear")}


def data(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, WIDTH, generator=generator) * 0.05).to(dtype)
    labels = torch.randint(vocabulary, (ROWS,), generator=generator)
    return hidden, weight.requires_grad_(), labels


def once(way: Loss, tensors: tuple[Tensor, Tensor, Tensor]) -> float:
    began = time.perf_counter()
    way(*tensors).backward()
    took = time.perf_counter() - began
    for tensor in tensors[:2]:
        tensor.grad = None
    return took


def added_megabytes(name: str, vocabulary: int, dtype: str) -> float:
    """The process's highest memory after one pass, less that before it."""
    command = [sys.executable, __file__, *sys.argv[1:], "--alone", name, str(vocabulary), dtype]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def alone(name: str, vocabulary: int, dtype: torch.dtype) -> float:
    small = data(64, dtype)
    once(WAYS[name], small)  # libraries are loaded and kernels built
    tensors = data(vocabulary, dtype)
    host.reset_memory_peak("cpu")
    before = processes.host_memory_peak()
    once(WAYS[name], tensors)
    return (processes.host_memory_peak() - before) / 2**20


def table(dtype: torch.dtype, rounds: int) -> None:
    print(f"\n{dtype}, {ROWS} rows of {WIDTH}, every row labelled, forward and backward")
    print("| vocabulary | way | ms | of whole logits | memory added |")
    print("|---|---|---|---|---|")
    for vocabulary in VOCABULARIES:
        tensors = data(vocabulary, dtype)
        passes = {name: partial(once, way, tensors) for name, way in WAYS.items()}
        taken = in_turns(passes, rounds)
        for name, seconds in taken.items():
            memory = added_megabytes(name, vocabulary, str(dtype).removeprefix("torch."))
            print(
                f"| {vocabulary:,} | {name} | {1e3 * statistics.median(seconds):.0f} | "
                f"{ratio(seconds, taken['whole logits']):.2f}× | {memory:.0f} MB |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    given = arguments(parser, rounds=1, ROWS=32, WIDTH=32, VOCABULARIES=(256,))
    torch.set_num_threads(given.threads)
    if given.alone:
        name, vocabulary, dtype = given.alone
        print(alone(name, int(vocabulary), getattr(torch, dtype)))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype in (torch.float32, torch.bfloat16):
        table(dtype, given.rounds)


if __name__ == "__main__":
    main()
