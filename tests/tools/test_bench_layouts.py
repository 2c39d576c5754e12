"""The layouts benchmark's own arithmetic: whose minutes are left, and what its ratios are of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from layouts import table, variants  # noqa: E402

from hasten.core.step import training  # noqa: E402
from hasten.machine.environment import World  # noqa: E402


def sitting(place: str, seconds: float = 100.0, **rates: list[float]) -> dict[str, Any]:
    rows = {n.replace("_", " "): {"rate": r, "bytes": [2e6] * len(r)} for n, r in rates.items()}
    models = {name: "llama" for name in rows if " " not in name}
    return {"place": place, "seconds": seconds, "found": {"variants": rows, "models": models}}


def test_a_layout_is_set_beside_one_process_and_beside_as_many_within_a_round() -> None:
    done = [
        sitting("2", alone_llama=[100.0, 50.0], apart_llama=[160.0, 80.0], ddp=[120.0, 60.0]),
        sitting("4", alone_llama=[1.0], apart_llama=[1.0], ddp=[1.0]),
    ]
    rounds, models = table.together(done, "2")
    text = "\n".join(table.rows(rounds, models, world=2))
    assert "| ddp | llama | 90 | 0.60 [0.60, 0.60] | 0.75 [0.75, 0.75] | 2.00 | 2 |" in text


def test_sittings_with_other_variants_are_not_mixed() -> None:
    done = [
        sitting("2", alone_llama=[1.0], apart_llama=[1.0], fsdp2=[9.0]),
        sitting("2", alone_llama=[1.0], apart_llama=[1.0], ddp=[2.0]),
        sitting("2", alone_llama=[1.0], apart_llama=[1.0], ddp=[4.0]),
    ]
    rounds, models = table.together(done, "2")
    assert models == {"ddp": "llama"}
    assert rounds["ddp"]["rate"] == [2.0, 4.0]
    assert len(rounds["alone llama"]["rate"]) == 2


@given(st.floats(0.1, 200), st.integers(1, 4))
def test_minutes_are_dealt_evenly_and_each_place_gets_a_sitting(minutes: float, count: int) -> None:
    places = list(table.PLACES)[:count]
    done: list[dict[str, Any]] = []
    for name, seconds in table.due(done, places, minutes).items():
        assert seconds == pytest.approx(max(table.LEAST, 60 * minutes / count))
        done.append({"place": name, "seconds": seconds})
    assert [s["place"] for s in done] == places
    assert table.due(done, places, minutes) == {}


@pytest.mark.parametrize("world", [2, 4])
def test_every_variant_is_one_that_its_ranks_allow(world: int) -> None:
    load = variants.Load("tiny", examples=2, tokens=16)
    for name, variant in variants.variants(world).items():
        assert variant.layout is not None
        known = variants._facts(variant, load, World(size=world), 8)
        assert variant.layout.unsupported_reasons(known) == (), name


@pytest.mark.parametrize("kind", [variants.DENSE, variants.EXPERTS])
def test_a_process_by_itself_has_the_load_that_was_asked_for(kind: str) -> None:
    run = training(variants.session(variants.Variant(kind), variants.Load("tiny", 2, 16), World()))
    assert [next(run).tokens for _ in range(2)] == [32, 32]
