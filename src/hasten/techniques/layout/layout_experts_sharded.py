"""The layout behind hybrid's shared experts beside shards: experts on ranks, the rest in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hasten.core.contracts import Dense, Wire
from hasten.core.layout import gradients_of, total_norm
from hasten.core.setup import Setup
from hasten.errors import InputError
from hasten.parts.distributed.expert_parallel import (
    ExpertGradients,
    SharedExperts,
    expert_groups,
    holds_part,
    share_experts,
)
from hasten.parts.distributed.fsdp import send_gradients, shard_rest
from hasten.parts.distributed.local_shards import LocalShards, whole_on_first
from hasten.parts.distributed.mesh import MeshSizes, data_mesh
from hasten.parts.optim.master_weights import MasterWeights
from hasten.techniques.layout import layout_dealt, layout_experts


class SharedAndSharded:
    """Experts on ``ranks`` neighbours each; of the rest every rank keeps a piece."""

    whole = False
    pieces = True

    def __init__(
        self, setup: Setup, sizes: MeshSizes, ranks: int, reshard: bool, whole_gradients: bool
    ) -> None:
        world = setup.facts.world
        layout_experts.refuse_own_choices(setup)
        try:
            sizes.check(world.size)
        except ValueError as error:
            raise InputError(f"hybrid: {error}; change the sizes, or nproc") from error
        if isinstance(setup.precision, MasterWeights):
            raise InputError(
                "hybrid: bf16_master_weights lets FSDP2 cast weights, and experts beside shards "
                "aren't its own; take autocast, or ep beside dp alone"
            )
        self.sizes, self.size = sizes, world.size
        self.data_size = self.averages = world.size
        self.data_rank = world.rank
        self.weights = LocalShards(setup.precision)
        setup.precision = self.weights
        self.shared: SharedExperts | None = None
        self._ranks, self._reshard, self._whole_gradients = ranks, reshard, whole_gradients
        self._device, self._module = setup.job.device, nn.Module()
        self._replicas: Any = None
        self._gradients: ExpertGradients | None = None

    @cached_property
    def mesh(self) -> DeviceMesh:
        return self.sizes.build(torch.device(self._device).type)

    def split(self, module: nn.Module) -> nn.Module:
        return module

    def within(self, module: nn.Module) -> nn.Module:
        try:
            group, self._replicas = expert_groups(self._ranks, self._device)
            self.shared = share_experts(module, group)
        except ValueError as error:
            raise InputError(f"hybrid: {error}") from error
        return module

    def across(self, module: nn.Module, wire: Wire) -> nn.Module:
        if not isinstance(wire, Dense):
            raise InputError(
                "plan: experts beside shards move their gradients in torch's own reduce-scatter, "
                "which no wire enters here; leave the wire's technique out, or give ep beside dp"
            )
        self._module, shared = module, self._held()
        self.place(module)  # copies are made alike next, by what carries the device's memory
        self._gradients = ExpertGradients(shared.parameters(), self._replicas, self.averages)
        shard_rest(module, shared, data_mesh(self.mesh), self._reshard)
        return module

    def place(self, module: nn.Module) -> None:
        """Shards are on the device already; experts, which FSDP2 leaves alone, go there."""
        for weight in self._held().parameters():
            weight.data = weight.data.to(self._device)

    @contextmanager
    def sync(self, module: nn.Module, last: bool) -> Iterator[None]:
        assert self._gradients is not None  # across() has made it
        send_gradients(module, last or not self._whole_gradients)
        self._gradients.reduces = last
        try:
            yield
        finally:
            self._gradients.reduces = True

    def sum(self, values: Tensor) -> Tensor:
        moved = values.to(self._device, copy=True)
        dist.all_reduce(moved)
        return moved.cpu()

    def everywhere(self, values: Tensor) -> Tensor:
        return self.sum(values)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Each piece once, and each expert once: its copies have the same gradient."""
        rest = [p for p in parameters if not holds_part(p)]
        found = self.weights.norm(rest, self.size, self.everywhere)
        parts = gradients_of([p for p in parameters if holds_part(p)])
        if not parts:
            return found
        square = total_norm(parts).double().square()
        dist.all_reduce(square, group=self._held().group)
        return (square + found.double().square()).sqrt().to(found.dtype)

    @contextmanager
    def gather(self, model: nn.Module) -> Iterator[bool]:
        with (
            self._held().gathered() as first,
            whole_on_first(self._module, model, first) as whole,
        ):
            yield whole

    def whole_of(self, weight: Tensor, value: Tensor) -> Tensor:
        if holds_part(weight):
            return layout_experts.whole_of(weight, value)
        return layout_dealt.whole_of("hybrid", self.weights, weight, value, not self.data_rank)

    def part_of(self, weight: Tensor, whole: Tensor) -> Tensor:
        if holds_part(weight):
            return layout_experts.part_of(weight, whole)
        return layout_dealt.part_of(self.weights, weight, whole)

    def _held(self) -> SharedExperts:
        assert self.shared is not None  # within() comes first
        return self.shared
