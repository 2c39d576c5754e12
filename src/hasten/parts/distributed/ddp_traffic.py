"""How long DistributedDataParallel's gradients were under way in a step, and how much of it showed.

    first bucket leaves                last gradient computed        last mean is back
            |------------- hidden --------------|------- exposed -----------|

DDP keeps these three moments itself, for its log of every hundredth step. Asked at once after a
backward pass, for every step, its logger computes the figures of that very pass. They hold for any
communication hook, decoding included; while ranks wait for a slower one, that shows as well. On an
accelerator the logger would wait for its stream, so nothing is asked there.

The logger has no public name (torch 2.13): where it isn't found, nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

NANO = 1e-9
UNDER_WAY, HIDDEN = "backward_comm_time", "backward_compute_comm_overlap_time"


@dataclass(frozen=True)
class UnderWay:
    """Seconds of a step's gradients: beside the computation, and after it."""

    hidden: float
    exposed: float


def watch(module: DistributedDataParallel) -> bool:
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


def under_way(module: DistributedDataParallel) -> UnderWay | None:
    """Of the backward pass that has just ended with an exchange; ``watch`` came before."""
    logger: Any = module.logger
    logger.set_runtime_stats_and_log()
    found = logger._get_ddp_logging_data().ints_map
    if UNDER_WAY not in found or HIDDEN not in found:
        return None
    whole, hidden = NANO * found[UNDER_WAY], NANO * found[HIDDEN]
    return UnderWay(hidden=hidden, exposed=max(0.0, whole - hidden))


def ring_bytes(module: DistributedDataParallel) -> int:
    """What a rank sends in a step where gradients are summed in a ring as they are."""
    world: int = dist.get_world_size(module.process_group)
    trained = [p for p in module.parameters() if p.requires_grad]
    size: int = sum(p.numel() * p.element_size() for p in trained)
    return 2 * size * (world - 1) // world
