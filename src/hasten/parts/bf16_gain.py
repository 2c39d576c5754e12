"""How much faster this processor computes in bf16 than in float32, by a measurement of seconds.

A processor's flags don't tell: with the same flag a training in bf16 was 1.7 times as fast on one
machine and 0.6 times on another. So products and attention, forward and backward, take turns in
both formats, each turn at a length that no turn before had: what a library compiles for a new
shape is part of its cost. One thread works and its own seconds are counted, so that a busy machine
is no other processor. The result is kept in the user's cache, by processor and version.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

FILE = Path("~/.cache/hasten/bf16_gain.json")
ROUNDS, SECONDS = 9, 4.0
FEWEST_ROUNDS = 3  # of a processor that is too slow for all in the time there is
WIDTH, INNER, HEADS = 384, 1024, 6
FIRST_LENGTH = 331  # and 26 more in each round
CLEAR = 1.02  # a smaller gain isn't worth another number format
SHARE = 4  # a fourth of the rounds may say otherwise


def bf16_gain(processor: str, file: Path = FILE) -> tuple[float, ...]:
    """Seconds in float32 over seconds in bf16, one ratio for each round, lowest first.

    Args:
        processor: its name and instruction sets; torch's version is added.
        file: where ratios of earlier calls are kept.
    """
    return _kept(f"{processor}, torch {torch.__version__}", file)


def bf16_pays(ratios: Sequence[float]) -> bool:
    """Whether bf16 is clearly faster: in three of four rounds. An undecided race is none."""
    return _quantile(ratios, SHARE) > CLEAR


def words(ratios: Sequence[float]) -> str:
    """``1.64 times as fast [1.52, 1.71]``: the median and the middle half of the rounds."""
    low, high = _quantile(ratios, SHARE), -_quantile([-r for r in ratios], SHARE)
    return f"{statistics.median(ratios):.2f} times as fast [{low:.2f}, {high:.2f}]"


def _quantile(ratios: Sequence[float], part: int) -> float:
    return sorted(ratios)[len(ratios) // part]


@functools.cache
def _kept(key: str, file: Path) -> tuple[float, ...]:
    place = file.expanduser()
    known: dict[str, list[float]] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        known = {str(k): [float(v) for v in found] for k, found in _read(place).items() if found}
    if key not in known:
        known[key] = [round(ratio, 3) for ratio in measure()]
        with contextlib.suppress(OSError):  # then the next process measures again
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary = place.with_name(f".{place.name}.{os.getpid()}")
            temporary.write_text(json.dumps(known, indent=1))
            temporary.replace(place)
    return tuple(sorted(known[key]))


def _read(place: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads(place.read_text())
    return found


def measure() -> list[float]:
    """Rounds of one turn in each format, the first to go changing."""
    ratios: list[float] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _turn(torch.float32, FIRST_LENGTH - 26)  # memory and libraries are there
        began = time.perf_counter()
        for number in range(ROUNDS):
            if number >= FEWEST_ROUNDS and time.perf_counter() - began > SECONDS:
                break
            length = FIRST_LENGTH + 26 * number
            formats = [torch.float32, torch.bfloat16]
            seconds = {f: _turn(f, length) for f in (formats if number % 2 else formats[::-1])}
            ratios.append(seconds[torch.float32] / seconds[torch.bfloat16])
    finally:
        torch.set_num_threads(threads)
    return ratios


def _turn(dtype: torch.dtype, length: int) -> float:
    """This thread's seconds for an MLP's products and an attention, with gradients."""
    generator = torch.Generator().manual_seed(length)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    x_TD, up_ID, down_DI = drawn(length, WIDTH), drawn(INNER, WIDTH), drawn(WIDTH, INNER)
    heads = (1, HEADS, length, WIDTH // HEADS)
    q, k, v = drawn(*heads), drawn(*heads), drawn(*heads)
    began = time.thread_time()
    hidden = F.linear(F.linear(x_TD, up_ID), down_DI)
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    (hidden.sum() + seen.sum()).backward()
    return max(time.thread_time() - began, 1e-9)
