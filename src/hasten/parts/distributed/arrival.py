"""Arrival of weights in a split model: each rank reads the parts that it keeps.

The model's parameters are on the meta device (:mod:`hasten.parts.nn.late_weights`). Tensor
parallelism, FSDP2, pipelines and expert parallelism cut them there without memory. Then each
parameter is filled in place, with the part of the weight that a DTensor's placement describes.

    arrival = Arrival(module)             # before anything is split
    parallelize(module); shard(module)
    arrival.fill(module, device)          # each rank reads its parts, one weight at a time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.comm.groups import gathered_objects
from hasten.parts.distributed.expert_parallel import holds_part, layer_of
from hasten.parts.distributed.fsdp import take_new_shards
from hasten.parts.nn.late_weights import MARK, LateWeight, box_of, late_weight


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
    def fill(
        self,
        module: nn.Module,
        device: torch.device | None = None,
        only: Callable[[Tensor], bool] = lambda parameter: True,
    ) -> None:
        """Reads this rank's part of each weight; parameters stay the same objects.

        A weight without a parameter in ``module`` belongs to other ranks. Ranks that receive
        weights together receive those that any of them wants.

        Args:
            device: of the parts; None: the host, or the device of a DTensor's mesh.
            only: selects the parameters that are filled now.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        local: dict[int, dict[int, nn.Parameter]] = {}
        for key, (_, names) in self._awaited.items():
            present = {id(p): p for n in names if (p := parameters.get(n)) is not None}
            local[key] = present if all(map(only, present.values())) else {}
        wanted = {names[0] for key, (_, names) in self._awaited.items() if local[key]}
        if any(weight.together for weight, _ in self._awaited.values()):
            wanted = set().union(*gathered_objects(wanted))
        for key, (weight, names) in list(self._awaited.items()):
            if names[0] not in wanted:
                continue
            del self._awaited[key]
            full = weight.read() if weight.together else None
            for parameter in local[key].values():
                start, size = _part(parameter, weight.shape)
                if full is None:
                    values = weight.read(start, size)
                else:
                    values = box_of(full, start, size).clone()
                _set_values(parameter, values.to(device or _home(parameter), parameter.dtype))
        take_new_shards(module)


def _part(parameter: Tensor, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns where a parameter begins in the weight of ``shape``, and its local shape."""
    if is_dtensor(parameter):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        size, start = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        return tuple(start), tuple(size)
    start = (0,) * parameter.ndim
    if holds_part(parameter):
        start = (layer_of(parameter).first, *start[1:])
    elif tuple(parameter.shape) != tuple(shape):
        raise ValueError(f"a weight of {list(shape)} became one of {list(parameter.shape)}")
    return start, tuple(parameter.shape)


def _home(parameter: Tensor) -> torch.device:
    return torch.device(parameter.device_mesh.device_type if is_dtensor(parameter) else "cpu")


def _set_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Gives a meta parameter memory; it stays the same object, with its attributes."""
    if is_dtensor(parameter):
        from torch.distributed.tensor import DTensor

        values = DTensor.from_local(
            values,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    filled = nn.Parameter(values, parameter.requires_grad)
    for name, attribute in vars(parameter).items():
        if name != MARK:
            vars(filled).setdefault(name, attribute)
    # Setting ``data`` fails: a meta tensor is of another kind.
    torch.utils.swap_tensors(parameter, filled)
