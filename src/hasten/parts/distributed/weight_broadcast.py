"""Weights that one rank of a host has, for ranks with a skeleton of the model.

It serves models of which no rank can read a part alone. One rank of each host builds the whole
model. When weights are read (:mod:`hasten.parts.distributed.arrival`), it sends one after the
other, and each rank keeps its part. So a host holds one whole model and the parts.

    model = broadcast_model(built if local_rank == 0 else None, skeleton)    # every rank
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.parts.comm.groups import gathered_objects, ordered_group
from hasten.parts.comm.topology import host_name, hosts_of
from hasten.parts.nn.late_weights import LateWeight, read_later


def broadcast_model(built: nn.Module | None, skeleton: nn.Module) -> nn.Module:
    """Returns the skeleton with the buffers of the built model; its parameters are sent later.

    Every rank calls it.

    Args:
        built: the model with its weights; at least one rank has it.
        skeleton: the same modules, with tensors on the meta device.

    Raises:
        ValueError: the skeleton is of another model on a rank.
    """
    sender = _Sender(built)
    parameters = dict(skeleton.named_parameters())
    buffers = dict(skeleton.named_buffers())
    _agree(skeleton, {**parameters, **buffers}, sender.group)
    for prefix, module in skeleton.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                name = f"{prefix}.{key}" if prefix else key
                module._buffers[key] = sender.send(name, buffer).clone()
    late = {}
    for name, parameter in parameters.items():
        full = partial(sender.send, name, parameter.detach())
        shape = tuple(parameter.shape)
        late[name] = LateWeight(name, shape, parameter.dtype, full=full, together=True)
    read_later(skeleton, late)
    return skeleton


class _Sender:
    """The ranks that receive tensors together; the first has them.

    Args:
        built: this rank's model, or None.
    """

    def __init__(self, built: nn.Module | None) -> None:
        self._tensors: dict[str, Tensor] = {}
        if built is not None:
            self._tensors = {**dict(built.named_parameters()), **dict(built.named_buffers())}
        self.group: Any = None
        self._first = 0
        local_host = host_name(), built is not None
        hosts, readers = zip(*gathered_objects(local_host), strict=True)
        for members in senders(hosts, readers):
            # gloo sends tensors in host memory. If the default group has gloo, it is used.
            # Otherwise all ranks would split NCCL's communicator together, where ranks outside
            # would wait.
            backend = None if "gloo" in dist.get_backend() else "gloo"
            group = ordered_group(members, backend=backend)
            if dist.get_rank() in members:
                self.group, self._first = group, members[0]

    def send(self, name: str, like: Tensor) -> Tensor:
        """Returns a whole tensor; the ranks of the group call it in the same order."""
        if name in self._tensors:
            values = self._tensors[name].detach().contiguous()
        else:
            values = torch.empty_like(like, device="cpu", memory_format=torch.contiguous_format)
        dist.broadcast(values, self._first, group=self.group)
        return values


def _agree(skeleton: nn.Module, tensors: dict[str, Tensor], group: Any) -> None:
    """Checks on all ranks that tensors equal the sender's; a missing one would shift others."""
    local_description = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()]
    descriptions = gathered_objects(local_description, group)
    for other in descriptions[1:]:
        if other != descriptions[0]:
            pairs = zip(descriptions[0], other, strict=False)
            wrong = next((f"{b} for {a}" for a, b in pairs if a != b), "more tensors, or fewer")
            raise ValueError(
                f"the skeleton of {type(skeleton).__name__} isn't that of the model which was "
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
