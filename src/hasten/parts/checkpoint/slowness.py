"""Says, with its MB/s, that a place takes checkpoints slowly; once, and again where it got worse.

A slow place costs nothing as long as the writer's thread keeps up with it. It has to be known where
training waits for that thread, or where a write takes so long that much is lost between two.
"""

from __future__ import annotations

import math

WAITED = 1.0  # seconds that training may wait for an earlier save in silence
LONG, SLOW = 10.0, 50e6  # seconds of a write, and bytes per second: below any disk, or 0.4 Gbit/s


class Slowness:
    """What one place was seen to do.

    Args:
        place: a folder or an address, as the user calls it.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._last = (0, 0.0)  # bytes and seconds of the last write
        self._said = math.inf  # bytes per second when it was last told

    def wrote(self, size: int, seconds: float) -> None:
        """A checkpoint of so many bytes has reached the place; any thread may call it."""
        self._last = (size, seconds)

    def words(self, waited: float = 0.0) -> str:
        """A sentence where one is due, else nothing; ``waited``: seconds of training, just now."""
        size, seconds = self._last
        if not size or seconds <= 0:
            return ""
        speed = size / seconds
        slow = (seconds >= LONG and speed < SLOW) or waited >= WAITED
        if not slow or speed > self._said / 2:
            return ""
        self._said = speed
        waiting = f", and training waited {waited:.1f} s for it" if waited >= WAITED else ""
        return (
            f"{self._place} is slow: a checkpoint of {size / 1e6:,.1f} MB took {seconds:.1f} s, "
            f"{speed / 1e6:,.1f} MB/s{waiting}; save less often, or to a faster folder"
        )
