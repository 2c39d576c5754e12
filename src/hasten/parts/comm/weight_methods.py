"""Methods that need the model and its updates, not a gradient: diloco and stream.

    compressor = GradientCompressor(sparsity_method="diloco")
    compressor.attach(model)       # the module itself; no DistributedDataParallel
    # the usual loop, as if there were one rank
    compressor.synchronize()       # before saving or evaluating: one model

diloco and stream send weights instead of gradients (:mod:`hasten.parts.comm.local_sgd`,
:mod:`hasten.parts.comm.streaming_local_sgd`). Both need a signal when weights have
moved. torch calls them after each step of the optimizer that has the model's first
weight. If that never happens, a warning is printed.

All ranks must take the same steps. If a step may be left out on one rank (a GradScaler
of its own), use the part itself. Then call its ``after_step`` in every step.
"""

from __future__ import annotations

import datetime
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from hasten.parts.comm.codecs import codec
from hasten.parts.comm.compression_settings import CompressionSettings
from hasten.parts.comm.local_sgd import LocalSteps, LocalTraining, same_start
from hasten.parts.comm.streaming_local_sgd import Stream

PATIENCE = 100  # gradients without an update after which a warning is printed


def start_method(
    model: nn.Module,
    settings: CompressionSettings,
    seconds: float,
) -> LocalTraining:
    """Returns the object that runs the method on this model, called after each update.

    Raises:
        ValueError: the method needs another kind of module.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"{settings.method} sends weights instead of gradients: attach the module "
            "itself; DistributedDataParallel would average gradients as well"
        )
    if dist.is_available() and dist.is_initialized():
        same_start(model)
    limit = datetime.timedelta(seconds=seconds)
    part: LocalTraining
    if settings.method == "diloco":
        part = LocalSteps(trained, settings.every, codec=codec("int4"), timeout=limit)
    else:
        part = Stream(trained, timeout=limit)
    after_updates(trained[0], part.after_step)
    return part


def after_updates(weight: torch.Tensor, action: Callable[[], object]) -> None:
    """Calls a method after each step of this weight's optimizer, while its owner lives.

    torch's hook is for all optimizers of the process. So it checks which optimizer made the
    step, and is removed with the owner. It warns if gradients arrive but no step is detected.
    """
    method, wanted, silence = weakref.WeakMethod(action), weakref.ref(weight), MissingUpdates()

    def updated(optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
        callback, live_weight = method(), wanted()
        if callback is None or live_weight is None:
            return
        if any(p is live_weight for group in optimizer.param_groups for p in group["params"]):
            silence.over = True
            callback()

    owner: Any = action
    # Not removed inside the hook, because torch iterates over all hooks then.
    for hook in (
        register_optimizer_step_post_hook(updated),
        weight.register_post_accumulate_grad_hook(silence),
    ):
        weakref.finalize(owner.__self__, hook.remove)


class MissingUpdates:
    """Counts gradients that came before the first update; warns once if too many."""

    def __init__(self) -> None:
        self.over = False
        self._gradients = 0

    def __call__(self, weight: torch.Tensor) -> None:
        self._gradients += not self.over
        if self._gradients == PATIENCE and not self.over:
            self.over = True
            warnings.warn(
                f"after {PATIENCE} gradients, no torch optimizer with the model's first trained "
                "weight has made a step: nothing is exchanged, and ranks drift apart. If the "
                "optimizer is of another kind, or has copies of the weights, use "
                "hasten.parts.comm.local_sgd.LocalSteps or "
                "hasten.parts.comm.streaming_local_sgd.Stream, and call after_step() after each "
                "update",
                stacklevel=2,
            )
