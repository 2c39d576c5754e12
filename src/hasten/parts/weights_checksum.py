"""A number that tells whether ranks hold the same weights, and what to say where they don't."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

COLUMNS = 1024
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def drifted(wrong: Sequence[int], steps: int) -> str:
    """What to say of ranks whose weights aren't rank 0's."""
    return (
        f"replicas have drifted apart: after step {steps} the weights of rank "
        f"{', '.join(map(str, wrong))} are not those of rank 0; go on from a checkpoint"
    )


@torch.no_grad()
def checksum(parameters: Iterable[Tensor]) -> int:
    """A number of 63 bits that another weight changes, or two that change places: sums of the bits
    of each tensor by rows and columns, times their places."""
    total = 0
    for p in parameters:
        bits = p.detach().contiguous().view(-1).view(WORDS[p.element_size()])
        whole = len(bits) // COLUMNS * COLUMNS
        table = bits[:whole].view(-1, COLUMNS)
        for sums in (
            table.sum(0, dtype=torch.int64),
            table.sum(1, dtype=torch.int64),
            bits[whole:],
        ):
            places = torch.arange(1, len(sums) + 1, device=sums.device)
            total = (total * 1_000_003 + int((sums * places).sum())) % 2**63  # waits
    return total
