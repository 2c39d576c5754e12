"""Ranks that train apart, against the same ranks simulated with plain loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hasten.parts.comm import local_sgd
from hasten.parts.comm.codecs import codec
from hasten.parts.comm.local_sgd import HEADER, Drift, DriftError, LocalSteps, rank_answers
from hasten.parts.comm.streaming_local_sgd import MOST, TIMED_STEPS, Stream, needed
from hasten.parts.kernels import codec as compiled
from hasten.parts.kernels.build import LoadedLibrary
from parts.comm.local_rank_jobs import (
    COARSE,
    NUMBERS,
    RATE,
    STEPS,
    a_rank_is_silent,
    all_parts,
    formats,
    gradient,
    no_numbers,
    running_sums,
    tokens_of,
)
from ranks import on_ranks, once_on_ranks

WORLD = 3
EXACT = codec("none")
EDGES = {1: [(0, NUMBERS)], 2: [(0, 256), (256, NUMBERS)]}


found = once_on_ranks(all_parts, WORLD)


def sent(kind: Any, delta: Tensor) -> Tensor:
    """What the others see of a difference."""
    if kind is None:
        return delta
    decoded: Tensor = kind.decode(kind.encode(delta.float()), len(delta))
    return decoded.double()


class Simulation:
    """Ranks as rows of a list, in float64; no message, no fragment object, no communication."""

    def __init__(self, kind: Any, move: Callable[[Tensor], Tensor] = lambda mean: mean) -> None:
        self.kind, self.move = kind, move
        self.weights = [torch.zeros(NUMBERS, dtype=torch.float64) for _ in range(WORLD)]
        self.anchor = torch.zeros(NUMBERS, dtype=torch.float64)
        self.since = [[0.0] * WORLD, [0.0] * WORLD]
        self.flight: list[Any] = []

    def step(self, step: int) -> None:
        for rank in range(WORLD):
            self.weights[rank] -= RATE * gradient(self.weights[rank], rank, step)
            for counts in self.since:
                counts[rank] += tokens_of(rank, step)

    def speak(self, part: int, low: int, high: int) -> list[Any]:
        shares = [c / sum(self.since[part]) for c in self.since[part]]
        self.since[part] = [0.0] * WORLD
        here = self.anchor[low:high]
        return [low, high, [sent(self.kind, w[low:high] - here) for w in self.weights], shares]

    def hear(self, low: int, high: int, said: list[Tensor], shares: list[float]) -> None:
        mean = sum((s * d for s, d in zip(shares, said, strict=True)), torch.zeros(high - low))
        moved = self.move(mean)
        self.anchor[low:high] += moved
        for rank in range(WORLD):
            self.weights[rank][low:high] += moved - said[rank]

    def synchronize(self, edges: list[tuple[int, int]]) -> Tensor:
        kind, self.kind, self.move = self.kind, None, lambda mean: mean
        for part, (low, high) in enumerate(edges):
            if not sum(self.since[part]):
                self.since[part] = [1.0] * WORLD
            self.hear(*self.speak(part, low, high))
        self.kind = kind
        return self.weights[0]


def averaged(every: int, kind: Any, move: Any = lambda mean: mean) -> Simulation:
    ranks = Simulation(kind, move)
    for step in range(STEPS):
        ranks.step(step)
        if (step + 1) % every == 0:
            ranks.hear(*ranks.speak(0, 0, NUMBERS))
    return ranks


def streamed(fragments: int, kind: Any) -> Simulation:
    ranks, flight = Simulation(kind), None
    for step in range(STEPS):
        ranks.step(step)
        if flight:
            ranks.hear(*flight)
        part = step % fragments
        flight = ranks.flight = ranks.speak(part, *EDGES[fragments][part])
    return ranks


def nesterov() -> Callable[[Tensor], Tensor]:
    """torch's own SGD with Nesterov's momentum, means taken for negative gradients."""
    place = torch.zeros(NUMBERS, dtype=torch.float64)
    outer = torch.optim.SGD([place], lr=0.7, momentum=0.9, nesterov=True)

    def move(mean: Tensor) -> Tensor:
        before, place.grad = place.clone(), -mean
        outer.step()
        return place - before

    return move


EXPECTED: dict[str, tuple[Callable[[], Simulation], int]] = {
    "exact": (lambda: averaged(5, None), 1),
    "coarse": (lambda: averaged(5, COARSE), 1),
    "momentum": (lambda: averaged(4, COARSE, nesterov()), 1),
    "exact momentum": (lambda: averaged(4, None, nesterov()), 1),
    "every step": (lambda: averaged(1, None), 1),
    "stream of one": (lambda: streamed(1, COARSE), 1),
    "stream": (lambda: streamed(2, COARSE), 2),
    "int4": (lambda: streamed(2, codec("int4")), 2),
    "sign": (lambda: streamed(2, codec("sign")), 2),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_ranks_are_where_a_float64_simulation_has_them(found: list[Any], name: str) -> None:
    simulate, fragments = EXPECTED[name]
    ranks = simulate()
    for rank in range(WORLD):
        close(found[rank][name]["unsettled"], ranks.weights[rank])
    if ranks.flight:  # what is on its way is taken in before all synchronize
        ranks.hear(*ranks.flight)
    mean = ranks.synchronize(EDGES[fragments])
    for rank in range(WORLD):
        close(found[rank][name]["synchronized"], mean)


def close(found: list[float], expected: Tensor) -> None:
    away = np.abs(np.asarray(found) - expected.numpy())
    # float32 may fall on the other side of a border between two codes.
    assert np.mean(away > 3e-6) <= 0.005
    assert away.max() < 0.1


def test_after_settling_all_ranks_have_the_same_bits(found: list[Any]) -> None:
    for name in found[0]:
        for rank in found[1:]:
            assert rank[name]["synchronized"] == found[0][name]["synchronized"], name
            assert rank[name]["anchor"] == found[0][name]["anchor"], name
        assert found[0][name]["did"] == [True, False], name


def test_between_exchanges_ranks_differ(found: list[Any]) -> None:
    for name in ("exact", "coarse", "stream"):
        assert found[0][name]["unsettled"] != found[1][name]["unsettled"]


def test_what_travels_is_what_was_predicted(found: list[Any]) -> None:
    for name in EXPECTED:
        for rank in found:
            assert rank[name]["sent"] == pytest.approx(rank[name]["predicted"], rel=0.02), name


def test_auto_finds_a_number_of_fragments_and_exchanges(found: list[Any]) -> None:
    assert {rank["auto"]["exchanges"] for rank in found} == {STEPS - TIMED_STEPS}


def test_signs_travel_where_four_bits_would_take_many_fragments(tmp_path: Path) -> None:
    one, other = on_ranks(formats, tmp_path)
    assert one == other
    fast, slow, counted, named = one
    assert fast == ["int4", 1, "int4", 1]
    assert slow == ["sign", MOST, "sign", MOST]
    assert counted == ["int4", 2, "int4", 2]
    assert named == ["int4", MOST, "int4", MOST]


@given(sizes=st.lists(st.integers(1, 900), min_size=1, max_size=6), fragments=st.integers(1, MOST))
def test_fragments_hold_every_weight_once(sizes: list[int], fragments: int) -> None:
    weights = [torch.zeros(n) for n in sizes]
    drift = Drift(weights, fragments)
    assert [drift.edges[0][0], drift.edges[-1][1]] == [0, sum(sizes)]
    assert all(a[1] == b[0] for a, b in zip(drift.edges, drift.edges[1:], strict=False))
    for weight in weights:
        weight.normal_()
    there = torch.cat(weights)
    for k, (start, end) in enumerate(drift.edges):
        message = drift.message(k, EXACT)
        assert len(message) == drift.message_bytes(k, EXACT)
        assert len(message) % 16 == drift.message_bytes(k, COARSE) % 16 == 0
        body = message[HEADER : HEADER + 4 * (end - start)]
        assert torch.equal(body.view(torch.float32), there[start:end])
    drift.move(-there)
    assert all(bool((w == 0).all()) for w in weights)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("name", ["none", "bf16", "int8", "int4"])
def test_neither_chunks_nor_compiled_loops_change_a_bit(
    name: str, outer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(chunk: int) -> tuple[list[Tensor], Tensor]:
        """What the second of three ranks holds after each fragment has travelled, and the last."""
        monkeypatch.setattr(local_sgd, "NUMBERS", chunk)
        torch.manual_seed(0)
        sizes = (700, 0, 600, 1, 12, 5000)
        ranks = [Drift([torch.zeros(n) for n in sizes], 2) for _ in range(3)]
        for tokens, rank in zip((1.0, 2.0, 5.0), ranks, strict=True):
            rank.count_step(tokens)
            for weight in rank.parameters:
                weight.normal_()
        second = ranks[1]
        second.rank, communication, by = 1, codec(name), torch.rand(sum(sizes))

        def half_way(common: Tensor, start: int) -> Tensor:
            return common * by[start : start + len(common)]

        for fragment in range(2):
            rows = torch.stack([rank.message(fragment, communication) for rank in ranks])
            assert not second.apply_messages(
                rows, fragment, communication, half_way if outer else None
            )
        return [second.anchor, *second.parameters], rows

    found = {(size, True): moved(size) for size in (1 << 20, 256, 512, 1024)}
    monkeypatch.setattr(compiled, "drift", lambda: LoadedLibrary(None, "there is no compiler"))
    found |= {(size, False): moved(size) for size in (1 << 20, 512)}
    first, _ = found[512, False]
    for weights, _ in found.values():
        assert all(torch.equal(a, b) for a, b in zip(first, weights, strict=True))
    for size in (1 << 20, 512):
        assert torch.equal(found[size, True][1], found[size, False][1])


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_told(
    wrong: float, loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not loops:
        monkeypatch.setattr(compiled, "drift", lambda: LoadedLibrary(None, "there is no compiler"))
    drift = Drift([torch.zeros(1000)])
    drift.parameters[0][777] = wrong
    message = drift.message(0, codec("int4"))
    with pytest.raises(DriftError, match="weights of rank 0 are not finite"):
        drift.apply_messages(message[None], 0, codec("int4"))


@given(st.floats(1e3, 1e10), st.floats(1e3, 1e10), st.floats(1e-3, 10))
def test_a_fragment_takes_two_thirds_of_a_step_at_most(
    whole: float, rate: float, seconds: float
) -> None:
    count = needed(int(whole), rate, seconds)
    assert 1 <= count <= MOST
    if count < MOST:
        assert int(whole) / count / rate <= 0.67 * seconds * 1.01 or 0.67 * rate * seconds < 1
    if count > 1:
        assert int(whole) / (count - 1) / rate > 0.67 * seconds * 0.99


@given(st.floats(1e-6, 10), st.floats(1e-4, 10), st.integers(1, 10**10))
def test_a_core_has_little_to_do_for_a_fragment(own: float, seconds: float, numbers: int) -> None:
    count = needed(0, 1e9, seconds, own, numbers)
    assert 1 <= count <= MOST
    if count > 1:  # with fewer it would have more than a twentieth of a step
        assert own / (count - 1) > 0.05 * seconds * 0.99
        assert numbers / (count - 1) > local_sgd.NUMBERS * 0.99
    elif numbers > local_sgd.NUMBERS:
        assert own <= 0.05 * seconds * 1.01


def test_shares_are_of_trained_tokens_and_equal_without_any() -> None:
    assert rank_answers([[30, 0], [10, 0]])[0] == [0.75, 0.25]
    assert rank_answers([[0, 0], [0, 0]])[0] == [0.5, 0.5]


def test_one_rank_alone_keeps_its_weights() -> None:
    weight = torch.randn(600)
    before = weight.clone()
    for part in (LocalSteps([weight], 1, codec=COARSE), Stream([weight], COARSE)):
        assert [part.after_step(stop=i == 1) for i in range(3)] == [False] * 3
        assert [part.stop, part.synchronize(), part.exchanges] == [True, False, 0]
    assert torch.equal(weight, before)


def test_state_comes_back_and_another_outer_step_is_refused() -> None:
    one = LocalSteps([torch.randn(50)], 3, "nesterov")
    assert one.velocity is not None
    one.velocity.normal_()
    for _ in range(4):
        one.after_step()
    one.synchronize()
    two = LocalSteps([torch.zeros(50)], 3, "nesterov")
    two.load_state_dict(one.state_dict())
    assert two.steps == 4
    assert torch.equal(two.state_dict()["velocity"], one.velocity)
    with pytest.raises(ValueError, match="another outer step"):
        LocalSteps([torch.zeros(50)], 3).load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="other weights"):
        LocalSteps([torch.zeros(49)], 3, "nesterov").load_state_dict(one.state_dict())
    three = Stream([torch.zeros(900)], COARSE)
    three.load_state_dict({"steps": 5, "exchanges": 5, "fragments": 3})
    assert (three.fragments, len(three.drift.edges)) == (3, 3)


@pytest.mark.parametrize("made", [LocalSteps, Stream])
def test_the_weights_at_a_resume_are_what_all_have_in_common(made: Any) -> None:
    weights = [torch.zeros(100, 30)]
    part = made(weights)
    part.after_step(7.0)
    weights[0].fill_(2.0)  # from a checkpoint
    part.load_state_dict(part.state_dict())
    assert torch.equal(part.drift.anchor, torch.full((3000,), 2.0))
    assert not any(part.drift.tokens)


@pytest.mark.waits
def test_weights_that_are_no_numbers_are_named_on_every_rank_and_taken_over_by_none(
    tmp_path: Path,
) -> None:
    one, other = on_ranks(no_numbers, tmp_path)
    for here, there in zip(one, other, strict=True):
        assert here.startswith("the weights of rank 1 are not finite")
        assert here.endswith("finite True")
        assert there.endswith("finite False")
        assert here.rsplit(";", 1)[0] == there.rsplit(";", 1)[0]


@pytest.mark.waits
def test_running_sums_become_their_mean_and_constants_stay(tmp_path: Path) -> None:
    for rank in on_ranks(running_sums, tmp_path):
        assert rank["started"] == [0.0, 0.0, 0.0, 0.0]  # those of rank 0
        assert rank["constant"] == [0.0, 0.0]
        assert rank["mean"] == pytest.approx([0.475] * 3)  # 0.1 x 9.5, and rank 0's zero


@pytest.mark.waits
def test_a_rank_that_never_answers_is_named_within_the_limit(tmp_path: Path) -> None:
    said = on_ranks(a_rank_is_silent, tmp_path)[0]
    assert said.startswith("bringing weights together failed on rank 0 (")
    assert "rank 1 (" in said
    assert "did not answer" in said
    assert said.endswith("whole True")
