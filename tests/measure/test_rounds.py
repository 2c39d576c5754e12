"""What a turn is worth, turns in slices, and which variants are alive together."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.machine import processes
from hasten.machine.processes import Instant, LoadMeter
from hasten.measure import schedule
from hasten.measure.ablation import Design
from hasten.measure.experiment import GROUP, SHARE, grouping_words, may_join
from hasten.measure.record import Event
from hasten.measure.rounds import rates
from hasten.measure.schedule import Turn, VariantProcess, run_round
from hasten.measure.workers import WorkerError

speeds = st.floats(1.0, 1e6)


def turn(found: Sequence[float], tokens: Sequence[int] | None = None) -> Event:
    work = tokens or [100] * len(found)
    steps = [
        {"tokens": count, "tokens_per_second": rate}
        for count, rate in zip(work, found, strict=True)
    ]
    return {"event": "turn", "steps": steps}


@given(st.lists(st.tuples(speeds, speeds), min_size=1, max_size=9))
def test_between_two_variants_it_is_the_median_of_the_ratios_of_like_steps(
    pairs: list[tuple[float, float]],
) -> None:
    found = rates({"a": turn([a for a, _ in pairs]), "b": turn([b for _, b in pairs])})
    expected = math.exp(statistics.median(math.log(b / a) for a, b in pairs))
    assert found["b"] / found["a"] == pytest.approx(expected, rel=1e-9)


def test_a_step_that_was_disturbed_in_one_variant_changes_nothing_between_any_two() -> None:
    base = [100.0, 900.0, 250.0]
    variants = {"base": base, "twice": [200.0, 1800.0, 500.0], "same": [100.0, 900.0, 1.0]}
    found = rates({name: turn(values) for name, values in variants.items()})
    assert found["twice"] / found["base"] == pytest.approx(2.0)
    assert found["same"] / found["base"] == pytest.approx(1.0)


def test_an_variant_that_took_other_tokens_has_the_median_of_its_own_steps() -> None:
    base, other = [100.0, 900.0, 250.0], [700.0, 10.0, 20.0]
    found = rates({"base": turn(base), "packed": turn(other, [300, 0, 0])})
    assert found["packed"] == 20.0
    assert found["base"] == pytest.approx(250.0)


def test_alone_in_its_round_an_variant_is_worth_the_median_of_its_steps() -> None:
    assert rates({"base": turn([10.0, 30.0, 20.0])})["base"] == pytest.approx(20.0)
    assert rates({"base": turn([0.0, 0.0])})["base"] == 0.0


def test_unlike_steps_do_not_add_to_the_noise_between_two_copies() -> None:
    """Steps as unlike as 1 to 4, each with 5 % noise of its own: three of them in a round."""
    draw = random.Random(3)
    paired, unpaired = [], []
    for _ in range(400):
        levels = [draw.choice([1000.0, 2000.0, 4000.0]) * draw.uniform(0.9, 1.1) for _ in range(3)]
        one, two = ([level * draw.gauss(1.0, 0.05) for level in levels] for _ in range(2))
        found = rates({"a": turn(one), "b": turn(two)})
        paired.append(found["b"] / found["a"])
        unpaired.append(statistics.median(two) / statistics.median(one))
    assert statistics.stdev(paired) < 0.85 * statistics.stdev(unpaired)


@given(st.lists(st.tuples(speeds, speeds), min_size=1, max_size=9), st.floats(0.1, 10))
def test_a_turn_of_its_own_length_is_compared_by_that_length(
    pairs: list[tuple[float, float]], factor: float
) -> None:
    base = [rate for rate, _ in pairs]
    seconds = factor * math.fsum(100 / rate for rate in base)
    apart = turn([rate for _, rate in pairs]) | {"seconds": seconds}
    found = rates({"base": turn(base), "apart": apart, "again": turn(base)})
    assert found["apart"] / found["base"] == pytest.approx(1 / factor, rel=1e-9)
    assert found["again"] == pytest.approx(found["base"])


PACES = {"fast": 0.1, "slow": 0.4, "middling": 0.2}


class Pretended:
    """A worker whose steps take ``pace`` seconds of a simulated clock."""

    can_slice = True

    def __init__(self, pace: float, slices: list[float], dies_after: float = 1e9) -> None:
        self.pace, self.slices, self.dies_after = pace, slices, dies_after
        self.worked = self.ahead = 0.0

    def ready(self, timeout: float) -> dict[str, Any]:
        return {}

    def request(self, op: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        return self.steps(arguments["count"])

    def steps(self, count: int) -> dict[str, Any]:
        return {"steps": [{"tokens": 1, "step_seconds": self.pace}] * count}

    def submit(self, op: str, **arguments: Any) -> None:
        self.ahead = arguments["count"] * self.pace

    def run_for(self, seconds: float) -> dict[str, Any] | None:
        self.slices.append(self.pace)
        self.worked += min(seconds, self.ahead)
        self.ahead -= seconds
        if self.worked > self.dies_after:
            raise WorkerError("it died")
        return self.steps(10) if self.ahead <= 1e-9 else None

    def close(self, kill: bool = False) -> None: ...


def round_of(workers: dict[str, Pretended]) -> dict[str, Turn | WorkerError]:
    """A round of ten steps of each."""
    variants = {name: VariantProcess(worker) for name, worker in workers.items()}
    for variant in variants.values():
        variant.begin(2)
    return dict(run_round(variants, 10, random.Random(0), LoadMeter(2)))


def test_slower_workers_have_longer_slices_and_all_end_together() -> None:
    slices: list[float] = []
    workers = {name: Pretended(pace, slices) for name, pace in PACES.items()}
    found = round_of(workers)
    assert all(isinstance(turn, Turn) and len(turn.steps) == 10 for turn in found.values())
    assert {name: w.worked for name, w in workers.items()} == pytest.approx(
        {"fast": 1.0, "slow": 4.0, "middling": 2.0}
    )
    assert Counter(slices) == dict.fromkeys(PACES.values(), 4)
    assert slices[:3] == slices[3:6][::-1]  # who was last is first: a drift favours nobody


def test_one_that_fails_leaves_the_others_their_turn() -> None:
    workers = {"a": Pretended(0.1, []), "b": Pretended(0.1, [], dies_after=0.3)}
    found = round_of(workers)
    assert isinstance(found["a"], Turn)
    assert str(found["b"]) == "it died"
    assert workers["a"].worked == pytest.approx(1.0)


def test_a_worker_that_works_on_and_on_in_its_slices_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LEAST_TIMEOUT", 0.2)
    worker = Pretended(1e-3, [])
    variant = VariantProcess(worker, clock=lambda: worker.worked)
    variant.begin(2)
    worker.pace = 1.0  # a thousand times slower now
    variant.begin_slices(10)
    with pytest.raises(WorkerError, match="no answer within 0 s: it hangs"):
        variant.go_on(0.3)


def test_background_load_is_put_down_to_those_in_whose_slices_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others use one of two cores in every slice of b, and none in those of a."""

    def clock() -> Iterator[Instant]:
        wall = busy = ours = 0.0
        while True:
            yield Instant(wall, busy, ours)
            wall, busy, ours = wall + 0.1, busy + 0.1, ours + 0.1
            yield Instant(wall, busy, ours)
            wall, busy, ours = wall + 0.1, busy + 0.2, ours + 0.1

    instants = clock()
    monkeypatch.setattr(processes, "read_clocks", lambda tree: next(instants))
    meter = LoadMeter(cores=2)
    for name in "ab" * 4:
        meter.lap(name)
    assert meter.share("a") == pytest.approx(0.0)
    assert meter.share("b") == pytest.approx(0.5)
    assert meter.share("never") == 0.0


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 10_000))
def test_variants_that_start_never_take_more_than_there_is(peaks: list[int], memory: int) -> None:
    names = [str(number) for number in range(len(peaks))]
    known = dict(zip(names, peaks, strict=True))
    alive: list[str] = []
    for name in names:
        if may_join(known, memory, Design(), alive, name):
            alive.append(name)
    assert alive[0] == "0"  # somebody always starts
    assert len(alive) == 1 or sum(known[n] for n in alive) <= SHARE * memory


def test_an_variant_never_seen_is_taken_for_the_largest() -> None:
    peaks = {"a": 100, "b": 300}
    assert may_join(peaks, int(700 / SHARE) + 1, Design(), ["a", "b"], "c")
    assert not may_join(peaks, int(700 / SHARE) - 1, Design(), ["a", "b"], "c")
    assert may_join({}, 0, Design(), ["a"], "b")  # nothing is known yet


def test_groups_have_the_baseline_and_so_many_more() -> None:
    design = Design(grouping="groups")
    for count in range(1, 6):
        alive = [str(n) for n in range(count)]
        assert may_join({"0": 1}, 1000, design, alive, "x") == (count <= GROUP)
    assert may_join({"0": 10}, 1, design, ["0"], "x")  # two at least, as was asked for
    assert not may_join({"0": 10}, 1, design, ["0", "1"], "x")


def test_together_means_together() -> None:
    assert may_join({"0": 10}, 1, Design(grouping="together"), ["0", "1"], "x")


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
