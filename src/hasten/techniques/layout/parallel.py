"""The layout behind all layout techniques but deep_speed: one mesh, and the order of its parts.

A technique gives sizes and settings. The sizes are applied in this order:

- pp: a rank keeps the layers of its stages.
- tp: layers are split over ranks.
- ep: a rank keeps its part of each layer's experts.
- dp, shard: copies in DistributedDataParallel, or shards in FSDP2. Copies of experts have their
  own sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hasten.core.context import JobContext
from hasten.core.job import Job
from hasten.core.layout import CommTiming, Communication, NoCompression
from hasten.core.setup import GivenPrecision, RankSync, Session, Setup, StepNumbers
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Forecast
from hasten.errors import InputError, as_input_error
from hasten.machine.lazy_torch import is_dtensor, is_fsdp_module
from hasten.machine.memory import return_large_blocks
from hasten.models.host_memory import FLOAT32
from hasten.models.memory import ADAMW_FLOAT32, gathered_bytes, routed_weights
from hasten.parts.checkpoint.chunks import place_like
from hasten.parts.checkpoint.state import hash_of
from hasten.parts.comm.collectives import TopoAwareCollective
from hasten.parts.comm.groups import MeshSizes, data_mesh
from hasten.parts.comm.link_model import bucket_bytes
from hasten.parts.distributed import expert_parallel as experts
from hasten.parts.distributed import fsdp
from hasten.parts.distributed.arrival import Arrival, broadcast_model, full_weight
from hasten.parts.distributed.compressed_shards import ShardedGradients
from hasten.parts.distributed.ddp import leave_constants, order_buckets, reduce_now
from hasten.parts.distributed.expert_parallel import holds_part, piece_count
from hasten.parts.distributed.fsdp import Sharding
from hasten.parts.distributed.pipeline.runtime import PipelineSettings
from hasten.parts.distributed.pipeline.stages import is_end, send_to_first
from hasten.parts.nn import compressed_attention
from hasten.parts.nn.causal_lm import freeze_indexers, may_rest
from hasten.parts.nn.late_weights import late_weight
from hasten.parts.nn.recompute import BlockRecompute
from hasten.parts.optim.master_weights import MasterWeights
from hasten.techniques.communication.compressed import exchange_for
from hasten.techniques.compile import Bucketed
from hasten.techniques.layout.pipeline_stages import PipelineStages, check_communication
from hasten.techniques.layout.ranks import LocalShards, RanksLayout, ReplicaTraffic
from hasten.techniques.precision import AutocastRegion


@dataclass(frozen=True)
class LayoutOptions:
    """Sizes and settings of a technique's layout.

    Args:
        name: of the technique, for messages.
        sharding: settings of FSDP2; None: weights are plain tensors, and DistributedDataParallel
            averages their gradients.
        whole_gradients: between the micro-batches of a step each rank keeps full gradients.
        sequence, parallel_loss: ``tp`` splits the sequence between layers, and the vocabulary.
        bucket_cap_mb: size of DistributedDataParallel's buckets; 0: by the link, measured.
        pipeline: settings of the stages, if there are several.
    """

    name: str
    sizes: MeshSizes
    sharding: Sharding | None = None
    whole_gradients: bool = False
    sequence: bool = True
    parallel_loss: bool = True
    bucket_cap_mb: int = 25
    pipeline: PipelineSettings | None = None


def lay_out(setup: Setup, how: LayoutOptions) -> None:
    """Sets LAYOUT; one rank needs none.

    Raises:
        InputError: the sizes don't make up the ranks that run, or a part doesn't go with them.
    """
    if setup.context.world.size == how.sizes.size == 1:
        return
    with as_input_error(how.name, "; change the sizes, or nproc"):
        how.sizes.check(setup.context.world.size)
    setup.layout = ParallelLayout(setup, how)
    if how.sizes.tp > 1 and how.sequence:
        setup.collate = Bucketed(setup.collate or setup.job.collate, how.sizes.tp)


class ParallelLayout(RanksLayout):
    """Ranks on a mesh of copies, shards, stages, split layers and shared experts.

    See ``hasten.core.layout.SplitsModel`` and ``hasten.models.weight_files.GathersWeights``.

    Args:
        weights: this rank's pieces, if weights are in shards or split.
        pipe: this rank's stages, if there are several.
        shared: this rank's experts, if several ranks share them.
        buckets: how the size of DistributedDataParallel's buckets was chosen.
    """

    def __init__(self, setup: Setup, how: LayoutOptions) -> None:
        world, sizes = setup.context.world, how.sizes
        super().__init__(world)
        self.setup, self.how, self.sizes = setup, how, sizes
        self.partners, self.stage = sizes.partners, sizes.stage(world.rank)
        self.data_size = self.averages = sizes.data_size
        self.data_rank = sizes.data_rank(world.rank)
        self.replicated = how.sharding is None and sizes.pp == sizes.ep == 1
        self.keeps = not self.data_rank and not world.rank % sizes.tp
        refuse_company(setup, how)
        self.pieces = how.sharding is not None
        self.weights: LocalShards | None = None
        if self.pieces:
            precision = setup.precision
            self.weights = LocalShards(precision)
            if isinstance(precision, MasterWeights):  # float32 shards are the master weights
                self.weights = LocalShards(GivenPrecision(), precision.dtype)
            setup.precision = self.weights
        self.pipe: PipelineStages | None = None
        self.copies: Mapping[str, str] = {}
        self.shared: experts.SharedExperts | None = None
        self.buckets = ""
        self._device = torch.device(setup.job.device)
        self._module = nn.Module()
        self._arrival = Arrival(self._module)
        self._replicas: DistributedDataParallel | None = None
        self._exchange: ShardedGradients | None = None
        self._sent = 0  # bytes that the exchange had sent before the step
        self._timed: ReplicaTraffic | Communication = NoCompression()  # for a replicated model
        self._places: dict[int, int] = {}  # stage of each tensor by id, inside all_modules()

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """Returns the mesh of ranks; created at the first call, which all ranks make together."""
        return self.sizes.build(self._device.type)

    # The model's arrival and its parts, in the order of calls

    def build(self, job: Job) -> nn.Module:
        """Returns the model without memory for parameters, if the job can build it so."""
        if self.replicated:
            return job.build_model()
        if (model := job.late_model()) is not None:
            return model
        if job.skeleton is None:
            return job.build_model()
        with as_input_error("model"):
            return broadcast_model(job.build_model, job.skeleton())

    def late_hash(self, model: nn.Module, names: Collection[str]) -> str:
        """Reads one weight after the other, all of them on the first rank."""
        state = model.state_dict(keep_vars=True)
        weights = {name: tensor for name, tensor in state.items() if name in set(names)}
        late = [w for tensor in weights.values() if (w := late_weight(tensor)) is not None]
        if not late or not (self._world.is_main or any(w.together for w in late)):
            return ""
        return hash_of(weights)

    def apply_model_parallel(self, module: nn.Module) -> nn.Module:
        how = self.how
        with as_input_error("plan"):
            self._arrival = Arrival(module)
        if how.pipeline is not None:
            group = lambda: self.mesh.get_group("pp")  # noqa: E731
            self.pipe = PipelineStages(self.setup, how.pipeline, module, group)
            self.copies = self.pipe.copies
        with as_input_error(how.name):
            if self.sizes.tp > 1:
                from hasten.parts.distributed.tensor_parallel import split_model

                module = split_model(module, self.mesh["tp"], how.sequence, how.parallel_loss)
            if self.sizes.ep > 1:
                mesh = self.sizes.experts(self._device.type)
                self.shared = experts.share_experts(module, mesh, some=self.pipe is not None)
        if self.weights is None:  # shards are read when they are made
            with as_input_error("plan"):
                self._arrival.fill(module)
        return module

    def apply_data_parallel(
        self, module: nn.Module, device: torch.device, communication: Communication
    ) -> nn.Module:
        refuse_communication(self.how, communication)
        self._module = module
        if self.weights is None:
            module.to(device)
        else:
            self._shard(module, communication, self.weights)
        if self.shared is not None:
            self.shared.start(self.averages, device)
            self.shared.reduces = self.pipe is None
        return module if self.weights is not None else self._replicate(module, communication)

    def _replicate(self, module: nn.Module, communication: Communication) -> nn.Module:
        if self.replicated:
            self._timed = communication
        # gradients stay on their rank, or in a single pipeline
        if isinstance(communication, RankSync) and communication.diverged:
            communication.attach(module)
            return module
        if self.data_size == 1:
            return module
        gpu = None if self._device.type == "cpu" else [self._device]
        cap = self.how.bucket_cap_mb
        if not cap:  # for the present link; all ranks measure together and use the same result
            topology = TopoAwareCollective("nccl" if gpu else "gloo", "measure").topology
            cap = math.ceil(bucket_bytes(topology) / 2**20)
            self.buckets = f"; buckets of {cap} MB for {topology}"
        if self.setup.indexer is None:
            freeze_indexers(module)
        self._replicas = wrapped = experts.replicated(
            module,
            self._expert_weights,
            device_ids=gpu,
            bucket_cap_mb=cap,
            process_group=None if self.pipe is None else self.mesh.get_group("dp"),
            find_unused_parameters=may_rest(module),
        )
        leave_constants(wrapped)
        order_buckets(wrapped)
        communication.attach(wrapped)
        if self.replicated:
            self._timed = ReplicaTraffic(wrapped, communication)
        return wrapped if self.pipe is None else module

    def _shard(self, module: nn.Module, communication: Communication, weights: LocalShards) -> None:
        how = self.how.sharding
        assert how is not None  # there are shards
        if not isinstance(communication, NoCompression):
            factor = lambda: self.setup.loss_factor  # noqa: E731
            self._exchange = exchange_for(
                self.how.name, self.sizes, self.mesh, communication, factor
            )
        # FSDP2's outermost groups
        parts = [module] if self.pipe is None else list(self.pipe.stages.values())
        layers = None if self.pipe is None else self.pipe.local_layers
        if self._device.type == "cpu" and Slot.ALLOCATOR not in self.setup.plan:
            return_large_blocks()
        if self.data_size > 1 or weights.dtype is not None:
            mesh = data_mesh(self.mesh, self._exchange is None)
            compressed_attention.give_all_gradients(module)
            with as_input_error(self.how.name):
                for part in parts:
                    fsdp.shard(part, mesh, how, weights.dtype, self._expert_weights, layers)
        with as_input_error("plan"):
            self._arrival.fill(module, torch.device("cpu") if how.offload else None)
        for part in parts:
            fsdp.take_new_shards(part)
        if self._exchange is not None:
            self._exchange.attach(module)
        if self.data_size == 1 and not is_fsdp_module(module):  # FSDP2 moves what it shards
            module.to(self._device)

    @property
    def _expert_weights(self) -> list[nn.Parameter]:
        return [] if self.shared is None else self.shared.parameters()

    # A step's gradients

    def sync(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        if self._exchange is not None:
            self._exchange.passes(last)
        if self.shared is not None:
            self.shared.reduces = last
        fsdp.send_gradients(module, last or not self.how.whole_gradients)
        if last or not isinstance(module, DistributedDataParallel):
            return nullcontext()
        quiet: AbstractContextManager[Any] = module.no_sync()
        return quiet

    def alone(self, module: nn.Module) -> nn.Module:
        return module.module if isinstance(module, DistributedDataParallel) else module

    def send(self, module: nn.Module) -> None:
        """Averages gradients that passes haven't; experts without tokens bring 0."""
        if self._replicas is not None:
            reduce_now(self._replicas)
        if self.shared is not None:
            self.shared.reduce_now()
        if isinstance(self._timed, ReplicaTraffic):
            self._timed.late = True

    def traffic(self) -> CommTiming | None:
        """Returns the timing of the step's communication: gradients, or weights instead.

        Of shards the bytes are counted if a method compresses them; the seconds are unknown.
        """
        if self._exchange is None:
            return self._timed.traffic()
        before, self._sent = self._sent, self._exchange.sent_bytes
        return CommTiming(None, sent_bytes=self._sent - before)

    # Sums over ranks

    def of_layers(self, values: Tensor) -> Tensor:
        """Returns the sum over data ranks of each rank's values for its layers, 0 elsewhere."""
        return self.all_reduce_world(values) / self.sizes.tp

    def carrier(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Returns the tied weight among the true weights: itself, its master or its shard."""
        if self.weights is None:
            return next((p for p in parameters if is_end(p)), None)
        end = None if self.pipe is None else self.pipe.tied.owner
        owners = self.weights.parameter_of
        return next((p for p in parameters if end is not None and owners(p) is end.weight), None)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        summed = self.norm_and_sums(parameters, torch.zeros(()), 0)
        return super().norm(parameters) if summed is None else summed[0]

    def norm_and_sums(
        self, parameters: Sequence[Tensor], loss_sum: Tensor, positions: int
    ) -> tuple[Tensor, StepNumbers] | None:
        """Returns norm and sums in one exchange; None if every rank has the norm.

        The norm is a sum over all ranks, in which a rank brings its part of what it shares.
        """
        if self.replicated:
            return None
        # Of a tied weight on two stages the embedding counts.
        is_copy = self.pipe is not None and not self.pipe.tied.counts
        copy = self.carrier(parameters) if is_copy else None
        counted = [p for p in parameters if p is not copy and p.grad is not None and p.grad.numel()]
        owners = counted if self.weights is None else map(self.weights.parameter_of, counted)
        holders = [self.size // self.sizes.pp // piece_count(p) for p in owners]
        gradients = [p.grad for p in counted]
        # Wide enough for the square of any number.
        dtype = functools.reduce(torch.promote_types, [g.dtype for g in gradients], torch.float32)
        norms = torch.zeros(0)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype))
        norms = norms.double()
        # The step's only wait for a device.
        *values, loss = torch.cat([norms, loss_sum.detach().to(norms).reshape(1)]).tolist()
        square = sum(value * value / h for value, h in zip(values, holders, strict=True))
        sums = self.all_reduce_world(torch.tensor([square, loss, positions], dtype=torch.float64))
        norm = sums[0].sqrt().to(dtype)
        total_loss, total_positions = (sums[1:] / self.partners).tolist()
        norm_on_host = norm.item()
        finite = math.isfinite(norm_on_host) and math.isfinite(total_loss)
        numbers = StepNumbers(norm_on_host, loss, finite, total_loss, total_positions)
        return norm.to(norms.device, non_blocking=True), numbers

    # The whole model, for checkpoints and files

    def placed(self, weight: Tensor, tensor: Tensor) -> Tensor:
        parameter = weight if self.weights is None else self.weights.parameter_of(weight)
        if is_dtensor(tensor) or not tensor.ndim:  # an optimizer's step count is a number
            return tensor
        parameter = experts.placed(parameter)
        try:
            return place_like(tensor, parameter) if is_dtensor(parameter) else tensor
        except ValueError as error:
            raise InputError(
                f"{self.how.name}: this optimizer keeps its state in another shape than weights "
                f"have ({error}); leave checkpoints out, or take another optimizer"
            ) from error

    @contextmanager
    def all_modules(self, model: nn.Module) -> Iterator[None]:
        fsdp.reshard_all(self._module)  # after an evaluation some weights are still gathered
        places: AbstractContextManager[dict[int, int]] = nullcontext({})
        if self.pipe is not None:
            places = self.pipe.all_modules()
        with places as self._places:
            yield

    def full_like(self, weight: Tensor) -> Tensor:
        """Returns the full weight without memory, with all experts if the weight holds some."""
        return torch.empty(experts.placed(weight).shape, dtype=weight.dtype, device="meta")

    def gather_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Joins the parts on one rank of the stage, which sends the weight to the first rank."""
        home = self._places.get(id(weight), 0)
        is_copy = holds_part(weight) and self._world.rank % self.sizes.tp
        if home == self.stage and not is_copy:
            weight = full_weight(experts.placed(weight), dtype, self.keeps)
        if self.pipe is None or not self.keeps:
            return weight
        return send_to_first(weight, dtype, home, self.pipe.group)


# What doesn't go together, in one sentence each.


def refuse_company(setup: Setup, how: LayoutOptions) -> None:
    """Raises InputError for parts of the plan that don't go with the sizes."""
    precision, recompute, sizes = setup.precision, setup.recompute, how.sizes
    float8 = isinstance(precision, AutocastRegion) and precision.layers is not None
    if sizes.tp > 1 and float8:  # code that reads a layer's weight by itself would get a shard
        raise InputError(
            f"plan: {how.name} cuts torch's own layers, and float8 replaces them with its own "
            "code; leave one of them out"
        )
    if sizes.ep > 1 and isinstance(recompute, BlockRecompute) and recompute.budget is not None:
        raise InputError(
            f"{how.name}: recompute with a budget lets each rank choose its own blocks, and tokens "
            "travel in all of them; leave budget out"
        )
    in_parts = how.sharding is not None and (sizes.pp > 1 or sizes.ep > 1)
    if in_parts and isinstance(precision, MasterWeights):
        raise InputError(
            f"{how.name}: bf16_master_weights lets FSDP2 cast weights, but not of stages (pp) or "
            "shared experts (ep); take autocast, or dp without shard and tp"
        )


def refuse_communication(how: LayoutOptions, communication: Communication) -> None:
    """Raises InputError for a communication method that can't exchange the gradients."""
    sizes = how.sizes
    if isinstance(communication, NoCompression) or sizes.pp == sizes.ep == 1:
        return
    if how.sharding is not None:
        raise InputError(
            "plan: pp or ep with shard or tp uses torch's reduce-scatter, which supports no "
            "communication method; leave the method's technique out, or give dp only"
        )
    if sizes.pp > 1:
        check_communication(communication, sizes.data_size)
    elif isinstance(communication, RankSync) and communication.diverged:
        raise InputError(
            f"{how.name}: tokens travel between ranks in every pass, so ranks can't train apart; "
            "choose a communication method that compresses gradients, or none"
        )


# Forecasts and checks that techniques share.


def routed(context: JobContext) -> float:
    """Returns the estimated number of weights in routed experts."""
    model = context.model
    sizes = model.hidden_size, model.layers, model.vocabulary
    return routed_weights(model.parameters, *sizes, model.tied_head) if model.experts else 0.0


def forecast(context: JobContext, sizes: MeshSizes) -> Forecast:
    """Forecasts a rank's part of the state; norms, routers and latents count as split by ``tp``.

    Tensor parallelism splits no routed expert, and FSDP2 none that ranks share.
    """
    if context.world.size == 1:
        return Forecast()
    model, routed_count = context.model, routed(context)
    of_experts = sizes.pp * (sizes.ep if sizes.ep > 1 else sizes.shard)
    of_others = sizes.pp * sizes.shard * sizes.tp
    others = model.parameters - routed_count
    gone = ADAMW_FLOAT32 * (routed_count * (1 - 1 / of_experts) + others * (1 - 1 / of_others))
    passing = 0.0
    if sizes.shard > 1:
        gathered = model.parameters - (routed_count if sizes.ep > 1 else 0.0)
        shape = model.hidden_size, model.layers, model.vocabulary
        passing = gathered_bytes(gathered, *shape) / sizes.tp
    elif sizes.dp > 1 and sizes.tp == 1:  # DistributedDataParallel's buckets hold all gradients
        passing = FLOAT32 * (model.adapter_weights or others) / sizes.pp
    return Forecast(flops=1 / sizes.tp, resident_bytes=-gone, passing_bytes=passing)


def proof(session: Session) -> EffectCheck:
    """Returns a check with this rank's part of the weights."""
    layout, steps = session.setup.layout, session.progress.step
    if not isinstance(layout, ParallelLayout) or layout.weights is None:
        return EffectCheck(False, "one rank holds everything")
    local_count = sum(p.numel() for p in layout.weights.parameters())
    total = sum(p.numel() for p in session.module.parameters() if p.requires_grad)
    copies = layout.sizes.dp == layout.sizes.size  # each rank holds the whole model
    return EffectCheck(
        steps > 0 and (local_count < total or copies),
        f"{layout.sizes}: this rank holds {local_count:,} of {total:,} trained weights; {steps} "
        "steps",
    )
