"""Bytes that a rank's collectives send to other hosts, counted where they are issued.

Where a machine has no namespaces there is no interface to read. Then a rank counts for itself:
each collective goes through torch's dispatcher, and gloo's algorithms are known (ring for sums and
gathers, one message per pair for all-to-all, a binomial tree for broadcasts: gloo's docs,
``algorithms.md``), so that the payload for each peer follows from the size. Connection set-up and
packet headers are not in it, some 3-6 % at an MTU of 1500.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hasten.machine import environment
from netlab.job import COUNTS


class CollectiveBytes(TorchDispatchMode):
    """Counts while it is entered, in the thread that entered it; ``to[rank]`` is what went there.

    ``unknown`` names the collectives it has no model of: a sum without them isn't the whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to: dict[int, float] = defaultdict(float)
        self.unknown: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self._count(str(func.name()).removeprefix("c10d::").rstrip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        group = next((g for a in args if (g := _group(a)) is not None), None)
        if name == "barrier" or group is None or len(group) == 1:
            return
        if name not in MODELS:
            self.unknown.add(name)
            return
        me = group.index(dist.get_rank())
        for peer, size in MODELS[name](me, len(group), args):
            self.to[group[peer]] += size


@contextlib.contextmanager
def counting() -> Iterator[CollectiveBytes]:
    """Count inside, and tell the lab at the end where one asked for it; gloo only.

    Enter it after the process group is there, in each thread that issues collectives.
    """
    counter = CollectiveBytes()
    with counter:
        yield counter
    folder = environment.variable(COUNTS)
    if folder is None or not dist.is_initialized():
        return
    if counter.unknown:
        raise ValueError(f"no count of {', '.join(sorted(counter.unknown))}: use namespaces")
    name = f"{dist.get_rank()}-{secrets.token_hex(4)}"
    beside = Path(folder) / f"{name}.writing"
    beside.write_text(json.dumps({"rank": dist.get_rank(), "to": dict(counter.to)}))
    beside.rename(Path(folder) / f"{name}.json")


Peers = list[tuple[int, float]]


def _ring(share: Callable[[int], float], which: int) -> Callable[[int, int, Any], Peers]:
    """All goes to the next rank: ``share(ranks)`` times the tensors at argument ``which``."""
    return lambda me, ranks, args: [((me + 1) % ranks, share(ranks) * _bytes(args[which]))]


def _pairs(me: int, ranks: int, args: Any) -> Peers:
    """Each peer gets its piece; pieces of unequal sizes come as the list of input sizes."""
    tensor = args[1]
    sizes = list(args[4]) if len(args) > 4 else []
    rows = tensor.shape[0] if tensor.dim() else 1
    whole = _bytes(tensor)
    parts = [whole * s / max(rows, 1) for s in sizes] if sizes else [whole / ranks] * ranks
    return [(peer, part) for peer, part in enumerate(parts) if peer != me]


def _tree(me: int, ranks: int, args: Any) -> Peers:
    """gloo's broadcast: ranks counted from the root; who has it sends it 1, 2, 4... further on."""
    root = int(args[2])
    place, size, found, step = (me - root) % ranks, _bytes(args[0]), [], 1
    while step < ranks:
        if place < step and place + step < ranks:
            found.append(((me + step) % ranks, float(size)))
        step *= 2
    return found


MODELS: dict[str, Callable[[int, int, Any], Peers]] = {
    "allreduce": _ring(lambda n: 2 * (n - 1) / n, 0),
    "allgather": _ring(lambda n: n - 1, 1),
    "_allgather_base": _ring(lambda n: n - 1, 1),
    "alltoall_base": _pairs,
    "broadcast": _tree,
}


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def _group(value: Any) -> list[int] | None:
    """The ranks of an argument that is a process group."""
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return list(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    except (RuntimeError, ValueError, TypeError):
        return None  # another object of torch's, such as a reduction
