"""Every way to deal ranks out to two or three layouts at once, for those who choose among them."""

from __future__ import annotations

import itertools

from hasten.core.technique import Technique
from hasten.techniques.layout.hybrid import Hybrid


def mixed_layouts(ranks: int) -> list[Technique]:
    """Layouts of so many ranks that no single technique has; none of two or three ranks.

    Whether a model can be cut so is for their obstacles to say.
    """
    shares = [n for n in range(1, ranks + 1) if ranks % n == 0]
    found: list[Technique] = []
    for dp, shard, tp in itertools.product(shares, repeat=3):
        if dp * shard * tp == ranks and sum(n > 1 for n in (dp, shard, tp)) > 1:
            found.append(Hybrid(dp=dp, shard=shard, tp=tp))
    for part in shares[1:-1]:
        found.append(Hybrid(dp=ranks // part, pp=part))
        found.append(Hybrid(dp=ranks, ep=part))
    return found
