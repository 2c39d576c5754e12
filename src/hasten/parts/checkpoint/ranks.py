"""Parts of a checkpoint from several ranks: signs of life, and the moment when all are there.

Ranks send no messages about a save. Each rewrites a small file of its own while it writes, and
leaves its description when it is done. So the first rank notices within seconds that a rank has
died, and training can use the process group meanwhile. The small files are on a board: a folder
that all ranks see, or one at the address that they send their parts to.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from hasten.parts.checkpoint.commit import Folder
from hasten.parts.checkpoint.format import DESCRIPTION, part_name
from hasten.parts.checkpoint.remote import Address

# Seconds without one after which a rank counts as dead. Training may be waiting for this save, and
# naming the dead rank takes 5 s more: together it has to stay below 10 s.
PATIENCE = 3.0
LOOK = 0.02  # seconds from one look at the board to the next, at first
ALIVE, FAILED = "alive", "failed"
Storage = Folder | Address


class SignOfLife:
    """Rewrites a rank's file on the board of a save until it is stopped; not if it is alone."""

    def __init__(self, board: Storage, rank: int, alone: bool = False) -> None:
        self._board, self._rank, self._stopped = board, rank, threading.Event()
        self._name = part_name(rank, ALIVE)
        self._thread = threading.Thread(target=self._run, name="hasten-alive", daemon=True)
        if not alone:
            self._thread.start()

    def stop(self) -> None:
        """Removes the file; a second call has no effect."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
            with contextlib.suppress(OSError):
                self._board.remove(self._name)

    def fail(self, reason: str) -> None:
        """Stops, and leaves the reason for the first rank if the board still takes it."""
        self.stop()
        if self._rank:
            with contextlib.suppress(OSError):
                self._board.put(part_name(self._rank, FAILED), reason.encode())

    def _run(self) -> None:
        # The write itself reports a place that can't be used.
        with contextlib.suppress(OSError):
            self._board.open()
        count = 0
        while True:
            count += 1
            with contextlib.suppress(OSError):  # the folder may be gone
                self._board.put(self._name, b"." * (1 + count % 9))
            if self._stopped.wait(self._board.each):
                return


def wait_for_parts(
    board: Storage, ranks: int, seconds: Callable[[], float] = time.monotonic
) -> None:
    """Returns when the description of each rank is on the board.

    Raises:
        OSError: a rank has failed, or has shown no sign of life for ``PATIENCE`` seconds.
    """
    missing = set(range(ranks))
    marks: dict[int, Any] = {}
    last_sign = dict.fromkeys(missing, seconds())
    pause = LOOK
    while True:
        files, now = board.look(), seconds()
        missing -= {rank for rank in missing if part_name(rank, DESCRIPTION) in files}
        for rank in sorted(missing):
            if part_name(rank, FAILED) in files:
                reason = board.read(part_name(rank, FAILED)).decode() or "it gave no reason"
                raise OSError(f"rank {rank} couldn't write its part: {reason}")
            mark = files.get(part_name(rank, ALIVE))
            if marks.get(rank) != mark:
                marks[rank], last_sign[rank] = mark, now
            elif now - last_sign[rank] > PATIENCE:
                raise OSError(f"rank {rank} stopped while it wrote its part")
        if not missing:
            return
        time.sleep(pause)
        pause = min(2 * pause, board.each)
