"""The clock at the seams: planted waits are found where they were planted, and parts add up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hasten.core import step as step_module
from hasten.core import timing as clock_module
from hasten.core.setup import Session
from hasten.core.timing import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
    IDLE,
    OPTIMIZER,
    PARTS,
    DeviceClock,
    HostClock,
    clock_on,
    data_stall,
    seconds_by_part,
    step_stability,
    step_total,
)
from hasten.parts.data.collate import padded
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.feed import Prefetched
from tiny import language_job, run, session_of

NAP = 0.03


class PlantedTime:
    """Goes on where somebody sleeps, and a little wherever it is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    process_time = staticmethod(time.process_time)


PLANTED = PlantedTime()


class FakeEvent:
    """An event of a device whose queue is always empty: it is passed when it is recorded."""

    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = PLANTED.perf_counter()

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1e3


class Napping(nn.Module):
    """The plain loss, asleep for a while in forward, backward, or both; each time longer."""

    def __init__(self, model: nn.Module, forward: float, backward: float) -> None:
        super().__init__()
        self.inner, self.naps, self.calls = WholeLogitsLoss(model), (forward, backward), 0

    def forward(self, **inputs: Any) -> Any:
        self.calls += 1
        loss, count = self.inner(**inputs)
        forward, backward = (nap * (1 + self.calls / 10) for nap in self.naps)
        PLANTED.sleep(forward)
        loss.register_hook(lambda grad: PLANTED.sleep(backward))
        return loss, count


class NappingAdamW(torch.optim.AdamW):
    """Asleep for a while in every update."""

    def step(self, closure: Any = None) -> Any:
        PLANTED.sleep(NAP)
        return super().step(closure)


def after_a_nap(act: Callable[..., Any]) -> Callable[..., Any]:
    def acting(*given: Any) -> Any:
        PLANTED.sleep(NAP)
        return act(*given)

    return acting


def napping_collate(examples: Sequence[Any]) -> Any:
    PLANTED.sleep(NAP)
    from hasten.core.job import with_language_counts

    return with_language_counts(padded)(examples)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and clocks, of which a device's runs on events that are passed at once, read it."""
    monkeypatch.setattr(clock_module.torch, "Event", FakeEvent)
    for module in (clock_module, step_module):
        monkeypatch.setattr(module, "time", PLANTED, raising=False)
        monkeypatch.setattr(module, "running_time", PLANTED.perf_counter, raising=False)


@pytest.fixture(params=["host", "device"])
def clocked(request: pytest.FixtureRequest, planted: None) -> Any:
    """Both clocks keep the same promises."""
    return HostClock if request.param == "host" else lambda: DeviceClock("cuda:0")


def counted(session: Session, clock: Any) -> tuple[list[Any], list[dict[str, float]]]:
    session.setup.clock = clock()
    metrics = run(session)
    return metrics, list(session.setup.clock.steps)


def test_a_slow_loader_is_found_under_data(clocked: Any) -> None:
    metrics, steps = counted(session_of(language_job(collate=napping_collate)), clocked)
    found = seconds_by_part(steps)
    assert (found[DATA] or 0) >= NAP
    assert all((m.data_seconds or 0) >= NAP for m in metrics)
    stall = data_stall(steps)
    assert stall == pytest.approx(sum(s[DATA] for s in steps) / sum(map(step_total, steps)))


def test_a_slow_forward_and_a_slow_backward_are_told_apart(clocked: Any) -> None:
    job = language_job(loss=lambda model: Napping(model, NAP, 3 * NAP))
    metrics, steps = counted(session_of(job), clocked)
    found = seconds_by_part(steps)
    assert (found[FORWARD] or 0) >= NAP
    assert (found[BACKWARD] or 0) >= 3 * NAP  # time counts once, so it isn't elsewhere
    assert all((m.passes_seconds or 0) >= 4 * NAP for m in metrics)


def test_parts_add_up_to_the_step_within_two_percent(clocked: Any) -> None:
    job = language_job(
        steps=8,
        collate=napping_collate,
        loss=lambda model: Napping(model, NAP, 2 * NAP),
        optimizer=NappingAdamW,
    )
    metrics, steps = counted(session_of(job), clocked)
    for step, known in zip(steps, metrics, strict=True):
        assert step_total(step) == pytest.approx(known.step_seconds, rel=0.02)
    parts = [
        seconds
        for part, seconds in seconds_by_part(steps).items()
        if part != CHECKPOINT and seconds
    ]
    totals = sorted(map(step_total, steps))
    assert totals[1] <= sum(parts) <= totals[-2]


def test_a_part_that_does_not_exist_is_none_and_not_zero() -> None:
    _, steps = counted(session_of(language_job()), HostClock)
    found = seconds_by_part(steps)
    assert [part for part in PARTS if found[part] is None] == ["copy", COMMUNICATION, CHECKPOINT]
    assert seconds_by_part([]) == dict.fromkeys(PARTS)
    assert data_stall([]) is step_stability([])["p50"] is None


def test_waiting_for_ranks_is_taken_out_of_the_part_in_which_it_was(clocked: Any) -> None:
    clock = clocked()
    for _ in range(4):
        clock.begin()
        for part in (DATA, FORWARD, BACKWARD, COMMUNICATION):
            PLANTED.sleep(NAP / 3)
            clock.mark(part)
        clock.exposed(BACKWARD, NAP / 6)
        clock.end()
    steps = list(clock.steps)
    found = seconds_by_part(steps)
    for part, most in ((BACKWARD, NAP / 4), (COMMUNICATION, NAP / 2)):
        assert (found[part] or 0) >= most * 0.6
    assert (found[COMMUNICATION] or 0) > (found[BACKWARD] or 0)
    assert found[IDLE] is None
    parts = [seconds for seconds in found.values() if seconds]
    assert sum(parts) == pytest.approx(sum(sorted(map(step_total, steps))[1:3]) / 2)
    assert sum(seconds for _, seconds in clock.laps) == pytest.approx(step_total(steps[-1]))


@pytest.mark.usefixtures("planted")
def test_reading_is_told_from_copying_on_a_device() -> None:
    _, steps = counted(
        session_of(language_job(collate=napping_collate)), lambda: DeviceClock("cuda:0")
    )
    assert all(step["data"] >= NAP and "copy" in step for step in steps)


@pytest.mark.usefixtures("planted")
def test_what_another_thread_reads_is_not_the_steps_wait() -> None:
    clock = DeviceClock("cuda:0")
    clock.begin()
    reader = threading.Thread(target=lambda: list(clock.reading(iter([1, 2]))))
    reader.start()
    reader.join()
    clock.fed()
    assert set(clock.end()) == {DATA}


def test_a_checkpoint_stands_beside_the_step(tmp_path: Path, clocked: Any) -> None:
    job = language_job(collate=napping_collate)
    session = session_of(job, Checkpoints(interval=1), folder=tmp_path)
    kept: Any = session.setup.checkpoint
    kept.after_step = after_a_nap(kept.after_step)
    metrics, steps = counted(session, clocked)
    assert session.has_checkpoints
    found = seconds_by_part(steps, session.has_checkpoints)
    assert (found[CHECKPOINT] or 0) >= NAP
    for step, known in zip(steps, metrics, strict=True):
        assert step_total(step) == pytest.approx(known.step_seconds, rel=0.05)


def test_counting_changes_no_bit_and_is_off_by_default() -> None:
    plain = session_of(language_job(steps=4), Prefetched())
    without = run(plain)
    assert without[-1].data_seconds is without[-1].passes_seconds is None
    assert not plain.setup.clock.steps
    with_clock, _ = counted(session_of(language_job(steps=4), Prefetched()), HostClock)
    assert [m.loss for m in with_clock] == [m.loss for m in without]


def test_an_engine_that_says_nothing_of_forward_has_no_backward_either() -> None:
    found = seconds_by_part([{DATA: 1.0, BACKWARD: 5.0, OPTIMIZER: 2.0, IDLE: 1.0}])
    assert found[FORWARD] is found[BACKWARD] is None
    assert found[IDLE] == 6.0


def test_the_clock_suits_the_device() -> None:
    assert isinstance(clock_on("cpu"), HostClock)
    assert isinstance(clock_on("cuda:1"), DeviceClock)


seconds = st.floats(1e-6, 1e3)
steps_of = st.lists(
    st.fixed_dictionaries(dict.fromkeys((DATA, FORWARD, BACKWARD, OPTIMIZER, IDLE), seconds)),
    min_size=1,
    max_size=40,
)


@given(steps_of)
def test_a_split_adds_up_to_a_step_between_the_quartiles(steps: list[Mapping[str, float]]) -> None:
    totals = sorted(map(step_total, steps))
    whole = sum(s for s in seconds_by_part(steps).values() if s is not None)
    cut = len(totals) // 4
    middle = totals[cut : len(totals) - cut]
    assert whole == pytest.approx(float(np.mean(middle)), rel=1e-9)
    assert totals[cut] * (1 - 1e-9) <= whole <= totals[-cut - 1] * (1 + 1e-9)


@given(st.lists(seconds, min_size=1, max_size=300))
def test_stability_agrees_with_numpy(times: list[float]) -> None:
    found = step_stability(times)
    median = float(np.median(times))
    assert found["p50"] == pytest.approx(median)
    spread = float(np.median(np.abs(np.array(times) - median))) / median
    assert found["relative_spread"] == pytest.approx(spread, rel=1e-9, abs=1e-12)
    assert found["p99"] == np.quantile(times, 0.99, method="inverted_cdf")
    assert found["stalls"] == sum(t > 3 * median for t in times)


def test_old_steps_are_forgotten_before_memory_ends() -> None:
    clock = HostClock()
    for _ in range(clock_module.KEPT_STEPS + 5):
        clock.begin()
        clock.mark(DATA)
        clock.end()
    assert len(clock.steps) == len(clock.busy) == clock_module.KEPT_STEPS


def test_busy_seconds_are_those_of_the_processor_and_not_of_sleep() -> None:
    clock = HostClock()
    clock.begin()
    time.sleep(0.2)
    clock.mark(DATA)
    clock.end()
    assert clock.busy[0] < 0.1 < clock.steps[0][DATA]
