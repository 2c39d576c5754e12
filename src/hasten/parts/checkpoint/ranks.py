"""Parts of a checkpoint from several ranks: signs of life, and the moment when all are there.

Ranks send no messages about a save. Each touches a file of its own while it writes, and
puts its description in the folder when it is done. So the first rank notices within
seconds that a rank has died, and training can use the process group meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hasten.parts.checkpoint.format import DESCRIPTION, part_name

EACH = 0.5  # seconds from one sign of life to the next
PATIENCE = 8.0  # seconds without one after which a rank counts as dead
LOOK = 0.02  # seconds from one look at the folder to the next, at first
ALIVE, FAILED = "alive", "failed"


class SignOfLife:
    """Touches a rank's file in the folder of a save until it is stopped."""

    def __init__(self, temporary: Path, rank: int) -> None:
        self._path = temporary / part_name(rank, ALIVE)
        self._stopped = threading.Event()
        with contextlib.suppress(OSError):  # the write itself reports a folder that can't be used
            temporary.mkdir(exist_ok=True)
            self._path.touch()
        self._thread = threading.Thread(target=self._run, name="hasten-alive", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Removes the file; a second call has no effect."""
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(EACH):
            count += 1
            # The folder may be gone. A full disk has room for a byte that is overwritten in place.
            with contextlib.suppress(OSError), self._path.open("r+") as file:
                file.write(str(count % 10))


def report_failure(temporary: Path, rank: int, reason: str) -> None:
    """Leaves the reason for the first rank, if the disk still takes it."""
    with contextlib.suppress(OSError):
        (temporary / part_name(rank, FAILED)).write_text(reason, encoding="utf-8")


def wait_for_parts(
    temporary: Path, ranks: int, seconds: Callable[[], float] = time.monotonic
) -> None:
    """Returns when the description of each rank is in the folder.

    Raises:
        OSError: a rank has failed, or has shown no sign of life for ``PATIENCE`` seconds.
    """
    missing = set(range(ranks))
    marks: dict[int, tuple[int, float] | None] = {}
    last_sign = dict.fromkeys(missing, seconds())
    look = LOOK
    while True:
        for rank in sorted(missing):
            if (temporary / part_name(rank, DESCRIPTION)).exists():
                missing.discard(rank)
                continue
            failure = temporary / part_name(rank, FAILED)
            if failure.exists():
                reason = failure.read_text(encoding="utf-8") or "it gave no reason"
                raise OSError(f"rank {rank} couldn't write its part: {reason}")
            mark, now = _mark(temporary / part_name(rank, ALIVE)), seconds()
            if marks.get(rank) != mark:
                marks[rank], last_sign[rank] = mark, now
            elif now - last_sign[rank] > PATIENCE:
                raise OSError(f"rank {rank} stopped while it wrote its part")
        if not missing:
            return
        time.sleep(look)
        look = min(2 * look, EACH)


def _mark(path: Path) -> tuple[int, float] | None:
    """Returns what changes with each touch; opened, because shared folders remember old times."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return len(file.read()), path.stat().st_mtime_ns
    return None
