"""A roll call after a failed collective: which ranks are still there, through the meeting place.

gloo says "connection closed by peer" and an address; a user needs the rank. Whoever sees a
collective fail writes so into the store through which the process group met, and waits for the
others to do the same. Who has written nothing by the end has ended, hangs, or can't be reached.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PAUSE = 0.05  # seconds between two looks


class CollectiveError(RuntimeError):
    """A collective failed; ``missing`` are the ranks that didn't answer."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


def explained(
    what: str, error: BaseException, subject: str, hosts: Sequence[str], seconds: float
) -> CollectiveError:
    """The error of a failed collective with the ranks it is about.

    ``subject`` is the same on all ranks and new for each failure; ``hosts`` has each rank's host.
    It takes ``seconds`` at most, and all of them if somebody is missing.
    """
    me, first = dist.get_rank(), _first_line(error)
    try:
        missing, words = _answers(subject, first, len(hosts), seconds)
    except RuntimeError as store_error:  # DistStoreError, DistNetworkError
        return CollectiveError(
            f"{what} failed on rank {me} ({first}) and the meeting place, kept by rank 0, can't be "
            f"reached either ({_first_line(store_error)}): rank 0 has ended or its link is cut",
            [0],
        )
    if not missing:
        return CollectiveError(
            f"{what} failed though every rank is alive; "
            + "; ".join(f"rank {r}: {text}" for r, text in sorted(words.items()))
        )
    names = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in missing)
    return CollectiveError(
        f"{what} failed on rank {me} ({first}): {names} did not answer within {seconds:g} s; it "
        "has ended, hangs, or its link is cut",
        missing,
    )


def _answers(
    subject: str, words: str, ranks: int, seconds: float
) -> tuple[list[int], dict[int, str]]:
    store = dist.PrefixStore(f"hasten/{subject}", _get_default_store())
    store.set(str(dist.get_rank()), words)
    end = time.monotonic() + seconds
    while True:
        missing = [rank for rank in range(ranks) if not store.check([str(rank)])]
        if not missing or time.monotonic() > end:
            here = [rank for rank in range(ranks) if rank not in missing]
            return missing, {rank: store.get(str(rank)).decode() for rank in here}
        time.sleep(PAUSE)


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition(". This is typically caused")[0]  # gloo's advice, which this replaces
