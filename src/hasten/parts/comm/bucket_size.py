"""How large gradient buckets should be: many leave early, and each pays the link's delay.

    backward      |--- 1 ---|--- 2 ---|--- 3 ---|            n buckets get ready one after the other
    wire                    |=== 1 ===|=== 2 ===|=== 3 ===|  and leave in that order
                                                 exposed

With a window of W seconds in which gradients get ready, bucket k leaves at k W / n or when the one
before it is back, and takes t seconds. What shows is t where the wire keeps up (n t <= W), and
W / n + n t - W where it doesn't. So n grows until delays eat what an earlier start gains: on a
link-bound step about sqrt(W / delay). (The schedule of Li et al., PyTorch Distributed,
arXiv:2006.15704, section 3.2.3, which leaves the size to the user.)

DDP lays its buckets before the first backward pass, so W isn't known when the size is due. Then
``link_model.bucket_bytes`` says it by the link alone: the smallest bucket of which delays take a
tenth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hasten.parts.comm.link_model import bucket_bytes, flat
from hasten.parts.comm.topology import Topology

LEAST, MOST = 1, 256  # MB that are looked at
MB = 2**20


@dataclass(frozen=True)
class BucketChoice:
    """A size in MB, and why."""

    megabytes: int
    reason: str


def exposed(seconds: float, count: int, window: float) -> float:
    """What shows of so many equal buckets that take ``seconds`` each (the formula above)."""
    return max(seconds, window / count + count * seconds - window)


def bucket_seconds(topology: Topology, size: float, overhead: float = 0.0) -> float:
    """One bucket's time in a ring over these hosts; ``overhead`` for each bucket's own handling."""
    return flat(topology, math.ceil(size / 4)).seconds + overhead


def by_window(topology: Topology, size: int, window: float, overhead: float = 0.0) -> BucketChoice:
    """The size that shows least where gradients of ``size`` bytes get ready in ``window`` seconds.

    Of sizes alike within 1 % the largest: fewer buckets are less work.
    """
    found: dict[int, float] = {}
    megabytes = LEAST
    while megabytes <= MOST:
        count = max(1, math.ceil(size / (megabytes * MB)))
        found[megabytes] = exposed(bucket_seconds(topology, size / count, overhead), count, window)
        megabytes *= 2
    least = min(found.values())
    chosen = max(mb for mb, seconds in found.items() if seconds <= 1.01 * least)
    return BucketChoice(
        chosen, f"{chosen} MB: {found[chosen]:.3g} s exposed, {found[LEAST]:.3g} s with {LEAST} MB"
    )


def by_link(topology: Topology) -> BucketChoice:
    """The smallest size of which delays take a tenth, by delay x bandwidth x ranks."""
    chosen = max(LEAST, math.ceil(bucket_bytes(topology) / MB))
    return BucketChoice(chosen, f"{chosen} MB for {topology}")
