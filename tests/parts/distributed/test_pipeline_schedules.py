"""Orders of passes against the papers' closed forms, and PipeDream against the whole model."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hasten import PipeDream
from hasten.parts.distributed.pipeline.runtime import PipelineSettings, receives_earlier
from hasten.parts.distributed.pipeline.schedules import (
    SCHEDULES,
    SPLIT,
    StageEvent,
    StageSeconds,
    actions,
    bubble_share,
    enough_micro_batches,
    orders,
    rank_of_stage,
    simulate,
    stages_per_rank,
    why_impossible,
)
from planner.usual import idle_seconds, most_kept, played

schedules = st.sampled_from(SCHEDULES)
PLANNED = ("gpipe", "1f1b", "interleaved", "zero_bubble")  # those with a closed form


def timetable(
    schedule: str, ranks: int, micro_batches: int, weights: float = 1.0
) -> list[StageEvent]:
    """The order in a simulator that knows nothing of schedules; it raises if ranks get stuck."""
    each = stages_per_rank(schedule)
    even = StageSeconds.even(ranks * each, 1 / each, 1 / each, weights / each)
    return played(schedule, ranks, micro_batches, even)


@given(schedules, st.integers(1, 4), st.integers(1, 14))
def test_every_rank_does_each_pass_of_its_stages_once_and_nobody_gets_stuck(
    schedule: str, ranks: int, wanted: int
) -> None:
    count = enough_micro_batches(schedule, ranks, wanted)
    assert count >= wanted
    listed = orders(schedule, ranks, count)
    for rank, of_rank in enumerate(listed):
        own = [s for s, home in enumerate(rank_of_stage(schedule, ranks)) if home == rank]
        assert len(set(of_rank)) == len(of_rank)
        forward = {(s, m) for kind, s, m in of_rank if kind == "F"}
        backward = {(s, m) for kind, s, m in of_rank if kind in "BI"}
        weights = {(s, m) for kind, s, m in of_rank if kind in "BW"}
        assert forward == backward == weights == {(s, m) for s in own for m in range(count)}
    assert timetable(schedule, ranks, count)


@pytest.mark.parametrize("schedule", PLANNED)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_the_order_is_as_idle_as_the_closed_form(schedule: str, ranks: int, count: int) -> None:
    lost = idle_seconds(schedule, ranks, 1, 1, 1, stages_per_rank(schedule))
    found = bubble_share(timetable(schedule, ranks, count))
    assert found == pytest.approx(lost / (lost + 3 * count))


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (4, 2), (4, 8)])
def test_1f1b_stores_a_micro_batch_for_each_stage_from_its_own_on_and_gpipe_all(
    ranks: int, count: int
) -> None:
    """At most, on each rank, of those whose backward pass is yet to come (arXiv 2006.09503)."""

    def most_stored(schedule: str) -> list[int]:
        of_ranks = orders(schedule, ranks, count)
        return [max(accumulate({"F": 1, "B": -1}[op[0]] for op in one)) for one in of_ranks]

    assert most_stored("1f1b") == [min(ranks - rank, count) for rank in range(ranks)]
    assert most_stored("gpipe") == [count] * ranks


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 16)])
def test_a_backward_pass_in_two_halves_idles_less_than_1f1b(
    schedule: str, ranks: int, count: int
) -> None:
    one_by_one = bubble_share(timetable("1f1b", ranks, count))
    assert bubble_share(timetable(schedule, ranks, count)) < one_by_one


def test_zero_bubble_reaches_0_068_where_a_greedy_order_reaches_0_086() -> None:
    assert bubble_share(timetable("zero_bubble", 8, 32)) == pytest.approx(0.068, abs=0.0005)


def test_the_slowest_stage_sets_the_pace() -> None:
    """With many micro-batches each more costs as much as the slowest stage takes for one."""
    slow = StageSeconds((1, 1, 1, 1.5), (1, 1, 1, 1.5), (1, 1, 1, 1.5))
    few, many = (max(e.end for e in played("1f1b", 4, M, slow)) for M in (20, 40))
    assert (many - few) / 20 == pytest.approx(4.5)


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    wrong = [[(("B", 0, 0),), (("F", 0, 0),)]]
    with pytest.raises(ValueError, match="for ever"):
        simulate(wrong, StageSeconds.even(1, 1, 1, 1))


@st.composite
def uneven(draw: st.DrawFn) -> tuple[str, int, int, int, StageSeconds]:
    schedule = draw(st.sampled_from(PLANNED))
    P = draw(st.integers(1, 6))
    v = stages_per_rank(schedule)
    M = P * draw(st.integers(1, 4))
    length = st.floats(0.1, 3)
    times = [
        tuple(draw(st.lists(length, min_size=P * v, max_size=P * v)))
        for _ in ("forward", "inputs", "weights")
    ]
    return schedule, P, M, v, StageSeconds(*times)


@given(uneven())
def test_any_timetable_is_sound(case: tuple[str, int, int, int, StageSeconds]) -> None:
    schedule, P, M, v, seconds = case
    table = played(schedule, P, M, seconds)
    done: Counter[tuple[str, int, int]] = Counter()
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * P
    for (rank, start, end), together in itertools.groupby(
        table, key=lambda e: (e.rank, e.start, e.end)
    ):
        assert start >= free[rank] - 1e-9  # one thing at a time
        free[rank] = end
        for kind, stage, micro in ((e.kind, e.stage, e.micro_batch) for e in together):
            done["F" if kind == "F" else "back", stage, micro] += {"F": 2, "B": 2}.get(kind, 1)
            ends[kind, stage, micro] = end
            if kind == "F" and stage:
                assert start >= ends["F", stage - 1, micro] - 1e-9
            if kind in "BI" and stage < P * v - 1:
                after = ends.get(("B", stage + 1, micro), ends.get(("I", stage + 1, micro)))
                assert after is not None
                assert start >= after - 1e-9
    # Each micro-batch goes through each stage once, both ways, weights included.
    assert len(done) == 2 * P * v * M
    assert set(done.values()) == {2}
    assert all(most_kept(table, rank) <= M * v for rank in range(P))


def test_a_v_begins_and_ends_on_the_same_rank() -> None:
    assert rank_of_stage("zbv", 3) == rank_of_stage("dualpipev", 3) == (0, 1, 2, 2, 1, 0)
    assert rank_of_stage("interleaved", 2) == (0, 1, 0, 1)
    assert rank_of_stage("1f1b", 3) == (0, 1, 2)


def test_numbers_that_a_schedule_cannot_run_are_refused_in_one_sentence() -> None:
    assert "take a multiple of 2" in why_impossible("interleaved", 2, 5)
    assert "3 equal rounds, which 13 can't be dealt into" in why_impossible("interleaved", 4, 13)
    assert [why_impossible("zero_bubble", 4, count) for count in (3, 7, 10, 15)] == [""] * 4
    assert "as many micro-batches at least, not 3" in why_impossible("dualpipev", 2, 3)
    assert why_impossible("gpipe", 4, 1) == ""
    with pytest.raises(ValueError, match="2 equal rounds, which 9 can't"):
        orders("zero_bubble", 4, 9)
    with pytest.raises(ValueError, match="no schedule 'chimera': take one of gpipe"):
        stages_per_rank("chimera")


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="take checkpoint='never'"):
        PipelineSettings("zbv", 2, "always")
    with pytest.raises(ValueError, match="one of always, except_last, never"):
        PipelineSettings("1f1b", 2, "sometimes")
    with pytest.raises(ValueError, match="stages is 0"):
        PipelineSettings("1f1b", 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_receives_move_up_and_never_past_each_other(schedule: str) -> None:
    runtime: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    listed = actions(schedule, 2, 8)
    home = rank_of_stage(schedule, 2)
    plain = {r: runtime._add_unshard_reshard(listed[r]) for r in listed}
    sent = runtime._add_send_recv(plain, stage_to_rank=home.__getitem__, num_stages=len(home))
    for of_rank in sent.values():
        moved = receives_earlier(of_rank, 2)
        assert sorted(map(str, moved)) == sorted(map(str, of_rank))
        for kinds in ("RECV", None):
            before, after = (
                [str(a) for a in one if ("RECV" in str(a)) == bool(kinds)]
                for one in (of_rank, moved)
            )
            assert before == after  # receives among themselves, and all else among itself
        places = [(moved.index(a), of_rank.index(a)) for a in of_rank if "RECV" in str(a)]
        assert all(new <= old for new, old in places)
        assert any(new < old for new, old in places)


EVENTS = [
    StageEvent(0, "F", 0, 0, 0.0, 1.0),
    StageEvent(1, "F", 1, 0, 1.0, 2.0),
    StageEvent(1, "B", 1, 0, 2.0, 4.0),
    StageEvent(0, "I", 0, 0, 4.0, 5.0),
    StageEvent(0, "W", 0, 0, 5.0, 6.0),
]


def test_the_bubble_is_the_time_without_a_pass() -> None:
    assert bubble_share(EVENTS) == pytest.approx(1 - 6 / 12)
    later = [dataclasses.replace(e, start=e.start + 7, end=e.end + 7) for e in EVENTS]
    assert bubble_share(later) == pytest.approx(1 - 6 / 12)


def test_without_events_there_is_no_bubble() -> None:
    with pytest.raises(ValueError, match="record a step first"):
        bubble_share([])


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(6, 6), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        found: Tensor = self.layer(x).tanh()
        return found


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Counted() for _ in range(5))).double()


@pytest.mark.parametrize(
    ("checkpoint", "passes"), [("never", 3), ("always", 6), ("except_last", 5)]
)
def test_outputs_and_gradients_are_those_of_the_whole_model(checkpoint: str, passes: int) -> None:
    plain, x = model(), torch.randn(7, 6).double()
    plain(x).square().mean().backward()
    whole = model()
    piped = PipeDream(whole, num_worker=2, chunks=3, checkpoint=checkpoint)
    out = piped(x)
    torch.testing.assert_close(out, plain(x), rtol=1e-12, atol=0)
    out.square().mean().backward()
    for mine, usual in zip(piped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, usual.grad, rtol=1e-12, atol=1e-15)
    counted = whole[0]
    assert isinstance(counted, Counted)
    assert counted.rows[:3] == [3, 3, 1]
    assert len(counted.rows) == passes
    with torch.no_grad():
        assert torch.equal(piped(x), out)
    assert len(counted.rows) == passes + 3
    assert list(piped.state_dict()) == [f"module.{name}" for name in plain.state_dict()]


def test_stages_are_runs_of_layers_of_about_the_same_work() -> None:
    spans = [span for _, span in PipeDream(model(), num_workers=3).stages]
    assert sorted(map(len, spans)) == [1, 2, 2]
    assert [layer for span in spans for layer in span] == [0, 1, 2, 3, 4]
    assert len(PipeDream(model()).stages) == max(torch.accelerator.device_count(), 1)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="this is a Linear"):
        PipeDream(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="are the same setting"):
        PipeDream(model(), 2, num_workers=2)
    with pytest.raises(ValueError, match="checkpoint is 'sometimes'"):
        PipeDream(model(), checkpoint="sometimes")
    with pytest.raises(ValueError, match="chunks is 0"):
        PipeDream(model(), chunks=0)
    with pytest.raises(ValueError, match="can't be cut into 6 stages"):
        PipeDream(model(), num_worker=6)
    pairs = nn.Sequential(nn.LSTM(2, 2))
    with pytest.raises(ValueError, match="returns a tuple"):
        PipeDream(pairs)(torch.ones(3, 2))
