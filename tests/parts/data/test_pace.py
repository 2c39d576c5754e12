"""The look-ahead that is wanted hides the bursts, by a simulation of the queue as reference."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.parts.data.prefetch import REMEMBERED, LookaheadController


def stalls(reads: list[float], use: float, room: int) -> float:
    """Seconds of waiting, first batch aside, with a queue of ``room`` batches, event by event."""
    ready: list[float] = []  # when each batch has been read
    taken: list[float] = []  # when each batch was taken
    waited = 0.0
    for number, read in enumerate(reads):
        # The reader begins once the batch before is read and the queue has room for this one.
        begins = max(ready[-1] if ready else 0.0, taken[number - room] if number >= room else 0.0)
        ready.append(begins + read)
        asked = taken[-1] + use if taken else ready[0]
        taken.append(max(asked, ready[-1]))
        waited += taken[-1] - asked
    return waited


@settings(max_examples=100, deadline=None)
@given(
    quiet=st.floats(0.001, 0.009),
    burst=st.lists(st.floats(0.012, 0.1), min_size=1, max_size=4),
    between=st.integers(0, 30),
)
def test_a_burst_seen_once_is_hidden_from_then_on(
    quiet: float, burst: list[float], between: int
) -> None:
    use = 0.01
    pace = LookaheadController(10_000)
    recovery = int(sum(burst) / (use - quiet)) + 2  # a queue needs so long to be full again
    period = burst + [quiet] * (between + recovery)
    for read in period:
        pace.note(read, use)
    full = [quiet] * (pace.wanted * int(use / (use - quiet) + 2))
    assert stalls([*full, *period, *period], use, pace.wanted) == pytest.approx(0, abs=1e-9)


def test_a_quiet_reader_wants_no_more_than_one_and_a_hopeless_one_no_more_than_there_is() -> None:
    quiet, hopeless = LookaheadController(32), LookaheadController(32)
    for _ in range(100):
        quiet.note(0.004, 0.012)
        hopeless.note(0.1, 0.01)
    assert quiet.wanted == 1
    assert hopeless.wanted == 32


def test_a_burst_is_forgotten_after_a_while() -> None:
    pace = LookaheadController(32)
    pace.note(0.1, 0.01)
    for _ in range(REMEMBERED - 1):
        pace.note(0.001, 0.01)
    assert pace.wanted > 1
    for _ in range(2 * REMEMBERED):
        pace.note(0.001, 0.01)
    assert pace.wanted == 1
