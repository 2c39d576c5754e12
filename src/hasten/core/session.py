"""Sessions: a session is a run that has been built by ``assemble``.

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
    """How far a run is: all that a checkpoint needs to continue at the same example."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    tokens: int = 0
    positions: int = 0
    micro_batches: int = 0  # number of passes on this rank
    trained_tokens: int = 0
    examples: int = 0


SUMMED = ("tokens", "positions", "trained_tokens", "examples")  # sum of progress over all ranks


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
    stop_reason: str = "interrupted"  # reason of a requested stop, for the run's summary
    preempted: bool = False  # the machine shuts down: evaluation and samples are left out
    is_trained: bool = False  # True after the last step
    meter: Meter = field(default_factory=Meter)
    changes: list[str] = field(default_factory=list)  # permitted ones since its checkpoint

    @property
    def has_checkpoints(self) -> bool:
        """Returns True if the run can write checkpoints."""
        return self.setup.checkpoint is not None

    def resume(self, path: Path | None = None) -> Path | None:
        """Resumes from the newest saved state, or from ``path``; returns its path, or None.

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
        """Makes weights and progress equal on all ranks; every rank calls it."""
        if not self.setup.rank_sync.diverged:
            return
        self.setup.rank_sync.synchronize()
        # Each rank multiplied its own work by the number of ranks, so the mean is the total.
        counts = torch.tensor([getattr(self.progress, n) for n in SUMMED], dtype=torch.float64)
        for name, total in zip(
            SUMMED, self.setup.layout.all_reduce_data(counts).tolist(), strict=True
        ):
            setattr(self.progress, name, round(total / self.setup.layout.data_size))

    def finish(self) -> nn.Module:
        """Ends the training: the model gets its true weights, ready to be saved."""
        self.synchronize()
        self.setup.precision.finish(self.loss_module)
        return self.model

    def versions(self) -> Iterator[str]:
        """After ``finish``: yields each version that AVERAGE saves, with its weights in place."""
        if self.setup.average is None:
            return iter([""])
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self.setup.average.versions(weights)


def assemble(setup: Setup) -> Session:
    """Builds the run that a setup describes."""
    job, layout = setup.job, setup.layout
    if setup.adapter is None or setup.loss is None or setup.optimizer is None:
        raise InputError("a setup comes from hasten.core.setup.prepare(job, plan, facts)")
    setup.threads()
    setup.allocator()
    torch.manual_seed(job.seed)
    began = time.perf_counter()
    # If weights are sent to this rank later, it builds the same modules without memory.
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
