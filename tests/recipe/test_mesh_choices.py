"""Mixtures of layouts: each deals out all ranks, none is one that a single technique has."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.machine.environment import World
from hasten.recipe.build import mixed_layouts
from tiny import job_context, language_job


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_few_or_prime_ranks_can_not_be_mixed(ranks: int) -> None:
    assert mixed_layouts(ranks) == []


def test_four_ranks_are_dealt_out_in_every_way() -> None:
    said = {str(t) for t in mixed_layouts(4)}
    assert said == {
        "hybrid(dp=2, shard=2)",
        "hybrid(dp=2, tp=2)",
        "hybrid(shard=2, tp=2)",
        "hybrid(dp=2, pp=2)",
        "hybrid(dp=4, ep=2)",
    }


@given(st.integers(1, 64))
def test_every_mixture_takes_all_ranks_and_comes_once(ranks: int) -> None:
    found = mixed_layouts(ranks)
    assert len(set(found)) == len(found)
    facts = dataclasses.replace(job_context(language_job()), world=World(size=ranks))
    for layout in found:
        s = layout.settings()
        assert s["dp"] * s["shard"] * s["tp"] * s["pp"] == ranks
        assert not any("ranks and" in o for o in layout.unsupported_reasons(facts))
