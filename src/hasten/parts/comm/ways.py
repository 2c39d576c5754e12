"""What every way to average gradients offers, and the plain one: their sum in full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from hasten.parts.comm.error_feedback import Pieces
from hasten.parts.comm.exchange import FIRST, Ranks, reduced_bytes

# The mean over ranks, None where a number of any rank wasn't finite (all ranks say the same), and
# what this rank's messages left out, None where nothing is remembered.
Outcome = tuple[Tensor | None, Tensor | None]
Finish = Callable[[], Outcome]


class Way(Protocol):
    """Averages a bucket: ``start`` sends and returns at once, the second half waits and decodes."""

    @property
    def feedback(self) -> bool:
        """Whether what a message leaves out is to be remembered."""

    def start(self, flat: Tensor, residual: Tensor | None, pieces: Pieces, ranks: Ranks) -> Finish:
        """Send ``flat + residual`` on its way; neither is changed, nor read after the return."""

    def local(self, flat: Tensor, residual: Tensor | None, pieces: Pieces) -> Outcome:
        """What the others would read of this rank's message, and what it leaves out."""

    def sent_bytes(self, pieces: Pieces, world: int) -> int:
        """What a rank sends for this bucket, exactly, in collectives that work in a ring."""

    def settle(self, counted: bool) -> None:
        """A step is over; what it taught is forgotten if it didn't count."""

    def state(self) -> dict[str, Any]:
        """What is remembered beside the residual: names and tensors by parameter."""

    def load(self, state: Mapping[str, Any]) -> None:
        """The reverse."""


class Forgetful:
    """A way's memory where it has none beside the residual."""

    def settle(self, counted: bool) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        return None


class Dense(Forgetful):
    """Gradients in the format they have, added in a ring, as DDP does without a hook."""

    feedback = False

    def start(self, flat: Tensor, residual: Tensor | None, pieces: Pieces, ranks: Ranks) -> Finish:
        pending = ranks.all_reduce(flat / ranks.world, FIRST)

        def finish() -> Outcome:
            mean = pending.wait()
            return (mean if bool(mean.isfinite().all()) else None), None  # waits for the device

        return finish

    def local(self, flat: Tensor, residual: Tensor | None, pieces: Pieces) -> Outcome:
        return (flat if bool(flat.isfinite().all()) else None), None

    def sent_bytes(self, pieces: Pieces, world: int) -> int:
        return reduced_bytes(sum(p.numbers * p.width for p in pieces), world)
