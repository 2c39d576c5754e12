"""The plan as a whole: nothing is lost, the best is the best, and every no has its reason."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten.search
from hasten.cluster.config import CloudConfig
from hasten.core.facts import Facts, ModelFacts, World, hardware
from hasten.core.slot import Slot
from hasten.errors import InputError
from hasten.parts.layout.pipeline_schedules import VIRTUAL
from hasten.recipe.build import requested_plan
from hasten.recipe.schema import Recipe
from hasten.search.advice import what_if
from hasten.search.architecture import Architecture, Experts
from hasten.search.candidate import (
    Candidate,
    Span,
    beyond_trainer,
    candidate,
    recipe_lines,
    words,
)
from hasten.search.constants import Calibration
from hasten.search.devices import DEVICES
from hasten.search.layout import RECOMPUTE, SCHEDULES, Job, Layout, Layouts
from hasten.search.machines import Cluster
from hasten.search.planning import consider, pareto, plan
from hasten.search.predict import predict
from hasten.search.reasons import (
    dominated,
    impossibilities,
    read_layout,
    refusals,
    rejected,
    why_not,
)
from hasten.search.resimulate import dealt, pipeline_seconds, resimulated
from hasten.search.schedules import SIMULATED, StageSeconds, impossible, orders, simulate
from hasten.search.space import Space, enumerate_layouts
from hasten.search.spending import WATTS, spending

PLAIN = Calibration()  # before any fit: tests don't depend on measurements
MODEL = Architecture("seven", 32, 4096, 32, 8, 128, 14336, 128256)
SPARSE = Architecture(
    "sparse", 16, 2048, 16, 16, 128, 8192, 32000, moe=Experts(16, 2, 1024, dense_layers=1)
)
JOB = Job(4096, 256, tokens=1e9)
TWO = Cluster.preset("dgx_h100", 2)


def test_it_is_reached_as_hasten_search_plan_with_a_cloud_config() -> None:
    found = hasten.search.plan(
        MODEL, CloudConfig(2, 8, "dgx_h100"), JOB, calibration=PLAIN, fewer_nodes=False
    )
    same = plan(MODEL, TWO, JOB, calibration=PLAIN, fewer_nodes=False)
    assert found.best == same.best
    assert found.cluster == TWO


@settings(max_examples=25, deadline=None)
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
    rows = enumerate_layouts(model, cluster, Job(sequence, batch)).layouts
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
        assert one.pp == 1 or not impossible(one.schedule, one.pp, count, one.virtual)


def test_no_layout_stands_twice_in_the_space() -> None:
    rows = enumerate_layouts(SPARSE, TWO, JOB).layouts
    table = np.stack([getattr(rows, name) for name in vars(rows)], axis=1)
    assert len(np.unique(table, axis=0)) == len(rows)


def test_the_best_is_the_quickest_that_fits() -> None:
    """Against a plain loop over the whole space, one layout at a time, closed forms only."""
    cluster = Cluster.preset("single_node", 1, 2, "a100-80gb")
    job = Job(2048, 16)
    small = replace(MODEL, layers=4, vocabulary=32000)
    rows = enumerate_layouts(small, cluster, job).layouts
    one_by_one = []
    for row in range(len(rows)):
        told = predict(small, cluster, job, rows.take([row]), PLAIN)
        if told.fits[0]:
            one_by_one.append(float(told.step_seconds[0]))
    whole = consider(small, cluster, job, calibration=PLAIN)
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
        layout = Layout(dp=4, pp=4, schedule=schedule)
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
    layout = Layout(dp=1, pp=4, schedule=schedule)
    whole = simulate(orders(schedule, 4, 96), seconds).seconds
    assert pipeline_seconds(layout, 96, seconds) == pytest.approx(whole, rel=0.005)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 40), st.floats(0, 8))
def test_layers_are_dealt_so_that_no_other_deal_is_quicker(
    stages: int, more: int, head: float
) -> None:
    layers = stages + more
    counts = dealt(layers, stages, head)
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
    base = Layout(dp=16)

    def said(**changes: object) -> str:
        return " ".join(why_not(found, replace(base, **changes)))  # type: ignore[arg-type]

    assert "the cluster has 16" in said(dp=8)
    assert "isn't a multiple of dp 16" in said(micro_batch=5)
    assert "240 would be" in said(micro_batch=5)
    assert "32 attention heads" in said(dp=1, tp=3, pp=1)
    assert "can't make 48 stages" in said(dp=1, pp=16, virtual=3, schedule="interleaved")
    assert "GB (P90) of 84.8" in said(dp=16, zero=0, micro_batch=16)
    assert "ep 3" in said(ep=3)
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
        plan(odd, three, Job(512, 5), calibration=PLAIN)


def test_a_batch_that_suits_all_nodes_and_not_half_of_them_is_planned() -> None:
    found = plan(MODEL, Cluster.preset("dgx_h100", 6), Job(4096, 3), calibration=PLAIN, top=1)
    assert found.best[0].devices == 48
    assert {each.cluster.nodes for each in found.considered} <= {6, 3}


def test_what_if_keeps_the_space_that_was_asked_for() -> None:
    only = Space(schedules=("gpipe",), zero=(0,))
    found = plan(MODEL, TWO, JOB, space=only, calibration=PLAIN, fewer_nodes=False)
    assert what_if(found, "nodes=1")[1].best[0].layout.zero == 0


def test_lossy_formats_come_only_if_asked_for() -> None:
    rows = enumerate_layouts(MODEL, TWO, JOB).layouts
    assert set(rows.precision) == {0}
    assert set(rows.compression) == {0}
    more = enumerate_layouts(MODEL, TWO, JOB, Space.everything(TWO)).layouts
    assert len(set(more.precision)) == 2
    assert len(set(more.compression)) > 1
    old = Cluster.preset("single_node", 1, 8, "v100")
    assert {enumerate_layouts(MODEL, old, JOB).layouts.at(0).precision} == {"fp16"}


def test_recomputing_part_of_a_layer_is_for_models_with_experts_or_asked_for() -> None:
    light = RECOMPUTE.index("light")
    assert light in enumerate_layouts(SPARSE, TWO, JOB).layouts.recompute
    assert light not in enumerate_layouts(MODEL, TWO, JOB).layouts.recompute
    asked = enumerate_layouts(MODEL, TWO, JOB, Space(recompute=("light",))).layouts
    assert set(asked.recompute) == {light}


def test_ends_that_are_stages_of_their_own_are_predicted_and_not_played() -> None:
    """126 layers on 128 stages, as Llama 3 405B: the first and the last have none."""
    deep = replace(MODEL, layers=14)
    layout = Layout(dp=2, pp=8, schedule="interleaved", virtual=2)
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

    class Price:
        currency, hour = "CNY", 0.6

    cluster = Cluster.preset("single_node", 1, 4, "a100")
    found = plan(MODEL, cluster, Job(2048, 64, "lora"), calibration=PLAIN)
    one = found.best[0]
    rate = one.tokens_per_second_per_device.middle
    job = Job(2048, 64, "lora", tokens=rate * 4 * 1.8 * 3600)
    cost = spending(one, job, Price())
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


def test_a_layout_is_read_back_from_its_words() -> None:
    for one in plan(SPARSE, TWO, JOB, calibration=PLAIN).best:
        plain = words(one.layout).replace("x", " virtual=") if "x" in words(one.layout) else ""
        said = [w for w in (plain or words(one.layout)).split() if "=" in w]
        again = read_layout(said, Layout(schedule=one.layout.schedule))
        names = ("dp", "tp", "pp", "ep", "cp", "micro_batch", "recompute")
        assert [getattr(again, n) for n in names] == [getattr(one.layout, n) for n in names]


def test_a_pipelines_words_are_not_taken_over_where_there_is_none() -> None:
    deep = Layout(dp=4, pp=4, schedule="interleaved", virtual=4)
    assert read_layout(["dp=16,pp=1"], deep) == Layout(dp=16)
    assert read_layout(["schedule=1f1b"], deep) == Layout(dp=4, pp=4)
    assert read_layout(["micro=2"], deep) == replace(deep, micro_batch=2)
    with pytest.raises(InputError, match="4 virtual stages"):
        read_layout(["schedule=gpipe virtual=4"], deep)


def test_what_is_quicker_than_the_best_is_not_called_as_quick() -> None:
    best = plan(MODEL, TWO, JOB, calibration=PLAIN, top=1, fewer_nodes=False).best[0]
    quick, same = (replace(best, step_seconds=best.step_seconds.times(x)) for x in (0.9, 0.9999))
    assert "10.0% quicker" in dominated(quick, best)
    assert "as quick as" in dominated(same, best)


def test_what_the_trainer_cannot_run_is_said() -> None:
    assert "no tp beside pp" in beyond_trainer(Layout(dp=4, tp=2, pp=2))
    assert "dualpipe" in beyond_trainer(Layout(pp=4, schedule="dualpipe"))
    assert "zero beside ep" in beyond_trainer(Layout(dp=4, ep=2, zero=3))
    assert "norms" in beyond_trainer(Layout(dp=4, recompute="light"))
    two, four = (Layout(pp=4, schedule="interleaved", virtual=v) for v in (2, 4))
    assert VIRTUAL["interleaved"] == 2
    assert beyond_trainer(two) == ""
    assert "interleaving of 4 chunks" in beyond_trainer(four)
    assert recipe_lines(Layout(dp=4, cp=2)) == ""
    assert "products in nvfp4" in beyond_trainer(Layout(precision="nvfp4"))
    assert "fp8 beside tp" in beyond_trainer(Layout(tp=2, precision="fp8"))
    assert "some layers beside ep" in beyond_trainer(Layout(dp=2, ep=2, recompute="selective"))
    assert "gradients beside tp" in beyond_trainer(Layout(dp=2, tp=2, compression="int8"))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=4, zero=0),
        Layout(dp=4, zero=3, recompute="full"),
        Layout(dp=4, zero=3, recompute="selective"),
        Layout(dp=4, zero=2, micro_batch=8),
        Layout(dp=2, tp=2, zero=0),
        Layout(dp=2, tp=2, zero=3),
        Layout(dp=4, ep=2, zero=1),
        Layout(dp=2, pp=2, zero=1, micro_batch=2),
        Layout(dp=1, pp=4, schedule="zb1p"),
        Layout(dp=4, zero=0, precision="fp32", compression="int4"),
        Layout(dp=4, zero=3, compression="topk1"),
        Layout(),
    ],
    ids=words,
)
@pytest.mark.usefixtures("bf16_products")
def test_the_lines_for_a_recipe_are_read_by_it_and_need_as_many_ranks(layout: Layout) -> None:
    assert beyond_trainer(layout) == ""
    lines = yaml.safe_load(recipe_lines(layout))
    recipe = Recipe(model="m", dataset="d", max_steps=1, **lines)
    plan = requested_plan(recipe)
    shown = [t for t in plan if t.slot is Slot.LAYOUT]
    known = Facts(
        hardware(),
        world=World(size=layout.devices),
        model=ModelFacts(
            architecture="deepseek_v3" if layout.ep > 1 else "llama",
            layers=8,
            heads=8,
            key_value_heads=8,
            experts=8 if layout.ep > 1 else 0,
        ),
    )
    assert len(shown) == (layout.devices > 1)
    assert (Slot.PRECISION in plan) == (layout.precision != "fp32")
    assert (Slot.WIRE in plan) == (layout.compression != "none")
    assert [reason for t in plan for reason in t.obstacles(known)] == []


def test_a_span_scales() -> None:
    assert Span(2, 1, 4).times(0.5) == Span(1, 0.5, 2)
    assert isinstance(plan(MODEL, TWO, JOB, calibration=PLAIN).best[0], Candidate)
