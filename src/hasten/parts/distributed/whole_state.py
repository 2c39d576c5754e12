"""A state of pieces brought together, tensor by tensor, and dealt out again: for checkpoints.

What belongs to a ``DTensor`` parameter (the parameter itself, a moment of its piece) becomes one
plain tensor on the host of the first rank, the same that a single process would write. The other
way round each rank takes its piece of a whole tensor that all of them have read; nothing travels.
So neither knows of the other's mesh, and a run may go on with another number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def whole_of(value: Tensor, parameter: DTensor, first: bool) -> Tensor:
    """The whole of ``value``, a DTensor or the piece of one that is laid out like ``parameter``.

    Every rank of the mesh calls it; those that aren't ``first`` get an empty tensor, and no rank
    holds more than this one tensor beside its own.

    Raises:
        ValueError: the value isn't laid out like the parameter's piece.
    """
    mesh = parameter.device_mesh
    if not isinstance(value, DTensor):
        if value.shape != parameter.to_local().shape:
            raise ValueError(
                f"a state of {tuple(value.shape)} for a piece of "
                f"{tuple(parameter.to_local().shape)} can't be brought together"
            )
        value = DTensor.from_local(
            value,
            mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    full: Tensor = value.to(mesh.device_type).full_tensor()
    return full.cpu() if first else full.new_empty(0)


@torch.no_grad()
def part_of(whole: Tensor, parameter: DTensor) -> DTensor:
    """This rank's piece of a whole tensor of the parameter's shape, with its place."""
    mesh, home = parameter.device_mesh, parameter.to_local().device
    dealt: DTensor = distribute_tensor(
        whole.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
    )
    return dealt.to(home)
