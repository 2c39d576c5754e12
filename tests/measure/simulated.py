"""How often intervals hold the truth, on rounds whose truth is known because they are drawn.

Four kinds of noise, all beside a weather that both variants of a round share: normal in logarithms;
skewed, with now and then a stall of one variant; a machine that slows down over the rounds, and
within them for whoever comes later; and weather in bursts that last some rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hasten.measure.statistics import paired_ratio

Draw = Callable[[np.random.Generator, int], tuple[Any, Any]]
ROUNDS = (5, 8, 12, 20)
TRUTH = 1.07


def normal(rng: np.random.Generator, rounds: int) -> tuple[Any, Any]:
    weather = rng.lognormal(0, 0.1, rounds)
    return weather * rng.lognormal(0, 0.03, rounds), weather * rng.lognormal(0, 0.03, rounds)


def skewed(rng: np.random.Generator, rounds: int) -> tuple[Any, Any]:
    """Step times with a long tail; one turn in ten is stalled by another factor."""

    def variant() -> Any:
        slow = rng.lognormal(0, 0.6, rounds) * 0.1 + 0.9
        stalled = rng.random(rounds) < 0.1
        return 1 / (slow * np.where(stalled, 1 + rng.exponential(0.3, rounds), 1.0))

    return variant(), variant()


def drifting(rng: np.random.Generator, rounds: int) -> tuple[Any, Any]:
    """30 % slower from first round to last; the turns of a round come in an order drawn anew."""
    slope = np.log(0.7) / max(rounds - 1, 1)
    first = rng.random(rounds) < 0.5
    places = np.where(first, 0.0, 0.5), np.where(first, 0.5, 0.0)
    here = np.arange(rounds)
    base, other = (np.exp(slope * (here + place)) for place in places)
    return base * rng.lognormal(0, 0.02, rounds), other * rng.lognormal(0, 0.02, rounds)


def bursts(rng: np.random.Generator, rounds: int) -> tuple[Any, Any]:
    """A neighbour takes a third of the machine for some rounds, from within a round on."""
    busy, state = np.zeros(rounds), False
    for number in range(rounds):
        state = rng.random() < (0.7 if state else 0.2)
        busy[number] = state
    edges = rng.random((2, rounds)) < 0.9  # whether the variant's turn saw what the round had
    base, other = (np.where(busy * edge > 0, 0.67, 1.0) for edge in edges)
    return base * rng.lognormal(0, 0.02, rounds), other * rng.lognormal(0, 0.02, rounds)


NOISES: dict[str, Draw] = {
    "normal": normal,
    "skewed, with stalls": skewed,
    "drifting": drifting,
    "in bursts": bursts,
}


def coverage(draw: Draw, rounds: int, replays: int, truth: float = TRUTH, seed: int = 20) -> float:
    """The share of 95 % intervals that hold the true ratio."""
    rng, held = np.random.default_rng(seed), 0
    for _ in range(replays):
        base, other = draw(rng, rounds)
        ratio = paired_ratio(list(base), list(truth * other))
        held += ratio.low <= truth <= ratio.high
    return held / replays
