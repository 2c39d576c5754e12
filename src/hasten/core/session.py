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

import torch

from hasten.core.health import StepChecks
from hasten.core.setup import EngineParts, Progress, Session, Setup
from hasten.core.step import PlainEngine
from hasten.errors import InputError, as_input_error

__all__ = ["Progress", "Session", "assemble"]


def assemble(setup: Setup) -> Session:
    """Builds the run that a setup describes."""
    job, layout = setup.job, setup.layout
    if setup.adapter is None or setup.loss is None or setup.optimizer is None:
        raise InputError("a setup comes from hasten.core.setup.prepare(job, plan, facts)")
    setup.step_checks = StepChecks()
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
    frozen = None
    if setup.checkpoint is not None:  # weights as they were loaded: later lines cut or cast them
        name = next(name for name, part in loss_module.named_modules() if part is model)
        frozen = setup.checkpoint.frozen(model, f"{name}." if name else "")
    loss_module = layout.apply_tensor_parallel(layout.apply_pipeline(loss_module))
    setup.recompute(loss_module)
    setup.compile(loss_module)
    setup.precision.prepare(loss_module)
    loss_module = layout.to_device(loss_module, torch.device(job.device))
    module = layout.apply_data_parallel(loss_module.train(), setup.communication)
    if frozen is not None:
        frozen.watch(loss_module.state_dict())
    optimizer = setup.optimizer((n, p) for n, p in module.named_parameters() if p.requires_grad)
    with as_input_error("plan"):
        setup.precision.attach_optimizer(optimizer)
    engine = (setup.engine or PlainEngine)(EngineParts(setup, module, optimizer))
    seconds = {"model": built - began, "assembly": time.perf_counter() - built}
    # Ranks share the weights' seed. Dropout must differ between ranks with different examples or
    # layers, and be equal on ranks with pieces of the same layers.
    torch.manual_seed(job.seed + 1 + layout.data_rank + layout.stage * layout.data_size)
    return Session(setup, model, loss_module, module, optimizer, engine, seconds, frozen)
