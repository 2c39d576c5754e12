"""DistributedDataParallel without constant buffers, with late reduction and timing.

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

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hasten.parts.nn.quantised import QuantisedLinear


def leave_constants(module: DistributedDataParallel) -> None:
    """Broadcast buffers in each step only where one of them may learn."""
    module.broadcast_buffers = may_learn(module.module)


def may_learn(module: nn.Module) -> bool:
    """Returns True if a buffer is in the model's state, but in no frozen quantised layer."""
    return any(
        buffer is not None and name not in part._non_persistent_buffers_set
        for part in module.modules()
        if not isinstance(part, QuantisedLinear)
        for name, buffer in part._buffers.items()
    )


# Gradients of DistributedDataParallel, reduced when a rank says so and not during a backward pass.
#
# DDP sends a bucket as soon as it is full, in the middle of the last backward pass. A rank that
# fails there has sent buckets that the others wait to see completed, and can't begin the step
# again. Here passes run on the wrapped module itself, where DDP doesn't listen; any of them may
# fail and be repeated without another rank noticing. Then every rank calls ``reduce_now``:
#
#     ddp.module(batch).sum().backward()  # as often as needed; ddp.module, not ddp
#     reduce_now(ddp)
#
# The same buckets travel by the same communication hook, but no longer beside a backward pass: what
# it costs is the overlap. A rank that repeats a pass lets the others wait in ``reduce_now``, as
# long as the process group's timeout allows.


def reduce_now(module: DistributedDataParallel) -> None:
    """Average the gradients that are there over all ranks; a missing one counts as zero.

    Buffers become those of rank 0, as DDP does before a forward pass.
    """
    parameters = [p for p in module.module.parameters() if p.requires_grad]
    # What DDP.forward does around the module (torch 2.13): new buckets, buffers, "gradients come".
    module._pre_forward()
    module._post_forward(None)
    # DDP listens where a gradient is accumulated: adding zero makes it take what is there. A zero
    # takes the memory of one number.
    zeros = [p.detach().new_zeros(()).expand_as(p) for p in parameters]
    torch.autograd.backward(parameters, zeros)


# How long DistributedDataParallel's gradients were under way in a step, and how much of it showed.
#
#     first bucket leaves                last gradient computed        last mean is back
#             |------------- hidden --------------|------- exposed -----------|
#
# DDP keeps these three moments itself, for its log of every hundredth step. Asked at once after a
# backward pass, for every step, its logger computes the figures of that very pass. They hold for
# any communication hook, decoding included; while ranks wait for a slower one, that shows as well.
# On an accelerator the logger would wait for its stream, so nothing is asked there.
#
# The logger has no public name (torch 2.13): where it isn't found, nothing is known.

NANO = 1e-9
UNDER_WAY, HIDDEN = "backward_comm_time", "backward_compute_comm_overlap_time"


@dataclass(frozen=True)
class GradientSeconds:
    """Seconds of a step's gradients: in parallel with the computation, and after it."""

    hidden: float
    exposed: float


def watch_reducer(module: DistributedDataParallel) -> bool:
    """Ask for figures of every step; whether there will be any. Before the first step."""
    if any(not p.is_cpu for p in module.parameters()):
        return False
    ask = getattr(module, "_set_ddp_runtime_logging_sample_rate", None)
    logger = getattr(module, "logger", None)
    if ask is None or not hasattr(logger, "set_runtime_stats_and_log"):
        return False
    if not hasattr(logger, "_get_ddp_logging_data"):
        return False
    ask(1)
    return True


def under_way(module: DistributedDataParallel) -> GradientSeconds | None:
    """Returns the times of the last backward pass with an exchange, after ``watch_reducer``."""
    logger: Any = module.logger
    logger.set_runtime_stats_and_log()
    stats = logger._get_ddp_logging_data().ints_map
    if UNDER_WAY not in stats or HIDDEN not in stats:
        return None
    total_seconds, hidden = NANO * stats[UNDER_WAY], NANO * stats[HIDDEN]
    return GradientSeconds(hidden=hidden, exposed=max(0.0, total_seconds - hidden))


def ring_bytes(module: DistributedDataParallel) -> int:
    """Bytes that a rank sends in a step with uncompressed gradients summed in a ring."""
    world: int = dist.get_world_size(module.process_group)
    trained = [p for p in module.parameters() if p.requires_grad]
    size: int = sum(p.numel() * p.element_size() for p in trained)
    return 2 * size * (world - 1) // world
