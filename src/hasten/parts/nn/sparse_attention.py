"""DeepSeek's sparse attention: an indexer chooses keys, and attention reads those alone.

The method is DeepSeek-V3.2's (arXiv:2512.02556, section 2.1). For a query ``t`` and an earlier key
``s`` the indexer's score is ``I = sum over its heads of w[t, head] relu(q[t, head] . k[s])``.
Attention is over the ``index_topk`` keys with the highest scores. Transformers computes the
scores of all heads and pairs at once, and then dense attention under a mask. Here nothing with
all pairs of tokens exists: each pass goes through blocks of queries. The steps of `attend`:

1. `choose` scores a document's keys, one block after another, and lists the chosen keys. Between
   equal scores the earlier key wins, so a choice doesn't depend on the blocks or the packing.
2. Attention over the chosen keys, in one of two ways, which keep no weights: the backward pass
   computes them again.

   - masked: products with all earlier keys, and a mask for each block.
   - gathered: each query's keys are gathered in their latent form. The query is multiplied by the
     keys' half of ``kv_b_proj`` before, and the output by the values' half (absorption). A pair
     costs more products, so this pays in long documents only (`gathers`).

3. If the indexer learns (`learn`), the same pass computes its loss and the loss's gradient: the
   divergence KL(target || softmax(I)) of each query, summed. The target is the mean of the heads'
   attention weights. In the stage ``sparse`` both are over the chosen keys. In the stage
   ``warmup`` attention is dense, and both are over all earlier keys. Inputs and target are
   detached, so only the indexer learns from it.
4. `AttachLoss` adds the loss's gradient behind the layer's output. So it reaches the indexer in
   every layout and under activation checkpointing, and the model's own gradients are unchanged.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.nn import rebind
from hasten.parts.nn.fused_functions import in_autocast

STAGES = ("warmup", "sparse")
ROWS = {"cpu": 128}  # queries of a block; of a GPU: MOST_ROWS
MOST_ROWS = 1024
ROOM = {"cpu": 1 << 20}  # bytes of a step's largest tensor, for the cache; of a GPU: MOST_ROOM
MOST_ROOM = 1 << 28
MEASURED = (
    64  # queries per pass for which the share of the attention in the chosen keys is computed
)


# What the indexer learns from


@dataclass(eq=False)
class IndexerLearning:
    """How the indexer of one attention module learns, and what its passes sum up.

    Args:
        stage: ``warmup`` (attention stays dense; the trunk should be frozen) or ``sparse``.
        factor: of the gradient of the divergences' sum.
        sums: float64 (5,). Index 0 and 1: the divergence summed over queries, and their number.
            Index 2 and 3: the heads' mean weight in the chosen and in the best ``index_topk``
            keys, summed over measured queries. Index 4: their number.
    """

    stage: str
    factor: float = 1.0
    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"stage is {self.stage!r}; give {' or '.join(STAGES)}")

    def add(self, *summands: Tensor | float) -> None:
        """Adds to the sums, on the device of the summands."""
        device = next(s.device for s in summands if isinstance(s, Tensor))
        self.sums = self.sums.to(device)
        for index, summand in enumerate(summands):
            self.sums[index] += summand


_learning: weakref.WeakKeyDictionary[nn.Module, IndexerLearning] = weakref.WeakKeyDictionary()


def has_indexer(module: nn.Module) -> bool:
    """Returns True for an attention module with an indexer that chooses keys."""
    return type(module).__name__ == "DeepseekV32Attention"


def indexed_attentions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns name and module of each attention with an indexer."""
    return [(name, module) for name, module in model.named_modules() if has_indexer(module)]


def learn(attention: nn.Module, learning: IndexerLearning | None) -> None:
    """Makes the passes of an attention module with gradients train its indexer; None ends it.

    Raises:
        ValueError: the module has no indexer.
    """
    if not has_indexer(attention):
        raise ValueError(f"{type(attention).__name__} has no indexer that could learn")
    if learning is None:
        _learning.pop(attention, None)
    else:
        _learning[attention] = learning


def take_sums(model: nn.Module) -> list[Tensor]:
    """Returns the sums (5,) of each attention with a learning indexer, and sets them to zero."""
    learnings = [_learning.get(module) for _, module in indexed_attentions(model)]
    taken = []
    for learning in learnings:
        if learning is not None:
            taken.append(learning.sums)
            learning.sums = torch.zeros_like(learning.sums)
    return taken


class AttachLoss(torch.autograd.Function):
    """Returns ``output`` as it is; in the backward pass ``loss`` gets the gradient ``factor``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, factor: float = 1.0) -> Tensor:
        ctx.loss_gradient = torch.full_like(loss, factor)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.loss_gradient, None


class _WithGradients(torch.autograd.Function):
    """Returns ``total``; its gradients for ``inputs`` are computed already."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [t.dtype for t in inputs]
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *((t * grads[0]).to(dtype) for t, dtype in pairs)


# Documents and blocks


class Document(NamedTuple):
    """A document in a row of tokens; ``counts`` is False for filler."""

    start: int
    end: int
    counts: bool = True

    @property
    def length(self) -> int:
        """Returns its number of tokens."""
        return self.end - self.start


class Row(NamedTuple):
    """A row of tokens for attention, all documents end to end.

    ``read`` (T, ...) are hidden states, the query's latent, cosines and sines. ``query`` is (T,
    heads, nope + rotary), ``latent`` (T, latent), ``shared`` (T, rotary).
    """

    read: tuple[Tensor, ...]
    query: Tensor
    latent: Tensor
    shared: Tensor
    documents: list[Document]

    def cut(self, documents: list[Document]) -> Row:
        """Returns the row of consecutive ``documents`` alone."""
        start, end = documents[0].start, documents[-1].end
        moved = [Document(d.start - start, d.end - start, d.counts) for d in documents]
        read = tuple(t[start:end] for t in self.read)
        return Row(
            read, self.query[start:end], self.latent[start:end], self.shared[start:end], moved
        )


class Block(NamedTuple):
    """Consecutive queries ``begin`` to ``end``; the first document of them starts at ``first``."""

    begin: int
    end: int
    first: int
    counts: bool = True
    joined: bool = False  # True: queries of several documents

    @property
    def rows(self) -> slice:
        """Returns the place of the queries in the row."""
        return slice(self.begin, self.end)


def documents_of(lengths: tuple[int, ...], fillers: int = 0) -> list[Document]:
    """Returns the documents of a row; the last ``fillers`` of them don't count."""
    ends = list(itertools.accumulate(lengths))
    last = len(lengths) - fillers
    return [
        Document(end - n, end, index < last)
        for index, (n, end) in enumerate(zip(lengths, ends, strict=True))
        if n
    ]


def repeated(documents: list[Document], times: int) -> list[Document]:
    """Returns the documents of ``times`` equal rows, end to end."""
    length = documents[-1].end
    return [
        Document(d.start + length * row, d.end + length * row, d.counts)
        for row in range(times)
        for d in documents
    ]


def blocks_of(documents: list[Document], device: torch.device) -> list[Block]:
    """Returns blocks over consecutive documents: parts of a long one, or several short ones."""
    most = ROWS.get(device.type, MOST_ROWS)
    blocks: list[Block] = []
    for document in documents:
        for begin in range(document.start, document.end, most):
            block = Block(begin, min(begin + most, document.end), document.start, document.counts)
            last = blocks[-1] if blocks else block
            joins = begin == document.start and last.end == begin and last.counts == block.counts
            if joins and block.end - last.first <= most:
                blocks[-1] = Block(last.begin, block.end, last.first, block.counts, True)
            else:
                blocks.append(block)
    return blocks


def _parts(count: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Yields slices of ``count`` rows, so that a slice with ``row_bytes`` per row has few bytes."""
    step = max(ROOM.get(device.type, MOST_ROOM) // max(row_bytes, 1), 1)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


@functools.lru_cache(maxsize=16)  # each layer needs the same ones
def _firsts(documents: tuple[Document, ...], device: torch.device) -> Tensor:
    """Returns the first key of each query, (T,) int32, without waiting for a GPU."""
    table = torch.empty(documents[-1].end, dtype=torch.int32)
    for document in documents:
        table[document.start : document.end] = document.start
    return table.to(device, non_blocking=True)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a @ b`` in at least float32, as scores need it: half formats aren't rounded to."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return a @ b
    if a.is_cuda and a.ndim == b.ndim == 3:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _hidden(rows: slice, first: int, firsts: Tensor) -> Tensor:
    """Returns True (C, n) for keys from ``first`` on that a query of ``rows`` can't see."""
    key = torch.arange(first, rows.stop, dtype=torch.int32, device=firsts.device)
    return (key > key[rows.start - first :, None]) | (key < firsts[rows, None])


# The choice


class Indexer:
    """The indexer's numbers for one row of tokens, from detached inputs.

    ``module`` is Transformers' indexer. ``learns`` keeps the graph of `keys`.
    """

    def __init__(self, module: Any, row: Row, learns: bool) -> None:
        self.module = module
        self.hidden, self.latent, *tables = (t.detach() for t in row.read)
        self._tables = tables
        self._casts = torch.is_autocast_enabled(self.latent.device.type)
        with torch.set_grad_enabled(learns):
            keys = self._turned(module.k_norm(module.wk(self.hidden)), *tables)
            self.graph = keys.to(torch.promote_types(keys.dtype, torch.float32))
        self.keys = self.graph.detach()  # (T, D)
        self.topk: int = module.index_topk
        self.scale = module.n_heads**-0.5 * module.softmax_scale

    def queries(self, rows: slice | Tensor) -> Tensor:
        """Returns (C, heads, D)."""
        with torch.autocast(self.latent.device.type, enabled=self._casts):
            x = self.module.wq_b(self.latent[rows])
        x = x.unflatten(-1, (self.module.n_heads, -1))
        return self._turned(x, *(t[rows, None] for t in self._tables)).to(self.keys.dtype)

    def weights(self, rows: slice | Tensor) -> Tensor:
        """Returns (C, heads), with both scales of the scores; never in a narrow format."""
        weight = self.module.weights_proj.weight
        with torch.autocast(weight.device.type, enabled=False):
            x = self.module.weights_proj(self.hidden[rows].to(weight.dtype))
        return x.to(self.keys.dtype) * self.scale

    def turned_back(self, grad: Tensor, rows: slice) -> Tensor:
        """Returns the gradient of ``wq_b``'s output (C, heads D) for that of `queries`."""
        cos, sin = (t[rows, None].to(grad.dtype) for t in self._tables)
        return self._turned(grad, cos, -sin).flatten(1)

    @staticmethod
    def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the first columns in halves, as the class does that will use the weights."""
        turned, plain = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
        low, high = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
        return torch.cat((turned, plain), dim=-1)


def scores(query: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """Returns the index scores (C, n) of queries (C, H, D), weights (C, H) and keys (n, D)."""
    out = query.new_empty(len(query), len(keys))
    key_bytes = query.shape[1] * query.element_size()
    for columns in _parts(len(keys), 4 * key_bytes, query.device):  # of four queries
        factor = keys[columns].mT
        for part in _parts(len(query), key_bytes * factor.shape[1], query.device):
            products = (query[part] @ factor).relu_()
            torch.bmm(weight[part, None], products, out=out[part, None, columns])
    return out


def taken(index: Tensor, topk: int) -> Tensor:
    """Returns True (C, n) for the ``topk`` highest scores above minus infinity.

    Of equal ones the first are taken.
    """
    visible = index > -torch.inf
    if index.shape[1] <= topk:
        return visible
    least = index.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    higher, equal = index > least, (index == least) & visible
    missing = topk - higher.sum(-1, keepdim=True, dtype=torch.int32)
    return higher | (equal & (equal.cumsum(-1, dtype=torch.int32) <= missing))


def _listed(mask: Tensor, first: int, topk: int) -> Tensor:
    """Returns the True columns of each row of a mask (C, n), from ``first`` on: (C, topk) int32."""
    columns = torch.arange(first, first + mask.shape[1], dtype=torch.int32, device=mask.device)
    at = mask.cumsum(-1).sub_(1).masked_fill_(~mask, topk)
    out = columns.new_full((len(mask), topk + 1), -1)
    return out.scatter_(1, at, columns.expand_as(mask))[:, :topk]


@torch.no_grad()
def choose(indexer: Indexer, documents: list[Document]) -> Tensor:
    """Returns the chosen keys (T, topk) int32 of each query in increasing order, -1 for none.

    Documents of at most ``topk`` tokens aren't scored.
    """
    device, topk = indexer.keys.device, indexer.topk
    firsts = _firsts(tuple(documents), device)
    chosen = torch.empty(documents[-1].end, topk, dtype=torch.int32, device=device)
    for document in documents:
        for block in blocks_of([document], device):
            _choose(indexer, block, document.length, firsts, chosen)
    return chosen


def _choose(indexer: Indexer, block: Block, length: int, firsts: Tensor, chosen: Tensor) -> None:
    topk = indexer.topk
    if length > topk:
        query, weight = indexer.queries(block.rows), indexer.weights(block.rows)
    for part in _parts(block.end - block.begin, 8 * (block.end - block.first), chosen.device):
        rows = slice(block.begin + part.start, block.begin + part.stop)
        mask = ~_hidden(rows, block.first, firsts)
        if length > topk:
            index = scores(query[part], weight[part], indexer.keys[block.first : rows.stop])
            mask = taken(index.masked_fill_(~mask, -torch.inf), topk)
        chosen[rows] = _listed(mask, block.first, topk)


# Attention over the chosen keys

Watch = Callable[[Block, Tensor, Tensor], None]  # gets the chosen keys and the heads' mean weights


def gathers(length: int, topk: int, widths: tuple[int, int, int, int]) -> bool:
    """Returns True if a document's attention costs fewer products with gathered latents.

    ``widths``: of the latent, the rotary columns, a head's query, a head's value.
    """
    latent, rotary, query, output = widths
    return length > 2 * topk * (2 * latent + rotary) / (query + output)


def _weighed(score: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the softmax of scores, which are overwritten, and the logarithm of each sum."""
    if hidden is not None:
        score.masked_fill_(hidden, -torch.inf)
    top = score.amax(-1, keepdim=True)
    total = score.sub_(top).exp_().sum(-1, keepdim=True)
    return score.div_(total), (top + total.log()).squeeze(-1)


def _weighed_again(score: Tensor, hidden: Tensor | None, lse: Tensor) -> Tensor:
    score = score.sub_(lse.unsqueeze(-1)).exp_()
    return score if hidden is None else score.masked_fill_(hidden, 0)


class _Gathered(torch.autograd.Function):
    """Attention over gathered latents.

    ``query`` (T, heads, nope + rotary), ``keys`` (T, latent + rotary), ``up`` (heads, nope +
    value, latent); the output is (T, heads, value).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        up: Tensor,
        chosen: Tensor,
        layout: tuple[list[Block], float, Watch | None],
    ) -> Tensor:
        blocks, scale, watch = layout
        parts = _Latents(query, keys, up, chosen, scale)
        out = query.new_empty(*query.shape[:2], parts.width)
        lse = query.new_empty(query.shape[:2], dtype=parts.sums)
        for block in blocks:
            absorbed, mixed = parts.absorbed(block), parts.empty(block)
            target = chosen.new_empty(len(mixed), parts.count(block), dtype=parts.sums)
            for part, rows in parts.split(block):
                latents, hidden = parts.gathered(block, rows)
                weights, lse[rows] = _weighed(_product(absorbed[part], latents.mT), hidden)
                torch.bmm(weights.to(keys.dtype), latents[..., : parts.latent], out=mixed[part])
                if watch is not None:
                    target[part] = weights.mean(1)
            out[block.rows] = _by_heads(mixed, parts.up_value.mT)
            if watch is not None:
                watch(block, chosen[block.rows, : target.shape[1]], target)
        ctx.save_for_backward(query, keys, up, chosen, out, lse)
        ctx.layout = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, up, chosen, out, lse = ctx.saved_tensors
        blocks, scale = ctx.layout
        grad, parts = grads[0], _Latents(query, keys, up, chosen, scale)
        dquery, dkeys = torch.empty_like(query), torch.zeros_like(keys, dtype=parts.sums)
        dup = torch.zeros_like(up, dtype=parts.sums) if ctx.needs_input_grad[2] else None
        for block in blocks:
            rows = block.rows
            absorbed, mixed = parts.absorbed(block), parts.empty(block)
            dabsorbed, dmixed = torch.empty_like(absorbed), _by_heads(grad[rows], parts.up_value)
            delta = (grad[rows] * out[rows]).sum(-1, dtype=parts.sums).unsqueeze(-1)
            for part, rows in parts.split(block):
                latents, hidden = parts.gathered(block, rows)
                values = latents[..., : parts.latent]
                weights = _weighed_again(_product(absorbed[part], latents.mT), hidden, lse[rows])
                dscore = _product(dmixed[part], values.mT).sub_(delta[part]).mul_(weights)
                weights, dscore = weights.to(keys.dtype), dscore.to(keys.dtype)
                torch.bmm(dscore, latents, out=dabsorbed[part])
                dlatents = dscore.mT @ absorbed[part]
                dlatents[..., : parts.latent].baddbmm_(weights.mT, dmixed[part])
                at = chosen[rows, : latents.shape[1]].clamp(min=0).flatten()
                dkeys.index_add_(0, at, dlatents.flatten(0, 1).to(dkeys.dtype))
                if dup is not None:
                    torch.bmm(weights, values, out=mixed[part])
            parts.add_gradients(block, dabsorbed, mixed, grad, dquery, dup)
        return dquery, dkeys.to(keys.dtype), None if dup is None else dup.to(up.dtype), None, None


class _Latents:
    """The tensors of `_Gathered`, by blocks. Absorbed queries contain the scale of the scores."""

    def __init__(
        self, query: Tensor, keys: Tensor, up: Tensor, chosen: Tensor, scale: float
    ) -> None:
        self.query, self.keys, self.chosen, self.scale = query, keys, chosen, scale
        self.latent: int = up.shape[-1]
        self.nope = query.shape[-1] - (keys.shape[-1] - self.latent)
        self.width: int = up.shape[1] - self.nope
        self.up_key, self.up_value = up.split([self.nope, self.width], dim=1)
        self.sums = torch.promote_types(query.dtype, torch.float32)

    def count(self, block: Block) -> int:
        """Returns the largest number of keys of a query of the block."""
        return min(int(self.chosen.shape[1]), block.end - block.first)

    def absorbed(self, block: Block) -> Tensor:
        """Returns the block's queries for latent keys, (C, heads, latent + rotary)."""
        query = self.query[block.rows]
        plain = _by_heads(query[..., : self.nope], self.up_key)
        return torch.cat((plain, query[..., self.nope :]), -1).mul_(self.scale)

    def empty(self, block: Block) -> Tensor:
        """Returns an empty tensor (C, heads, latent)."""
        return self.query.new_empty(block.end - block.begin, self.query.shape[1], self.latent)

    def split(self, block: Block) -> Iterator[tuple[slice, slice]]:
        """Yields parts of a block: their place in the block and in the row."""
        numbers = self.count(block) * (self.keys.shape[1] + self.query.shape[1])
        row_bytes = numbers * self.keys.element_size()
        for part in _parts(block.end - block.begin, row_bytes, self.keys.device):
            yield part, slice(block.begin + part.start, block.begin + part.stop)

    def gathered(self, block: Block, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Returns the chosen latents (C, k, latent + rotary), and True (C, 1, k) for no key."""
        chosen = self.chosen[rows, : self.count(block)]
        shape = *chosen.shape, self.keys.shape[1]
        if not block.joined and rows.start - block.first >= self.chosen.shape[1] - 1:
            return self.keys.index_select(0, chosen.flatten()).view(shape), None
        latents = self.keys.index_select(0, chosen.clamp(min=0).flatten())
        return latents.view(shape), (chosen < 0).unsqueeze(1)

    def add_gradients(
        self,
        block: Block,
        dabsorbed: Tensor,
        mixed: Tensor,
        grad: Tensor,
        dquery: Tensor,
        dup: Tensor | None,
    ) -> None:
        """Writes the block's gradient of the query, and adds that of ``up``."""
        rows = block.rows
        dabsorbed.mul_(self.scale)
        dplain = dabsorbed[..., : self.latent]
        dquery[rows, :, : self.nope] = _by_heads(dplain, self.up_key.mT)
        dquery[rows, :, self.nope :] = dabsorbed[..., self.latent :]
        if dup is not None:
            plain = self.query[rows, :, : self.nope]
            dup[:, : self.nope] += plain.permute(1, 2, 0) @ dplain.transpose(0, 1)
            dup[:, self.nope :] += grad[rows].permute(1, 2, 0) @ mixed.transpose(0, 1)


def _by_heads(x: Tensor, matrices: Tensor) -> Tensor:
    """Returns ``x`` (C, heads, m) times a matrix (m, n) of each head."""
    return (x.transpose(0, 1) @ matrices).transpose(0, 1)


class _Masked(torch.autograd.Function):
    """Attention under masks: ``query`` and ``key`` (T, heads, d), ``values`` (T, heads, dv)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        values: Tensor,
        chosen: Tensor,
        layout: tuple[list[Block], float, Watch | None],
    ) -> Tensor:
        blocks, scale, watch = layout
        sums = torch.promote_types(query.dtype, torch.float32)
        out, lse = torch.empty_like(values), query.new_empty(query.shape[1::-1], dtype=sums)
        for block, rows in _masked_parts(blocks, query):
            keys = slice(block.first, rows.stop)
            score = _product(query[rows].transpose(0, 1) * scale, key[keys].permute(1, 2, 0))
            weights, lse[:, rows] = _weighed(score, _unchosen(chosen[rows], keys))
            mixed = weights.to(values.dtype) @ values[keys].transpose(0, 1)
            out[rows] = mixed.transpose(0, 1)
            if watch is not None:
                listed = chosen[rows, : keys.stop - keys.start]
                columns = (listed - keys.start).clamp_(min=0).long()
                target = weights.mean(0).gather(1, columns).masked_fill_(listed < 0, 0)
                watch(block._replace(begin=rows.start, end=rows.stop), listed, target)
        ctx.save_for_backward(query, key, values, chosen, out, lse)
        ctx.layout = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, values, chosen, out, lse = ctx.saved_tensors
        blocks, scale = ctx.layout
        dquery = torch.empty_like(query)
        dkey, dvalue = (torch.zeros_like(t, dtype=lse.dtype) for t in (key, values))
        for block, rows in _masked_parts(blocks, query):
            keys = slice(block.first, rows.stop)
            scaled, grad = query[rows].transpose(0, 1) * scale, grads[0][rows].transpose(0, 1)
            score = _product(scaled, key[keys].permute(1, 2, 0))
            weights = _weighed_again(score, _unchosen(chosen[rows], keys), lse[:, rows])
            delta = (grad * out[rows].transpose(0, 1)).sum(-1, keepdim=True, dtype=lse.dtype)
            dscore = _product(grad, values[keys].permute(1, 2, 0)).sub_(delta).mul_(weights)
            dscore, weights = dscore.to(key.dtype), weights.to(key.dtype)
            dquery[rows] = (dscore @ key[keys].transpose(0, 1)).mul_(scale).transpose(0, 1)
            dkey[keys] += (dscore.mT @ scaled).transpose(0, 1)
            dvalue[keys] += (weights.mT @ grad).transpose(0, 1)
        return dquery, dkey.to(key.dtype), dvalue.to(values.dtype), None, None


def _masked_parts(blocks: list[Block], query: Tensor) -> Iterator[tuple[Block, slice]]:
    for block in blocks:
        row_bytes = query.shape[1] * (block.end - block.first) * query.element_size()
        for part in _parts(block.end - block.begin, row_bytes, query.device):
            yield block, slice(block.begin + part.start, block.begin + part.stop)


def _unchosen(chosen: Tensor, keys: slice) -> Tensor:
    """Returns True (C, n) for the keys that aren't in ``chosen`` (C, topk)."""
    count = keys.stop - keys.start
    mask = torch.ones(len(chosen), count + 1, dtype=torch.bool, device=chosen.device)
    columns = (chosen - keys.start).masked_fill_(chosen < 0, count)
    return mask.scatter_(1, columns.long(), False)[:, :count]


# The indexer's loss


class _Loss:
    """Sums up the divergence and its gradients for an indexer's weights, block by block."""

    def __init__(self, module: Any, learning: IndexerLearning) -> None:
        self.learning = learning
        self._projections = module.wq_b.weight, module.weights_proj.weight
        self._of_projections = tuple(
            torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
            for w in self._projections
        )
        self._graphs: list[Tensor] = []
        self._of_keys: list[Tensor] = []
        self.total = torch.zeros_like(self._of_projections[0][0, 0])
        self.queries = 0

    def begin(self, indexer: Indexer) -> None:
        """Begins with the blocks of another row of tokens."""
        self.indexer = indexer
        self._graphs.append(indexer.graph)
        self._of_keys.append(torch.zeros_like(indexer.keys))

    def watch(self, block: Block, chosen: Tensor, target: Tensor) -> None:
        """Adds the loss over the chosen keys; called by the attention's forward pass."""
        self.add(block, chosen, target, chosen < 0)

    def add(self, block: Block, chosen: Tensor | None, target: Tensor, hidden: Tensor) -> None:
        """Adds the loss of a block of queries.

        ``target`` (C, n) are the heads' mean weights of the keys ``chosen`` (C, n), or of all
        keys from the block's first on. They are zero for ``hidden`` (C, n) ones.
        """
        if not block.counts:
            return
        indexer, rows = self.indexer, block.rows
        query, weight = indexer.queries(rows), indexer.weights(rows)
        dquery, dweight = torch.empty_like(query), torch.empty_like(weight)
        row_bytes = query.shape[1] * target.shape[1] * query.element_size()
        for part in _parts(len(query), row_bytes, query.device):
            keys = indexer.keys[block.first : block.end]
            if chosen is not None:
                at = chosen[part].clamp(min=0)
                keys = indexer.keys.index_select(0, at.flatten()).view(*at.shape, -1)
            products = (query[part] @ keys.mT).relu_()  # (C, heads, n)
            index = torch.bmm(weight[part, None], products)[:, 0]
            log = index.masked_fill_(hidden[part], -torch.inf).log_softmax(-1)
            p = target[part].to(log.dtype)
            self.total += (p.xlogy(p) - p * log.masked_fill(hidden[part], 0)).sum()
            grad = log.exp_().sub_(p)
            dweight[part] = torch.bmm(products, grad.unsqueeze(-1)).squeeze(-1)
            passed = torch.ops.aten.threshold_backward(grad.unsqueeze(1), products, 0)
            dquery[part] = (passed @ keys).mul_(weight[part, :, None])
            weighed = query[part] * weight[part, :, None]
            if chosen is None:
                dkeys = passed.flatten(0, 1).T @ weighed.flatten(0, 1)
                self._of_keys[-1][block.first : block.end] += dkeys
            else:
                dkeys = (passed.mT @ weighed).flatten(0, 1)
                self._of_keys[-1].index_add_(0, at.flatten(), dkeys)
        self.queries += len(query)
        of_query, of_weight = self._of_projections
        latent, states = (t[rows].to(of_query.dtype) for t in (indexer.latent, indexer.hidden))
        of_query.addmm_(indexer.turned_back(dquery, rows).T.to(of_query.dtype), latent)
        of_weight.addmm_(dweight.T.to(of_query.dtype), states, alpha=indexer.scale)

    def attached_to(self, output: Tensor) -> Tensor:
        """Returns the output; the loss gets its gradient in the output's backward pass."""
        self.learning.add(self.total, self.queries)
        gradients = (*self._of_projections, *self._of_keys)
        inputs = (*self._projections, *self._graphs)
        total = _WithGradients.apply(self.total, gradients, *inputs)
        attached: Tensor = AttachLoss.apply(output, total, self.learning.factor)
        return attached


Dense = Callable[[Tensor, Tensor, Tensor, list[Document]], Tensor]


def attend(module: Any, row: Row, dense: Dense) -> Tensor:
    """Computes the attention (T, heads, value) of a module with an indexer.

    ``dense`` computes causal attention of query, key and value (T, heads, width) by documents.
    """
    grad, learning = torch.is_grad_enabled(), _learning.get(module)
    loss = _Loss(module.indexer, learning) if learning is not None and grad else None
    if learning is not None and learning.stage == "warmup" and (module.training or grad):
        # A pass without gradients may be the first of two, which must compute the same.
        out = _warm_up(module, row, dense, loss)
        return out if loss is None else loss.attached_to(out)
    way = functools.partial(_way, module, loss is not None)
    runs = [(name, row.cut(list(run))) for name, run in itertools.groupby(row.documents, way)]
    outputs = [
        dense(one.query, *expanded(module, one), one.documents)
        if name == "dense"
        else _sparse(module, one, name, loss)
        for name, one in runs
    ]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if loss is None else loss.attached_to(out)


def _way(module: Any, learns: bool, document: Document) -> str:
    topk = module.indexer.index_topk
    if document.length <= topk and not (learns and document.counts):
        return "dense"
    widths = module.kv_lora_rank, module.qk_rope_head_dim, module.qk_head_dim, module.v_head_dim
    absorbs = absorbable(module.kv_b_proj) and gathers(document.length, topk, widths)
    return "gathered" if absorbs else "masked"


def absorbable(layer: Any) -> bool:
    """Returns True if a layer is the product with its whole weight and nothing else."""
    bound = {f"{f.__module__}.{f.__name__}" for f in rebind.bound(layer)}
    return (
        rebind.plain_class(layer) is nn.Linear
        and layer.bias is None
        and not rebind.has_hooks(layer)
        and "forward" not in vars(layer)
        and bound <= {"hasten.parts.nn.fused_layers._linear"}
        and not is_dtensor(layer.weight)
    )


def expanded(module: Any, row: Row) -> tuple[Tensor, Tensor]:
    """Returns key (T, heads, nope + rotary) and value (T, heads, value) of each head."""
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    both = module.kv_b_proj(row.latent).unflatten(-1, (-1, sum(widths)))
    plain, values = both.split(widths, dim=-1)
    shared = row.shared.unsqueeze(1).expand(-1, plain.shape[1], -1)
    return torch.cat((plain, shared), dim=-1), values


def _sparse(module: Any, row: Row, way: str, loss: _Loss | None) -> Tensor:
    """Computes attention over the chosen keys, and in the same pass the indexer's loss."""
    indexer = Indexer(module.indexer, row, loss is not None)
    if way == "gathered":
        up = module.kv_b_proj.weight.unflatten(0, (row.query.shape[1], -1))
        tensors = in_autocast(row.query, torch.cat((row.latent, row.shared), -1), up)
    else:
        tensors = in_autocast(row.query, *expanded(module, row))
    with torch.autocast(row.query.device.type, enabled=False):
        chosen = choose(indexer, row.documents)
        if loss is not None:
            loss.begin(indexer)
        watch = None if loss is None else loss.watch
        layout = blocks_of(row.documents, chosen.device), module.scaling, watch
        function: Any = _Gathered if way == "gathered" else _Masked
        out: Tensor = function.apply(*tensors, chosen, layout)
        if loss is not None:
            dense_scores = _latent_scores if way == "gathered" else _dense_scores
            of_row = functools.partial(dense_scores, tensors, module.scaling)
            _measure(indexer, loss.learning, row.documents, chosen, of_row)
    return out


Tensors = tuple[Tensor, Tensor, Tensor]


def _latent_scores(
    tensors: Tensors, scale: float, rows: Tensor | slice, first: int, end: int
) -> Tensor:
    """Returns the heads' scores (C, heads, n) for the latents ``first`` to ``end``."""
    query, keys, up = tensors
    absorbed = _Latents(query[rows], keys, up, keys, scale).absorbed(Block(0, len(query), 0))
    return _product(absorbed, keys[first:end].T.expand(len(absorbed), -1, -1))


def _dense_scores(
    tensors: Tensors, scale: float, rows: Tensor | slice, first: int, end: int
) -> Tensor:
    """Returns the heads' scores (C, heads, n) for keys ``first`` to ``end``."""
    query, key, _ = tensors
    scaled = query[rows].transpose(0, 1) * scale
    return _product(scaled, key[first:end].permute(1, 2, 0)).transpose(0, 1)


def _warm_up(module: Any, row: Row, dense: Dense, loss: _Loss | None) -> Tensor:
    """Computes dense attention, and the loss over all earlier keys of each query."""
    query, key, values = in_autocast(row.query, *expanded(module, row))
    out = dense(query, key, values, row.documents)
    if loss is None:
        return out
    indexer = Indexer(module.indexer, row, True)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        loss.begin(indexer)
        firsts = _firsts(tuple(row.documents), query.device)
        counted = [d for d in row.documents if d.counts]
        of_row = functools.partial(_dense_scores, (query, key, values), module.scaling)
        for block, rows in _masked_parts(blocks_of(counted, query.device), query):
            hidden = _hidden(rows, block.first, firsts)
            score = of_row(rows, block.first, rows.stop)
            target = _weighed(score, hidden.unsqueeze(1))[0].mean(1)
            loss.add(block._replace(begin=rows.start, end=rows.stop), None, target, hidden)
        _measure(indexer, loss.learning, row.documents, None, of_row)
    return out


@torch.no_grad()
def _measure(
    indexer: Indexer,
    learning: IndexerLearning,
    documents: list[Document],
    chosen: Tensor | None,
    dense_scores: Callable[[Tensor, int, int], Tensor],
) -> None:
    """Adds the attention weight in the chosen keys of some queries, and in the best keys."""
    topk, device = indexer.topk, indexer.keys.device
    for document, rows in measured_queries(documents, topk):
        at = torch.arange(rows.start, rows.stop, rows.step, device=device)
        heads_bytes = indexer.module.n_heads * document.length * 4
        for part in _parts(len(at), heads_bytes, device):
            queries = at[part]
            key = torch.arange(document.start, document.end, device=device)
            hidden = key > queries[:, None]
            score = dense_scores(queries, document.start, document.end)
            weights = _weighed(score, hidden.unsqueeze(1))[0].mean(1)
            if chosen is None:
                keys = indexer.keys[document.start : document.end]
                index = scores(indexer.queries(queries), indexer.weights(queries), keys)
                mask = taken(index.masked_fill_(hidden, -torch.inf), topk)
            else:
                mask = ~_unchosen(chosen[queries], slice(document.start, document.end))
            captured, best = (weights * mask).sum(), weights.topk(topk, dim=-1).values.sum()
            learning.add(0.0, 0.0, captured, best, float(len(queries)))


def measured_queries(documents: list[Document], topk: int) -> Iterator[tuple[Document, range]]:
    """Yields at most `MEASURED` queries that have more than ``topk`` keys, evenly spread."""
    long = [d for d in documents if d.counts and d.length > topk]
    stride = -(-sum(d.length - topk for d in long) // MEASURED)
    skip = 0
    for document in long:
        rows = range(document.start + topk + skip, document.end, stride)
        if rows:
            yield document, rows
        skip = (skip - document.length + topk) % stride
