"""Arrival of weights in a split model, where each rank reads its parts, and their way back.

The model's parameters are on the meta device (:mod:`hasten.parts.nn.late_weights`). Tensor
parallelism, FSDP2, pipelines and expert parallelism cut them there without memory. Then each
parameter is filled in place, with the part of the weight that a DTensor's placement describes.

    arrival = Arrival(module)             # before anything is split
    parallelize(module); shard(module)
    arrival.fill(module, device)          # each rank reads its parts, one weight at a time

Of some models no rank can read a part alone (``broadcast_model``). Then one rank of each host
builds the whole model, and sends one weight after the other when they are read. So a host holds
one whole model and the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.checkpoint.chunks import local_part, place_like, position_of
from hasten.parts.comm.groups import gathered_objects, message_device
from hasten.parts.comm.topology import host_name, hosts_of
from hasten.parts.distributed.expert_parallel import placed
from hasten.parts.nn.late_weights import MARK, LateWeight, box_of, late_weight, read_later


class Arrival:
    """The weights of a module that are read later, by their names in it.

    Raises:
        ValueError: a parameter has neither values nor a way to read them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._awaited: dict[int, tuple[LateWeight, list[str]]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not parameter.is_meta:
                continue
            weight = late_weight(parameter)
            if weight is None:
                raise ValueError(
                    f"{name} was made from weights that aren't loaded yet; leave out the technique "
                    "that replaces it, or take ddp as the layout"
                )
            self._awaited.setdefault(id(weight), (weight, []))[1].append(name)

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Reads this rank's part of each weight; parameters stay the same objects.

        A weight without a parameter in ``module`` belongs to other ranks. Ranks that receive
        weights together receive those that any of them wants.

        Args:
            device: of the parts; None: the host, or the device of a DTensor's mesh.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        awaited, self._awaited = list(self._awaited.values()), {}
        wanted = {names[0] for _, names in awaited if parameters.keys() & set(names)}
        if any(weight.together for weight, _ in awaited):
            wanted = set().union(*gathered_objects(wanted))
        for weight, names in awaited:
            if names[0] in wanted:
                full = weight.read() if weight.together else None
                present = {id(parameters[n]): parameters[n] for n in names if n in parameters}
                for parameter in present.values():
                    _set_values(parameter, weight, full, device)


def _set_values(
    parameter: nn.Parameter, weight: LateWeight, full: Tensor | None, device: torch.device | None
) -> None:
    """Gives a meta parameter its part; it stays the same object, with its attributes."""
    whole = placed(parameter)
    position, size = position_of(whole), local_part(whole).shape
    if position.shape != tuple(weight.shape):
        raise ValueError(f"a weight of {list(weight.shape)} became one of {list(position.shape)}")
    box = position.offset, size
    values = weight.read(*box) if full is None else box_of(full, *box).clone()
    home = parameter.device_mesh.device_type if is_dtensor(parameter) else "cpu"
    values = values.to(device or home, parameter.dtype)
    values = place_like(values, parameter) if is_dtensor(parameter) else values
    filled = nn.Parameter(values, parameter.requires_grad)
    for name, attribute in vars(parameter).items():
        if name != MARK:
            vars(filled).setdefault(name, attribute)
    # Setting ``data`` fails: a meta tensor is of another kind.
    torch.utils.swap_tensors(parameter, filled)


@torch.no_grad()
def full_weight(weight: Tensor, dtype: torch.dtype, first: bool) -> Tensor:
    """Returns a full weight in ``dtype`` on the first rank's host; all ranks of its mesh call it.

    It is rounded before it is sent. No other memory is taken than the full tensor and one shard.
    The return value of other ranks has no meaning.
    """
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    if not is_dtensor(weight):
        return weight.detach().to("cpu", dtype) if first else weight
    mesh, placements, rank = weight.device_mesh, weight.placements, dist.get_rank()
    local, device = weight.detach().to(dtype).to_local(), message_device()
    axes = tuple(0 if cut.is_replicate() else slice(None) for cut in placements)
    ranks = mesh.mesh[axes].flatten().tolist()
    if rank != ranks[0]:
        if rank in ranks and local.numel():
            dist.send(local.to(device).contiguous(), dst=ranks[0])
        return local
    full = torch.empty(tuple(weight.shape), dtype=dtype)
    for source in ranks:
        coordinate = (mesh.mesh == source).nonzero()[0].tolist()
        size, start = _compute_local_shape_and_global_offset(
            weight.shape, mesh.shape, coordinate, placements
        )
        part = box_of(full, start, size)
        if source == rank:
            part.copy_(local)
        elif part.numel():
            received = torch.empty(part.shape, dtype=dtype, device=device)
            dist.recv(received, src=source)
            part.copy_(received)
    return full


def broadcast_model(build: Callable[[], nn.Module], skeleton: nn.Module) -> nn.Module:
    """Returns the skeleton with the buffers of the built model; its parameters are sent later.

    Every rank calls it. The first rank of each host builds the model.

    Args:
        skeleton: the same modules, with tensors on the meta device.

    Raises:
        ValueError: the skeleton is of another model on a rank.
    """
    # gloo sends tensors in host memory. If the default group has gloo, it is used. Otherwise all
    # ranks would split NCCL's communicator together, where ranks outside would wait.
    backend = None if "gloo" in dist.get_backend() else "gloo"
    hosts = [list(ranks) for ranks in hosts_of(gathered_objects(host_name()))]
    group, _ = dist.new_subgroups_by_enumeration(hosts, backend=backend)
    parameters, buffers = dict(skeleton.named_parameters()), dict(skeleton.named_buffers())
    built: dict[str, Tensor] = {}
    if dist.get_rank(group) == 0:
        model = build()
        built = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # A tensor that is missing on a rank would shift all others.
    tensors = {**parameters, **buffers}.items()
    first, *others = gathered_objects(
        [(n, tuple(t.shape), str(t.dtype)) for n, t in tensors], group
    )
    for other in others:
        if wrong := [f"{b} for {a}" for a, b in zip_longest(first, other) if a != b]:
            raise ValueError(
                f"the skeleton of {type(skeleton).__name__} isn't that of the model which was "
                f"built: it has {wrong[0]}"
            )

    def send(name: str, like: Tensor) -> Tensor:
        """Returns a whole tensor; the ranks of the group call it in the same order."""
        if name in built:
            values = built[name].detach().contiguous()
        else:
            values = torch.empty_like(like, device="cpu", memory_format=torch.contiguous_format)
        dist.broadcast(values, group=group, group_src=0)
        return values

    for prefix, module in skeleton.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                name = f"{prefix}.{key}" if prefix else key
                module._buffers[key] = send(name, buffer).clone()
    late = {}
    for name, parameter in parameters.items():
        full, shape = partial(send, name, parameter.detach()), tuple(parameter.shape)
        late[name] = LateWeight(name, shape, parameter.dtype, full=full, together=True)
    read_later(skeleton, late)
    return skeleton
