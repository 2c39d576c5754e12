"""Finds the remaining ranks after a failed collective; compares weights over ranks.

gloo reports "connection closed by peer" and an address, but a user needs the rank. If a
collective fails on a rank, it reports this in the store that formed the process group.
Then it waits for the reports of the others. A rank without a report has ended, hangs,
or can't be reached. If a rank's own code failed, it reports the reason and doesn't
wait. The collectives of the others then fail too, and their errors name that reason.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

PAUSE = 0.05  # seconds between two reads of the store
LONGEST = 10.0  # seconds to wait for reports at most
NAMED = "named"  # key in the store: a rank has waited for all reports
_built: Counter[str] = Counter()  # number of RankReports of this process, by kind and members


class CollectiveError(RuntimeError):
    """A collective failed; ``missing`` are the ranks that didn't answer."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class RankReports:
    """Reports of the ranks ``members`` about the first exchange that fails among them.

    Each of them builds one at the same moment, so all use the same name for it.
    """

    def __init__(self, kind: str, members: Sequence[int], seconds: float) -> None:
        group_key = f"{kind}/{zlib.crc32(str(list(members)).encode())}"
        self._subject = f"{group_key}/{_built[group_key]}"
        _built[group_key] += 1
        self._members, self._seconds = tuple(members), min(seconds, LONGEST)
        self._lock = threading.Lock()  # several threads may use it
        self.first_failure: CollectiveError | None = None
        self._hosts().set(str(dist.get_rank()), socket.gethostname())

    def failed(self, what: str, error: Exception) -> CollectiveError:
        """Returns the exception: with the missing ranks, or this rank's own reason.

        Later failures follow from the first one and return the same exception.
        """
        with self._lock:
            if self.first_failure is None:
                self.first_failure = self._found(what, error)
            return self.first_failure

    def _found(self, what: str, error: Exception) -> CollectiveError:
        me, reason = dist.get_rank(), _first_line(error)
        if not of_an_exchange(error):
            with contextlib.suppress(RuntimeError):  # the store may have ended
                _place(self._subject).set(str(me), reason)
            return CollectiveError(f"{what} failed on rank {me}: {reason}")
        try:
            missing, answers = self._answers(reason)
            names = ", ".join(f"rank {rank} ({self._host(rank)})" for rank in missing)
        except RuntimeError as store_error:  # DistStoreError, DistNetworkError
            return CollectiveError(
                f"{what} failed on rank {me} ({reason}) and the meeting place, kept by rank 0, "
                f"can't be reached either ({_first_line(store_error)}): rank 0 has ended or its "
                "link is cut",
                [0],
            )
        if not missing:
            return CollectiveError(
                f"{what} failed though every rank is alive; "
                + "; ".join(f"rank {r}: {text}" for r, text in sorted(answers.items()))
            )
        return CollectiveError(
            f"{what} failed on rank {me} ({reason}): {names} did not answer within "
            f"{self._seconds:g} s; it has ended, hangs, or its link is cut",
            missing,
        )

    def _answers(self, message: str) -> tuple[list[int], dict[int, str]]:
        store = _place(self._subject)
        store.set(str(dist.get_rank()), message)
        end = time.monotonic() + self._seconds
        while True:
            missing = [rank for rank in self._members if not store.check([str(rank)])]
            # A rank that notices it only because its neighbours have ended needn't wait again.
            if not missing or time.monotonic() > end or store.check([NAMED]):
                store.set(NAMED, "")
                answered = [rank for rank in self._members if rank not in missing]
                return missing, {rank: store.get(str(rank)).decode() for rank in answered}
            time.sleep(PAUSE)

    def _host(self, rank: int) -> str:
        hosts = self._hosts()
        return hosts.get(str(rank)).decode() if hosts.check([str(rank)]) else "never met"

    def _hosts(self) -> Any:
        return _place(f"{self._subject}/hosts")


def of_an_exchange(error: BaseException) -> bool:
    """Returns True if an exchange between ranks failed, and not this rank's own code.

    gloo's errors are plain RuntimeErrors with the location in its source. Others have a
    class.
    """
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _place(subject: str) -> Any:
    """Returns the prefix of the store that formed the process group."""
    return dist.PrefixStore(f"hasten/{subject}", _get_default_store())


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition(". This is typically caused")[0]  # removes gloo's advice


# A checksum that shows if ranks hold the same weights, and the message if they don't.

COLUMNS = 1024
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def drift_message(wrong: Sequence[int], steps: int) -> str:
    """Returns the message about ranks with other weights than rank 0."""
    return (
        f"replicas have drifted apart: after step {steps} the weights of rank "
        f"{', '.join(map(str, wrong))} are not those of rank 0; resume from a checkpoint"
    )


@torch.no_grad()
def checksum(parameters: Iterable[Tensor]) -> int:
    """Returns a 63-bit number that changes with any weight and with swapped weights.

    It sums the bits of each tensor by rows and columns, times odd numbers for their
    positions. An even factor would push a weight's highest bits out of the 64 bits of the
    sum.
    """
    total = 0
    for p in parameters:
        bits = p.detach().contiguous().view(-1).view(WORDS[p.element_size()])
        table_size = len(bits) // COLUMNS * COLUMNS
        table = bits[:table_size].view(-1, COLUMNS)
        for sums in (
            table.sum(0, dtype=torch.int64),
            table.sum(1, dtype=torch.int64),
            bits[table_size:],
        ):
            places = 2 * torch.arange(len(sums), device=sums.device) + 1
            total = (total * 1_000_003 + int((sums * places).sum())) % 2**64  # waits for the device
    # Spreads each of 64 bits over all of them, one to one (SplitMix: Steele et al., OOPSLA 2014).
    total = (total ^ (total >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    total = (total ^ (total >> 27)) * 0x94D049BB133111EB % 2**64
    return (total ^ (total >> 31)) >> 1
