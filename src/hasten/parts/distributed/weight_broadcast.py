"""Broadcast of weights from the rank of a host that has built the model to the others.

The others have its skeleton: the same modules with tensors on the meta device, which
have shapes and no memory. One module after the other, they allocate memory for its
tensors, receive the values and cut them into their shards. So a host holds one whole
model and its shards, instead of one whole model for each rank. Files are read once.

    arrival = WeightBroadcast(reads=local_rank == 0)  # every rank, at the same moment

    for block in blocks:
        arrival(block)                            # every rank
        fully_shard(block)                        # releases the full weights
    arrival(model)                                # modules outside the blocks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.comm.groups import gathered_objects, ordered_group
from hasten.parts.comm.topology import host_name, hosts_of

Table = dict[str, Any]  # a module's parameters, or its buffers


class WeightBroadcast:
    """Sends a module's tensors from the host's rank that has them to the ranks that don't.

    Args:
        reads: this rank has built the model; at least one rank has.
    """

    def __init__(self, reads: bool) -> None:
        self.sent_bytes = 0  # bytes sent or received
        self._buffers: dict[int, Any] = {}  # arrived; parameters are sharded afterwards
        self._group: Any = None
        self._sender = 0
        hosts, readers = zip(*gathered_objects((host_name(), reads)), strict=True)
        for members in senders(hosts, readers):
            # gloo sends tensors in host memory. If the default group has gloo, it is used.
            # Otherwise all ranks would split NCCL's communicator together, where ranks outside
            # would wait.
            backend = None if "gloo" in dist.get_backend() else "gloo"
            group = ordered_group(members, backend=backend)
            if dist.get_rank() in members:
                self._group, self._sender = group, members[0]

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Sends the tensors of the module and its children that aren't sharded yet.

        Every rank of a host calls it with the same module.

        Raises:
            ValueError: ranks have different modules.
        """
        tensors = [one for one in _tensors(module) if id(one[2]) not in self._buffers]
        self._agree(module, tensors)
        arrived: dict[int, Any] = {}
        for table, name, old in tensors:
            if id(old) not in arrived:  # tied weights are one tensor
                arrived[id(old)] = self._sent(old)
            table[name] = arrived[id(old)]
            if not isinstance(old, nn.Parameter):
                self._buffers[id(table[name])] = table[name]

    def _sent(self, tensor: Any) -> Any:
        """Returns the tensor itself if it has values, else a replacement that has values."""
        if not tensor.is_meta:
            values, materialized = tensor.detach(), tensor
        elif isinstance(tensor, nn.Parameter):
            values = torch.empty_like(tensor, device="cpu")
            materialized = nn.Parameter(values, tensor.requires_grad)
        else:
            values = materialized = torch.empty_like(tensor, device="cpu")
        plain = values.contiguous()
        dist.broadcast(plain, self._sender, group=self._group)
        if plain is not values:  # not contiguous
            values.copy_(plain)
        self.sent_bytes += plain.nbytes
        return materialized

    def _agree(self, module: nn.Module, tensors: Sequence[tuple[Table, str, Any]]) -> None:
        """Checks on all ranks that tensors equal the sender's; a missing one would shift others."""
        local_description = [(name, tuple(t.shape), str(t.dtype)) for _, name, t in tensors]
        descriptions = gathered_objects(local_description, self._group)
        for other in descriptions[1:]:
            if other != descriptions[0]:
                pairs = zip(descriptions[0], other, strict=False)
                wrong = next((f"{b} for {a}" for a, b in pairs if a != b), "more tensors, or fewer")
                raise ValueError(
                    f"the skeleton of {type(module).__name__} isn't that of the model which was "
                    f"built: it has {wrong}"
                )


def senders(hosts: Sequence[str], reads: Sequence[bool]) -> list[tuple[int, ...]]:
    """Returns groups of ranks, each with a rank that has the model first; arguments are by rank.

    A host's ranks get it from one of their own that has it, or, where none has, from the first rank
    that has.

    Raises:
        ValueError: no rank has it.
    """
    if not any(reads):
        raise ValueError("no rank has built the model")
    first = list(reads).index(True)
    groups: dict[int, list[int]] = {}
    for ranks in hosts_of(hosts):
        source = next((rank for rank in ranks if reads[rank]), first)
        groups.setdefault(source, [source]).extend(r for r in ranks if r != source)
    return [tuple(dict.fromkeys(members)) for members in groups.values()]


def _tensors(module: nn.Module) -> Iterator[tuple[Table, str, Tensor]]:
    """Yields full parameters and buffers with their tables, in one order on all ranks."""
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None and not is_dtensor(tensor):
                    yield table, name, tensor
