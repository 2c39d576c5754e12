"""Memory: against plain loops over every rank, played schedules, and runs that are known to fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.models.architecture import Architecture, Indexer
from hasten.parts.distributed.pipeline.schedules import stages_per_rank
from hasten.planner.cluster import Cluster
from hasten.planner.layout import PRECISIONS, RECOMPUTE, Layouts, PlannedJob, PlannedLayout
from hasten.planner.memory import in_flight, layer_bytes, memory
from hasten.planner.numbers import Calibration, MemoryConstants, numbers, stage_layers
from hasten.planner.predict import Prediction, predict
from planner.usual import most_kept, played_evenly

V3 = Architecture.from_config("deepseek-v3")
LLAMA = Architecture("405b", 126, 16384, 128, 8, 128, 53248, 128256)
DENSE = Architecture("seven", 32, 4096, 32, 8, 128, 14336, 128256)
PLAIN = Calibration()
H100 = Cluster.preset("fat_tree", 2048, 8, "h100")
# What was published of both runs: arXiv 2412.19437, section 3.3; arXiv 2407.21783, section 3.3.2
# and table 4: gradients and optimizer sharded, weights not, nothing recomputed.
OF_V3 = PlannedLayout(*(128, 1, 16, 64), recompute="light", precision="fp8")
OF_LLAMA = PlannedLayout(*(128, 8, 16, 1, 1, 2, 1, "interleaved"), virtual=8)


def one(
    layout: PlannedLayout, model: Architecture, cluster: Cluster, job: PlannedJob
) -> Prediction:
    return predict(model, cluster, job, Layouts.of([layout]))


def bytes_of(
    layout: PlannedLayout, model: Architecture = DENSE, micro_batches: float = 64
) -> float:
    held = memory(
        numbers(model, 4096), Layouts.of([layout]), micro_batches, MemoryConstants(), False
    )
    return float(held.total[0])


def test_llama_405b_s_own_layout_fits_where_it_ran() -> None:
    found = one(OF_LLAMA, LLAMA, H100, PlannedJob(8192, 2048))
    assert OF_LLAMA.devices == H100.devices == 16384
    assert found.fits[0]
    assert not one(replace(OF_LLAMA, zero=0), LLAMA, H100, PlannedJob(8192, 2048)).fits[0]


def test_a_layer_of_v3_keeps_what_its_report_lists() -> None:
    """By hand, a token: section 3.2.3 and 3.3.3; what attention returns in 12 bits (E5M6)."""
    found = layer_bytes(numbers(V3, 4096), Layouts.of([OF_V3]))
    norms = 2 * 7168 * 2
    ranks = (1536 + 512 + 64) * 2
    attended = 128 * 128 * 1.5
    dispatched, swiglu = 8 * 7168, 9 * 2 * 2048
    expected = norms + ranks + attended + 1.03 * (dispatched + swiglu)
    assert found.expert[0] / 4096 == pytest.approx(expected)
    dense = norms + ranks + attended + 1.03 * 2 * 18432
    assert found.plain[0] / 4096 == pytest.approx(dense)


def test_a_layer_keeps_the_keys_that_an_indexer_chose() -> None:
    """A whole number of 4 bytes for each of 2,048 keys; none in rows where all keys are used."""
    sparse = replace(V3, indexer=Indexer(64, 128, 2048))
    kept = {
        (name, tokens): layer_bytes(numbers(model, tokens), Layouts.of([OF_V3])).expert[0] / tokens
        for name, model in {"dense": V3, "sparse": sparse}.items()
        for tokens in (2048, 4096)
    }
    assert kept["sparse", 4096] - kept["dense", 4096] == pytest.approx(4 * 2048)
    assert kept["sparse", 2048] == kept["dense", 2048]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_plain_layer_keeps_what_its_backward_pass_reads(precision: str) -> None:
    """Two norms, their results, queries, keys, values, what is attended, three sides of the MLP."""
    layout = PlannedLayout(tp=4, precision=precision)
    found = layer_bytes(numbers(DENSE, 4096), Layouts.of([layout])).plain[0] / 4096 * 4
    inputs = 2 * 4096 + 14336  # of products, but what is attended, which attention needs as well
    rest = 2 * 4096 + (32 + 2 * 8) * 128 + 32 * 128 + 2 * 14336
    size = {"bf16": 2.0, "fp8": 1.03}[precision]
    assert found == pytest.approx(size * inputs + 2 * rest)


@given(
    st.sampled_from([DENSE, V3, Architecture.from_config("deepseek-v2-lite")]),
    st.sampled_from(PRECISIONS),
    st.sampled_from([1, 2, 4]),
)
def test_each_word_of_recomputation_keeps_less(
    model: Architecture, precision: str, tp: int
) -> None:
    def kept(word: str) -> np.ndarray:
        layout = PlannedLayout(tp=tp, recompute=word, precision=precision)
        found = layer_bytes(numbers(model, 4096), Layouts.of([layout]))
        return np.array([found.plain[0], found.expert[0]])

    assert (kept("full") <= kept("light")).all()
    assert (kept("light") <= kept("none")).all()
    assert (kept("selective") < kept("none")).any()


def test_eight_bits_save_where_inputs_of_products_are_kept() -> None:
    for word in RECOMPUTE:
        rows = Layouts.of([PlannedLayout(recompute=word, precision=p) for p in ("bf16", "fp8")])
        sixteen, eight = layer_bytes(numbers(DENSE, 4096), rows).plain
        if word in ("none", "light"):
            assert eight < sixteen
        else:
            assert eight == sixteen


def test_light_recomputation_costs_little() -> None:
    rows = Layouts.of([PlannedLayout(dp=8, recompute=word) for word in ("none", "light", "full")])
    cluster = Cluster.preset("dgx_h100", 1)
    none, light, full = predict(DENSE, cluster, PlannedJob(4096, 64), rows, PLAIN).step.recompute
    assert none == 0
    assert 0 < light < full / 3


@pytest.mark.parametrize(
    ("layers", "stages", "virtual", "expected"),
    [
        (126, 16, 8, (7, 8, 7)),  # Llama 3: embedding and head are a layer each
        (70, 12, 1, (5, 6, 5)),  # BLOOM
        (72, 6, 1, (12, 12, 12)),
        (61, 16, 1, (4, 4, 1)),
        (61, 1, 1, (61, 61, 61)),
        (61, 1, 4, (61, 61, 61)),
        (10, 8, 1, (2, 2, 0)),
    ],
)
def test_layers_are_dealt_to_stages(
    layers: int, stages: int, virtual: int, expected: tuple[int, int, int]
) -> None:
    found = stage_layers(float(layers), np.array([float(stages)]), np.array([float(virtual)]))
    assert (found.first[0], found.most[0], found.last[0]) == expected


@given(
    st.sampled_from(["gpipe", "1f1b", "zero_bubble", "interleaved"]),
    st.integers(2, 8),
    st.integers(1, 4),
)
def test_what_is_in_flight_is_what_the_played_schedule_keeps(
    schedule: str, stages: int, groups: int
) -> None:
    virtual, count = stages_per_rank(schedule), groups * stages
    played = played_evenly(schedule, stages, count)
    layout = Layouts.of([PlannedLayout(pp=stages, schedule=schedule, virtual=virtual)])
    for rank in (0, 1, stages - 1):
        counted = in_flight(layout, float(count), rank)[0] * virtual
        assert counted == pytest.approx(most_kept(played, rank))


@given(
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([2, 8]),
    st.sampled_from([1000, 32000, 250_880]),
    st.sampled_from(["none", "full"]),
)
def test_the_fullest_rank_is_that_of_a_loop_over_all(
    stages: int, tp: int, zero: int, dp: int, vocabulary: int, recompute: str
) -> None:
    """1F1B, layers dealt evenly, each rank's bytes added up one by one."""
    model, c, sequence = replace(DENSE, vocabulary=vocabulary), MemoryConstants(), 4096
    layout = PlannedLayout(dp=dp, tp=tp, pp=stages, zero=zero, recompute=recompute)
    one_layer = layer_bytes(numbers(model, sequence), Layouts.of([layout]))
    kept, at_work = float(one_layer.plain[0]), float(one_layer.working[0])
    ends = vocabulary * 4096
    inner = (model.parameters() - 2 * ends) / stages
    most = 0.0
    for rank in range(stages):
        weights = (inner + (ends if rank in (0, stages - 1) else 0)) / tp
        gradients = 2 * weights / dp if zero >= 2 else 4 * weights
        state = 2 * weights + gradients + 12 * weights / (dp if zero else 1)
        working = c.working * at_work - kept
        if rank == stages - 1:
            working += c.logits * sequence * vocabulary / tp
        activations = (stages - rank) * 32 // stages * kept
        most = max(most, state + activations + working + c.context * 1e9)
    assert bytes_of(layout, model) == pytest.approx(most)


def test_in_fp32_there_is_no_second_copy_of_the_weights() -> None:
    held = memory(
        *(numbers(DENSE, 4096), Layouts.of([PlannedLayout(zero=0, precision="fp32")])),
        *(1, MemoryConstants(), False),
    )
    each = DENSE.parameters()
    assert held.weights[0] == pytest.approx(4 * each)
    assert held.gradients[0] == pytest.approx(4 * each)
    assert held.optimizer[0] == pytest.approx(8 * each)


@given(st.integers(0, 3), st.sampled_from([2, 8]), st.sampled_from(RECOMPUTE))
def test_doubt_is_the_larger_the_more_gradients_a_rank_has(zero: int, dp: int, word: str) -> None:
    layouts = Layouts.of([PlannedLayout(dp=dp, zero=z, recompute=word) for z in (0, zero)])
    held = memory(numbers(DENSE, 4096), layouts, 64, MemoryConstants(), False)
    assert (held.doubt > 0.04).all()
    assert (held.doubt < 0.5).all()
    bytes_ = held.doubt * held.total
    assert bytes_[0] >= bytes_[1] * (1 - 1e-9)
