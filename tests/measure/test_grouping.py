"""Which variants are alive together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.measure.ablation import Design
from hasten.measure.experiment import GROUP, SHARE, grouping_words, may_join, variant_fits


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 10_000))
def test_variants_that_start_never_take_more_than_there_is(peaks: list[int], memory: int) -> None:
    names = [str(number) for number in range(len(peaks))]
    known = dict(zip(names, peaks, strict=True))
    alive: list[str] = []
    for name in names:
        if may_join(alive, known, name, memory, Design()):
            alive.append(name)
    assert alive[0] == "0"  # somebody always starts
    assert len(alive) == 1 or sum(known[n] for n in alive) <= SHARE * memory


def test_an_variant_never_seen_is_taken_for_the_largest() -> None:
    peaks = {"a": 100, "b": 300}
    assert variant_fits(["a", "b"], peaks, "c", int(700 / SHARE) + 1)
    assert not variant_fits(["a", "b"], peaks, "c", int(700 / SHARE) - 1)
    assert variant_fits(["a"], {}, "b", 0)  # nothing is known yet


def test_groups_have_the_baseline_and_so_many_more() -> None:
    design = Design(grouping="groups")
    for count in range(1, 6):
        alive = [str(n) for n in range(count)]
        assert may_join(alive, {"0": 1}, "x", 1000, design) == (count <= GROUP)
    assert may_join(["0"], {"0": 10}, "x", 1, design)  # two at least, as was asked for
    assert not may_join(["0", "1"], {"0": 10}, "x", 1, design)


def test_together_means_together() -> None:
    assert may_join(["0", "1"], {"0": 10}, "x", 1, Design(grouping="together"))


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([], "all 0 variants alive together"),
        ([["a", "b"], ["a", "b"]], "all 2 variants alive together"),
        ([["a", "b"], ["a", "c"]], "groups that share the baseline: a, b; a, c"),
    ],
)
def test_the_report_says_who_was_alive_together(members: list[list[str]], text: str) -> None:
    assert grouping_words([{"event": "cohort", "members": m} for m in members]) == text
