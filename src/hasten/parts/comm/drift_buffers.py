"""A module's buffers while ranks train apart, and the start that all have in common."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from hasten.parts.comm.drift import Drift


class Buffers:
    """What a module's passes change beside its weights (running sums, routers' biases).

    ``average`` makes those that have changed on some rank their mean, taken in float64, so that
    equal ones keep their bits.
    """

    def __init__(self, module: nn.Module, drift: Drift) -> None:
        self._module, self._drift = module, drift
        self._seen = self._sums()

    @torch.no_grad()
    def average(self) -> None:
        """Every rank calls it between the same two steps."""
        drift, named, now = self._drift, dict(self._module.named_buffers()), self._sums()
        if drift.size == 1 or not named:
            return
        changed = torch.tensor([float(now[n] != self._seen.get(n)) for n in named])
        changed = changed.to(drift.anchor.device)
        drift.travel(dist.all_reduce, changed)
        for buffer, anywhere in zip(named.values(), changed.tolist(), strict=True):
            if anywhere:
                mean = buffer.double()
                drift.travel(dist.all_reduce, mean)
                mean /= drift.size
                buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        self._seen = self._sums()

    def _sums(self) -> dict[str, float]:
        """What shows a change; batch_norm doesn't count its writes in the tensors' versions."""
        return {n: b.sum(dtype=torch.float64).item() for n, b in self._module.named_buffers()}


@torch.no_grad()
def same_start(module: nn.Module) -> None:
    """Weights and buffers become those of rank 0, as DistributedDataParallel does at its start."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), 0)
