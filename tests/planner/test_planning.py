"""The plan as a whole: all that can be trained, the best of it, and lines that a recipe reads."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten.planner
from hasten.core.context import JobContext, ModelFacts
from hasten.core.slot import Slot
from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig
from hasten.machine.environment import World
from hasten.machine.host import hardware
from hasten.models.architecture import Architecture
from hasten.parts.distributed.pipeline.schedules import StageSeconds, why_impossible
from hasten.planner.cluster import Cluster
from hasten.planner.inputs import count_of
from hasten.planner.layout import SCHEDULES, Layouts, PlannedJob, PlannedLayout
from hasten.planner.planning import (
    LayoutSpace,
    enumerate_layouts,
    evaluate_layouts,
    layers_per_stage,
    pipeline_seconds,
    plan,
    recipe_lines,
    resimulated,
)
from hasten.planner.predict import Span, candidate, predict
from hasten.planner.text import spending
from hasten.recipe.build import requested_plan
from hasten.recipe.price import Price
from hasten.recipe.schema import Recipe
from planner.usual import JOB, MODEL, PLAIN, SPARSE, TWO, played

STAGED = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def test_it_is_reached_as_hasten_planner_plan_with_a_cloud_config() -> None:
    found = hasten.planner.plan(MODEL, CloudConfig(2, 8, "dgx_h100"), JOB, calibration=PLAIN)
    same = plan(MODEL, TWO, JOB, calibration=PLAIN)
    assert found.best == same.best
    assert found.cluster == TWO


def config(family: str) -> dict[str, Any]:
    """The fields of a small model of that family."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8}
    sizes |= {"vocab_size": 1024, "intermediate_size": 1024}
    named: dict[str, Any] = {"model_type": family, **sizes, "num_key_value_heads": 4}
    if "moe" in family or family in ("mixtral", "deepseek_v3"):
        named |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    if family == "deepseek_v3":
        named |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64}
        named |= {"q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
        named |= {"v_head_dim": 32, "num_key_value_heads": 8}
    return named


FAMILIES = ("llama", "qwen2", "qwen3_moe", "deepseek_v3", "mixtral", "gpt2", "gemma2")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("bf16_products")
def test_every_layout_is_one_that_the_trainer_runs(family: str) -> None:
    """Its lines are a recipe's, and no technique in them refuses the model or the ranks."""
    model = Architecture.from_config(config(family))
    cluster = Cluster.preset("single_node", 1, 8, "h100")
    facts = ModelFacts(
        architecture=family,
        layers=model.layers,
        heads=model.heads,
        key_value_heads=model.kv_heads,
        experts=model.moe.count if model.moe else 0,
    )
    job = PlannedJob(512, 64)
    rows = enumerate_layouts(model, cluster, job, LayoutSpace(lossy=True))
    prediction = predict(model, cluster, job, rows, PLAIN)
    shown = set()
    for row in range(len(rows)):
        one = candidate(prediction, rows, row, cluster, job)
        if one.layout.micro_batch == 1:
            shown.add(recipe_lines(one))
    axes = {line.split(": ", 2)[1] for line in "\n".join(shown).splitlines() if "layout" in line}
    assert {"{fsdp2", "{ddp"} <= axes
    assert ("{pipeline" in axes) == (family not in ("mixtral", "gpt2", "gemma2"))
    assert ("{shard" in axes) == (family in ("llama", "qwen2", "deepseek_v3"))
    for lines in shown:  # of float8 the processor's own reasons are left out
        recipe = Recipe(model="m", dataset="d", max_steps=1, **yaml.safe_load(lines))
        assert recipe.nproc == 8
        context = JobContext(hardware(), world=World(size=8), model=facts)
        techniques = requested_plan(recipe)
        assert sum(t.slot is Slot.LAYOUT for t in techniques) == 1
        works = [t for t in techniques if t.name() != "float8"]
        assert [r for t in works for r in t.unsupported_reasons(context)] == [], lines


def lines_of(**layout: Any) -> Any:
    one = plan(MODEL, TWO, JOB, calibration=PLAIN, top=1).best[0]
    return yaml.safe_load(recipe_lines(replace(one, layout=PlannedLayout(**layout))))


def test_the_lines_say_what_the_layout_says() -> None:
    assert lines_of(dp=16, zero=2, micro_batch=8, recompute="selective") == {
        "layout": {"fsdp2": {"reshard": False}},
        "plan": [
            {"gradient_accumulation": {"micro_batch_size": 8}},
            {"activation_checkpointing": {"budget": 0.5}},
            "bf16_master_weights",
        ],
    }
    assert lines_of(dp=16, zero=3)["layout"] == {"fsdp2": {"reshard": True}}
    assert lines_of(dp=16, zero=0)["layout"] == {"ddp": {}}
    assert lines_of(dp=8, tp=2, zero=0)["layout"] == {"dp": 8, "tp": 2}
    assert lines_of(dp=8, tp=2, zero=3)["layout"] == {"shard": 8, "tp": 2, "reshard": True}
    assert lines_of(dp=16, ep=4, zero=0)["layout"] == {"dp": 16, "ep": 4}
    piped = lines_of(dp=4, pp=4, zero=0, micro_batch=2, recompute="full")
    sizes = {"stages": 4, "micro_batch_size": 2, "schedule": "1f1b", "checkpoint": "always"}
    assert piped == {"layout": {"pipeline": sizes}, "plan": ["bf16_master_weights"]}
    packed = lines_of(dp=16, zero=0, precision="fp8", compression="topk1")["plan"]
    assert packed[1:] == ["float8", {"topk": {"ratio": 0.01}}]


def test_a_span_scales() -> None:
    assert Span(2, 1, 4).times(0.5) == Span(1, 0.5, 2)


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
    rows = enumerate_layouts(model, cluster, PlannedJob(sequence, batch))
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
        assert one.pp == 1 or not why_impossible(one.schedule, one.pp, count)


def test_no_layout_stands_twice_in_the_space() -> None:
    rows = enumerate_layouts(SPARSE, TWO, JOB)
    table = np.stack([getattr(rows, name) for name in vars(rows)], axis=1)
    assert len(np.unique(table, axis=0)) == len(rows)


def test_the_best_is_the_quickest_that_fits() -> None:
    """Against a plain loop over the whole space, one layout at a time, closed forms only."""
    cluster = Cluster.preset("single_node", 1, 2, "a100-80gb")
    job = PlannedJob(2048, 16)
    small = replace(MODEL, layers=4, vocabulary=32000)
    rows = enumerate_layouts(small, cluster, job)
    one_by_one = []
    for row in range(len(rows)):
        told = predict(small, cluster, job, Layouts.of([rows.at(row)]), PLAIN)
        if told.fits[0]:
            one_by_one.append(float(told.step_seconds[0]))
    whole = evaluate_layouts(small, cluster, job, calibration=PLAIN)
    quickest = whole.candidate(int(whole.order()[0])).step_seconds.middle
    assert quickest == pytest.approx(min(one_by_one), rel=1e-3)


def test_what_does_not_fit_is_never_among_the_best() -> None:
    found = plan(MODEL, Cluster.preset("single_node", 1, 8, "a100-40gb"), JOB, calibration=PLAIN)
    for one in found.best:
        assert one.fits
        assert one.memory_bytes.high <= one.cluster.device.memory_bytes


def test_parts_add_up_and_intervals_enclose() -> None:
    for one in plan(SPARSE, TWO, JOB, calibration=PLAIN).best:
        assert sum(one.step_parts.values()) == pytest.approx(one.step_seconds.middle)
        assert sum(one.memory_parts.values()) == pytest.approx(one.memory_bytes.middle)
        for span in (one.step_seconds, one.tokens_per_second_per_device, one.memory_bytes):
            assert span.low < span.middle < span.high
        share = one.mfu_span
        assert share.low < share.middle == one.mfu < share.high
        rate = JOB.global_batch * JOB.sequence / one.step_seconds.middle / one.devices
        assert one.tokens_per_second_per_device.middle == pytest.approx(rate)


def test_a_simulated_even_pipeline_is_its_closed_form() -> None:
    even = replace(MODEL, vocabulary=16)  # a head that weighs nothing
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        layout = PlannedLayout(dp=4, pp=4, schedule=schedule)
        rows = Layouts.of([layout])
        found = predict(even, TWO, JOB, rows, PLAIN)
        closed = candidate(found, rows, 0, TWO, JOB)
        played = resimulated(even, closed)
        assert played.simulated
        assert played.step_seconds.middle == pytest.approx(closed.step_seconds.middle, rel=0.02)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_long_step_follows_from_two_short_ones(schedule: str) -> None:
    length = np.random.default_rng(1).uniform(0.8, 1.2, (3, 4))
    seconds = StageSeconds(*(tuple(map(float, row)) for row in length))
    layout = PlannedLayout(dp=1, pp=4, schedule=schedule)
    whole = max(event.end for event in played(schedule, 4, 96, seconds))
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


def test_lossy_formats_come_only_if_asked_for() -> None:
    rows = enumerate_layouts(MODEL, TWO, JOB)
    assert set(rows.precision) == {0}
    assert set(rows.compression) == {0}
    more = enumerate_layouts(MODEL, TWO, JOB, LayoutSpace(lossy=True))
    assert len(set(more.precision)) == 2
    assert len(set(more.compression)) > 1
    old = Cluster.preset("single_node", 1, 8, "v100")
    assert {enumerate_layouts(MODEL, old, JOB).at(0).precision} == {"fp16"}


def test_one_device_has_nothing_to_shard() -> None:
    rows = enumerate_layouts(MODEL, Cluster.preset("single_node", 1, 1, "h100"), JOB)
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


def test_a_format_that_the_device_lacks_is_one_sentence() -> None:
    old = Cluster.preset("single_node", 1, 8, "a100")
    some = plan(MODEL, old, JOB, space=LayoutSpace(precisions=("bf16", "fp8")), calibration=PLAIN)
    assert {one.layout.precision for one in some.best} == {"bf16"}
    with pytest.raises(InputError, match="a100-80gb has no unit for products in fp8"):
        plan(MODEL, old, JOB, space=LayoutSpace(precisions=("fp8",)), calibration=PLAIN)


@given(st.floats(1e-3, 9e5), st.sampled_from("kmbtKMBT"))
def test_counts_are_read_as_people_write_them(value: float, letter: str) -> None:
    times = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[letter.lower()]
    assert count_of(f"{value:.6f}{letter}", "x") == pytest.approx(value * times, rel=1e-2)


@pytest.mark.parametrize("text", ["", "1 Q", "-3B", "B", "nan", "0", "1e400", "9" * 40])
def test_what_is_no_count_is_one_sentence(text: str) -> None:
    with pytest.raises(InputError, match="give a number such as"):
        count_of(text, "--tokens")
