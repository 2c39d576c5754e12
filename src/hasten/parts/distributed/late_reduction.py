"""Gradients of DistributedDataParallel, reduced when a rank says so and not during a backward pass.

DDP sends a bucket as soon as it is full, in the middle of the last backward pass. A rank that fails
there has sent buckets that the others wait to see completed, and can't begin the step again. Here
passes run on the wrapped module itself, where DDP doesn't listen; any of them may fail and be
repeated without another rank noticing. Then every rank calls ``reduce_now``:

    ddp.module(batch).sum().backward()  # as often as needed; ddp.module, not ddp
    reduce_now(ddp)

The same buckets travel by the same communication hook, but no longer beside a backward pass: what
it costs is the overlap. A rank that repeats a pass lets the others wait in ``reduce_now``, as long
as the process group's timeout allows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def reduce_now(module: DistributedDataParallel) -> None:
    """Average the gradients that are there over all ranks; a missing one counts as zero.

    Buffers become those of rank 0, as DDP does before a forward pass.
    """
    parameters = [p for p in module.module.parameters() if p.requires_grad]
    # What DDP.forward does around the module (torch 2.13): new buckets, buffers, "gradients come".
    module._pre_forward()
    module._post_forward(None)
    # DDP listens where a gradient is accumulated: adding zero makes it take what is there.
    torch.autograd.backward(parameters, [_zeros_like(p) for p in parameters])


def _zeros_like(parameter: Tensor) -> Tensor:
    """Zeros of a shape that take the memory of one."""
    return parameter.detach().new_zeros(()).expand_as(parameter)
