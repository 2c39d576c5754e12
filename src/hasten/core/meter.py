"""The meter: what share of a machine's best matrix product rate a step's model FLOPs are.

Model FLOPs are linear in two counts of a batch, its tokens and its pairs (the sum of squared record
lengths), so a step's are two products. Who counts a model's FLOPs, and who knows the machine's
ceiling, is decided outside; a meter that wasn't told says None and never guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.batch import Counts


@dataclass(frozen=True)
class Meter:
    """FLOPs per token and per pair of the model; FLOP/s of all devices together; 0: not known.

    ``source`` says where the ceiling comes from, ``convention`` what is counted.
    """

    per_token: float = 0.0
    per_pair: float = 0.0
    ceiling: float = 0.0
    source: str = ""
    convention: str = ""

    def flops(self, counts: Counts) -> float | None:
        """Model FLOPs of a batch."""
        if not self.per_token:
            return None
        return self.per_token * counts.tokens + self.per_pair * counts.pairs

    def mfu(self, flops: float | None, seconds: float) -> float | None:
        """Model FLOPs utilisation of work that took ``seconds``."""
        if flops is None or not self.ceiling or seconds <= 0:
            return None
        return flops / seconds / self.ceiling
