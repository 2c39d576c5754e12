"""Buffers of DistributedDataParallel that never change, left out of what it sends in every step.

DDP broadcasts all buffers of rank 0 before a forward pass, since running means learn apart on each
rank. In a language model they hardly ever do: tables of rotary angles are computed anew by each
rank, and a quantised base is frozen, but is as large as the model. Construction made all ranks
alike once; what can't change stays so.

    ddp = DistributedDataParallel(model)
    leave_constants(ddp)

The switch is DDP's ``broadcast_buffers``, set after construction so that torch before 2.13, which
has no ``forward_sync_buffers``, makes the ranks alike too.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hasten.parts.nn.quantised_linear import QuantisedLinear


def leave_constants(module: DistributedDataParallel) -> None:
    """Broadcast buffers in each step only where one of them may learn."""
    module.broadcast_buffers = may_learn(module.module)


def may_learn(module: nn.Module) -> bool:
    """Whether a buffer belongs to the model's state and to no frozen, quantised layer."""
    return any(
        buffer is not None and name not in part._non_persistent_buffers_set
        for part in module.modules()
        if not isinstance(part, QuantisedLinear)
        for name, buffer in part._buffers.items()
    )
