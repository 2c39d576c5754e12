"""What the ranks' clocks say together of a trial, and how a failed exchange is told once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.comm.rank_check import RankReports, of_an_exchange
from hasten.parts.comm.route_choice import StepPace, over_ranks, share_saved

seconds = st.floats(0.001, 100.0)
GLOO = "[third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer"


@given(st.lists(st.builds(StepPace, seconds, seconds, seconds), min_size=1, max_size=6))
def test_a_step_is_the_slowest_ranks_and_its_traffic_that_of_who_waited_least(
    paces: list[StepPace],
) -> None:
    found = over_ranks(paces)
    assert found is not None
    assert found.step == max(p.step for p in paces)
    assert found.exposed == min(p.exposed for p in paces)
    assert (found.exposed, found.window) in {(p.exposed, p.window) for p in paces}


def test_one_rank_without_figures_leaves_none() -> None:
    assert over_ranks([StepPace(1.0, 0.5, 0.1), None]) is None


@given(st.lists(seconds, min_size=1, max_size=8), st.integers(1, 4), st.floats(0.1, 2.0))
def test_a_candidate_saves_what_it_saves_on_the_slowest_rank(
    plain: list[float], ranks: int, factor: float
) -> None:
    slow = {False: plain, True: [factor * s for s in plain]}
    quick = {kind: [s / 2 for s in steps] for kind, steps in slow.items()}
    trials = [quick] * (ranks - 1) + [slow]
    assert share_saved(trials) == pytest.approx(1 - factor, abs=1e-9)


def test_a_rank_that_is_slower_with_the_candidate_is_not_overlooked() -> None:
    first, other = {False: [1.0] * 6, True: [0.5] * 6}, {False: [1.0] * 6, True: [1.2] * 6}
    assert share_saved([first, other]) == pytest.approx(-0.2)


def test_a_trial_of_skipped_steps_alone_saves_nothing() -> None:
    assert share_saved([{False: [], True: []}] * 2) == 0.0
    assert share_saved([{False: [1.0], True: []}] * 2) == 0.0


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_failure_is_told_once_and_what_follows_from_it_alike(alone: None) -> None:
    calls = RankReports("tests", [0], 1.0)
    first = calls.failed("a sum", ArithmeticError("no such codes"))
    assert str(first) == "a sum failed on rank 0: no such codes"
    assert calls.failed("another sum", RuntimeError(GLOO)) is first


def test_who_never_met_is_missing(alone: None) -> None:
    found = RankReports("tests", [0, 3], 0.1).failed("a sum", RuntimeError(GLOO))
    assert found.missing == (3,)
    assert "rank 3 (never met) did not answer within 0.1 s" in str(found)


def test_only_errors_between_ranks_call_the_roll() -> None:
    assert of_an_exchange(RuntimeError(GLOO))
    assert of_an_exchange(dist.DistBackendError("NCCL error"))
    assert not of_an_exchange(RuntimeError("shapes don't fit"))
    assert not of_an_exchange(KeyError("weight"))
