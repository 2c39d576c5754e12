"""The plan as a whole: nothing is lost, the best is the best, and every no has its reason."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten.planner
from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig
from hasten.machine.accelerators import DEVICES
from hasten.models.architecture import Architecture
from hasten.planner.advice import dominated, impossibilities, refusals, rejected, what_if, why_not
from hasten.planner.candidate import WATTS, candidate, spending
from hasten.planner.cluster import Cluster
from hasten.planner.layout import (
    RECOMPUTE,
    SCHEDULES,
    SIMULATED,
    Layouts,
    LayoutSpace,
    PlannedJob,
    PlannedLayout,
    enumerate_layouts,
    why_impossible,
)
from hasten.planner.planning import evaluate_layouts, pareto, plan
from hasten.planner.predict import predict
from hasten.planner.simulate import (
    StageSeconds,
    layers_per_stage,
    orders,
    pipeline_seconds,
    resimulated,
    simulate,
)
from hasten.recipe.price import Price
from planner.usual import JOB, MODEL, PLAIN, SPARSE, TWO


def test_it_is_reached_as_hasten_search_plan_with_a_cloud_config() -> None:
    found = hasten.planner.plan(
        MODEL, CloudConfig(2, 8, "dgx_h100"), JOB, calibration=PLAIN, fewer_nodes=False
    )
    same = plan(MODEL, TWO, JOB, calibration=PLAIN, fewer_nodes=False)
    assert found.best == same.best
    assert found.cluster == TWO


@settings(max_examples=25)
@given(
    nodes=st.integers(1, 5),
    per_node=st.sampled_from([1, 2, 3, 4, 6, 8]),
    batch=st.integers(1, 200),
    sequence=st.sampled_from([512, 4096, 16384]),
    model=st.sampled_from([MODEL, SPARSE]),
)
def test_every_layout_of_the_space_can_be_built(
    nodes: int, per_node: int, batch: int, sequence: int, model: Architecture
) -> None:
    cluster = Cluster.preset("fat_tree", nodes, per_node, "h100")
    rows = enumerate_layouts(model, cluster, PlannedJob(sequence, batch)).layouts
    if not len(rows):
        return
    assert (rows.devices == cluster.devices).all()
    assert (batch % (rows.dp * rows.micro_batch) == 0).all()
    assert (model.heads % rows.tp == 0).all()
    assert (rows.pp * rows.virtual <= model.layers).all()
    assert ((rows.dp * rows.cp * rows.tp) % rows.ep == 0).all()
    for row in np.random.default_rng(0).choice(len(rows), 20):
        one = rows.at(int(row))
        assert one.devices == cluster.devices
        count = batch // (one.dp * one.micro_batch)
        assert one.pp == 1 or not why_impossible(one.schedule, one.pp, count, one.virtual)


def test_no_layout_stands_twice_in_the_space() -> None:
    rows = enumerate_layouts(SPARSE, TWO, JOB).layouts
    table = np.stack([getattr(rows, name) for name in vars(rows)], axis=1)
    assert len(np.unique(table, axis=0)) == len(rows)


def test_the_best_is_the_quickest_that_fits() -> None:
    """Against a plain loop over the whole space, one layout at a time, closed forms only."""
    cluster = Cluster.preset("single_node", 1, 2, "a100-80gb")
    job = PlannedJob(2048, 16)
    small = replace(MODEL, layers=4, vocabulary=32000)
    rows = enumerate_layouts(small, cluster, job).layouts
    one_by_one = []
    for row in range(len(rows)):
        told = predict(small, cluster, job, rows.take([row]), PLAIN)
        if told.fits[0]:
            one_by_one.append(float(told.step_seconds[0]))
    whole = evaluate_layouts(small, cluster, job, calibration=PLAIN)
    quickest = whole.candidate(int(whole.order()[0])).step_seconds.middle
    assert quickest == pytest.approx(min(one_by_one), rel=1e-3)


def test_what_does_not_fit_is_never_among_the_best() -> None:
    found = plan(MODEL, Cluster.preset("single_node", 1, 8, "a100-40gb"), JOB, calibration=PLAIN)
    for one in (*found.best, *found.pareto):
        assert one.fits
        assert one.memory_bytes.high <= one.cluster.device.memory_bytes


def test_parts_add_up_and_intervals_enclose() -> None:
    for one in plan(SPARSE, TWO, JOB, calibration=PLAIN).pareto:
        assert sum(one.step_parts.values()) == pytest.approx(one.step_seconds.middle)
        assert sum(one.memory_parts.values()) == pytest.approx(one.memory_bytes.middle)
        for span in (one.step_seconds, one.tokens_per_second_per_device, one.memory_bytes):
            assert span.low < span.middle < span.high
        share = one.mfu_span
        assert share.low < share.middle == one.mfu < share.high
        rate = JOB.global_batch * JOB.sequence / one.step_seconds.middle / one.devices
        assert one.tokens_per_second_per_device.middle == pytest.approx(rate)


def test_nothing_in_the_front_beats_another_in_everything() -> None:
    front = plan(MODEL, Cluster.preset("ethernet", 4, 8, "h100"), JOB, calibration=PLAIN).pareto
    assert {one.cluster.nodes for one in front} > {4}  # fewer nodes are slower and cheaper
    for one in front:
        for other in front:
            if one is not other:
                assert not (
                    one.step_seconds.middle < other.step_seconds.middle
                    and one.memory_bytes.high < other.memory_bytes.high
                    and one.step_seconds.middle * one.devices
                    < other.step_seconds.middle * other.devices
                )


def test_a_front_of_one_is_that_one() -> None:
    one = plan(MODEL, TWO, JOB, calibration=PLAIN, top=1, fewer_nodes=False).best[0]
    assert pareto([one, one]) == [one]
    assert pareto([]) == []


def test_a_simulated_even_pipeline_is_its_closed_form() -> None:
    even = replace(MODEL, vocabulary=16)  # a head that weighs nothing
    for schedule in ("gpipe", "1f1b", "zb1p", "dualpipe"):
        layout = PlannedLayout(dp=4, pp=4, schedule=schedule)
        rows = Layouts.of([layout])
        found = predict(even, TWO, JOB, rows, PLAIN)
        closed = candidate(found, rows, 0, TWO, JOB)
        played = resimulated(even, closed)
        assert played.simulated
        assert played.step_seconds.middle == pytest.approx(closed.step_seconds.middle, rel=0.02)


@pytest.mark.parametrize("schedule", SIMULATED)
def test_a_long_step_follows_from_two_short_ones(schedule: str) -> None:
    length = np.random.default_rng(1).uniform(0.8, 1.2, (3, 4))
    seconds = StageSeconds(*(tuple(map(float, row)) for row in length))
    layout = PlannedLayout(dp=1, pp=4, schedule=schedule)
    whole = max(event.end for event in simulate(orders(schedule, 4, 96), seconds))
    assert pipeline_seconds(layout, 96, seconds) == pytest.approx(whole, rel=0.005)


@given(st.integers(1, 12), st.integers(0, 40), st.floats(0, 8))
def test_layers_are_dealt_so_that_no_other_deal_is_quicker(
    stages: int, more: int, head: float
) -> None:
    layers = stages + more
    counts = layers_per_stage(layers, stages, head)
    assert sum(counts) == layers
    assert min(counts) >= 1
    slowest = max([*counts[:-1], counts[-1] + head])
    # With the last stage's count fixed, the others can't do better than evenly.
    least = min(
        max(last + head, math.ceil((layers - last) / (stages - 1)) if stages > 1 else 0)
        for last in ([layers] if stages == 1 else range(1, layers - stages + 2))
    )
    assert slowest == pytest.approx(least)


def test_every_no_has_its_numbers() -> None:
    found = plan(MODEL, TWO, JOB, calibration=PLAIN, fewer_nodes=False)
    best = found.best[0].layout
    assert why_not(found, best) == []
    base = PlannedLayout(dp=16)

    def said(**changes: object) -> str:
        return " ".join(why_not(found, replace(base, **changes)))  # type: ignore[arg-type]

    assert "the cluster has 16" in said(dp=8)
    assert "isn't a multiple of dp 16" in said(micro_batch=5)
    assert "240 would be" in said(micro_batch=5)
    assert "32 attention heads" in said(dp=1, tp=3, pp=1)
    assert "can't make 48 stages" in said(dp=1, pp=16, virtual=3, schedule="interleaved")
    assert "GB (P90) of 84.8" in said(dp=16, zero=0, micro_batch=16)
    assert "ep 3" in said(ep=3)
    assert "no unit for products in nvfp4" in said(precision="nvfp4")
    assert "DualPipe" in said(dp=1, pp=16, schedule="dualpipe", micro_batch=16)
    assert "slower than" in said(dp=2, tp=8, zero=1)


def test_each_rejected_deal_is_told_once_with_a_reason() -> None:
    found = plan(SPARSE, TWO, JOB, calibration=PLAIN, fewer_nodes=False)
    said = rejected(found)
    deals = {(r.layout.dp, r.layout.tp, r.layout.pp, r.layout.ep, r.layout.cp) for r in said}
    assert len(deals) == len(said)
    assert all(r.reason for r in said)
    rows = found.considered[0].layouts
    every = {tuple(d) for d in np.stack([rows.dp, rows.tp, rows.pp, rows.ep, rows.cp], 1)}
    assert len(said) + len(found.best) == len(every)
    assert len(rejected(found, 3)) == 3


def test_rules_that_refuse_are_counted() -> None:
    odd = replace(MODEL, heads=6, kv_heads=6, layers=3)
    found = plan(odd, TWO, JOB, calibration=PLAIN, fewer_nodes=False)
    told = " ".join(refusals(found))
    assert "tp doesn't divide" in told
    assert "fewer layers than pipeline stages" in told


def test_what_fits_nowhere_says_what_would() -> None:
    huge = replace(MODEL, layers=80, hidden=8192, heads=64, ffn=28672)
    one = Cluster.preset("single_node", 1, 8, "a100-40gb")
    with pytest.raises(InputError, match=r"needs [\d.]+ GB \(P90\) of 42\.4.*it would fit on") as e:
        plan(huge, one, JOB, calibration=PLAIN)
    assert "as a LoRA" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_batch_that_no_layout_suits_is_one_sentence() -> None:
    three = Cluster.preset("fat_tree", 1, 7, "h100")
    odd = replace(MODEL, heads=4, kv_heads=4, layers=2)
    with pytest.raises(InputError, match="give a multiple of 7"):
        plan(odd, three, PlannedJob(512, 5), calibration=PLAIN)


def test_a_batch_that_suits_all_nodes_and_not_half_of_them_is_planned() -> None:
    found = plan(
        MODEL, Cluster.preset("dgx_h100", 6), PlannedJob(4096, 3), calibration=PLAIN, top=1
    )
    assert found.best[0].devices == 48
    assert {each.cluster.nodes for each in found.considered} <= {6, 3}


def test_what_if_keeps_the_space_that_was_asked_for() -> None:
    only = LayoutSpace(schedules=("gpipe",), zero=(0,))
    found = plan(MODEL, TWO, JOB, space=only, calibration=PLAIN, fewer_nodes=False)
    assert what_if(found, "nodes=1").best[0].layout.zero == 0


def test_lossy_formats_come_only_if_asked_for() -> None:
    rows = enumerate_layouts(MODEL, TWO, JOB).layouts
    assert set(rows.precision) == {0}
    assert set(rows.compression) == {0}
    more = enumerate_layouts(MODEL, TWO, JOB, LayoutSpace.everything(TWO)).layouts
    assert len(set(more.precision)) == 2
    assert len(set(more.compression)) > 1
    old = Cluster.preset("single_node", 1, 8, "v100")
    assert {enumerate_layouts(MODEL, old, JOB).layouts.at(0).precision} == {"fp16"}


def test_a_format_that_the_devices_lack_is_left_out_and_told() -> None:
    some = LayoutSpace(precisions=("bf16", "nvfp4"))
    found = plan(MODEL, TWO, JOB, space=some, calibration=PLAIN, fewer_nodes=False)
    assert {one.layout.precision for one in found.best} == {"bf16"}
    assert "format: the device has no unit for nvfp4" in " ".join(refusals(found))
    with pytest.raises(InputError, match="h100-80gb has no unit for products in nvfp4"):
        plan(MODEL, TWO, JOB, space=LayoutSpace(precisions=("nvfp4",)), calibration=PLAIN)


def test_recomputing_part_of_a_layer_is_for_models_with_experts_or_asked_for() -> None:
    light = RECOMPUTE.index("light")
    assert light in enumerate_layouts(SPARSE, TWO, JOB).layouts.recompute
    assert light not in enumerate_layouts(MODEL, TWO, JOB).layouts.recompute
    asked = enumerate_layouts(MODEL, TWO, JOB, LayoutSpace(recompute=("light",))).layouts
    assert set(asked.recompute) == {light}


def test_ends_that_are_stages_of_their_own_are_predicted_and_not_played() -> None:
    """126 layers on 128 stages, as Llama 3 405B: the first and the last have none."""
    deep = replace(MODEL, layers=14)
    layout = PlannedLayout(dp=2, pp=8, schedule="interleaved", virtual=2)
    assert impossibilities(deep, TWO, JOB, layout) == []
    rows = Layouts.of([layout])
    closed = candidate(predict(deep, TWO, JOB, rows, PLAIN), rows, 0, TWO, JOB)
    assert resimulated(deep, closed) == closed
    assert impossibilities(replace(MODEL, layers=13), TWO, JOB, layout) != []


def test_one_device_has_nothing_to_shard() -> None:
    rows = enumerate_layouts(MODEL, Cluster.preset("single_node", 1, 1, "h100"), JOB).layouts
    assert set(rows.zero) == {0}
    assert set(rows.schedule) == {SCHEDULES.index("1f1b")}


def test_the_articles_price_is_reproduced() -> None:
    """4 GPUs at 0.6 CNY an hour for 1.8 hours are 4.32 CNY."""

    cluster = Cluster.preset("single_node", 1, 4, "a100")
    found = plan(MODEL, cluster, PlannedJob(2048, 64, "lora"), calibration=PLAIN)
    one = found.best[0]
    rate = one.tokens_per_second_per_device.middle
    job = PlannedJob(2048, 64, "lora", tokens=rate * 4 * 1.8 * 3600)
    cost = spending(one, job, Price(currency="CNY", per_device_hour=0.6))
    assert cost.money is not None
    assert cost.money.middle == pytest.approx(4.32)
    assert cost.device_hours.middle == pytest.approx(7.2)
    assert cost.money.low < cost.money.middle < cost.money.high


def test_without_a_price_there_are_hours_and_without_a_power_limit_no_energy() -> None:
    assert set(WATTS) <= set(DEVICES)
    found = plan(MODEL, TWO, JOB, calibration=PLAIN, fewer_nodes=False).best[0]
    cost = spending(found, JOB)
    assert cost.money is None
    assert cost.kwh_at_most == pytest.approx(cost.device_hours.high * 0.7)
    other = replace(found, cluster=replace(TWO, device=replace(TWO.device, name="mine")))
    assert spending(other, JOB).kwh_at_most is None


def test_what_is_quicker_than_the_best_is_not_called_as_quick() -> None:
    best = plan(MODEL, TWO, JOB, calibration=PLAIN, top=1, fewer_nodes=False).best[0]
    quick, same = (replace(best, step_seconds=best.step_seconds.times(x)) for x in (0.9, 0.9999))
    assert "10.0% quicker" in dominated(quick, best)
    assert "as quick as" in dominated(same, best)
