"""Where a model is cut into pipeline stages: the cut whose slowest stage is as fast as can be.

A pipeline goes at the pace of its slowest stage, so the cut to look for has the smallest largest
stage (the linear partition problem; Skiena, The Algorithm Design Manual, 10.7). Layers stay in
order; the embedding is more work for the first stage, norm and head for the last. Among all cuts
with that bottleneck the evenest is taken, which is the one that keeps memory even too.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import nn

SLACK = 1 + 1e-9  # sums of the same costs in another order differ by less


def balanced(
    costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Layers of each stage; every stage gets one at least.

    Args:
        costs: of each layer, in any unit.
        stages: how many runs of layers to make.
        first: what the first stage does beside its layers (embedding).
        last: what the last stage does beside its layers (norm, head and loss).

    Raises:
        ValueError: there are fewer layers than stages, or a cost is no number from 0 on.
    """
    if stages < 1:
        raise ValueError(f"{stages} stages: give 1 at least")
    if len(costs) < stages:
        raise ValueError(
            f"a model of {len(costs)} layers can't be cut into {stages} stages; take "
            f"{len(costs)} stages at most"
        )
    if any(not math.isfinite(c) or c < 0 for c in (*costs, first, last)):
        raise ValueError("the costs of layers must be finite and not negative")
    ends = (0.0, *itertools.accumulate(costs))

    def stage(start: int, end: int, index: int) -> float:
        more = (first if index == 0 else 0.0) + (last if index == stages - 1 else 0.0)
        return ends[end] - ends[start] + more

    bound = _bottleneck(len(costs), stages, stage) * SLACK
    return _evenest(len(costs), stages, stage, bound)


def bottleneck(
    costs: Sequence[float], sizes: Sequence[int], first: float = 0.0, last: float = 0.0
) -> float:
    """The cost of the slowest stage of a cut."""
    found, start = [], 0
    for index, size in enumerate(sizes):
        more = (first if index == 0 else 0.0) + (last if index == len(sizes) - 1 else 0.0)
        found.append(math.fsum(costs[start : start + size]) + more)
        start += size
    return max(found)


Stage = Callable[[int, int, int], float]  # cost of layers start..end as the stage of that index


def _bottleneck(layers: int, stages: int, stage: Stage) -> float:
    """The smallest possible largest stage; ``best[end]`` is that of the layers before ``end``."""
    best = [0.0] + [math.inf] * layers
    for index in range(stages):
        row = [math.inf] * (layers + 1)
        for end in range(index + 1, layers + 1):
            row[end] = min(max(best[s], stage(s, end, index)) for s in range(index, end))
        best = row
    return best[layers]


def _evenest(layers: int, stages: int, stage: Stage, bound: float) -> tuple[int, ...]:
    """Of all cuts within the bound the one with the smallest sum of squares."""

    @cache
    def best(end: int, index: int) -> tuple[float, tuple[int, ...]]:
        if index < 0:
            return (0.0, ()) if end == 0 else (math.inf, ())
        found: tuple[float, tuple[int, ...]] = (math.inf, ())
        for start in range(index, end):
            cost = stage(start, end, index)
            if cost <= bound:
                squares, sizes = best(start, index - 1)
                found = min(found, (squares + cost * cost, (*sizes, end - start)))
        return found

    return best(layers, stages - 1)[1]


def ranges(sizes: Sequence[int]) -> list[range]:
    """The layers of each stage, as ranges."""
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def work(module: nn.Module, active: float = 1.0) -> float:
    """Multiplications per token of a module: its matrices' elements, experts by their active share.

    Args:
        module: one layer. Convolutions count as often as their kernel is applied to one position.
        active: the share of a layer's experts that a token passes through.
    """
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2:
            routed = ".experts." in f".{name}"
            total += parameter.numel() * (active if routed else 1.0)
    return total or float(sum(p.numel() for p in module.parameters()))


def seconds(run: Callable[[], torch.Tensor], device: torch.device, times: int = 3) -> float:
    """Fastest of some forward and backward passes; gradients they leave are the caller's."""
    best = math.inf
    for _ in range(times):
        _wait(device)
        began = time.perf_counter()
        out = run()
        if out.requires_grad:
            out.backward(torch.ones_like(out))
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return best


def _wait(device: torch.device) -> None:
    """A measurement ends when the device has done the work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
