"""A model in place that loses what other stages hold, and gets it back to be saved.

:func:`prune` takes other ranks' layers, embedding, norm and head out of a model; what stays keeps
its name, since the list of layers keeps its numbers. :func:`put_together` brings everything to the
first rank, one tensor at a time from where it lies, and lets it go again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from hasten.parts.distributed.pipeline import partition
from hasten.parts.distributed.pipeline.pipeline_stages import Elsewhere, LanguageModel


@dataclass
class Pruned:
    """Where each module of a language model is, and the structure of those that are not here."""

    model: LanguageModel
    places: dict[str, int]  # rank of ``layers.3``, ``embed_tokens``, ``norm``, ``lm_head``
    rank: int
    absent: dict[str, nn.Module] = field(default_factory=dict)  # on the meta device
    tied: bool = False

    def owner(self, name: str) -> nn.Module:
        """The module that holds a place."""
        found: nn.Module = self.model.causal if name == "lm_head" else self.model.trunk
        return found.layers if name.startswith("layers.") else found


def prune(model: LanguageModel, sizes: Sequence[int], homes: Sequence[int], rank: int) -> Pruned:
    """Take out of the model what other ranks hold."""
    places: dict[str, int] = {"embed_tokens": homes[0], "norm": homes[-1], "lm_head": homes[-1]}
    for index, span in enumerate(partition.ranges(sizes)):
        places |= {f"layers.{layer}": homes[index] for layer in span}
    found = Pruned(model, places, rank, tied=model.tied)
    for name, home in places.items():
        if home != rank:
            owner, key = found.owner(name), name.rpartition(".")[2]
            module = owner._modules[key]
            assert module is not None  # the places are the model's own
            found.absent[name] = module.to("meta")
            _replace(owner, key, None)
    return found


@contextmanager
def put_together(pruned: Pruned, group: dist.ProcessGroup) -> Iterator[bool]:
    """On the group's first rank the whole model, in host memory where it was elsewhere.

    Every rank of the group enters, and leaves; True on the first.
    """
    first, came = pruned.rank == 0, []
    for name, home in pruned.places.items():
        if home == 0:
            continue
        if pruned.rank == home:
            module = pruned.owner(name)._modules[name.rpartition(".")[2]]
            assert module is not None  # this rank is its home
            _send(_named(module), group)
        elif first:
            came.append(name)
            _fill(pruned.absent[name], home, group)
            _replace(pruned.owner(name), name.rpartition(".")[2], pruned.absent[name])
    if first and pruned.tied:
        pruned.model.causal.lm_head.weight = pruned.model.trunk.embed_tokens.weight
    try:
        yield first
    finally:
        for name in came:
            pruned.absent[name].to("meta")
            _replace(pruned.owner(name), name.rpartition(".")[2], None)


def _replace(owner: nn.Module, key: str, module: nn.Module | None) -> None:
    """Put a module in its place, or take it out; layers stay in the order of their numbers."""
    if not isinstance(owner, nn.ModuleList):
        setattr(owner, key, Elsewhere() if module is None else module)
        return
    kept: dict[str, Any] = dict(owner._modules)
    kept.pop(key, None)
    if module is not None:
        kept[key] = module
    owner._modules.clear()
    owner._modules.update({k: kept[k] for k in sorted(kept, key=int)})


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every parameter and buffer with the module that holds it, those that aren't saved too."""
    for inner in module.modules():
        for held in (inner._parameters, inner._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    yield inner, key, tensor


def brought(mine: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """On the group's first rank everybody's tensors by name, on the host; all ranks call it."""
    if dist.get_rank(group):
        _send(mine, group)
        return dict(mine)
    found = dict(mine)
    for source in range(1, dist.get_world_size(group)):
        found |= {name: tensor.cpu() for name, tensor in _received(source, group)}
    return found


def _send(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """To the first rank of the group, one after the other."""
    device = _wire_device(group)
    about = [[(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]]
    dist.send_object_list(about, group=group, group_dst=0, device=device)
    for tensor in tensors.values():
        if tensor.numel():
            dist.send(tensor.detach().to(device).contiguous(), group=group, group_dst=0)


def _received(source: int, group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    device = _wire_device(group)
    about: list[Any] = [None]
    dist.recv_object_list(about, group=group, group_src=source, device=device)
    for name, shape, dtype in about[0]:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if tensor.numel():
            dist.recv(tensor, group=group, group_src=source)
        yield name, tensor


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {str(place): tensor for place, (_, _, tensor) in enumerate(_tensors(module))}


def _fill(module: nn.Module, home: int, group: dist.ProcessGroup) -> None:
    """Give a structure the weights of its other self on another rank."""
    places = list(_tensors(module))
    for (inner, key, old), (_, new) in zip(places, _received(home, group), strict=True):
        if isinstance(old, nn.Parameter):
            inner._parameters[key] = nn.Parameter(new.cpu(), requires_grad=old.requires_grad)
        else:
            inner._buffers[key] = new.cpu()


def _wire_device(group: dist.ProcessGroup) -> torch.device:
    """Where messages of a group have to lie."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type)
