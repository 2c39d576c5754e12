"""Tokens travel to the ranks that hold their experts, and results travel back: all of them, once.

    (1) a token goes to every rank that holds one of its experts, once     rows    (N, H)
    (2) there it becomes a pair for each of its experts on that rank       pairs   (S, H)
    (3) whoever computes the experts takes pairs, each with one expert     results (S, H)
    (4) a row's results are added up and travel back                       rows    (N, H)
    (5) rows are added up by token, in the order of the ranks              tokens  (T, H)

No expert has a capacity: messages are as long as the routers make them, none is cut and none is
filled up. A token whose experts lie on few ranks crosses the wire few times, which is why routers
limit the groups they choose from (DeepSeek-V2, arXiv:2405.04434, section 2.2.2), and why rows
travel and not pairs (DeepSeek-V3, arXiv:2412.19437, section 3.2.2). Backward is the same way back.

Every rank of the group takes part in every pass, with tokens or without. Rows and weights go in one
autograd node: two nodes could become ready in another order on a rank that got no token, and
messages would be mixed up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ELSEWHERE = -1  # the place of an expert that another rank holds


@dataclass
class Traffic:
    """What this rank sent to others since it was built; what it kept for itself isn't counted."""

    passes: int = 0  # forward passes, recomputed ones included
    rows: int = 0  # tokens that left in them, once for each rank that they went to
    kept: int = 0  # rows for experts of this rank
    bytes: int = 0  # of all messages, backward included
    messages: int = 0  # exchanges in which every rank takes part

    def __add__(self, other: Traffic) -> Traffic:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Traffic(**sums)


@dataclass(frozen=True)
class Journey:
    """Where the rows of one pass came from, to send the results back."""

    group: dist.ProcessGroup
    traffic: Traffic
    count: int  # T, this rank's tokens
    tokens: Tensor  # (N sent,), the token of each row that left, by rank and then by token
    leaving: list[int]  # rows for each rank
    coming: list[int]  # rows from each rank
    homes: Tensor  # (S,), the row here that each pair belongs to


Pairs = tuple[Tensor, Tensor, Tensor]  # x (S, H), expert of this rank (S, 1), weight (S, 1)


def depart(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    here: int,
    group: dist.ProcessGroup,
    traffic: Traffic,
) -> tuple[Journey, Pairs]:
    """Steps 1 and 2: what this rank's experts have to compute, for tokens of all ranks.

    There is always a pair to compute: without a token it is a row of zeros that weighs nothing, so
    that the experts' weights have a gradient on every rank.

    Args:
        x: (T, H), this rank's tokens.
        index: (T, K), the experts of each token, of all there are.
        weights: (T, K), what each of them weighs.
        here: experts of a rank; expert e lies on rank e // here of the group.
    """
    tokens, where, leaving, coming = _addresses(index, here, group, traffic)
    local = index.index_select(0, tokens) - here * where.unsqueeze(1)
    local = local.masked_fill((local < 0) | (local >= here), ELSEWHERE)
    given = (x.index_select(0, tokens), weights.index_select(0, tokens))
    rows, shares = _Exchange.apply(group, traffic, leaving, coming, *given)
    places = _travel(local.int(), leaving, coming, group, traffic)
    chosen = places != ELSEWHERE
    homes = chosen.nonzero()[:, 0]
    journey = Journey(group, traffic, len(x), tokens, leaving, coming, homes)
    rank = dist.get_rank(group)
    traffic.passes += 1
    traffic.kept += leaving[rank]
    traffic.rows += sum(leaving) - leaving[rank]
    if not len(homes):
        nothing = rows.sum() + shares.sum()  # of no rows: keeps the way back in the graph
        idle = rows.new_zeros(1, rows.shape[1]) + nothing.to(rows.dtype)
        return journey, (idle, index.new_zeros(1, 1), shares.new_zeros(1, 1))
    pairs = rows.index_select(0, homes)
    return journey, (
        pairs,
        places.masked_select(chosen).to(index.dtype).unsqueeze(1),
        shares.masked_select(chosen).unsqueeze(1),
    )


def come_home(journey: Journey, results: Tensor) -> Tensor:
    """Steps 4 and 5: (T, H), each token's results added up.

    Sums are taken in float32 at least. On a GPU their order is fixed only under
    ``torch.use_deterministic_algorithms``, as for every ``index_add``.
    """
    wide = torch.promote_types(results.dtype, torch.float32)
    if len(journey.homes):
        rows = results.new_zeros(sum(journey.coming), results.shape[1], dtype=wide)
        rows = rows.index_add(0, journey.homes, results.to(wide)).to(results.dtype)
    else:
        rows = results[:0]
    back = (journey.group, journey.traffic, journey.coming, journey.leaving)
    (returned,) = _Exchange.apply(*back, rows)
    found = results.new_zeros(journey.count, results.shape[1], dtype=wide)
    return found.index_add(0, journey.tokens, returned.to(wide)).to(results.dtype)


@torch.no_grad()
def _addresses(
    index: Tensor, here: int, group: dist.ProcessGroup, traffic: Traffic
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Token and rank of each row that leaves; how many leave for, and come from, each rank."""
    ranks = torch.arange(dist.get_world_size(group), device=index.device)
    owners = index.div(here, rounding_mode="floor")  # (T, K)
    goes = (owners.unsqueeze(0) == ranks.view(-1, 1, 1)).any(dim=2)  # (ranks, T)
    where, tokens = goes.nonzero(as_tuple=True)
    leaving = goes.sum(dim=1)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=group)
    traffic.messages += 1
    traffic.bytes += leaving.element_size() * (len(ranks) - 1)
    # The host has to know how long messages are: on a GPU it waits here, once per pass.
    sent, got = torch.stack([leaving, coming]).tolist()
    return tokens, where, sent, got


def _travel(
    x: Tensor, leaving: list[int], coming: list[int], group: dist.ProcessGroup, traffic: Traffic
) -> Tensor:
    """Rows to each rank of the group, by their numbers, and what came instead."""
    found = x.new_empty(sum(coming), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), coming, leaving, group=group)
    others = len(x) - leaving[dist.get_rank(group)]
    traffic.messages += 1
    traffic.bytes += others * x[:1].nbytes if len(x) else 0
    return found


class _Exchange(torch.autograd.Function):
    """Several tensors of the same rows to other ranks; their gradients the same way back."""

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        traffic: Traffic,
        leaving: list[int],
        coming: list[int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.way = (coming, leaving, group, traffic)
        return tuple(_travel(t, leaving, coming, group, traffic) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *(_travel(g, *ctx.way) for g in grads))
