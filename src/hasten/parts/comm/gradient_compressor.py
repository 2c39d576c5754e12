"""Averages gradients over ranks in fewer bytes: a compressor for DDP or a plain loop.

    compressor = GradientCompressor(sparsity_method="int8")
    compressor.attach(ddp)                      # DDP: buckets are sent while backward runs
    compressor.synchronize_gradients(model)     # or a plain loop: after backward

(1) A bucket is full, or all gradients are ready.
(2) The errors of earlier messages are added to the gradients, and the sum is encoded.
(3) The message is sent. A thread waits for the buckets in their order.
(4) The mean, the same bits on every rank, replaces the gradient.
(5) The error of this message is stored once the step counts. If a gradient on any rank
    isn't finite, the error memory stays unchanged. Every rank then gets NaN in that
    bucket, and all skip the step.

Clip gradients afterwards; their norm is then the same on all ranks. The first
``dense_steps`` send uncompressed gradients. Under DDP the first two steps always do,
because DDP rebuilds its buckets after the first step.
"""

from __future__ import annotations

import datetime
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from hasten.errors import require_real
from hasten.parts.comm import buckets as gradients
from hasten.parts.comm.buckets import BucketExchange
from hasten.parts.comm.codecs import codec
from hasten.parts.comm.compression_settings import WHOLE, CompressionSettings, backend_of
from hasten.parts.comm.exchange import CommunicationError, Hosts, Ranks, found_hosts
from hasten.parts.comm.groups import (
    OrderedThread,
    at_once,
    bucket_hook,
    gathered_objects,
    world_size,
)
from hasten.parts.comm.local_sgd import LocalSteps, LocalTraining, same_start
from hasten.parts.comm.methods import (
    AveragingMethod,
    BucketPart,
    ErrorMemory,
    Pieces,
    parts_of,
)
from hasten.parts.comm.rank_check import checksum, drift_message
from hasten.parts.comm.streaming_local_sgd import Stream


class LocalCompression:
    """State of ``GradientCompressor.compress``; ``calls`` counts calls since the last average.

    A tensor without a name is identified by its position among the calls between two averages.
    So their order must stay the same.
    """

    def __init__(self, settings: CompressionSettings) -> None:
        self.calls = 0
        self._way = settings.way(settings.momentum)
        self._memory = ErrorMemory()
        self._shapes: list[tuple[int, ...]] = []  # shapes of unnamed tensors, in their order
        self._unnamed = 0
        self._complete = False  # True after a complete round of calls

    @torch.no_grad()
    def compress(self, tensor: Tensor, name: str | None) -> Tensor:
        """Returns the tensor as other ranks would decode it; unchanged if it isn't finite."""
        if name is None:
            name = self._name_by_position(tuple(tensor.shape))
        self.calls += 1
        pieces = (BucketPart(name, tuple(tensor.shape)),)
        if self._memory.is_pending(name):  # same name again, without an average between
            self._memory.commit(True)
            self._way.commit(True)
        flat = tensor.detach().flatten().float()
        residual = self._memory.bucket(pieces, flat.device) if self._way.feedback else None
        decoded, new_residual = self._way.local(flat, residual, pieces)
        if decoded is None:
            return tensor
        if new_residual is not None:
            self._memory.leave_bucket(pieces, new_residual)
        return decoded.view(tensor.shape).to(tensor.dtype)

    def commit(self, counted: bool) -> None:
        """Ends a step after the average of gradients; without ``counted`` memory stays unchanged.

        Raises:
            ValueError: fewer tensors without a name were compressed than before.
        """
        if self._complete and self._unnamed != len(self._shapes):
            raise ValueError(
                f"{self._unnamed} tensors without a name were compressed since the last "
                f"synchronize_gradients and {len(self._shapes)} before it; give each a name"
            )
        self._complete = self._complete or bool(self._unnamed)
        self.calls = self._unnamed = 0
        self._memory.commit(counted)
        self._way.commit(counted)

    def state(self) -> dict[str, Any]:
        shapes = [list(shape) for shape in self._shapes] if self._complete else []
        return {
            "shapes": shapes,
            "residual": self._memory.state(),
            "way": self._way.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._shapes = [tuple(shape) for shape in state["shapes"]]
        self._complete, self.calls, self._unnamed = bool(self._shapes), 0, 0
        self._memory.load(state["residual"])
        self._way.load(state["way"])

    def _name_by_position(self, shape: tuple[int, ...]) -> str:
        position = self._unnamed
        if not self._complete and position == len(self._shapes):
            self._shapes.append(shape)
        before = self._shapes[position] if position < len(self._shapes) else None
        if before != shape:
            raise ValueError(
                f"tensor {position} since the last synchronize_gradients has shape {shape} and had "
                f"{before or 'no place'} before; call compress in the same order, or give each "
                "tensor a name"
            )
        self._unnamed += 1
        return f"call {position}"


class GradientCompressor:
    """Averages gradients over ranks in fewer bytes, and remembers what it left out.

    Args:
        compression_ratio: share of the numbers that topk sends.
        sparsity_method: none, half, bf16, int8, int4, topk or powersgd; or diloco or stream,
            which are attached to a model instead of compressing single gradients.
        communication_backend: nccl (gloo if there is no GPU) or gloo; None: the process group's.
        rank: columns of a factor of powersgd.
        momentum: momentum correction of topk (Deep Gradient Compression); needs plain SGD.
        dense_steps: first steps, which send uncompressed gradients.
        minimum: buckets of fewer numbers are sent uncompressed.
        scope: all: compressed between all ranks; hosts: compressed between hosts alone.
        every: steps between two averages of the weights by diloco.
        timeout_seconds: longest wait for other ranks.
        sparisty_method: one article's spelling of ``sparsity_method``.

    Raises:
        ValueError: an unknown method or backend, or a number outside its range.
    """

    def __init__(
        self,
        compression_ratio: float = 0.05,
        sparsity_method: str = "topk",
        communication_backend: str | None = "nccl",
        *,
        rank: int = 16,
        momentum: float = 0.0,
        dense_steps: int = 0,
        minimum: int = 4096,
        scope: str = "all",
        every: int = 20,
        timeout_seconds: float = 600.0,
        sparisty_method: str | None = None,
    ) -> None:
        if sparisty_method is not None:
            warnings.warn("sparisty_method is spelt sparsity_method", stacklevel=2)
            sparsity_method = sparisty_method
        self._settings = CompressionSettings(
            *(sparsity_method, compression_ratio, rank, momentum, dense_steps, minimum),
            *(scope, every),
        )
        self.communication_backend = backend_of(communication_backend)
        require_real(timeout_seconds=timeout_seconds)
        self.timeout_seconds = timeout_seconds
        self._bucket_exchange = BucketExchange(self._settings)
        self._local_compression = LocalCompression(self._settings)
        self._local_training: LocalTraining | None = None  # diloco, stream
        self._ranks: Ranks | None = None  # None until several ranks have connected
        # With scope hosts, if there are several hosts with several ranks each.
        self._hosts: Hosts | None = None
        self.hosts = 0  # hosts that exchange their ranks' averages; 0: ranks exchange directly
        self._ordered_thread: OrderedThread | None = None
        self._largest = 0  # numbers of the largest tensor given to ``compress`` in this step
        self._warned = False  # True after the warning that all tensors were too small
        self._names: dict[int, str] = {}  # by id; references to parameters would keep DDP alive

    def settings(self) -> dict[str, Any]:
        """Returns the constructor's settings."""
        return asdict(self._settings)

    @property
    def sent_bytes(self) -> int:
        """Returns the bytes that this rank has sent for gradients, counted at the collectives.

        With scope hosts, these are the bytes to other hosts.
        """
        if self._local_training is not None:
            return self._local_training.sent_bytes
        ranks = self._ranks if self._hosts is None else self._hosts.across
        return 0 if ranks is None else ranks.sent_bytes

    @property
    def steps(self) -> int:
        """Returns the number of started steps."""
        return (
            self._bucket_exchange if self._local_training is None else self._local_training
        ).steps

    @property
    def compresses(self) -> bool:
        """Returns True if the current or last step is past the dense start."""
        return (
            self._bucket_exchange.compresses
            if self._local_training is None
            else self._local_training.acts
        )

    def attach(
        self,
        model: nn.Module,
        loss_scale: Callable[[], float] | None = None,
        confirmed: bool = False,
    ) -> None:
        """Registers as communication hook of a DistributedDataParallel; every rank calls it.

        diloco and stream take a module that isn't DDP, and act after each update of its weights.

        Args:
            loss_scale: returns the factor of the loss (``scaler.get_scale``); errors are stored
                without it.
            confirmed: True: a step counts after ``confirm()``; False: if its gradients were
                finite.

        Raises:
            ValueError: the method needs another kind of model, or is already attached.
            CommunicationError: the ranks' settings differ, or hosts have different numbers of
                ranks.
        """
        if self._local_training is not None or self._names:
            raise ValueError("this compressor is attached to a model; build one for each model")
        if self._settings.method in WHOLE:
            self._connect()
            self._local_training = start_method(model, self._settings, self.timeout_seconds)
            return
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"attach() takes a DistributedDataParallel and was given {type(model).__name__}; "
                "without it, call synchronize_gradients(model) after backward"
            )
        self._names = {id(p): name for name, p in model.module.named_parameters()}
        travel = self._bucket_exchange
        travel.attached, travel.asks = True, confirmed
        travel.scale = loss_scale or travel.scale
        self._connect(model.process_group)
        self._ordered_thread = OrderedThread()
        model.register_comm_hook(self._start, bucket_hook)

    def compress(self, tensor: Tensor, name: str | None = None) -> Tensor:
        """Returns a dense tensor of the same shape: this rank's message as others decode it.

        The error is added to the next tensor of the same name. Tensors without a name are
        identified by their position in the calls since ``synchronize_gradients``.

        Raises:
            ValueError: the order of calls has changed, or the method or scope can't compress a
                single gradient.
        """
        self._settings.takes_gradients("compress()", alone=True)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"compress() takes a gradient, and this is a {type(tensor).__name__}")
        self._settings.takes_format(tensor.dtype)
        self._largest = max(self._largest, tensor.numel())
        start = self.steps < self._settings.dense_steps or tensor.numel() < self._settings.minimum
        return tensor if start else self._local_compression.compress(tensor, name)

    @torch.no_grad()
    def synchronize_gradients(self, model: nn.Module | Iterable[Any]) -> None:
        """Averages the gradients of a model, or of parameters, over all ranks; all call it.

        A missing gradient counts as zero. Gradients returned by ``compress`` are sent tensor by
        tensor. With one rank nothing is sent.

        Raises:
            ValueError: a gradient is sparse or sharded, the order of ``compress`` has changed, or
                the method takes no gradients.
        """
        self._settings.takes_gradients("synchronize_gradients()")
        parameters, alone = gradients.named(model), self._local_compression.calls > 0
        self._connect()
        self._bucket_exchange.begin()
        if self._ranks is not None:
            self._exchange(gradients.buckets_of(parameters, alone), self._ranks, alone)
        self._local_compression.commit(not self._bucket_exchange.spoiled)
        if 0 < self._largest < self._settings.minimum and not self._warned:
            self._warned = True
            how = f"compression_ratio={self._settings.ratio:g} acts"
            warnings.warn(
                f"{how if self._settings.method == 'topk' else self._settings.method + ' acts'} on "
                f"gradients of {self._settings.minimum} numbers or more; the largest here has "
                f"{self._largest}, so all travel in full: give minimum=0",
                stacklevel=4,
            )
        self._largest = 0

    def _exchange(self, buckets: list[list[gradients.Named]], ranks: Ranks, alone: bool) -> None:
        """Sends all buckets before waiting for the first."""
        # ``compress`` has done the momentum correction already.
        way = (
            self._settings.way() if alone and self._settings.momentum else self._bucket_exchange.way
        )
        jobs = []
        for bucket in buckets:
            flat = torch.cat([p.grad.flatten() for _, p in bucket if p.grad is not None])
            pieces = tuple(gradients.piece_of(name, p) for name, p in bucket)
            jobs.append((bucket, pieces, self._send(flat, pieces, ranks, way)))
        for bucket, pieces, done in jobs:
            for (_, p), mean in zip(bucket, parts_of(done(), pieces), strict=True):
                if p.grad is not None:
                    p.grad.copy_(mean.view_as(p.grad))

    def explain(self) -> str:
        """Describes the compressor's current behaviour."""
        if self._local_training is not None:
            return f"{self._settings.method}: {self._local_training.summary()}"
        done = "compresses" if self.compresses else "sends in full so far"
        return f"{self._settings.method}: {done}; {self.steps} steps, {self.sent_bytes:,} bytes"

    def synchronize(self) -> None:
        """Averages weights that ranks trained locally (diloco, stream); call it before saving."""
        if self._local_training is not None:
            self._local_training.synchronize()

    def confirm(self) -> None:
        """Confirms that the weights will move by the gradients of this step."""
        self._bucket_exchange.confirmed = True

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Compares weights over ranks; all call it between the same two steps.

        Raises:
            CommunicationError: a rank's weights differ from rank 0's.
        """
        self._connect()
        if self._ranks is None:
            return
        wrong = self._ranks.differing(checksum(parameters))
        if wrong:
            raise CommunicationError(drift_message(wrong, self.steps))

    def predicted(
        self,
        model: nn.Module | Iterable[Any],
        world: int | None = None,
        bucket_cap_mb: float = 25,
    ) -> int:
        """Returns the bytes that a rank sends in a step of ``world`` ranks after the dense start.

        With scope hosts: bytes that a host sends among ``world`` hosts. The number is exact for
        the buckets of the last step. Before the first step it assumes buckets of
        ``bucket_cap_mb``. The network adds headers and acknowledgements: below 5 %, except for
        messages of about 50 kB.
        """
        self._settings.takes_gradients("predicted()")
        cap, travel = bucket_cap_mb, self._bucket_exchange
        buckets = travel.buckets or gradients.predicted_buckets(gradients.named(model), cap)
        ranks = self._ranks if self._hosts is None else self._hosts.across
        world = world or (world_size() if ranks is None else ranks.world)
        return sum(travel.way_of(b, travel.way).sent_bytes(b, world) for b in buckets)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state (errors by parameter); call it between two steps."""
        if self._local_training is not None:
            return {"whole": self._local_training.state_dict()}
        return {
            "travel": self._bucket_exchange.state(),
            "locally": self._local_compression.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state.

        Raises:
            ValueError: the state is from another method, or the model isn't attached yet.
        """
        if (self._local_training is not None) != ("whole" in state):
            method = self._settings.method
            raise ValueError(f"the state isn't one of {method}, or attach(model) has to come first")
        if self._local_training is not None:
            self._local_training.load_state_dict(state["whole"])
            return
        self._bucket_exchange.load(state["travel"])
        self._local_compression.load(state["locally"])

    def gathered(self, values: Tensor) -> Tensor:
        """Returns every rank's ``values`` as rows on the host; all call it between two steps."""
        return values[None] if self._ranks is None else self._ranks.gathered(values)

    def _start(self, bucket: Any) -> Any:
        """Sends a full bucket, as DDP's hook; returns a future of the mean."""
        buffer, ranks = bucket.buffer(), self._ranks
        if bucket.index() == 0:
            self._bucket_exchange.begin()
        if ranks is None or self._ordered_thread is None:  # a single rank in DDP
            return at_once(buffer)
        try:
            pieces = tuple(gradients.piece_of(self._names[id(p)], p) for p in bucket.parameters())
            done = self._send(buffer, pieces, ranks, self._bucket_exchange.way)
            return self._ordered_thread(done, buffer.device)
        except Exception as error:
            raise ranks.failed(error) from error

    def _send(
        self, flat: Tensor, pieces: Pieces, ranks: Ranks, way: AveragingMethod
    ) -> Callable[[], Tensor]:
        """Sends a bucket; the returned function waits for its mean."""
        self._settings.takes_format(flat.dtype)
        if self._hosts is None:
            return self._bucket_exchange.send(flat, pieces, ranks, way)
        return self._bucket_exchange.send_between(flat, pieces, self._hosts, way)

    def _connect(self, group: dist.ProcessGroup | None = None) -> None:
        """Compares the ranks' settings and opens groups, at the first call with several ranks.

        Every rank calls it, with the ``group`` of its DDP, if any.
        """
        if world_size() == 1 or self._ranks is not None:
            return
        link, scope = (self.timeout_seconds, self.communication_backend), self._settings.scope
        members = None  # ranks of each rank's group, every group once
        if group is not None and dist.get_world_size(group) < dist.get_world_size():
            members = sorted(set(gathered_objects(tuple(dist.get_process_group_ranks(group)))))
        if members and scope == "hosts":
            raise ValueError("scope 'hosts' is for gradients of all ranks; set scope='all'")
        self._ranks = Ranks(*link, members)
        self._ranks.agree(asdict(self._settings))
        if scope == "hosts":
            hosts = found_hosts(self._ranks)
            self._bucket_exchange.quiet = (
                len(hosts) == 1
            )  # a single host: nothing is sent between hosts
            self.hosts = len(hosts) if len(hosts) < self._ranks.world else 0
            if self.hosts > 1:
                self._hosts = Hosts(hosts, *link, self._ranks.reports)


PATIENCE = 100  # gradients without an optimizer step, after which a warning is issued


# Methods that exchange weights after updates instead of gradients: diloco and stream.
#
#     compressor = GradientCompressor(sparsity_method="diloco")
#     compressor.attach(model)       # the module itself; no DistributedDataParallel
#     # the usual loop, as if there were one rank
#     compressor.synchronize()       # before saving or evaluating: one model
#
# torch calls both after each step of the optimizer that has the model's first weight. If gradients
# arrive without such a step, a warning is issued.
#
# All ranks must take the same steps. If one rank may skip a step (because of its own GradScaler),
# use LocalSteps or Stream directly, and call ``after_step`` in every step.


def start_method(
    model: nn.Module,
    settings: CompressionSettings,
    seconds: float,
) -> LocalTraining:
    """Returns the object that runs the method on this model, called after each update.

    Raises:
        ValueError: the method needs another kind of module.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"{settings.method} sends weights instead of gradients: attach the module "
            "itself; DistributedDataParallel would average gradients as well"
        )
    if dist.is_available() and dist.is_initialized():
        same_start(model)
    limit = datetime.timedelta(seconds=seconds)
    part: LocalTraining
    if settings.method == "diloco":
        part = LocalSteps(trained, settings.every, codec=codec("int4"), timeout=limit)
    else:
        part = Stream(trained, timeout=limit)
    after_updates(trained[0], part.after_step)
    return part


def after_updates(weight: torch.Tensor, action: Callable[[], object]) -> None:
    """Calls the method ``action`` after each step of this weight's optimizer.

    torch's hook is for all optimizers of the process. So the hook checks which optimizer made
    the step. It is removed when the method's object is freed. A warning is issued if gradients
    arrive without a step.
    """
    method, wanted, missing_updates = (
        weakref.WeakMethod(action),
        weakref.ref(weight),
        MissingUpdates(),
    )

    def updated(optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
        callback, live_weight = method(), wanted()
        if callback is None or live_weight is None:
            return
        if any(p is live_weight for group in optimizer.param_groups for p in group["params"]):
            missing_updates.over = True
            callback()

    owner: Any = action
    # A hook can't remove itself, because torch iterates over all hooks while it runs.
    for hook in (
        register_optimizer_step_post_hook(updated),
        weight.register_post_accumulate_grad_hook(missing_updates),
    ):
        weakref.finalize(owner.__self__, hook.remove)


class MissingUpdates:
    """Counts gradients that came before the first update; warns once if too many."""

    def __init__(self) -> None:
        self.over = False
        self._gradients = 0

    def __call__(self, weight: torch.Tensor) -> None:
        self._gradients += not self.over
        if self._gradients == PATIENCE and not self.over:
            self.over = True
            warnings.warn(
                f"after {PATIENCE} gradients, no torch optimizer with the model's first trained "
                "weight has made a step: nothing is exchanged, and ranks drift apart. If the "
                "optimizer is of another kind, or has copies of the weights, use "
                "hasten.parts.comm.local_sgd.LocalSteps or "
                "hasten.parts.comm.streaming_local_sgd.Stream, and call after_step() after each "
                "update",
                stacklevel=2,
            )
