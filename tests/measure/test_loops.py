"""Anybody's loops against each other: processes of their own, turns, pairs, named failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hasten.errors import InputError
from hasten.measure.loops import LoopFailedError, loop_reference
from hasten.measure.worker import timed
from hasten.report import compare

pytestmark = pytest.mark.waits

JOBS = str(Path(__file__).with_name("loop_jobs.py"))
ROOT = Path(__file__).parents[2]


@pytest.mark.timing
def test_the_faster_of_two_loops_is_found_with_its_interval() -> None:
    found = compare(f"{JOBS}:slow", f"{JOBS}:fast", rounds=4, steps=3, warmup=1)
    assert found.verdict == "helped"
    assert 1 < found.ratio.low <= found.ratio.estimate <= found.ratio.high
    assert len(found.first.rounds) == len(found.second.rounds) == 4
    assert found.first.losses == pytest.approx([10 - 0.01 * i for i in range(1, 13)])
    assert found.second.losses == ()
    assert found.first.peak_memory_bytes
    text = str(found)
    assert "slow" in text
    assert "verdict: helped (4 rounds)" in text


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("raising", "raising: ValueError: no such file: weights.bin"),
        ("dying", "the process ended with code 7: last words"),
        ("idle", "0.0 items; a speed needs a positive number"),
        ("wordy", "it must return how many tokens or items it did"),
        ("nothing", r"nothing\(\) returned a NoneType; it must return a function"),
        ("absent", "has no function absent"),
    ],
)
def test_a_loop_that_fails_says_why(job: str, said: str) -> None:
    with pytest.raises(LoopFailedError, match=said):
        compare(f"{JOBS}:{job}", f"{JOBS}:fast", rounds=2)


def test_a_loop_that_hangs_is_ended() -> None:
    with pytest.raises(LoopFailedError, match="no answer within 1 s"):
        compare(f"{JOBS}:hanging", f"{JOBS}:fast", patience_seconds=1)


@pytest.mark.parametrize("job", ["loops", ":f", "m:", "m:f()", "nowhere.py:f"])
def test_an_unreadable_name_is_refused(job: str) -> None:
    with pytest.raises(InputError):
        loop_reference(job)


def test_a_function_another_process_can_t_find_is_refused() -> None:
    for job in (lambda: lambda: 1, print, object()):
        with pytest.raises(InputError, match="another process"):
            loop_reference(job)  # type: ignore[arg-type]


@pytest.mark.timing
def test_a_budget_ends_the_rounds() -> None:
    found = compare(f"{JOBS}:slow", f"{JOBS}:fast", rounds=10_000, warmup=1, budget_seconds=2)
    assert 2 <= len(found.first.rounds) == len(found.second.rounds) < 10_000


def test_a_budget_that_ends_before_the_first_round_is_refused() -> None:
    with pytest.raises(InputError, match=r"budget_seconds is -1"):
        compare(f"{JOBS}:slow", f"{JOBS}:fast", budget_seconds=-1)
    with pytest.raises((InputError, LoopFailedError), match="budget: 1 s is too short"):
        compare(f"{JOBS}:slow", f"{JOBS}:fast", steps=200, budget_seconds=0.2)


def test_numbers_that_can_t_be_are_refused() -> None:
    with pytest.raises(InputError, match="rounds is 0"):
        compare(f"{JOBS}:slow", f"{JOBS}:fast", rounds=0)
    with pytest.raises(InputError, match=r"noise_floor is 1\.5"):
        compare(f"{JOBS}:raising", f"{JOBS}:fast", noise_floor=1.5)  # before any job is built


def test_a_loss_that_is_not_finite_is_none() -> None:
    assert timed(lambda: (3, float("nan")))[2] is None
    assert timed(lambda: (3, 1.5))[::2] == (3.0, 1.5)


def test_the_example_compares_its_own_functions() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "compare_loops.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "verdict:" in done.stdout
    assert "tokens/s" in done.stdout
