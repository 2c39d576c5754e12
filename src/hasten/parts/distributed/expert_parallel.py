"""Expert parallelism: a layer's experts are on several ranks; tokens are sent to them.

Ranks have different examples. Router, shared experts and attention are replicas, and
DistributedDataParallel averages their gradients. An expert's gradient is complete on
the rank that holds it, because its tokens came there. Only the other groups' copies of
it are added, and the sum is divided like the other gradients. Sources: Lepikhin et al.,
GShard, arXiv:2006.16668; Rajbhandari et al., DeepSpeed-MoE, arXiv:2201.05596.

The computation remains the module's own code: Transformers' or fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hasten.machine.lazy_torch import is_dtensor, not_compiled

# Exchange of tokens: each token is sent to the ranks of its experts, and results come back.
#
# 1. A token is sent to every rank with one of its experts, once: rows (N, H).
# 2. There it becomes a pair for each of its experts on that rank: pairs (S, H).
# 3. The experts' code computes pairs, each with one expert: results (S, H).
# 4. A row's results are summed and sent back: rows (N, H).
# 5. Rows are summed by token, in the order of the ranks: tokens (T, H).
#
# Experts have no capacity: messages are as long as the routers decide, without cuts or padding. A
# token with experts on few ranks crosses the network few times. So routers limit the groups they
# choose from (DeepSeek-V2, arXiv:2405.04434, section 2.2.2), and rows are sent instead of pairs
# (DeepSeek-V3, arXiv:2412.19437, section 3.2.2). Backward uses the same routes in reverse.
#
# Every rank of the group takes part in every pass, with or without tokens. Rows and weights share
# one autograd node. Two nodes could become ready in another order on a rank without tokens, which
# would mix up messages.

ADAPTED = (
    "adapted experts have one matrix together, which ranks can't share: leave experts out of the "
    "targets, or use ddp or fsdp2"
)
ELSEWHERE = -1  # index of an expert that another rank holds


@dataclass
class TokenTraffic:
    """Counts the data that this rank has sent to others; data for itself isn't counted."""

    passes: int = 0  # forward passes, with repeated ones
    rows: int = 0  # sent tokens, once for each rank that received them
    local_rows: int = 0  # rows for experts of this rank
    bytes: int = 0  # bytes of all messages, with those of backward
    messages: int = 0  # exchanges of all ranks


@dataclass(frozen=True)
class RowRoutes:
    """Sources of the rows of one pass, to send the results back."""

    count: int  # T, this rank's tokens
    tokens: Tensor  # (N sent,), the token of each sent row, by rank and then by token
    sends: list[int]  # rows for each rank
    gets: list[int]  # rows from each rank
    pair_rows: Tensor  # (S,), the local row of each pair


Pairs = tuple[Tensor, Tensor, Tensor]  # x (S, H), expert of this rank (S, 1), weight (S, 1)


MARK = "shared_experts"  # attribute of a weight with a rank's part of the experts


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """Returns modules that hold all experts of a layer in tensors of (experts, ...), by name.

    They are called with (tokens (T, H), experts (T, K), weights (T, K)), as those of Transformers 5
    are.
    """
    layers = {}
    for name, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        weights = list(module.parameters(recurse=False))
        stacked = [w for w in weights if w.ndim > 1 and len(w) == count]
        if isinstance(count, int) and len(weights) == len(stacked) > 1:
            layers[name] = module
    return layers


def share_experts(model: nn.Module, mesh: DeviceMesh, some: bool = False) -> SharedExperts:
    """Keeps this rank's part of every layer's experts; frees the parts of the group's others.

    Args:
        mesh: with the axes ``replicas`` and ``experts``.
        some: the model has a pipeline stage's layers, perhaps none with experts.

    Raises:
        ValueError: there are no experts, or a layer's can't be shared out evenly.
    """
    layers = expert_layers(model)
    if any(name.endswith("base_layer") for name in layers):  # PEFT wraps a layer so
        raise ValueError(ADAPTED)
    ranks = mesh["experts"].size()
    if not layers and not some:
        raise ValueError(
            f"{type(model).__name__} has no layers of stacked experts to share out over ranks"
        )
    for name, module in layers.items():
        if module.num_experts % ranks:
            raise ValueError(
                f"{name or 'this module'} has {module.num_experts} experts, which {ranks} ranks "
                f"can't share evenly: choose a number of ranks that divides {module.num_experts}"
            )
    traffic = TokenTraffic()
    shared = {name: ExpertLayer(module, mesh, traffic) for name, module in layers.items()}
    return SharedExperts(shared, mesh, traffic)


class ExpertLayer:
    """One layer's experts on this rank: ``here`` of ``total``, starting with number ``first``.

    Expert e is on rank e // ``here`` of the group.
    """

    def __init__(self, module: Any, mesh: DeviceMesh, traffic: TokenTraffic) -> None:
        self.module, self.mesh, self.traffic = module, mesh, traffic
        self.total, self.group = int(module.num_experts), mesh.get_group("experts")
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.here = self.total // self.ranks
        self.first = self.here * self.rank
        self._routes: RowRoutes | None = None  # routes of the pass in progress
        for name, weight in list(module.named_parameters(recurse=False)):
            part = weight.detach()[self.first : self.first + self.here].clone()
            parameter = nn.Parameter(part, requires_grad=weight.requires_grad)
            setattr(parameter, MARK, self)
            setattr(module, name, parameter)
        module.num_experts = self.here
        module.register_forward_pre_hook(self._send_tokens)
        module.register_forward_hook(self._return_results)

    @not_compiled
    def _send_tokens(self, module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> Pairs:
        """Steps 1 and 2: returns the work of this rank's experts, for tokens of all ranks.

        There is always a pair to compute. Without a token it is a row of zeros with weight 0.
        So the experts' weights have a gradient on every rank.

        Args:
            args: this rank's tokens (T, H), the experts of each token (T, K), numbered over all
                ranks, and the weight of each of them (T, K).
        """
        x, index, weights = args
        tokens, where, sends, gets, local_pairs = self._addresses(index)
        local = index.index_select(0, tokens) - self.here * where.unsqueeze(1)
        local = local.masked_fill((local < 0) | (local >= self.here), ELSEWHERE)
        inputs = (x.index_select(0, tokens), weights.index_select(0, tokens))
        rows, shares = _Exchange.apply(self, sends, gets, *inputs)
        places = self.exchange(local.int(), sends, gets)
        # As many as the sending ranks have announced, so the host need not wait for a count.
        chosen = torch.nonzero_static((places != ELSEWHERE).flatten(), size=local_pairs)[:, 0]
        pair_rows = chosen.div(places.shape[1], rounding_mode="floor")
        self._routes = RowRoutes(len(x), tokens, sends, gets, pair_rows)
        self.traffic.passes += 1
        self.traffic.local_rows += sends[self.rank]
        self.traffic.rows += sum(sends) - sends[self.rank]
        if not len(pair_rows):
            nothing = rows.sum() + shares.sum()  # keeps the backward pass in the graph without rows
            idle = rows.new_zeros(1, rows.shape[1]) + nothing.to(rows.dtype)
            return idle, index.new_zeros(1, 1), shares.new_zeros(1, 1)
        return (
            rows.index_select(0, pair_rows),
            places.flatten().index_select(0, chosen).to(index.dtype).unsqueeze(1),
            shares.flatten().index_select(0, chosen).unsqueeze(1),
        )

    @not_compiled
    def _return_results(self, module: nn.Module, args: Any, results: Tensor) -> Tensor:
        """Steps 4 and 5: returns (T, H), the sum of each token's results.

        Sums are taken in float32 at least. On a GPU their order is fixed only under
        ``torch.use_deterministic_algorithms``, as for every ``index_add``.
        """
        routes, self._routes = self._routes, None
        assert routes is not None  # tokens were sent
        wide = torch.promote_types(results.dtype, torch.float32)
        rows = results[:0]
        if len(routes.pair_rows):
            rows = results.new_zeros(sum(routes.gets), results.shape[1], dtype=wide)
            rows = rows.index_add(0, routes.pair_rows, results.to(wide)).to(results.dtype)
        (returned,) = _Exchange.apply(self, routes.gets, routes.sends, rows)
        combined = results.new_zeros(routes.count, results.shape[1], dtype=wide)
        return combined.index_add(0, routes.tokens, returned.to(wide)).to(results.dtype)

    @torch.no_grad()
    def _addresses(self, index: Tensor) -> tuple[Tensor, Tensor, list[int], list[int], int]:
        """Returns token and rank of each sent row, the row counts by rank, and the local pairs."""
        ranks = torch.arange(self.ranks, device=index.device)
        owners = index.div(self.here, rounding_mode="floor")  # (T, K)
        meant = owners.unsqueeze(0) == ranks.view(-1, 1, 1)  # (ranks, T, K)
        goes = meant.any(dim=2)  # (ranks, T)
        sends = torch.stack([goes.sum(dim=1), meant.sum(dim=(1, 2))], dim=1)  # rows and pairs
        each = [1] * self.ranks
        gets = self.exchange(sends, each, each)
        # The host needs the message lengths: on a GPU it waits here, once per pass.
        sent, got, pairs = torch.stack([sends[:, 0], gets[:, 0], gets[:, 1]]).tolist()
        where, tokens = torch.nonzero_static(goes, size=sum(sent)).unbind(1)
        return tokens, where, sent, got, sum(pairs)

    def exchange(self, x: Tensor, sends: list[int], gets: list[int]) -> Tensor:
        """Sends rows to each rank of the group, by their counts; returns the received rows."""
        received = x.new_empty(sum(gets), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), gets, sends, group=self.group)
        self.traffic.messages += 1
        self.traffic.bytes += (len(x) - sends[self.rank]) * x[:1].nbytes if len(x) else 0
        return received


class _Exchange(torch.autograd.Function):
    """Sends several tensors of the same rows to other ranks; gradients return the same way."""

    @staticmethod
    def forward(
        ctx: Any, layer: ExpertLayer, sends: list[int], gets: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layer, ctx.way = layer, (gets, sends)
        return tuple(layer.exchange(t, sends, gets) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *(ctx.layer.exchange(g, *ctx.way) for g in grads))


class SharedExperts:
    """The layers of a model with experts that were spread over ranks, by name.

    An expert's gradient is complete on its rank, for the tokens of its group. It is summed over
    the copies of other groups while backward runs, and divided.

    Attributes:
        traffic: data that this rank sent, over all layers.
        reduces: False: gradients are accumulated until a backward pass with True.
    """

    def __init__(
        self, layers: dict[str, ExpertLayer], mesh: DeviceMesh, traffic: TokenTraffic
    ) -> None:
        self.layers, self.mesh, self.traffic, self.reduces = layers, mesh, traffic, True
        self._divisor, self._copies = 1, 1
        self._works: list[Any] = []

    def parameters(self) -> list[nn.Parameter]:
        """Returns the weights with this rank's parts."""
        modules = [layer.module for layer in self.layers.values()]
        return [weight for module in modules for weight in module.parameters(recurse=False)]

    def start(self, divisor: int, device: torch.device | None = None) -> None:
        """Makes copies equal on their device, and sums gradients from now on.

        Args:
            divisor: of the other gradients: the number of ranks that DistributedDataParallel
                averages over.
        """
        self._replicas, self._divisor = self.mesh.get_group("replicas"), divisor
        self._copies = dist.get_world_size(self._replicas)
        for weight in self.parameters():
            weight.data = weight.data.to(
                device or weight.device
            )  # the group sends the device's memory
            if self._copies > 1:  # as DistributedDataParallel does with other weights
                dist.broadcast(weight.data, group_src=0, group=self._replicas)
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._ready)

    def reduce_now(self) -> None:
        """Sums the existing gradients, after backward passes without ``reduces``."""
        for weight in self.parameters():
            self._send(weight)
        self._wait()

    def _ready(self, weight: Tensor) -> None:
        if self.reduces and weight.grad is not None:
            if self._copies > 1 and not self._works:  # at the end of this backward
                Variable._execution_engine.queue_callback(self._wait)
            self._send(weight)

    def _send(self, weight: Tensor) -> None:
        if weight.grad is None:
            return
        weight.grad.div_(self._divisor)  # before the sum: fp16 can't hold all
        if self._copies > 1:
            self._works.append(dist.all_reduce(weight.grad, group=self._replicas, async_op=True))

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()


def replicated(module: nn.Module, ignored: Sequence[Tensor], **settings: Any) -> Any:
    """Wraps ``module`` in DistributedDataParallel with ``settings``, without some weights."""
    ignored_ids = {id(weight) for weight in ignored}
    names = [name for name, weight in module.named_parameters() if id(weight) in ignored_ids]
    # Torch has no public function for it; TorchRec uses this one.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    return DistributedDataParallel(module, **settings)


def holds_part(weight: Tensor) -> bool:
    """Returns True if a weight, or a copy with its attributes, is a part of the experts."""
    return hasattr(weight, MARK)


def piece_count(weight: Tensor) -> int:
    """Returns the number of different pieces of a weight; other ranks hold copies of them."""
    count: int = getattr(weight, MARK).ranks if holds_part(weight) else 1
    if is_dtensor(weight):
        for axis, cut in enumerate(weight.placements):
            count *= 1 if cut.is_replicate() else weight.device_mesh.size(axis)
    return count


def placed(weight: Tensor) -> Tensor:
    """Returns a rank's part of the experts, as DTensor of those of all ranks; others as given."""
    if not holds_part(weight):
        return weight
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements, mesh = (Replicate(), Shard(0)), getattr(weight, MARK).mesh
    return DTensor.from_local(weight.detach(), mesh, placements, run_check=False)
