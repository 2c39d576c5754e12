"""Sessions: a session is a run that has been built, and ``assemble`` builds it.

Only ``assemble`` contains the order of construction that PyTorch requires:

    build (a skeleton, if LAYOUT sends weights) -> ADAPTER, ROUTING
    -> EXPERTS, ATTENTION, LAYERS, LOSS, OBJECTIVE
    -> LAYOUT.apply_pipeline, .apply_tensor_parallel -> ACTIVATION_CHECKPOINTING -> COMPILE
    -> PRECISION -> device -> LAYOUT.apply_data_parallel with COMMUNICATION
    -> OPTIMIZER over the parameters as they are now -> engine -> batches

- Adapters come before anything that replaces modules. Otherwise the replacements would
  not be adapted.
- Precision comes before replication. Otherwise replicas would reduce in the wrong
  format.
- The optimizer comes last, because every earlier line may exchange parameters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from hasten.core.setup import Setup
from hasten.core.step import Engine, EngineParts, PlainEngine
from hasten.core.timing import Meter
from hasten.errors import InputError, as_input_error


@dataclass
class Progress:
    """How far a run is; what a checkpoint needs to find its place in the data."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    tokens: int = 0
    positions: int = 0
    micro_batches: int = 0  # passes on this rank
    trained_tokens: int = 0
    examples: int = 0


SUMMED = ("tokens", "positions", "trained_tokens", "examples")  # of progress, over all ranks


@dataclass
class Session:
    """A run's live objects.

    ``model`` is what gets saved, ``loss_module`` maps a micro-batch to (sum, count), ``module`` is
    that as the layout wrapped it.
    """

    setup: Setup
    model: nn.Module
    loss_module: nn.Module
    module: nn.Module
    optimizer: Optimizer
    engine: Engine
    startup_seconds: dict[str, float]
    progress: Progress = field(default_factory=Progress)
    stop_requested: bool = False
    stop_reason: str = "interrupted"  # of such a request, for the run's summary
    preempted: bool = False  # this machine goes away: what can wait is left out
    is_trained: bool = False  # no further step follows
    meter: Meter = field(default_factory=Meter)
    changes: list[str] = field(default_factory=list)  # since the checkpoint that it goes on from

    @property
    def has_checkpoints(self) -> bool:
        """Returns True if CHECKPOINT may write."""
        return self.setup.checkpoint is not None

    def resume(self, path: Path | None = None) -> Path | None:
        """Resumes from the newest saved state, or from that of ``path``; its path, or None.

        Raises:
            InputError: the state can't be read, or is of another run.
        """
        if self.setup.checkpoint is not None:
            return self.setup.checkpoint.resume(self, path)
        if path is not None:
            raise InputError(
                f"resume: {path} needs checkpoints in the plan, or checkpoint_every, to be read"
            )
        return None

    def synchronize(self) -> None:
        """Weights and progress of all ranks are the same after it; every rank calls it."""
        if not self.setup.rank_sync.diverged:
            return
        self.setup.rank_sync.synchronize()
        # Each rank has counted its own work times the number of ranks: the mean is the truth.
        counts = torch.tensor([getattr(self.progress, n) for n in SUMMED], dtype=torch.float64)
        for name, total in zip(
            SUMMED, self.setup.layout.all_reduce_data(counts).tolist(), strict=True
        ):
            setattr(self.progress, name, round(total / self.setup.layout.data_size))

    def finish(self) -> nn.Module:
        """End of training: the model with its true weights, ready to be saved."""
        self.synchronize()
        self.setup.precision.finish(self.loss_module)
        return self.model

    def versions(self) -> Iterator[str]:
        """After ``finish``: what AVERAGE has to save, weights in place while each name is out."""
        if self.setup.average is None:
            return iter([""])
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self.setup.average.versions(weights)


def assemble(setup: Setup) -> Session:
    """Build the run that a setup describes."""
    job, layout = setup.job, setup.layout
    if setup.adapter is None or setup.loss is None or setup.optimizer is None:
        raise InputError("a setup comes from hasten.core.setup.prepare(job, plan, facts)")
    setup.allocator()
    torch.manual_seed(job.seed)
    began = time.perf_counter()
    # Where this rank is sent its weights later, the same modules without any.
    model = job.build_model() if layout.builds or job.skeleton is None else job.skeleton()
    model = setup.adapter(model)
    built = time.perf_counter()
    if setup.routing is not None:
        setup.routing.prepare(model)
    for edit in (setup.experts, setup.attention, setup.layers):
        edit(model)
    loss_module = setup.loss(model)
    setup.objective(loss_module)
    loss_module = layout.apply_tensor_parallel(layout.apply_pipeline(loss_module))
    setup.recompute(loss_module)
    setup.compile(loss_module)
    setup.precision.prepare(loss_module)
    loss_module = layout.to_device(loss_module, torch.device(job.device))
    module = layout.apply_data_parallel(loss_module.train(), setup.communication)
    optimizer = setup.optimizer((n, p) for n, p in module.named_parameters() if p.requires_grad)
    with as_input_error("plan"):
        setup.precision.attach_optimizer(optimizer)
    engine = (setup.engine or PlainEngine)(EngineParts(setup, module, optimizer))
    seconds = {"model": built - began, "assembly": time.perf_counter() - built}
    # Ranks share the weights' seed. Dropout must differ between ranks with different examples or
    # layers, and be equal on ranks with pieces of the same layers.
    torch.manual_seed(job.seed + 1 + layout.data_rank + layout.stage * layout.data_size)
    return Session(setup, model, loss_module, module, optimizer, engine, seconds)
