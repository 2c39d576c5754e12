"""The meter: what share of a machine's best matrix product rate a step's model FLOPs are.

Model FLOPs are linear in two counts of a batch, its tokens and its pairs (the sum of squared record
lengths), so a step's are two products. Who counts a model's FLOPs, and who knows the machine's
ceiling, is decided outside; a meter that wasn't told says None and never guesses.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

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


@dataclass(frozen=True)
class StepMetrics:
    """What one step did and cost, over all ranks; a line of ``metrics.jsonl``.

    ``grad_norm`` is the norm before clipping; a step that was ``skipped`` moved nothing;
    ``model_flops`` and ``mfu`` are None where the session's meter doesn't know them, and the
    seconds of the step's parts, on this rank, where its clock doesn't count. What the wire took is
    this rank's too, None where it isn't known; on one rank nothing travels.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    slots: int
    records: int
    step_seconds: float
    tokens_per_second: float
    padding_share: float
    peak_memory_bytes: int
    model_flops: float | None
    mfu: float | None
    skipped: bool = False
    expert_load_ratio: float | None = None
    data_seconds: float | None = None
    passes_seconds: float | None = None
    optimizer_seconds: float | None = None
    wire_seconds: float | None = None
    exposed_communication_seconds: float | None = None
    hidden_communication_seconds: float | None = None
    wire_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a number that isn't finite becomes None, which JSON can say."""
        found = asdict(self)
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in found.items()
        }
