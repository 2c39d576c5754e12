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
    of each tensor by rows and columns, times odd numbers that stand for their places.

    An even one would push a weight's highest bits out of the 64 that a sum has.
    """
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
            places = 2 * torch.arange(len(sums), device=sums.device) + 1
            total = (total * 1_000_003 + int((sums * places).sum())) % 2**64  # waits
    return _mixed(total) >> 1


def _mixed(value: int) -> int:
    """Each of 64 bits spread over all of them, one to one (SplitMix: Steele et al., OOPSLA 2014)"""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)
