"""Collectives: closed forms against a ring that is played step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.models.architecture import Architecture
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Layouts, PlannedLayout
from hasten.planner.numbers import Constants, MachineNumbers, machine, numbers
from hasten.planner.seconds import communication, gather_seconds, links

C = replace(Constants(), intra=1.0, inter=1.0, latency=1.0)
CLUSTER = Cluster.preset("dgx_h100", 4)
HERE = machine(CLUSTER)


def played_gather(size: float, ranks: int, rate: float, hop: float) -> float:
    """Every rank passes one piece on in each of n-1 rounds; a round ends when all have."""
    return sum(size / ranks / rate + hop for _ in range(ranks - 1))


@given(st.floats(1, 1e12), st.integers(1, 64), st.floats(1e6, 1e12), st.floats(0, 1e-3))
def test_a_gather_takes_what_a_ring_played_out_takes(
    size: float, ranks: int, rate: float, hop: float
) -> None:
    found = float(gather_seconds(size, ranks, rate, hop))
    assert found == pytest.approx(played_gather(size, ranks, rate, hop), rel=1e-9)


@pytest.mark.parametrize(
    ("stride", "ranks", "rate"),
    [
        (1, 8, CLUSTER.intra),  # within a node
        (8, 4, CLUSTER.inter),  # one rank of each node: its own card
        (4, 8, 2 * CLUSTER.inter),  # two of each node share two cards
        (1, 32, 8 * CLUSTER.inter),  # all of each node: all cards
    ],
)
def test_a_group_has_the_cards_of_its_ranks(stride: int, ranks: int, rate: float) -> None:
    found = float(links(np.array([stride]), np.array([ranks]), HERE, C).rate[0])
    assert found == pytest.approx(min(rate, CLUSTER.intra))


def sent(
    layout: PlannedLayout, name: str = "deepseek-llm-7b", here: MachineNumbers = HERE
) -> object:
    model = numbers(Architecture.from_config(name), 2048)
    return communication(model, here, Layouts.of([layout]), C, False)


def test_data_parallelism_moves_what_its_zero_stage_says() -> None:
    parameters = Architecture.from_config("deepseek-llm-7b").parameters()
    free = replace(HERE, intra_latency=0.0, inter_latency=0.0)
    bytes_sent = {0: 8, 1: 6, 2: 4, 3: 6}  # per parameter; sums over micro-batches in fp32
    for zero, count in bytes_sent.items():
        found = sent(PlannedLayout(dp=8, zero=zero), here=free)
        expected = count * parameters * 7 / 8 / CLUSTER.intra
        assert found.dp[0] == pytest.approx(expected, rel=1e-6)  # type: ignore[attr-defined]


def test_over_gloo_a_reduce_scatter_is_an_all_reduce_and_nothing_hides_it() -> None:
    parameters = Architecture.from_config("deepseek-llm-7b").parameters()
    free = replace(HERE, intra_latency=0.0, inter_latency=0.0)
    bytes_sent = {0: 8, 2: 6, 3: 8}  # per parameter: a gather or two, and 4 in place of 2
    for zero, count in bytes_sent.items():
        found = sent(PlannedLayout(dp=8, zero=zero), here=replace(free, gloo=1.0))
        expected = count * parameters * 7 / 8 / CLUSTER.intra
        assert found.dp[0] == pytest.approx(expected, rel=1e-6)  # type: ignore[attr-defined]
        whole = found.dp_last[0] == 1.0  # type: ignore[attr-defined]
        assert whole == (zero >= 2)


def test_compressed_gradients_travel_in_their_own_bits() -> None:
    parameters = Architecture.from_config("deepseek-llm-7b").parameters()
    free = replace(HERE, intra_latency=0.0, inter_latency=0.0)
    for word, bits in (("int8", 8), ("int4", 4)):  # there and back, whatever the sums are kept in
        found = sent(PlannedLayout(dp=8, zero=0, compression=word), here=free)
        expected = 2 * bits / 8 * parameters * 7 / 8 / CLUSTER.intra
        assert found.dp[0] == pytest.approx(expected, rel=1e-6)  # type: ignore[attr-defined]


def test_a_lora_has_no_gradients_worth_compressing() -> None:
    model = numbers(Architecture.from_config("deepseek-llm-7b"), 2048)
    for zero in (0, 3):
        rows = Layouts.of([PlannedLayout(dp=8, zero=zero, compression=c) for c in ("none", "int8")])
        found = communication(model, HERE, rows, C, True)
        assert found.dp[0] == found.dp[1]
        assert list(found.encode) == [0, 0]


def test_nobody_to_talk_to_is_silence() -> None:
    found = sent(PlannedLayout())
    for kind in ("tp", "cp", "ep", "pp", "dp", "encode"):
        assert getattr(found, kind)[0] == 0


def test_full_recomputation_repeats_tensor_parallelism() -> None:
    plain, again = (sent(PlannedLayout(tp=8, recompute=r)) for r in ("none", "full"))
    assert again.tp[0] == pytest.approx(1.5 * plain.tp[0])  # type: ignore[attr-defined]


def test_a_token_goes_to_a_node_once_however_many_experts_it_has_there() -> None:
    free = replace(HERE, intra=1e30, intra_latency=0.0, inter_latency=0.0)
    found = sent(PlannedLayout(dp=32, ep=32), "deepseek-v2-lite", free)
    model = Architecture.from_config("deepseek-v2-lite")
    # Of 4 nodes, six experts drawn at random meet so many; a quarter of those is one's own.
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 4, size=(200_000, 6))
    met = np.mean([(drawn == node).any(axis=1) for node in range(1, 4)]) * 3
    expected = 4 * 26 * 2048 * met * 2 * model.hidden / CLUSTER.inter
    assert found.ep[0] == pytest.approx(expected, rel=0.01)  # type: ignore[attr-defined]


def test_node_limited_routing_reaches_fewer_nodes() -> None:
    """DeepSeek-V3: eight experts, of four of the groups, a group to each of eight nodes."""
    eight = machine(Cluster.preset("dgx_h100", 8))
    free = replace(eight, intra=1e30, intra_latency=0.0, inter_latency=0.0)
    found = sent(PlannedLayout(dp=64, ep=64), "deepseek-v3", free)
    rng = np.random.default_rng(0)
    nodes = rng.permuted(np.tile(np.arange(8), (100_000, 1)), axis=1)[:, :4]
    drawn = np.take_along_axis(nodes, rng.integers(0, 4, size=(100_000, 8)), axis=1)
    met = np.mean([(drawn == node).any(axis=1) for node in range(1, 8)]) * 7
    expected = 4 * 58 * 2048 * met * 2 * 7168 / CLUSTER.inter
    assert found.ep[0] == pytest.approx(expected, rel=0.01)  # type: ignore[attr-defined]


def test_in_fp32_weights_gradients_and_activations_are_twice_as_long() -> None:
    free = replace(HERE, intra_latency=0.0, inter_latency=0.0)
    for layout, name, times in (
        (PlannedLayout(dp=8, zero=3), "dp", 2),
        (PlannedLayout(dp=8, zero=0), "dp", 1),  # the sums of gradients are in fp32 anyway
        (PlannedLayout(tp=8), "tp", 2),
        (PlannedLayout(pp=4), "pp", 2),
    ):
        half, whole = (sent(replace(layout, precision=p), here=free) for p in ("bf16", "fp32"))
        assert getattr(whole, name)[0] == pytest.approx(times * getattr(half, name)[0])


def test_the_last_bucket_is_all_of_a_small_model_and_little_of_a_large_one() -> None:
    small, large = (
        sent(PlannedLayout(dp=8, zero=0), n) for n in ("deepseek-llm-tiny", "deepseek-llm-7b")
    )
    assert small.dp_last[0] == 1  # type: ignore[attr-defined]
    assert large.dp_last[0] < 0.01  # type: ignore[attr-defined]
    layers = Architecture.from_config("deepseek-llm-7b").layers
    sharded = sent(PlannedLayout(dp=8, zero=3))
    assert sharded.dp_last[0] == pytest.approx(1 / layers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_experts_within_a_node_dont_use_its_cards(tp: int) -> None:
    """Nor where tensor parallelism shares them: experts aren't cut, so its ranks have some each."""
    layout = PlannedLayout(dp=16 // tp, tp=tp, ep=8)
    near = sent(layout, "deepseek-v2-lite")
    slower = replace(HERE, inter=HERE.inter / 100)
    assert sent(layout, "deepseek-v2-lite", slower).ep[0] == near.ep[0]  # type: ignore[attr-defined]


def test_a_rank_gathers_the_layers_of_its_own_stage_one_by_one() -> None:
    free = replace(HERE, intra=1e30, inter=1e30)
    whole, quarter = (sent(PlannedLayout(dp=8, pp=pp, zero=3), here=free) for pp in (1, 4))
    assert quarter.dp[0] == pytest.approx(whole.dp[0] / 4)  # type: ignore[attr-defined]


def test_compression_shrinks_gradients_and_costs_passes() -> None:
    plain, small = (sent(PlannedLayout(dp=32, compression=c)) for c in ("none", "int8"))
    assert small.dp[0] < plain.dp[0]  # type: ignore[attr-defined]
    assert small.encode[0] > 0  # type: ignore[attr-defined]
