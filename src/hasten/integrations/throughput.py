"""``benchmark``: how many samples per second a model trains, from a loop over the user's loader."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.errors import InputError, require_whole
from hasten.integrations.given_loader import examples_in, split_batch
from hasten.measure.statistics import spread
from hasten.parts.comm.groups import gathered_objects
from hasten.parts.data.prefetch import each_tensor
from hasten.parts.distributed.pipeline.model import usual_loss

WARMUP_STEPS = 2  # the first steps allocate and compile
BLOCKS = 10  # of steps, whose speeds tell how sure the result is


def benchmark(
    model: nn.Module,
    loader: Iterable[Any],
    epochs: int = 1,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
) -> float:
    """Samples per second of training steps, data loading included; printed with its interval.

    A copy of model and optimizer is trained. Two steps on the first batch warm up. The random
    state is put back. Ranks of a process group measure together; the result is their sum.

    Args:
        model: copied on the device it is on.
        loader: gives (inputs, target) pairs, or dictionaries with ``labels``.
        loss_fn: ``loss_fn(output, target)``; the model's own where its output has a ``loss``, else
            cross-entropy for a target of whole numbers and the mean squared error for others.
        optimizer: over the model's parameters; AdamW if left out.

    Raises:
        InputError: the loader is empty.
        ValueError: a target has no usual loss, so that ``loss_fn`` is needed.
    """
    require_whole(epochs=epochs)
    if epochs < 1:
        raise InputError(f"epochs is {epochs}; give 1 at least")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    samples, seconds = [], []
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        first = next(iter(loader), None)
        if first is None:
            raise InputError("the loader gave no batch")
        trained, chosen = copy.deepcopy((model, optimizer))
        chosen = chosen or torch.optim.AdamW(p for p in trained.parameters() if p.requires_grad)
        trained.train().zero_grad()
        began = time.perf_counter()
        passes = itertools.chain.from_iterable(itertools.repeat(loader, epochs))
        for number, batch in enumerate(itertools.chain([first] * WARMUP_STEPS, passes)):
            loss_of(trained, moved(batch, device), loss_fn).backward()
            chosen.step()
            chosen.zero_grad()
            if device.type != "cpu":  # a step ends when the device has done its work
                torch.accelerator.synchronize(device)
            if number >= WARMUP_STEPS:
                samples.append(examples_in(batch))
                seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
    if not samples:
        raise InputError("the loader gave batches once and none in a second pass; give a list")
    # The rate of all ranks, printed by the first.
    size = max(len(samples) // BLOCKS, 1)
    starts = range(0, len(samples) - size + 1, size)
    blocks = [sum(samples[i : i + size]) / sum(seconds[i : i + size]) for i in starts]
    ranks = gathered_objects((sum(samples) / sum(seconds), blocks))
    rate = float(sum(one for one, _ in ranks))
    interval = spread([float(sum(block)) for block in zip(*(b for _, b in ranks), strict=False)])
    low, high = min(interval.low, rate), max(interval.high, rate)
    doubt = f" (95 %: {low:.2f} to {high:.2f})"
    if interval.rounds < 2:
        doubt = " (one step: nothing is known of its spread)"
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        among = f" on {len(ranks)} ranks" if len(ranks) > 1 else ""
        print(f"throughput: {rate:.2f} samples/sec{among}{doubt}")
    return rate


def loss_of(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """The mean loss of a batch on the model's device."""
    inputs, named, target = split_batch(batch)
    if loss_fn is None and named:
        loss = getattr(model(*inputs, **named, labels=target), "loss", None)
        if not isinstance(loss, Tensor):
            raise InputError("the model returns no loss for a batch with labels; give loss_fn=")
        return loss
    output = model(*inputs, **named)
    return (loss_fn or usual_loss(target)[0])(output, target)


def moved(batch: Any, device: torch.device) -> Any:
    return each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))
