"""An exchange that failed, told with the rank that it failed for.

gloo and NCCL say "connection closed by peer", or that time is up, and an address. The ranks that
see it hold a roll call in the place where they met (:mod:`hasten.parts.comm.rank_check`), and who
doesn't answer is named with its host.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from hasten.errors import StoppedError
from hasten.machine.environment import World
from hasten.machine.processes import attempt

ANSWER_SECONDS = 5.0  # others see the same failure within moments, or their own time limit


class LinkError(StoppedError):
    """A rank has ended, hangs, or can't be reached."""

    code = 7


@contextlib.contextmanager
def naming_ranks(world: World) -> Iterator[None]:
    """Inside a process group: an error of an exchange between ranks names those that are missing.

    Raises:
        LinkError: an exchange failed.
    """
    if world.size == 1:
        yield
        return
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    from hasten.parts.comm.rank_check import CollectiveError, explained, of_an_exchange

    subject = f"run/{attempt()}"
    hosts = dist.PrefixStore(f"hasten/{subject}/hosts", _get_default_store())
    hosts.set(str(world.rank), socket.gethostname())
    try:
        yield
    except CollectiveError as error:
        raise LinkError(str(error)) from error
    except RuntimeError as error:
        if isinstance(error, StoppedError) or not of_an_exchange(error):
            raise
        known = _known_hosts(hosts, world.size)
        what = "an exchange between ranks"
        raise LinkError(str(explained(what, error, subject, known, ANSWER_SECONDS))) from error


def _known_hosts(store: object, size: int) -> list[str]:
    found = []
    for rank in range(size):
        try:
            known = store.check([str(rank)])  # type: ignore[attr-defined]
            found.append(store.get(str(rank)).decode() if known else "never met")  # type: ignore[attr-defined]
        except RuntimeError:  # the meeting place is gone
            found.append("host not known")
    return found
