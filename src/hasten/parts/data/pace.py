"""The pace of a reader and a user: how many batches have to wait so that a burst isn't felt.

While the reader needs longer for a batch than the user, the queue between them loses what the
difference is worth in batches. The deficit of time adds up over a burst, however many batches it
has, and is paid back while reading is faster (the recursion of a waiting line, Lindley 1952):

    deficit <- max(0, deficit + seconds to read a batch - seconds it was used)

The worst deficit of the last some hundred batches, divided by the seconds that a batch is used, is
the number of batches that must wait when such a burst begins. So a queue is long enough from the
second burst on, also if the first one was hidden by luck, and stays so between bursts.
"""

from __future__ import annotations

import math

REMEMBERED = 512  # batches after which a burst is forgotten, at the earliest
NOTICEABLE_SECONDS = 1e-3  # a smaller deficit is the scheduler's, not the loader's
WEIGHT = 0.05  # of the newest batch in the mean time of use


class Pace:
    """Two clocks, kept by whoever takes the batches."""

    def __init__(self, most: int) -> None:
        self.most = most  # batches that could wait at all: a reader too slow for ever owes no more
        self.use_seconds = 0.0  # mean
        self._deficit = self._worst = self._worst_before = 0.0
        self._noted = 0

    def note(self, read_seconds: float, use_seconds: float) -> None:
        """A batch was read in so long, and the one before it was used for so long."""
        mean = self.use_seconds
        self.use_seconds = mean + WEIGHT * (use_seconds - mean) if self._noted else use_seconds
        owed = self._deficit + read_seconds - use_seconds
        self._deficit = min(max(owed, 0.0), self.most * self.use_seconds)
        self._worst = max(self._worst, self._deficit)
        self._noted += 1
        if self._noted % REMEMBERED == 0:
            self._worst_before, self._worst = self._worst, self._deficit

    @property
    def wanted(self) -> int:
        """Batches that should wait; one more than the worst burst took, for it may begin late."""
        worst = max(self._worst, self._worst_before)
        if worst < NOTICEABLE_SECONDS or not self.use_seconds:
            return 1
        return min(math.ceil(worst / self.use_seconds) + 1, self.most)
