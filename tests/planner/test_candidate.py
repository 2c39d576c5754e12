"""A candidate in words and as lines of a recipe: both are read back as the layout they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from hasten.core.context import JobContext, ModelFacts
from hasten.core.slot import Slot
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.machine.host import hardware
from hasten.parts.distributed.pipeline.schedules import VIRTUAL
from hasten.planner.advice import read_layout
from hasten.planner.candidate import Span, beyond_trainer, layout_text, recipe_lines
from hasten.planner.layout import PlannedLayout
from hasten.planner.planning import plan
from hasten.recipe.build import requested_plan
from hasten.recipe.schema import Recipe
from planner.usual import JOB, PLAIN, SPARSE, TWO


def test_a_layout_is_read_back_from_its_words() -> None:
    for one in plan(SPARSE, TWO, JOB, calibration=PLAIN).best:
        plain = (
            layout_text(one.layout).replace("x", " virtual=")
            if "x" in layout_text(one.layout)
            else ""
        )
        said = [w for w in (plain or layout_text(one.layout)).split() if "=" in w]
        again = read_layout(said, PlannedLayout(schedule=one.layout.schedule))
        names = ("dp", "tp", "pp", "ep", "cp", "micro_batch", "recompute")
        assert [getattr(again, n) for n in names] == [getattr(one.layout, n) for n in names]


def test_a_pipelines_words_are_not_taken_over_where_there_is_none() -> None:
    deep = PlannedLayout(dp=4, pp=4, schedule="interleaved", virtual=4)
    assert read_layout(["dp=16,pp=1"], deep) == PlannedLayout(dp=16)
    assert read_layout(["schedule=1f1b"], deep) == PlannedLayout(dp=4, pp=4)
    assert read_layout(["micro=2"], deep) == replace(deep, micro_batch=2)
    with pytest.raises(InputError, match="4 virtual stages"):
        read_layout(["schedule=gpipe virtual=4"], deep)


def test_what_the_trainer_cannot_run_is_said() -> None:
    assert "no tp together with pp" in beyond_trainer(PlannedLayout(dp=4, tp=2, pp=2))
    assert "dualpipe" in beyond_trainer(PlannedLayout(pp=4, schedule="dualpipe"))
    assert "zero together with ep" in beyond_trainer(PlannedLayout(dp=4, ep=2, zero=3))
    assert "norms" in beyond_trainer(PlannedLayout(dp=4, recompute="light"))
    two, four = (PlannedLayout(pp=4, schedule="interleaved", virtual=v) for v in (2, 4))
    assert VIRTUAL["interleaved"] == 2
    assert beyond_trainer(two) == ""
    assert "interleaving of 4 chunks" in beyond_trainer(four)
    assert recipe_lines(PlannedLayout(dp=4, cp=2)) == ""
    assert "products in nvfp4" in beyond_trainer(PlannedLayout(precision="nvfp4"))
    assert "fp8 together with tp" in beyond_trainer(PlannedLayout(tp=2, precision="fp8"))
    assert "some layers together with ep" in beyond_trainer(
        PlannedLayout(dp=2, ep=2, recompute="selective")
    )
    assert "gradients together with tp" in beyond_trainer(
        PlannedLayout(dp=2, tp=2, compression="int8")
    )


@pytest.mark.parametrize(
    "layout",
    [
        PlannedLayout(dp=4, zero=0),
        PlannedLayout(dp=4, zero=3, recompute="full"),
        PlannedLayout(dp=4, zero=3, recompute="selective"),
        PlannedLayout(dp=4, zero=2, micro_batch=8),
        PlannedLayout(dp=2, tp=2, zero=0),
        PlannedLayout(dp=2, tp=2, zero=3),
        PlannedLayout(dp=4, ep=2, zero=1),
        PlannedLayout(dp=2, pp=2, zero=1, micro_batch=2),
        PlannedLayout(dp=1, pp=4, schedule="zb1p"),
        PlannedLayout(dp=4, zero=0, precision="fp32", compression="int4"),
        PlannedLayout(dp=4, zero=3, compression="topk1"),
        PlannedLayout(),
    ],
    ids=layout_text,
)
@pytest.mark.usefixtures("bf16_products")
def test_the_lines_for_a_recipe_are_read_by_it_and_need_as_many_ranks(
    layout: PlannedLayout,
) -> None:
    assert beyond_trainer(layout) == ""
    lines = yaml.safe_load(recipe_lines(layout))
    recipe = Recipe(model="m", dataset="d", max_steps=1, **lines)
    plan = requested_plan(recipe)
    shown = [t for t in plan if t.slot is Slot.LAYOUT]
    known = JobContext(
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
    assert (Slot.COMMUNICATION in plan) == (layout.compression != "none")
    assert [reason for t in plan for reason in t.unsupported_reasons(known)] == []


def test_a_span_scales() -> None:
    assert Span(2, 1, 4).times(0.5) == Span(1, 0.5, 2)
