"""Memory by owner: whose bytes they are, counted from tensors in one pass outside the training.

    weights       parameters and buffers of the model as they are in memory
    gradients     what a backward pass leaves, before it is forgotten
    optimizer     the optimizer's state, and true weights that it keeps beside the model's
    activations   what forward keeps for backward, vocabulary-wide tensors left out
    logits        the largest vocabulary-wide tensor that existed
    other         the run's peak less all of these: temporary tensors, communication buffers,
                  fragments; on a processor also Python, its libraries, and the data

Each storage counts once, however many tensors look at it, and of a sharded tensor the part that
lies here. The pass runs the largest micro-batch of the epoch's first step; its gradients are
forgotten and no weight moves. Other steps may be larger: compare ``other`` only within one job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from hasten.core.job import MicroBatch
from hasten.core.session import Session, step_outside
from hasten.core.setup import leave
from hasten.core.timing import Unclocked
from hasten.machine import host

OWNERS = ("weights", "gradients", "optimizer", "activations", "logits", "other")
Storages = dict[int, int]  # address -> bytes


def memory_of(session: Session) -> dict[str, int | None]:
    """Bytes of each owner on this rank; None where nobody can tell. All ranks call it together."""
    setup = session.setup
    peak = host.memory_peak(setup.job.device)  # before the pass below
    weights = storages([*session.module.parameters(), *session.module.buffers()])
    masters = storages(setup.precision.parameters())
    state = masters | storages(_tensors(list(session.optimizer.state.values())))
    found: dict[str, int | None] = dict.fromkeys(OWNERS)
    found["weights"] = sum(weights.values())
    found["optimizer"] = sum(_without(state, weights).values())
    micro_batches = step_outside(session)
    if micro_batches is None:
        return found
    largest = max(micro_batches, key=lambda m: m.counts.slots)
    try:
        found |= _one_pass(session, largest, weights)
    except (RuntimeError, MemoryError):
        # Too large, or an operator that can't be watched: what was measured before stays good. On
        # several ranks the others wait in this pass, so there the run has to end.
        if setup.layout.size > 1:
            raise
        return found
    known = [found[owner] or 0 for owner in OWNERS]
    found["other"] = peak - sum(known) if peak >= sum(known) else None
    return found


def storages(tensors: Iterable[Tensor]) -> Storages:
    """The memory behind tensors, each piece once."""
    found = {}
    for tensor in tensors:
        for piece in _local(tensor):
            storage = piece.untyped_storage()
            if storage.data_ptr():  # nothing lies behind a tensor without memory
                found[storage.data_ptr()] = storage.nbytes()
    return found


def _one_pass(session: Session, micro_batch: MicroBatch, weights: Storages) -> dict[str, int]:
    """Forward and backward under watch; the gradients are counted and forgotten."""
    setup = session.setup
    device, clock = torch.device(setup.job.device), setup.clock
    gpus = [] if device.type == "cpu" else [device.index or 0]
    watch = SavedTensors(setup.facts.model.vocabulary)
    wide = WidestTensor(setup.facts.model.vocabulary, weights)
    # Compiled code doesn't run under a mode: the pass would measure another program.
    watched = setup.compile is leave and setup.facts.model.vocabulary > 0
    setup.clock = Unclocked()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(gpus, device_type=device.type))
            stack.enter_context(watch.watching())
            if watched:
                stack.enter_context(wide)
            session.engine.gradients((micro_batch,), max(micro_batch.counts.trained_tokens, 1))
        owners = [*session.module.parameters(), *setup.precision.parameters()]
        gradients = storages([p.grad for p in owners if p.grad is not None])
    finally:
        session.engine.discard()
        setup.clock = clock
    found = {
        "gradients": sum(_without(gradients, weights).values()),
        "activations": sum(_without(watch.kept, weights).values()),
    }
    return {**found, "logits": wide.bytes} if watched else found


class SavedTensors:
    """Storages that autograd keeps while it is watched; those as wide as the vocabulary apart."""

    def __init__(self, vocabulary: int = 0) -> None:
        self.kept: Storages = {}
        self._vocabulary = vocabulary

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        if not (self._vocabulary and _is_wide(tensor, self._vocabulary)):
            self.kept |= storages([tensor])
        return tensor.detach()  # an output that held itself would never be freed


class WidestTensor(TorchDispatchMode):
    """The largest result of any operator whose rows are as long as the vocabulary, in bytes."""

    def __init__(self, vocabulary: int, weights: Storages) -> None:
        super().__init__()
        self.bytes = 0
        self._vocabulary, self._weights = vocabulary, weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _is_wide(leaf, self._vocabulary):
                behind = storages([leaf])
                if not behind.keys() & self._weights.keys():
                    self.bytes = max(self.bytes, sum(behind.values()))
        return out


def _is_wide(tensor: Tensor, vocabulary: int) -> bool:
    """Rows of scores; a head's transposed weight or gradient has them in its columns' place."""
    return tensor.dim() > 1 and int(tensor.shape[-1]) == vocabulary and tensor.is_contiguous()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _local(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a sharded or quantised one is made of, as far as they lie here."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a mesh of ranks may be named among them
                yield from _local(inner)
    else:
        yield tensor


def _without(found: Storages, others: Storages) -> Storages:
    return {address: size for address, size in found.items() if address not in others}
