"""The layout behind pipeline: several pipelines of ranks; each rank runs stages of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hasten.core.layout import Communication, NoCompression, total_norm
from hasten.core.setup import Setup, run_once
from hasten.errors import InputError, as_input_error
from hasten.parts.comm.groups import MeshSizes, data_mesh
from hasten.parts.distributed import local_shards
from hasten.parts.distributed.ddp import order_buckets, reduce_now
from hasten.parts.distributed.fsdp import shard_stage, take_new_shards
from hasten.parts.distributed.local_shards import LocalShards
from hasten.parts.distributed.pipeline import stages as partition
from hasten.parts.distributed.pipeline.model import (
    Pruned,
    hidden_shape,
    prune_stage,
    send_to_first,
    with_absent,
)
from hasten.parts.distributed.pipeline.runtime import (
    PassHooks,
    PipelineSettings,
    PipelineWork,
    RanksRunner,
)
from hasten.parts.distributed.pipeline.schedules import SPLIT
from hasten.parts.distributed.pipeline.stages import LanguageModel, TiedEmbedding, is_end
from hasten.parts.distributed.tensor_plans import TENSOR_PLANS
from hasten.parts.nn.multi_token import decoders
from hasten.parts.nn.recompute import BlockRecompute
from hasten.parts.optim.master_weights import MasterWeights
from hasten.techniques.communication.compressed import Compressed
from hasten.techniques.compile import Compiling
from hasten.techniques.layout.mesh import ShardedLayout
from hasten.techniques.layout.ranks import PartsLayout
from hasten.techniques.layout.tensor import refuse_other_code

# One rank's part of a pipeline: splits a model, runs stages, and joins them again.


class StagesLayout(PartsLayout):
    """The part of the model on this rank, which is number ``stage`` of its pipeline.

    Weights are dealt as stages have them, and have the names of the full model
    (``hasten.models.weight_files.GathersWeights``).

    Args:
        stage: this rank's index among those of its pipeline.
        keeps: this rank's pipeline is the source of states and saved models.
        axes: size of each axis of the ranks' mesh; ``pp`` is a pipeline.
    """

    def __init__(
        self,
        setup: Setup,
        settings: PipelineSettings,
        stage: int,
        keeps: bool,
        axes: Mapping[str, int],
    ) -> None:
        super().__init__(setup.context.world)
        self.setup, self.settings, self.keeps = setup, settings, keeps
        self.stage_layers: tuple[int, ...] = ()
        self.copies = {}  # holds the embedding's copy on the last stage's rank
        self.runner: RanksRunner | None = None
        self.stage, self._axes = stage, axes
        self._device = torch.device(setup.job.device)
        self._pruned: Pruned | None = None
        self._tied: TiedEmbedding | None = None
        self._places: dict[int, int] = {}  # stage of each tensor by id, inside all_modules()

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Returns the mesh of ranks; created at the first call, which all ranks make together."""
        names, shape = tuple(self._axes), tuple(self._axes.values())
        return init_device_mesh(self._device.type, shape, mesh_dim_names=names)

    @property
    def group(self) -> dist.ProcessGroup:
        """Returns the group of the pipeline's ranks."""
        return self.mesh.get_group("pp")

    @property
    def model(self) -> LanguageModel:
        assert self._pruned is not None  # apply_pipeline() runs first
        return self._pruned.model

    @property
    def tied(self) -> TiedEmbedding:
        assert self._tied is not None  # apply_pipeline() runs first
        return self._tied

    def apply_pipeline(self, module: nn.Module) -> nn.Module:
        """Splits the model by cost and frees other ranks' layers; evaluation uses all stages."""
        check_company(self.setup, self.settings)
        self._expect(module)
        try:
            language_model = LanguageModel(module)
            costs, first, last = language_model.costs()
            homes = self.settings.homes
            self.stage_layers = partition.balanced_layers(costs, len(homes), first, last)
        except AttributeError as error:
            raise InputError(
                f"pipeline: {type(module).__name__} isn't a loss around a language model "
                "of Hugging Face's, and nothing else can be cut into stages; take ddp or fsdp2"
            ) from error
        except ValueError as error:
            raise InputError(f"pipeline: {error}") from error
        self._tied = tied = TiedEmbedding(language_model, homes, self.group)
        state = module.state_dict(keep_vars=True)
        originals = {id(tensor): name for name, tensor in reversed(state.items())}
        self._pruned = prune_stage(language_model, self.stage_layers, homes, self.stage)
        local_state = module.state_dict(keep_vars=True)
        if not tied.counts:
            self.copies = {n: originals[id(t)] for n, t in local_state.items() if t is tied.weight}
        if isinstance(self.setup.recompute, BlockRecompute):
            self.setup.recompute.among = lambda module: list(language_model.trunk.layers)
        loss: Any = module
        loss.forward = self._evaluate  # set on this instance; the last stage calls the class's own
        return module

    @cached_property
    def stages(self) -> dict[int, nn.Module]:
        """Returns this rank's stages by number, over the modules at the first call."""
        spans = partition.ranges(self.stage_layers)
        homes = enumerate(self.settings.homes)
        return {i: self.model.stage(spans[i]) for i, home in homes if home == self.stage}

    def start(self, seams: PassHooks) -> RanksRunner:
        """Returns the runner of this rank's stages."""
        language_model, work = self.model, PipelineWork(self.settings, seams, self._device)
        shape = hidden_shape(language_model.causal.config.hidden_size, lambda: language_model.dtype)
        self.runner = RanksRunner(self.stages, work, self.group, self._device, shape)
        return self.runner

    def _evaluate(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        assert self.runner is not None  # set by the engine
        with torch.no_grad():
            output, labels = self.runner.evaluate(inputs), inputs["labels"]
        if inputs.get("predict"):
            return output.long(), labels[labels != -100]
        return output, (labels != -100).sum()

    @contextmanager
    def all_modules(self, model: nn.Module) -> Iterator[None]:
        assert self._pruned is not None  # apply_pipeline() runs first
        with with_absent(self._pruned, self.group) as self._places:
            yield

    def full_like(self, weight: Tensor) -> Tensor:
        return torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    def gather_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return self._send(weight, dtype, self._places.get(id(weight), 0))

    def _send(self, weight: Tensor, dtype: torch.dtype, home: int) -> Tensor:
        return send_to_first(weight, dtype, home, self.group) if self.keeps else weight


def check_company(setup: Setup, settings: PipelineSettings) -> None:
    """Raises InputError for techniques that change passes which a pipeline runs itself."""
    reasons = {
        "compiled": isinstance(setup.compile, Compiling)
        and "since it compiles a whole model's blocks and a rank has some of them; leave it out",
        "adaptive_batch": setup.run_passes is not run_once
        and "no rank can run its passes again by itself; leave it out",
        "activation_checkpointing": isinstance(setup.recompute, BlockRecompute)
        and _no_recompute(setup.recompute, settings),
    }
    for name, reason in reasons.items():
        if reason:
            raise InputError(
                f"plan: {name} doesn't work under pipeline here, {reason}, or take another layout"
            )


def _no_recompute(recompute: BlockRecompute, settings: PipelineSettings) -> str:
    if settings.checkpoint != "never":
        return (
            f"since the pipeline's own checkpoint is {settings.checkpoint} already; give one of "
            "the two"
        )
    if recompute.segments is not None:
        return "since a rank's layers need not follow each other; leave segments out"
    if settings.schedule in SPLIT:
        return (
            f"since {settings.schedule} runs a backward pass in two halves that would each compute "
            "the blocks again; take the schedule 1f1b"
        )
    return ""


# The layout


class Stages(StagesLayout):
    """``data_size`` parallel pipelines; neighbouring ranks make up one of them.

    Stages that several pipelines have are copies. Their gradients are averaged when all
    passes of a step are done. DistributedDataParallel's buckets and the communication
    method's codec do it.
    """

    def __init__(self, setup: Setup, settings: PipelineSettings) -> None:
        world = setup.context.world
        if world.size % settings.ranks:
            raise InputError(
                f"pipeline: {world.size} ranks can't be dealt into pipelines of {settings.ranks} "
                "stages; make nproc a multiple of stages"
            )
        pipelines, (lane, stage) = world.size // settings.ranks, divmod(world.rank, settings.ranks)
        axes = {"dp": pipelines, "pp": settings.ranks}
        super().__init__(setup, settings, stage, not lane, axes)
        self.partners, self.data_rank = settings.ranks, lane
        self.data_size = self.averages = pipelines
        self._replicas: DistributedDataParallel | None = None

    def apply_tensor_parallel(self, module: nn.Module) -> nn.Module:
        self._fill(module)
        return module

    def apply_data_parallel(self, module: nn.Module, communication: Communication) -> nn.Module:
        check_communication(communication, self.data_size)
        if self.data_size > 1:
            group = self.mesh.get_group("dp")
            self._replicas = DistributedDataParallel(module, process_group=group)
            order_buckets(self._replicas)
            communication.attach(self._replicas)
        return module

    def average(self) -> None:
        """Gradients of this rank's stages over the pipelines; experts without tokens bring 0."""
        if self._replicas is not None:
            reduce_now(self._replicas)

    def placed(self, weight: Tensor, tensor: Tensor) -> Tensor:
        return tensor  # a stage has whole tensors

    def carrier(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Returns the tied weight among the true weights: itself, or its master."""
        return next((p for p in parameters if is_end(p)), None)

    def of_layers(self, values: Tensor) -> Tensor:
        """Returns the sum over data ranks of each rank's values for its layers, 0 elsewhere."""
        return self.all_reduce_world(values)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Sums squares over stages; a tied head counts in the stage of the embedding."""
        twice = None if self.tied.counts else self.carrier(parameters)
        stage_norm = total_norm([p for p in parameters if p is not twice])
        squares = stage_norm.to(self._device, torch.float64) ** 2
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt().to(stage_norm.dtype)


def check_communication(communication: Communication, pipelines: int) -> None:
    """Raises InputError if a communication method can't exchange the pipelines' gradients."""
    if isinstance(communication, NoCompression):
        return
    if not isinstance(communication, Compressed):
        raise InputError(
            f"plan: pipelines average the gradients of their stages, which "
            f"{type(communication).__name__.lower()} can't do for some of the ranks; take half, "
            "quantised, topk or powersgd as the communication method, or none"
        )
    if pipelines == 1:
        raise InputError(
            f"plan: {communication.kind} has nothing to compress in a single pipeline: its ranks "
            "exchange hidden states only; leave it out, or set stages below the number of ranks"
        )
    if communication.compressor.settings()["scope"] != "all":
        raise InputError(
            f"plan: {communication.kind} with scope hosts works on gradients of all ranks, and "
            "pipelines average stage by stage; set scope to all"
        )


# The layout behind hybrid's pipelines with shards: stages whose weights are sharded and layers
# split.


class StagesInPieces(StagesLayout, ShardedLayout):
    """Pipelines of ``settings.ranks`` stages, each stage on copies, shards and split layers.

    Ranks are numbered with ``tp`` innermost and stages next to it, so that what talks most are
    neighbours. Hidden states travel whole; embedding and head are whole on each piece's rank.
    """

    def __init__(self, setup: Setup, settings: PipelineSettings, sizes: MeshSizes) -> None:
        world = setup.context.world
        if sizes.size * settings.ranks != world.size:
            raise InputError(
                f"hybrid: {sizes} x pp {settings.ranks} is {sizes.size * settings.ranks} ranks and "
                f"{world.size} are running; change the sizes, or nproc"
            )
        if isinstance(setup.precision, MasterWeights):
            raise InputError(
                "hybrid: bf16_master_weights doesn't support the pieces of a pipeline's stages; "
                "take autocast, or pp with dp only"
            )
        lane, tensor_rank = divmod(world.rank, sizes.tp)
        data_rank, stage = divmod(lane, settings.ranks)
        keeps = data_rank == tensor_rank == 0  # one rank of each stage
        axes = {"dp": sizes.dp, "shard": sizes.shard, "pp": settings.ranks, "tp": sizes.tp}
        super().__init__(setup, settings, stage, keeps, axes)
        self.sizes, self.partners = sizes, settings.ranks * sizes.tp
        self.data_size = self.averages = sizes.data_size
        self.data_rank, self.weights = data_rank, LocalShards(setup.precision)
        setup.precision = self.weights
        self._module = nn.Module()

    def apply_tensor_parallel(self, module: nn.Module) -> nn.Module:
        if self.sizes.tp == 1:
            return module
        from hasten.parts.distributed.tensor_parallel import split_layers

        refuse_other_code(self.setup, "hybrid")
        causal = self.model.causal
        plan = TENSOR_PLANS.get(causal.config.model_type)
        if plan is None:
            raise InputError(
                f"hybrid: how to cut the layers of {type(causal).__name__} isn't known"
            )
        with as_input_error("hybrid"):
            for decoder in decoders(module):
                split_layers(decoder, self.mesh["tp"], plan, sequence=False)
        return module

    def apply_data_parallel(self, module: nn.Module, communication: Communication) -> nn.Module:
        if not isinstance(communication, NoCompression):
            raise InputError(
                "plan: pp with shard or tp uses torch's reduce-scatter, which supports no "
                "communication method; leave the method's technique out, or give pp with dp only"
            )
        self._module = module
        if self.data_size > 1:
            for stage in self.stages.values():
                shard_stage(stage, self.model.trunk.layers, data_mesh(self.mesh))
        self._fill(module)
        for stage in self.stages.values():  # FSDP2's outermost groups, which the module lacks
            take_new_shards(stage)
        if self.data_size == 1:
            module.to(self._device)
        return module

    def average(self) -> None:
        """Does nothing: each backward pass has averaged its gradients."""

    def carrier(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Returns this rank's shard of the tied weight."""
        end, owners = self.tied.owner, self.weights.parameter_of
        return next((p for p in parameters if end is not None and owners(p) is end.weight), None)

    def of_layers(self, values: Tensor) -> Tensor:
        """Returns the sum over data ranks of each rank's values for its layers, 0 elsewhere."""
        return self.all_reduce_world(values) / self.sizes.tp

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Counts each shard once among the ranks of its stage, and a tied head at the embedding."""
        twice = None if self.tied.counts else self.carrier(parameters)
        counted = [p for p in parameters if p is not twice]
        return self.weights.norm(counted, self.size // self.settings.ranks, self.all_reduce_world)

    @contextmanager
    def all_modules(self, model: nn.Module) -> Iterator[None]:
        with ShardedLayout.all_modules(self, model), StagesLayout.all_modules(self, model):
            yield

    def gather_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Joins the shards on one rank of the stage, which sends the weight to the first rank."""
        home = self._places.get(id(weight), 0)
        if home == self.stage:
            weight = local_shards.full_weight(weight, dtype, self.keeps)
        return self._send(weight, dtype, home)
