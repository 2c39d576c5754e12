"""Spaces and plans: what may be chosen, what is equal, what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Knob
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.recipe.build import mixed_layouts
from hasten.recipe.shorthands import catalogue
from hasten.tune.space import NONE, Dimension, Space, plan_space, values_of
from tiny import able, job_context, language_job
from tune.simulated import of_values

FACTS = able(job_context(language_job()))
NESTED = Space(
    (
        Dimension("way", ("none", "graph")),
        Dimension("bucket", (64, 128, 256), ordered=True, needs=("way", "graph")),
        Dimension("threads", (1, 2, 4), ordered=True),
    ),
    (0, 0, 0),
)


def test_a_value_that_does_not_matter_makes_no_other_point() -> None:
    assert NESTED.canonical((0, 2, 1)) == (0, 0, 1)
    assert NESTED.settings((0, 2, 1)) == {"way": "none", "threads": 2}
    assert len(NESTED.points()) == (1 + 3) * 3 < NESTED.size


@given(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2)))
def test_settings_name_their_point(raw: tuple[int, int, int]) -> None:
    point = NESTED.canonical(raw)
    assert NESTED.point(NESTED.settings(point)) == point
    assert NESTED.canonical(point) == point


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.lists(st.integers(), min_size=1, max_size=4, unique=True),
        min_size=1,
        max_size=4,
    )
)
def test_a_plain_space_has_every_combination_once(knobs: dict[str, list[int]]) -> None:
    space = of_values(knobs)
    points = space.points()
    assert len(points) == len(set(points)) == space.size
    assert points[0] == space.start


def test_neighbours_differ_in_one_decision() -> None:
    near = [NESTED.settings(p) for p in NESTED.neighbours((1, 1, 0))]
    assert {"way": "graph", "bucket": 64, "threads": 1} in near
    assert {"way": "graph", "bucket": 128, "threads": 4} in near
    assert {"way": "graph", "bucket": 64, "threads": 2} not in near
    assert {"way": "none", "threads": 1} in near


@pytest.mark.parametrize("seed", range(5))
def test_the_summit_of_a_space_too_large_to_look_at_is_found_from_any_sample(seed: int) -> None:
    space = of_values({f"knob {n}": list(range(9)) for n in range(9)})
    best = tuple((3 * n + 1) % 9 for n in range(9))

    def worth(point: tuple[int, ...]) -> float:
        return -float(sum(a != b for a, b in zip(point, best, strict=True)))

    assert best not in space.points(seed)
    assert space.summit(worth, seed) == best


def test_refused_points_are_not_offered() -> None:
    def refuse(point: tuple[int, ...]) -> str | None:
        return "no" if point[2] == 2 else None

    space = dataclasses.replace(NESTED, refuse=refuse)
    assert all(p[2] < 2 for p in space.points())
    assert all(p[2] < 2 for p in space.neighbours((0, 0, 1)))


def test_settings_that_the_space_has_not_are_refused_with_a_sentence() -> None:
    with pytest.raises(InputError, match="did you mean 'threads'"):
        NESTED.point({"thread": 1})
    with pytest.raises(InputError, match="can't be 3"):
        NESTED.point({"threads": 3})
    with pytest.raises(InputError, match="nothing to choose"):
        Space((), ())


def test_ranges_become_a_few_values_and_keep_the_own_one() -> None:
    assert values_of(Knob(low=1, high=512), 8, (1, 16)) == (1, 2, 4, 8, 16)
    assert len(values_of(Knob(low=1, high=2**20), 24)) == 7
    assert values_of(Knob(choices=(True, False)), False) == (False, True)
    assert values_of(Knob(low=256, high=65536), 0, (1, 0)) == (0,)
    assert values_of(Knob(low=0.01, high=0.16, log=True), 0.02)[:2] == (0.01, 0.02)


def test_every_point_of_a_plan_space_is_a_plan_without_obstacles() -> None:
    found = plan_space(
        catalogue(), Plan(), FACTS, only=("precision", "activation_checkpointing", "layers")
    )
    points = found.space.points()
    assert len(points) > 10
    for point in points:
        plan = found.plan(point)
        assert not [o for t in plan for o in t.unsupported_reasons(FACTS)]
        assert all(t.fidelity is not Fidelity.LOSSY for t in plan)


def test_other_mathematics_takes_part_only_on_request() -> None:
    exact, all_ = (plan_space(catalogue(), Plan(), FACTS, lossy=lossy) for lossy in (False, True))
    assert set(exact.kinds) < set(all_.kinds)
    lossy = [n for n, t in all_.kinds.items() if t.fidelity is Fidelity.LOSSY]
    assert lossy
    assert not set(lossy) & set(exact.kinds)


def test_the_search_starts_from_the_recipe_and_keeps_what_is_not_tuned() -> None:
    known = {kind.name(): kind for kind in catalogue()}
    base = Plan([known["weight_average"](), known["autocast"]()])
    found = plan_space(catalogue(), base, FACTS)
    assert found.plan(found.space.start) == base
    assert found.space.settings(found.space.start)[Slot.PRECISION.name] == "autocast"
    other = found.space.point({Slot.PRECISION.name: NONE})
    assert [t.name() for t in found.plan(other)] == ["weight_average"]


def test_the_start_is_expected_to_gain_nothing_over_itself() -> None:
    found = plan_space(catalogue(), Plan(), FACTS)
    assert found.gain(found.space.start) == 0


def test_an_unknown_name_in_only_is_refused() -> None:
    with pytest.raises(InputError, match="neither a technique nor a slot"):
        plan_space(catalogue(), Plan(), FACTS, only=("fused",))
    with pytest.raises(InputError, match="did you mean 'precision'"):
        plan_space(catalogue(), Plan(), FACTS, only=("precison",))


def test_a_technique_that_did_not_act_is_left_out_and_its_slot_is_empty() -> None:
    found = plan_space(
        catalogue(), Plan(), FACTS, only=("precision", "activation_checkpointing", "layers")
    )
    point = found.space.point(
        {"PRECISION": "autocast", "ACTIVATION_CHECKPOINTING": "activation_checkpointing"}
    )
    nearer, lost = found.without(point, ["activation_checkpointing", "never_heard_of"])
    assert lost == ["activation_checkpointing"]
    assert [t.name() for t in found.plan(nearer)] == ["autocast"]
    assert found.without(point, []) == (point, [])


def test_what_the_recipe_has_itself_stays_though_it_did_not_act() -> None:
    known = {kind.name(): kind for kind in catalogue()}
    base = Plan([known["autocast"](), known["weight_average"]()])
    found = plan_space(catalogue(), base, FACTS, only=("precision", "activation_checkpointing"))
    point = found.space.point({"ACTIVATION_CHECKPOINTING": "activation_checkpointing"})
    nearer, lost = found.without(point, ["autocast", "weight_average", "activation_checkpointing"])
    assert lost == ["activation_checkpointing"]
    assert set(found.plan(nearer)) == set(base)


def test_without_what_others_need_nothing_is_taken_away() -> None:
    found = plan_space(catalogue(), Plan(), FACTS, only=("precision", "activation_checkpointing"))
    point = found.space.point(
        {"PRECISION": "autocast", "ACTIVATION_CHECKPOINTING": "activation_checkpointing"}
    )

    def needs_autocast(p: tuple[int, ...]) -> str | None:
        return None if found.space.settings(p)["PRECISION"] == "autocast" else "needs autocast"

    strict = dataclasses.replace(
        found, space=dataclasses.replace(found.space, refuse=needs_autocast)
    )
    assert strict.without(point, ["autocast"]) == (point, [])


def test_on_ranks_layouts_and_mixtures_of_them_are_choices() -> None:
    ranks = dataclasses.replace(FACTS, world=World(size=4))
    more = mixed_layouts(4)
    found = plan_space(catalogue(), Plan(), ranks, only=("layout", "communication"), more=more)
    (layouts,) = [d for d in found.space.dimensions if d.name == "LAYOUT"]
    assert {"none", "ddp", "fsdp2", "hybrid(dp=2, shard=2)"} <= set(layouts.values)
    assert any(d.name == "COMMUNICATION" for d in found.space.dimensions)
    point = found.space.point({"LAYOUT": "hybrid(dp=2, shard=2)"})
    knobs = [n for n in found.space.settings(point) if n.startswith("hybrid(dp=2, shard=2).")]
    assert "hybrid(dp=2, shard=2).reshard" in knobs
    (layout,) = found.plan(point)
    assert (layout.name(), layout.settings()["dp"], layout.settings()["shard"]) == ("hybrid", 2, 2)
    for p in found.space.points():
        assert not [o for t in found.plan(p) for o in t.unsupported_reasons(ranks)]


def test_of_one_rank_neither_layout_nor_wire_is_a_choice() -> None:
    found = plan_space(catalogue(), Plan(), FACTS, more=mixed_layouts(1))
    assert not {"LAYOUT", "COMMUNICATION"} & {d.name for d in found.space.dimensions}


def test_of_equal_forecasts_a_knob_where_its_author_has_set_it_comes_first() -> None:
    found = plan_space(catalogue(), Plan(), FACTS, only=("gradient_accumulation",))
    gains = {
        found.space.settings(p)["gradient_accumulation.micro_batch_size"]: found.gain(p)
        for p in found.space.points()
        if found.space.settings(p)["BATCH"] == "gradient_accumulation"
        and found.space.settings(p).get("gradient_accumulation.micro_batch_tokens", 0) == 0
    }
    own = found.kinds["gradient_accumulation"].settings()["micro_batch_size"]
    assert max(gains, key=lambda size: gains[size]) == own
    assert found.gain(found.space.start) == 0
