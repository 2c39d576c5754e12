"""Intervals hold the truth as often as they say, whatever the noise is like."""

import pytest

from measure.simulated import NOISES, ROUNDS, coverage


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("noise", NOISES)
def test_a_95_percent_interval_holds_the_truth_95_percent_of_the_time(
    noise: str, rounds: int
) -> None:
    assert 0.92 <= coverage(NOISES[noise], rounds, replays=2000) <= 0.98


@pytest.mark.parametrize("noise", NOISES)
def test_two_copies_of_one_program_are_found_alike_93_times_of_100(noise: str) -> None:
    assert coverage(NOISES[noise], 8, replays=1000, truth=1.0) >= 0.93
