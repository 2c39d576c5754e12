"""LAYOUT: the experts of a layer are divided over ranks, all other weights are replicated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hasten.core.context import JobContext
from hasten.core.layout import Communication, NoCompression, total_norm
from hasten.core.setup import RankSync, Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.errors import InputError, as_input_error
from hasten.machine.environment import World
from hasten.models.memory import ADAMW_FLOAT32, routed_weights
from hasten.parts.comm.groups import MeshSizes, data_mesh
from hasten.parts.distributed.ddp import leave_constants, order_buckets
from hasten.parts.distributed.expert_parallel import (
    ADAPTED,
    ExpertGradients,
    SharedExperts,
    expert_groups,
    holds_part,
    layer_of,
    replicated,
    share_experts,
)
from hasten.parts.distributed.fsdp import Sharding, send_gradients, shard
from hasten.parts.distributed.local_shards import LocalShards, join_on_first
from hasten.parts.nn.recompute import BlockRecompute
from hasten.parts.optim.master_weights import MasterWeights
from hasten.techniques.experts import ARCHITECTURES
from hasten.techniques.layout.mesh import ShardedLayout, gathered
from hasten.techniques.layout.ranks import PartsLayout, no_torch_distributed


@dataclass(frozen=True)
class ExpertParallel(Technique):
    """Each rank holds a part of every layer's experts and receives their tokens.

    Ranks keep their own examples, and what isn't an expert is averaged as under ``ddp``.
    """

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    size: int = setting(0, "neighbouring ranks that share the experts out; 0: all ranks", least=0)
    bucket_cap_mb: int = knob(
        25, "size of a gradient bucket of the rest in MB", low=1, high=256, log=True, least=1
    )

    def apply(self, setup: Setup) -> None:
        if setup.context.world.size == 1:
            return
        refuse_own_choices(setup)
        world, ranks = setup.context.world, self._ranks(setup.context)
        setup.layout = ExpertsInDDP(world, ranks, self.bucket_cap_mb, setup.job.device)

    def _ranks(self, context: JobContext) -> int:
        return self.size or context.world.size

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        model, ranks, world = context.model, self._ranks(context), context.world.size
        if reasons := (
            model.why_not_of(ARCHITECTURES, needs_experts=True) or no_torch_distributed(context)
        ):
            return reasons
        if model.merged_weights:
            return (ADAPTED,)
        if world > 1 and world % ranks:
            return (
                f"{world} ranks can't form groups of {ranks}; give a size that divides {world}",
            )
        if model.experts % ranks:
            return (
                f"{model.experts} experts of a layer can't be shared evenly by {ranks} ranks; give "
                f"a size that divides {model.experts}",
            )
        return ()

    def forecast(self, context: JobContext) -> Forecast:
        return forecast(context, self._ranks(context))

    def check_effect(self, session: Session) -> EffectCheck:
        layout = session.setup.layout
        shared = layout.shared if isinstance(layout, ExpertsInDDP) else None
        return (
            EffectCheck(False, "every rank holds all experts") if shared is None else proof(shared)
        )


def routed(context: JobContext) -> float:
    """Returns the estimated number of weights in routed experts."""
    model = context.model
    if not model.experts:
        return 0.0
    sizes = model.hidden_size, model.layers, model.vocabulary
    return routed_weights(model.parameters, *sizes, model.tied_head)


def forecast(context: JobContext, ranks: int, shards: int = 1) -> Forecast:
    """Returns the forecast for experts on so many ranks, and the rest in so many shards."""
    if context.world.size == 1:
        return Forecast()
    experts = routed(context)
    other_weights = context.model.parameters - experts
    gone = ADAMW_FLOAT32 * (experts * (1 - 1 / ranks) + other_weights * (1 - 1 / shards))
    passing = gathered(context, experts) if shards > 1 else 0.0
    return Forecast(resident_bytes=-gone, passing_bytes=passing)


def proof(shared: SharedExperts, more: str = "") -> EffectCheck:
    """Returns a check with the experts per rank, and the rows sent to other ranks."""
    layers, sent = list(shared.layers.values()), shared.traffic
    gone = sent.rows / ((sent.rows + sent.local_rows) or 1)
    return EffectCheck(
        sent.rows > 0,
        f"{layers[0].here} of {layers[0].total} experts of each of {len(layers)} layers on a "
        f"rank; {sent.rows} rows ({gone:.0%}) went to other ranks, {sent.bytes / 1e6:.2f} MB "
        f"with what came back, in {sent.messages} exchanges{more}",
    )


class ExpertsLayout(PartsLayout):
    """Experts on groups of ``ranks`` neighbouring ranks; ``name`` is the technique."""

    def __init__(self, name: str, world: World, ranks: int, device: str) -> None:
        super().__init__(world)
        self.keeps = world.is_main
        self.shared: SharedExperts | None = None
        self._name, self._ranks, self._device = name, ranks, device
        self._replicas: Any = None  # group of the ranks with the same experts
        self._gradients: ExpertGradients | None = None

    def apply_tensor_parallel(self, module: nn.Module) -> nn.Module:
        self._expect(module)
        with as_input_error(self._name):
            group, self._replicas = expert_groups(self._ranks, self._device)
            self.shared = share_experts(module, group)
        self._fill(module, only=self._is_whole)
        return module

    def _is_whole(self, parameter: Tensor) -> bool:
        """Returns True if no later step splits a parameter."""
        return True

    def _shared_experts(self) -> SharedExperts:
        assert self.shared is not None  # apply_tensor_parallel() runs first
        return self.shared

    def placed(self, weight: Tensor, tensor: Tensor) -> Tensor:
        """Returns the tensor as a part of that with all experts, if the weight contains some."""
        if not holds_part(weight) or not tensor.ndim:  # an optimizer's step count is a number
            return tensor
        if tensor.shape != weight.shape:
            raise InputError(
                "expert_parallel: this optimizer's state has another shape than its weights, so "
                "the ranks' parts can't be joined; leave checkpoints out, or choose another "
                "optimizer"
            )
        from torch.distributed.tensor import DTensor, Replicate, Shard

        full = torch.empty(layer_of(weight).total, *tensor.shape[1:], device="meta")
        return DTensor.from_local(
            tensor.detach(),
            self.expert_mesh,
            (Replicate(), Shard(0)),
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """Returns the mesh of copies and experts, over the groups that exchange tokens."""
        shape = torch.arange(self.size).reshape(-1, self._ranks)
        groups = [self._replicas, self._shared_experts().group]
        kind = torch.device(self._device).type
        return DeviceMesh.from_group(groups, kind, shape, mesh_dim_names=("replicas", "experts"))

    def all_modules(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def full_like(self, weight: Tensor) -> Tensor:
        """Returns the full weight without memory, with all experts if the weight holds some."""
        rows = [layer_of(weight).total] if holds_part(weight) else weight.shape[:1]
        return torch.empty((*rows, *weight.shape[1:]), dtype=weight.dtype, device="meta")

    def gather_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if not holds_part(weight):
            return weight if self.data_rank else weight.detach().to("cpu", dtype)
        group = self._shared_experts().group
        if 0 not in dist.get_process_group_ranks(group):
            return weight  # a copy of what others send
        shape = layer_of(weight).total, *weight.shape[1:]
        return join_on_first(weight.detach().to(dtype), shape, 0, group)


class ExpertsInDDP(ExpertsLayout):
    """Experts on ranks, the rest in DistributedDataParallel over all."""

    def __init__(self, world: World, ranks: int, bucket_cap_mb: int, device: str) -> None:
        super().__init__("expert_parallel", world, ranks, device)
        self._bucket_cap_mb = bucket_cap_mb

    def apply_data_parallel(self, module: nn.Module, communication: Communication) -> nn.Module:
        if isinstance(communication, RankSync) and communication.diverged:
            raise InputError(
                "expert_parallel: tokens travel between ranks in every pass, so ranks can't train "
                "apart; choose a communication method that compresses gradients, or none"
            )
        shared = self._shared_experts()
        self._gradients = ExpertGradients(shared.parameters(), self._replicas, self.averages)
        gpu = None if self._device == "cpu" else [torch.device(self._device)]
        wrapped = replicated(module, shared, device_ids=gpu, bucket_cap_mb=self._bucket_cap_mb)
        leave_constants(wrapped)
        order_buckets(wrapped)
        communication.attach(wrapped)
        return wrapped

    @contextmanager
    def sync(self, module: nn.Module, last: bool) -> Iterator[None]:
        if last or self._gradients is None or not isinstance(module, DistributedDataParallel):
            yield
            return
        self._gradients.reduces = False
        try:
            with module.no_sync():
                yield
        finally:
            self._gradients.reduces = True

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Counts each expert once: its copies in other groups have the same gradient."""
        dense_norm = total_norm([p for p in parameters if not holds_part(p)])
        return norm_with_experts(dense_norm, parameters, self._shared_experts())


def norm_with_experts(
    dense_norm: Tensor, parameters: Sequence[Tensor], shared: SharedExperts
) -> Tensor:
    """Returns the full gradient's norm; ``dense_norm`` is that without experts, on all ranks."""
    parts = [p for p in parameters if holds_part(p) and p.grad is not None]
    if not parts:
        return dense_norm
    square = total_norm(parts).double().square()
    dist.all_reduce(square, group=shared.group)
    return (square + dense_norm.double().square()).sqrt().to(dense_norm.dtype)


def refuse_own_choices(setup: Setup) -> None:
    """Raises InputError if ranks would run separate passes, in which tokens can't be exchanged."""
    recompute = setup.recompute
    if isinstance(recompute, BlockRecompute) and recompute.budget is not None:
        raise InputError(
            "expert_parallel: recompute with a budget lets each rank choose its own blocks, and "
            "tokens travel in all of them; leave budget out"
        )


# The layout behind hybrid's shared experts with shards: experts on ranks, the rest in shards.


class ExpertsInFSDP(ExpertsLayout, ShardedLayout):
    """Experts on ranks; each rank holds a shard of all other weights."""

    def __init__(
        self, setup: Setup, sizes: MeshSizes, ranks: int, reshard: bool, whole_gradients: bool
    ) -> None:
        refuse_own_choices(setup)
        with as_input_error("hybrid", "; change the sizes, or nproc"):
            sizes.check(setup.context.world.size)
        if isinstance(setup.precision, MasterWeights):
            raise InputError(
                "hybrid: bf16_master_weights lets FSDP2 cast weights, and FSDP2 doesn't manage the "
                "experts of ep with shard; take autocast, or ep with dp only"
            )
        super().__init__("hybrid", setup.context.world, ranks, setup.job.device)
        self.sizes = sizes
        self.weights = LocalShards(setup.precision)
        setup.precision = self.weights
        self._reshard, self._whole_gradients = reshard, whole_gradients
        self._module = nn.Module()

    def _is_whole(self, parameter: Tensor) -> bool:
        return holds_part(parameter)

    def apply_data_parallel(self, module: nn.Module, communication: Communication) -> nn.Module:
        if not isinstance(communication, NoCompression):
            raise InputError(
                "plan: ep with shard uses torch's reduce-scatter, which supports no "
                "communication method; leave the method's technique out, or give ep with dp only"
            )
        self._module, shared = module, self._shared_experts()
        for weight in shared.parameters():  # FSDP2 ignores them
            weight.data = weight.data.to(self._device)
        # The next lines make copies equal, over the group for the device's memory.
        self._gradients = ExpertGradients(shared.parameters(), self._replicas, self.averages)
        mesh = self.sizes.build(torch.device(self._device).type)
        shard(module, data_mesh(mesh), Sharding(self._reshard), ignored=shared.parameters())
        self._fill(module)
        return module

    @contextmanager
    def sync(self, module: nn.Module, last: bool) -> Iterator[None]:
        assert self._gradients is not None  # set by apply_data_parallel()
        send_gradients(module, last or not self._whole_gradients)
        self._gradients.reduces = last
        try:
            yield
        finally:
            self._gradients.reduces = True

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Counts each shard once and each expert once: its copies have the same gradient."""
        dense = [p for p in parameters if not holds_part(p)]
        dense_norm = self.weights.norm(dense, self.size, self.all_reduce_world)
        return norm_with_experts(dense_norm, parameters, self._shared_experts())

    @contextmanager
    def all_modules(self, model: nn.Module) -> Iterator[None]:
        with ShardedLayout.all_modules(self, model):
            yield

    def gather_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        layout = ExpertsLayout if holds_part(weight) else ShardedLayout
        return layout.gather_weight(self, weight, dtype)

    def placed(self, weight: Tensor, tensor: Tensor) -> Tensor:
        layout = ExpertsLayout if holds_part(weight) else ShardedLayout
        return layout.placed(self, weight, tensor)
