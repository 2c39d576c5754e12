"""Copies of a sharded model average their shards' gradients in fewer bytes, once a step.

    (1) within a copy FSDP2 reduces and scatters a group's gradients in full, in each backward pass
    (2) a rank adds up what its shards get in the passes of a step
    (3) in the last one the ranks with the same shards, one of each copy, average them by a
        compressor's way, and remember what their messages left out

Copies on hosts of their own are where this pays: between hosts a rank sends its shards alone, and
within a host nothing is compressed. FSDP2's own hybrid sharding would add copies up in full, so a
module is sharded within a copy alone (its mesh has no axis of copies), and this works on the result
of its reduce-scatter. All copies read the same bytes, so that they keep the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hasten.parts.comm.error_feedback import Piece, Pieces
from hasten.parts.comm.exchange import Ranks, WireError
from hasten.parts.comm.settings import Settings
from hasten.parts.comm.travel import Travel
from hasten.parts.comm.weights_checksum import checksum
from hasten.parts.distributed.shard_groups import ShardGroup, shard_groups
from hasten.parts.distributed.sharded import row_codec


class CopiedShards:
    """An exchange between copies; every rank attaches one, and says ``passes`` before each
    backward.

    Args:
        members: for each shard its ranks, one of each copy; alike on all ranks.
        loss_scale: what the loss is multiplied by now; memory is kept without it.

    Raises:
        ValueError: a method that needs whole matrices.
    """

    def __init__(
        self,
        settings: Settings,
        members: Sequence[tuple[int, ...]],
        loss_scale: Callable[[], float] = lambda: 1.0,
        timeout_seconds: float = 600.0,
    ) -> None:
        row_codec(settings)  # refuses the method
        self._members, self._seconds = members, timeout_seconds
        self._travel = Travel(settings)
        self._travel.asks, self._travel.scale = True, loss_scale
        self._ranks: Ranks | None = None
        self._sums: dict[str, Tensor] = {}  # of a step's passes but the last, by group
        self._last = True
        self.groups: list[ShardGroup] = []

    def attach(self, module: nn.Module) -> None:
        """Work on what each group's reduce-scatter results in.

        Raises:
            ValueError: the module isn't sharded, or nothing in it learns.
        """
        self.groups = shard_groups(module)
        if not self.groups:
            raise ValueError("no weight that learns is in shards: call fully_shard before")
        self._ranks = Ranks(self._seconds, None, self._members)
        for group in self.groups:
            group.module.set_all_reduce_hook(self._of(group, self._ranks))

    @property
    def steps(self) -> int:
        """Begun."""
        return self._travel.steps

    @property
    def sent_bytes(self) -> int:
        """By this rank, to ranks of other copies."""
        return 0 if self._ranks is None else self._ranks.sent_bytes

    @property
    def compresses(self) -> bool:
        """Whether the step under way, or the last one, is past the dense start."""
        return self._travel.compresses

    def passes(self, last: bool) -> None:
        """A backward pass begins; ``last``: of its step. Every rank calls it."""
        if self._last:
            self._travel.begin()
            self._sums = {}
        self._last = last

    def confirm(self) -> None:
        """The weights are about to move by the gradients of this step."""
        self._travel.confirmed = True

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Compare shards over copies; all ranks call it between the same two steps.

        Raises:
            WireError: a copy's weights are not the first one's.
        """
        if self._ranks is None:
            return
        wrong = self._ranks.differing(checksum(parameters))
        if wrong:
            alike = next(m for m in self._members if dist.get_rank() in m)
            named = ", ".join(str(alike[place]) for place in wrong)
            raise WireError(
                f"copies have drifted apart: after step {self.steps} the shards of rank {named} "
                f"are not those of rank {alike[0]}; go on from a checkpoint"
            )

    def predicted(self) -> int:
        """Bytes that a rank sends in a step past the dense start, exactly, of float32 gradients."""
        copies = len(self._members[0])
        way = self._travel.way
        pieces = [_pieces(group) for group in self.groups]
        return sum(self._travel.way_of(p, way).sent_bytes(p, copies) for p in pieces)

    def state(self) -> dict[str, Any]:
        """This rank's memory of its shards."""
        return self._travel.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: it is of another method, or of other shards.
        """
        sizes = {piece.name: piece.numbers for g in self.groups for piece in _pieces(g)}
        for name, kept in state["residual"].items():
            if sizes.get(name) != kept.numel():
                raise ValueError(
                    f"the memory has {kept.numel()} numbers of {name} and this layout's shards "
                    f"{sizes.get(name, 'none')}"
                )
        self._travel.load(state)

    def _of(self, group: ShardGroup, ranks: Ranks) -> Callable[[Tensor], None]:
        pieces = _pieces(group)

        def average(shards: Tensor) -> None:
            """FSDP2 adds ``shards`` to the gradients as soon as this returns."""
            if not self._last:
                before = self._sums.get(group.name)
                self._sums[group.name] = shards.clone() if before is None else before + shards
                shards.zero_()
                return
            if group.name in self._sums:
                shards.add_(self._sums.pop(group.name))
            if shards.numel() != group.row:
                raise WireError(
                    f"a weight beside {group.name} had no gradient in a step, and copies exchange "
                    "those of all weights that learn: freeze what isn't used"
                )
            self._travel.send(shards, pieces, ranks, self._travel.way)()

        return average


def _pieces(group: ShardGroup) -> Pieces:
    """A rank's row of a group, as a bucket."""
    return tuple(Piece(f"shard of {w.name}", (w.piece(group.ranks),)) for w in group.weights)
