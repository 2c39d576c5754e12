"""Gradients of a sharded model in fewer bytes: in its reduce-scatter, or between copies.

One copy of the model has a codec in the reduce-scatter of FSDP2:

1. FSDP2 lays a group's gradients out in rows, one for each rank.
2. The errors of earlier messages are added, and each row is encoded separately.
3. all_to_all sends row r of every rank to rank r.
4. Rank r decodes the rows one after the other; their mean in float32 is its shards' gradient.

A number is rounded once, on its way to the one rank that needs it, and no rank sends a mean back.
So half of the bytes of :mod:`hasten.parts.comm.methods` are sent, as a reduce-scatter is half of
an all-reduce. Errors are stored by parameter in float32, in full on every rank. A rank sends its
own gradient of all weights, so more ranks don't reduce its memory. The backward passes of a step
add to it in turn; it counts once the step does. If a number isn't finite, the message contains
NaN. The decoding rank then has NaN in its shards, and the norm over all ranks shows it.

Copies of a sharded model average their shards' gradients once per step:

1. Within a copy FSDP2 reduces and scatters a group's gradients in full, in each backward pass.
2. A rank sums the gradients of its shards over the passes of a step.
3. In the last pass the ranks with the same shards, one of each copy, average them. They use a
   compressor's method and store the errors of their messages.

So between hosts a rank sends its shards alone, and within a host nothing is compressed. FSDP2's own
hybrid sharding would sum copies in full, so the module's mesh has no axis of copies. All copies
read the same bytes, so they keep the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.parts.comm import groups as full_duplex
from hasten.parts.comm.buckets import BucketExchange
from hasten.parts.comm.codecs import ChunkedTopK, Codec, codec
from hasten.parts.comm.compression_settings import CompressionSettings
from hasten.parts.comm.exchange import CommunicationError, Ranks
from hasten.parts.comm.methods import BucketPart, Pieces
from hasten.parts.comm.rank_check import checksum
from hasten.parts.distributed.fsdp import ShardGroup, rows_of, shard_groups, values_of


def row_codec(settings: CompressionSettings) -> Codec:
    """Returns the codec that encodes a row by the settings' method.

    Raises:
        ValueError: the method needs more than rows of numbers.
    """
    if settings.method == "topk" and not settings.momentum:
        return ChunkedTopK.of_share(settings.ratio)
    if settings.method in ("half", "bf16", "int8", "int4"):
        return codec(settings.method)
    what = "momentum correction" if settings.momentum else settings.method
    raise ValueError(
        f"{what} needs whole gradients on every rank, and a rank has those of its shards; take "
        "quantised, half or topk, or ddp as the layout"
    )


class ShardedGradients:
    """Compresses the gradients of a sharded module: in its reduce-scatter, or between copies.

    Every rank attaches one, and sets ``passes`` before each backward.

    Args:
        settings: ``scope`` and ``rank`` are ignored.
        loss_scale: current factor of the loss; memory is stored without it.
        members: for each shard its ranks, one of each copy; equal on all ranks. None: there is
            one copy.

    Attributes:
        travel: counts the steps, and has the errors of their messages.

    Raises:
        ValueError: a method that needs more than rows of numbers.
    """

    def __init__(
        self,
        settings: CompressionSettings,
        loss_scale: Callable[[], float] = lambda: 1.0,
        members: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self._settings, self._codec, self.members = settings, row_codec(settings), members
        self.travel = BucketExchange(settings)
        self.travel.asks, self.travel.scale = True, loss_scale
        self._ranks: Ranks | None = None  # ranks with the same shards
        self._sums: dict[str, Tensor] = {}  # for copies, of a step's passes but the last, by group
        self._last = True  # the present pass is the last of its step
        self._sent_bytes = 0
        self.groups: list[ShardGroup] = []

    def attach(self, module: nn.Module) -> None:
        """Sets the hooks of each of the module's groups.

        Raises:
            ValueError: the module isn't sharded, or nothing in it learns.
        """
        self.groups = shard_groups(module)
        self._ranks = None if self.members is None else Ranks(600.0, None, self.members)
        for group in self.groups:
            if self._ranks is None:
                group.module.set_custom_reduce_scatter(_RowReduceScatter(self, group))
            else:
                group.module.set_all_reduce_hook(self._average_of(group, self._ranks))

    @property
    def sent_bytes(self) -> int:
        """Returns the bytes that this rank sent; between copies, only to other copies."""
        return self._sent_bytes if self._ranks is None else self._ranks.sent_bytes

    def passes(self, last: bool) -> None:
        """Begins a backward pass; ``last``: the last of its step. Every rank calls it."""
        if self._last:
            self.travel.begin()
            self._sums = {}
        self._last = last

    def confirm(self) -> None:
        """Confirms that the weights will move by the gradients of this step."""
        self.travel.confirmed = True

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Compares shards over copies; all ranks call it between the same two steps.

        Raises:
            CommunicationError: a copy's weights are not the first one's.
        """
        if self._ranks is None or self.members is None:
            return
        wrong = self._ranks.differing(checksum(parameters))
        if wrong:
            alike = next(m for m in self.members if dist.get_rank() in m)
            named = ", ".join(str(alike[index]) for index in wrong)
            raise CommunicationError(
                f"copies have drifted apart: after step {self.travel.steps} the shards of rank "
                f"{named} are not those of rank {alike[0]}; resume from a checkpoint"
            )

    def predicted(self) -> int:
        """Returns the exact bytes of float32 gradients that a rank sends past the dense start.

        They are those of a backward pass, between copies those of a step.
        """
        if self.members is None:
            size = self._codec.message_bytes
            rows = [(size(g.row) if self._takes(g) else 4 * g.row, g.ranks) for g in self.groups]
            return sum(row * (ranks - 1) for row, ranks in rows)
        way, copies = self.travel.way, len(self.members[0])
        pieces = [_pieces(group) for group in self.groups]
        return sum(self.travel.way_of(p, way).sent_bytes(p, copies) for p in pieces)

    def state(self) -> dict[str, Any]:
        """Returns this rank's memory by weight, in the form of GradientCompressor."""
        state = self.travel.state()
        if self.members is None:
            memory, residual = state["residual"], dict[str, Tensor]()
            for group in self.groups:
                if group.name in memory:
                    residual |= values_of(memory[group.name].view(group.ranks, -1), group)
            state["residual"] = residual
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state.

        Raises:
            ValueError: it is of another method, or of weights of another size.
        """
        residual, cpu = state["residual"], torch.device("cpu")
        entries: Any = (group.weights for group in self.groups)
        if self.members is not None:
            entries = map(_pieces, self.groups)
        sizes = {entry.name: entry.numbers for group in entries for entry in group}
        for name, values in residual.items():
            if sizes.get(name) != values.numel():
                raise ValueError(
                    f"error feedback remembers {values.numel()} numbers of {name} and it has "
                    f"{sizes.get(name, 'none')}: the memory is of another model or layout"
                )
        if self.members is None:
            stored = [g for g in self.groups if any(w.name in residual for w in g.weights)]
            residual = {group.name: rows_of(residual, group, cpu) for group in stored}
        self.travel.load({**state, "residual": residual})

    def _takes(self, group: ShardGroup) -> bool:
        """Returns True if a group is encoded after the dense start; small ones stay dense."""
        return group.ranks > 1 and group.row * group.ranks >= self._settings.minimum

    def reduce(self, group: ShardGroup, output: Tensor, rows: Tensor, ranks: Any, op: Any) -> None:
        """Reduces and scatters a group's rows; replaces FSDP2's own function."""
        # A weight without a gradient in this pass isn't in the message.
        is_complete = rows.numel() == group.ranks * group.row
        codes = self.travel.compresses and self._takes(group)
        if codes and (is_complete or not self.travel.way.feedback):
            self._encoded(group, output, rows, ranks, op)
            return
        self._sent_bytes += rows.nbytes // group.ranks * (group.ranks - 1)
        full_duplex.reduce_scatter(output, rows, op=op, group=ranks)

    def _encoded(
        self, group: ShardGroup, output: Tensor, rows: Tensor, ranks: Any, op: Any
    ) -> None:
        scale = self.travel.scale() if self.travel.way.feedback else 1.0
        gradients = rows.view(group.ranks, -1).float()
        gradients = gradients if scale == 1.0 else gradients / scale
        row = gradients.shape[1]
        size = self._codec.message_bytes(row)
        messages = torch.empty(group.ranks, size, dtype=torch.uint8, device=rows.device)
        if self.travel.way.feedback:
            self.travel.memory.encode(self._codec, gradients, group.ranks, group.name, messages)
        else:
            for numbers, message in zip(gradients, messages, strict=True):
                self._codec.encode(numbers, message)
        received = torch.empty_like(messages)
        full_duplex.all_to_all(received, messages, ranks).wait()
        self._sent_bytes += size * (group.ranks - 1)
        # FSDP2 requests a mean, or divides by itself before and after a sum.
        factor = scale if op == dist.ReduceOp.AVG else scale * group.ranks
        output.copy_(self._codec.decode_mean(received, row).mul_(factor))

    def _average_of(self, group: ShardGroup, ranks: Ranks) -> Callable[[Tensor], None]:
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
                raise CommunicationError(
                    f"a weight beside {group.name} had no gradient in a step, and copies exchange "
                    "those of all weights that learn: freeze what isn't used"
                )
            self.travel.send(shards, pieces, ranks, self.travel.way)()

        return average


@dataclass(frozen=True)
class _RowReduceScatter:
    """The interface of torch's own class."""

    exchange: ShardedGradients
    group: ShardGroup

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **options: Any
    ) -> None:
        self.exchange.reduce(self.group, output_tensor, input_tensor, group, op)


def _pieces(group: ShardGroup) -> Pieces:
    """Returns a rank's row of a group, as a bucket."""
    pairs = zip(group.weights, group.columns, strict=True)
    return tuple(BucketPart(f"shard of {weight.name}", (width,)) for weight, width in pairs)
