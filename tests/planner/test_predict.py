"""Predictions: many layouts as one, never faster for worse hardware, sums that add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.machine.accelerators import device
from hasten.models.architecture import Architecture
from hasten.planner import seconds as timed
from hasten.planner.cluster import Cluster
from hasten.planner.layout import (
    PRECISIONS,
    RECOMPUTE,
    SCHEDULES,
    Layouts,
    PlannedJob,
    PlannedLayout,
)
from hasten.planner.memory import LORA_SHARE, in_flight
from hasten.planner.numbers import Calibration, Constants, machine
from hasten.planner.predict import Prediction, predict

DENSE = Architecture.from_config("deepseek-llm-7b")
SPARSE = Architecture.from_config("deepseek-v2-lite")
CLUSTER = Cluster.preset("dgx_h100", 4)
JOB = PlannedJob(4096, 256)
PLAIN = Calibration()  # priors: what holds must hold whatever the constants are fitted to

layouts = st.builds(
    PlannedLayout,
    dp=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 8]),
    cp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    micro_batch=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from([s for s in SCHEDULES if s != "interleaved"]),
    recompute=st.sampled_from(RECOMPUTE),
    precision=st.sampled_from(PRECISIONS),
    compression=st.sampled_from(["none", "int8"]),
    sequence_parallel=st.booleans(),
    flash=st.booleans(),
)


def one(
    layout: PlannedLayout, model: Architecture = DENSE, cluster: Cluster = CLUSTER
) -> Prediction:
    return predict(model, cluster, JOB, Layouts.of([layout]), PLAIN)


@given(st.lists(layouts, min_size=1, max_size=6), st.sampled_from([DENSE, SPARSE]))
def test_many_at_once_are_predicted_as_each_alone(
    many: list[PlannedLayout], model: Architecture
) -> None:
    together = predict(model, CLUSTER, JOB, Layouts.of(many), PLAIN)
    for place, layout in enumerate(many):
        alone = one(layout, model)
        assert together.step_seconds[place] == alone.step_seconds[0]
        assert together.memory_bytes[place] == alone.memory_bytes[0]
        assert together.fits[place] == alone.fits[0]


@given(layouts, st.sampled_from([DENSE, SPARSE]), st.floats(1.01, 10))
@pytest.mark.parametrize("field", ["intra", "inter"])
def test_more_bandwidth_is_never_slower(
    field: str, layout: PlannedLayout, model: Architecture, times: float
) -> None:
    faster = replace(CLUSTER, **{field: getattr(CLUSTER, field) * times})
    before, after = one(layout, model).step_seconds[0], one(layout, model, faster).step_seconds[0]
    assert after <= before * (1 + 1e-12)  # sums of other numbers are rounded otherwise


@given(layouts, st.sampled_from([DENSE, SPARSE]), st.floats(1.01, 10))
@pytest.mark.parametrize("field", ["memory_rate", "peak16", "reached16"])
def test_a_faster_device_is_never_slower(
    field: str, layout: PlannedLayout, model: Architecture, times: float
) -> None:
    chip = replace(CLUSTER.device, **{field: getattr(CLUSTER.device, field) * times})
    faster = replace(CLUSTER, device=chip)
    before, after = one(layout, model).step_seconds[0], one(layout, model, faster).step_seconds[0]
    # Data parallelism hides behind the backward pass: what that gets shorter may come to light.
    assert after <= before * (1 + 1e-12)


@given(layouts, st.sampled_from([DENSE, SPARSE]))
def test_parts_add_up_and_none_is_negative(layout: PlannedLayout, model: Architecture) -> None:
    found = one(layout, model)
    parts = [value[0] for value in vars(found.step).values()]
    assert sum(parts) == pytest.approx(found.step_seconds[0])
    assert min(parts) >= 0
    held = [value[0] for value in vars(found.memory).values()]
    assert sum(held) == pytest.approx(found.memory_bytes[0])
    assert min(held) >= 0
    assert found.step_p10[0] <= found.step_seconds[0] <= found.step_p90[0]
    assert found.tokens_p10[0] <= found.tokens_per_second_per_device[0] <= found.tokens_p90[0]
    assert found.memory_p10[0] <= found.memory_bytes[0] <= found.memory_p90[0]


@given(layouts)
def test_a_layout_survives_the_way_through_columns(layout: PlannedLayout) -> None:
    assert Layouts.of([layout, PlannedLayout()]).at(0) == layout


@given(layouts)
def test_recomputation_takes_time_and_saves_memory(layout: PlannedLayout) -> None:
    none, full = (one(replace(layout, recompute=word)) for word in ("none", "full"))
    assert none.step_seconds[0] < full.step_seconds[0]
    assert none.memory_bytes[0] > full.memory_bytes[0]


def test_latent_attention_keeps_its_low_ranks_where_it_recomputes_selectively() -> None:
    plain = replace(SPARSE, latent=None, head_dim=160)  # as wide, without ranks to go back to
    kept = [
        one(PlannedLayout(dp=8, recompute="selective"), m).memory.activations[0]
        / one(PlannedLayout(dp=8, recompute="none"), m).memory.activations[0]
        for m in (SPARSE, plain)
    ]
    assert kept[0] < kept[1]


@given(layouts)
def test_zero_shards_more_with_each_stage(layout: PlannedLayout) -> None:
    wide = replace(layout, dp=8)
    held = [
        sum(getattr(one(replace(wide, zero=z)).memory, p)[0] for p in ("gradients", "optimizer"))
        for z in range(4)
    ]
    assert held == sorted(held, reverse=True)
    assert held[3] < held[0]


def test_a_longer_micro_batch_is_used_better_but_the_bubble_grows() -> None:
    rows = [PlannedLayout(dp=4, pp=8, micro_batch=m, recompute="full") for m in (1, 2, 4, 8, 16)]
    found = predict(DENSE, CLUSTER, JOB, Layouts.of(rows), PLAIN)
    assert np.all(np.diff(found.step.compute) < 0)
    assert found.step.pp[-1] > found.step.pp[0]


def bubbles(model: Architecture, job: PlannedJob, rows: list[PlannedLayout]) -> np.ndarray:
    """Idle time over work, less what a schedule without a bubble waits for: uneven stages."""
    constants = replace(Constants(), stage_seconds=1e-300, pp_exposed=1e-300, bubble=1.0)
    zero = replace(rows[0], schedule="zb2p", virtual=1)
    found = predict(model, CLUSTER, job, Layouts.of([*rows, zero]), Calibration(constants))
    work = found.step.compute + found.step.attention + found.step.head
    return ((found.step.pp - found.step.pp[-1]) / work)[:-1]


def test_a_bubble_is_that_of_its_closed_form() -> None:
    rows = [PlannedLayout(pp=8, schedule=name) for name in ("1f1b", "gpipe", "zero_bubble")]
    found = bubbles(replace(DENSE, layers=8), PlannedJob(4096, 64), rows)
    expected = np.array([7, 7, 7 / 3]) / 64
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_an_interleaved_bubble_is_smaller_by_the_virtual_stages() -> None:
    rows = [PlannedLayout(pp=4, dp=8), PlannedLayout(pp=4, dp=8, schedule="interleaved", virtual=4)]
    plain, interleaved = bubbles(replace(DENSE, layers=32), JOB, rows)
    assert interleaved == pytest.approx(plain / 4)


def test_micro_batches_in_flight_are_the_schedules() -> None:
    plain = PlannedLayout(pp=4)
    rows = [
        plain,
        replace(plain, schedule="gpipe"),
        replace(plain, schedule="zero_bubble"),
        replace(plain, schedule="interleaved", virtual=2),
        PlannedLayout(),
    ]
    assert list(in_flight(Layouts.of(rows), 16.0)) == [4, 16, 4, 4 * (1 + 3 / 8), 1]
    assert list(in_flight(Layouts.of(rows), 2.0)) == [2, 2, 2, 2, 1]


def test_a_head_width_that_is_no_multiple_of_eight_is_slow_without_flash() -> None:
    aligned = replace(DENSE, heads=64, kv_heads=64, head_dim=208)
    odd = replace(aligned, heads=64, kv_heads=64, head_dim=212)
    layout = PlannedLayout(dp=8, tp=4, flash=False)
    ratio = one(layout, odd).step_seconds[0] / one(layout, aligned).step_seconds[0]
    assert ratio > 1.15


def test_32_bits_reach_no_more_of_their_peak_than_16_do() -> None:
    rows = Layouts.of([PlannedLayout(precision=p) for p in ("bf16", "fp32")])
    chip = device("l4")  # whose best product nobody is known to have measured
    for one, share in ((chip, 1.0), (replace(chip, reached32=0.5 * chip.best32), 0.5)):
        cluster = Cluster(one, 1, 1, one.link, one.link)
        half, whole = timed.rates(machine(cluster), rows, Constants())[0]
        assert whole / half == pytest.approx(share * chip.peak32 / chip.peak16)


def test_an_uneven_pipeline_waits_for_its_fullest_stage() -> None:
    even, uneven = (replace(DENSE, layers=n, vocabulary=1) for n in (32, 33))
    layout = PlannedLayout(pp=4, dp=8)
    grown = one(layout, uneven).step_seconds[0] / one(layout, even).step_seconds[0]
    assert grown > 33 / 32 * 1.02


def test_compression_pays_on_a_slow_network_and_not_on_a_fast_link() -> None:
    rows = Layouts.of(
        [PlannedLayout(dp=8, zero=0), PlannedLayout(dp=8, zero=0, compression="int4")]
    )
    slow = replace(CLUSTER, per_node=1, nodes=8, inter=1e8)
    fast = replace(CLUSTER, per_node=8, nodes=1)
    job = PlannedJob(4096, 8)
    busy = PlannedJob(4096, 512)
    on_slow = predict(DENSE, slow, job, rows, PLAIN).step_seconds
    on_fast = predict(DENSE, fast, busy, rows, PLAIN).step_seconds
    assert on_slow[1] < 0.6 * on_slow[0]
    assert on_fast[1] > 0.97 * on_fast[0]


def test_gradients_are_encoded_as_often_as_they_are_exchanged() -> None:
    """ZeRO 2 and 3 exchange those of every micro-batch, the others those of a step."""
    free = replace(CLUSTER, intra=1e30, inter=1e30, intra_latency=0.0, inter_latency=0.0)
    rows = [PlannedLayout(dp=8, zero=z, micro_batch=2, compression="int8") for z in range(4)]
    encoded = predict(DENSE, free, JOB, Layouts.of(rows), PLAIN).step.dp
    assert encoded[0] > 0
    np.testing.assert_allclose(encoded / encoded[0], [1, 1, 16, 16], rtol=1e-9)


@pytest.mark.parametrize("changes", [{"schedule": "zero_bubble"}, {"schedule": "interleaved"}])
def test_without_stages_the_schedule_makes_no_difference(changes: dict[str, str]) -> None:
    chunks = 4 if changes["schedule"] == "interleaved" else 1
    plain = PlannedLayout(dp=8, ep=8)
    other = replace(plain, virtual=chunks, **changes)  # type: ignore[arg-type]
    model = replace(SPARSE, layers=30)  # four chunks don't go into it
    found = predict(model, CLUSTER, JOB, Layouts.of([plain, other]), PLAIN)
    assert found.step_seconds[0] == found.step_seconds[1]
    assert found.memory_bytes[0] == found.memory_bytes[1]


def test_a_lora_has_neither_gradients_nor_moments_of_what_is_frozen() -> None:
    rows = Layouts.of([PlannedLayout(dp=8, zero=0)])
    silent = Calibration(replace(Constants(), loss_bytes=1e-300))
    full, lora = (
        predict(DENSE, CLUSTER, PlannedJob(2048, 64, task), rows, silent).step
        for task in ("full", "lora")
    )
    assert lora.head[0] == pytest.approx(full.head[0] * 2 / 3)
    assert lora.optimizer[0] == pytest.approx(full.optimizer[0] * LORA_SHARE)


def test_lora_takes_less_memory_and_less_time() -> None:
    rows = Layouts.of([PlannedLayout(dp=8, zero=3)])
    full, lora = (
        predict(DENSE, CLUSTER, PlannedJob(2048, 64, task), rows, PLAIN)
        for task in ("full", "lora")
    )
    assert lora.step_seconds[0] < full.step_seconds[0]
    assert lora.memory_bytes[0] < full.memory_bytes[0]


def test_a_layout_fits_where_its_p90_lies_within_the_devices_memory() -> None:
    for layout in (PlannedLayout(dp=1, zero=0), PlannedLayout(dp=2, tp=16, recompute="full")):
        found = one(layout)
        assert found.fits[0] == (found.memory_p90[0] <= CLUSTER.device.memory_bytes)
    assert found.fits[0]


def test_an_unknown_stack_has_the_wider_interval() -> None:
    known = Calibration(stacks={"mine": 1.1})
    rows = Layouts.of([PlannedLayout(dp=32)])
    mine, other = (predict(DENSE, CLUSTER, JOB, rows, known, stack=s) for s in ("mine", "other"))
    assert mine.step_seconds[0] == pytest.approx(1.1 * other.step_seconds[0])
    assert np.log(mine.step_p90[0] / mine.step_p10[0]) < np.log(
        other.step_p90[0] / other.step_p10[0]
    )


@pytest.mark.parametrize("wrong", [{"schedule": "zigzag"}, {"recompute": "some"}])
def test_a_layouts_unknown_word_is_refused_in_a_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        PlannedLayout(**wrong)


def test_a_job_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="global_batch"):
        PlannedJob(4096, 0)
    for tokens in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="job: tokens is"):
            PlannedJob(4096, 8, tokens=tokens)
