"""DistributedDataParallel without constant buffers, with lasting buckets, late reduction, timing.

DDP broadcasts all buffers of rank 0 before a forward pass, because running means differ
between ranks. In a language model such buffers are rare. Each rank computes tables of
rotary angles itself. A quantised base is frozen, but is as large as the model.
Construction made all ranks equal once, and constants stay equal.

    ddp = DistributedDataParallel(model)
    leave_constants(ddp)

The option is DDP's ``broadcast_buffers``, set after construction. So torch before 2.13,
which has no ``forward_sync_buffers``, makes the ranks equal too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hasten.parts.nn.quantised import QuantisedLinear


def leave_constants(module: DistributedDataParallel) -> None:
    """Broadcasts buffers in each step only if one of them may change in training."""
    module.broadcast_buffers = may_learn(module.module)


def may_learn(module: nn.Module) -> bool:
    """Returns True if a buffer is in the model's state, but in no frozen quantised layer."""
    return any(
        buffer is not None and name not in part._non_persistent_buffers_set
        for part in module.modules()
        if not isinstance(part, QuantisedLinear)
        for name, buffer in part._buffers.items()
    )


# Buckets that are the same in the first step as in all later ones.
#
# DDP builds its buckets again after the first backward pass of a process, in the order in which the
# gradients were complete. On three or more ranks, a ring then adds the numbers of a weight in
# another order. A resumed process would have other bits in its first step than one that went on.
# Here that pass comes before all steps, without a model: each weight gets a zero, last ones first,
# which is about the order of a backward pass. It costs one exchange of a model's gradients.

ORDERED_FROM = 3  # ranks; the sum of two numbers has no order


def order_buckets(module: DistributedDataParallel) -> None:
    """Makes DDP build its final buckets before the first step; all its ranks call it."""
    builds_again = not module.find_unused_parameters
    if not builds_again or dist.get_world_size(module.process_group) < ORDERED_FROM:
        return
    parameters = _begin_pass(module)
    for parameter in reversed(parameters):
        parameter.backward(parameter.detach().new_zeros(()).expand_as(parameter))
    for parameter in parameters:
        parameter.grad = None


def _begin_pass(module: DistributedDataParallel) -> list[nn.Parameter]:
    """Does what DDP.forward does around the module (torch 2.13); returns its trained weights.

    These are: new buckets, buffers, "gradients come". On a GPU it needs an input that it can move.
    """
    names = module.parameters_to_ignore
    every = module.module.named_parameters()
    parameters = [p for name, p in every if p.requires_grad and name not in names]
    module._pre_forward(parameters[0].detach())
    module._post_forward(None)
    return parameters


# Gradients of DistributedDataParallel that are reduced on request, not during a backward pass.
#
# DDP sends a bucket as soon as it is full, in the middle of the last backward pass. If a rank fails
# there, the others wait for its buckets and it can't repeat the step. Here passes run on the
# wrapped module itself, without DDP's hooks. Any of them may fail and be repeated without notice by
# other ranks. Then every rank calls ``reduce_now``:
#
#     ddp.module(batch).sum().backward()  # as often as needed; ddp.module, not ddp
#     reduce_now(ddp)
#
# The same buckets are sent by the same communication hook, but not in parallel with a backward
# pass. If a rank repeats a pass, the others wait in ``reduce_now``, as long as the process group's
# timeout allows.


def reduce_now(module: DistributedDataParallel) -> None:
    """Averages the existing gradients over all ranks; a missing one counts as zero.

    Buffers become those of rank 0, as DDP does before a forward pass.
    """
    parameters = _begin_pass(module)
    # DDP's hook runs when a gradient is accumulated, so adding zero passes the existing one to it.
    # An expanded zero takes the memory of one number.
    zeros = [p.detach().new_zeros(()).expand_as(p) for p in parameters]
    torch.autograd.backward(parameters, zeros)


# Seconds of DistributedDataParallel's communication in a step, and the exposed part.
#
# - hidden: from the first sent bucket to the last computed gradient
# - exposed: from the last computed gradient to the last received mean
#
# DDP records these moments for its log of every hundredth step. If its logger is read after a
# backward pass, it computes the figures of that pass. They are valid for any communication hook,
# with decoding. Waiting for a slower rank counts too. On an accelerator the logger would wait for
# its stream, so it isn't read there.
#
# The logger has no public name (torch 2.13). If it isn't found, the figures are unknown.

NANO = 1e-9
UNDER_WAY, HIDDEN = "backward_comm_time", "backward_compute_comm_overlap_time"


class GradientSeconds(NamedTuple):
    """Seconds of a step's gradients: in parallel with the computation, and after it."""

    hidden: float
    exposed: float


def watch_reducer(module: DistributedDataParallel) -> bool:
    """Requests figures of every step, before the first step; returns True if there will be any."""
    logger = getattr(module, "logger", None)
    names = "set_runtime_stats_and_log", "_get_ddp_logging_data"
    on_host = all(p.is_cpu for p in module.parameters())
    if not (on_host and all(hasattr(logger, name) for name in names)):
        return False
    module._set_ddp_runtime_logging_sample_rate(1)
    return True


def under_way(module: DistributedDataParallel) -> GradientSeconds | None:
    """Returns the times of the last backward pass with an exchange, after ``watch_reducer``."""
    logger: Any = module.logger
    logger.set_runtime_stats_and_log()
    stats = logger._get_ddp_logging_data().ints_map
    if UNDER_WAY not in stats or HIDDEN not in stats:
        return None
    hidden = NANO * stats[HIDDEN]
    return GradientSeconds(hidden, exposed=max(0.0, NANO * stats[UNDER_WAY] - hidden))


def ring_bytes(module: DistributedDataParallel) -> int:
    """Bytes that a rank sends in a step with uncompressed gradients summed in a ring."""
    world: int = dist.get_world_size(module.process_group)
    size: int = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return 2 * size * (world - 1) // world
