"""DeepSeek's sparse attention: an indexer chooses keys, and attention reads those alone.

The method is DeepSeek-V3.2's (arXiv:2512.02556, section 2.1). For a query ``t`` and an earlier key
``s`` the indexer's score is ``I = sum over its heads of w[t, head] relu(q[t, head] . k[s])``.
Attention is over the ``index_topk`` keys with the highest scores. Transformers computes the
scores of all heads and pairs at once, and then dense attention under a mask. Here nothing with
all pairs of tokens exists: each pass goes through a few queries at a time. The steps of `attend`:

1. `choose` scores the keys of each query's document and lists the chosen ones. Between equal
   scores the earlier key wins, so a choice doesn't depend on the packing.
2. Attention over the chosen keys, in one of two ways, which keep no weights: the backward pass
   computes them again.

   - masked: products with all earlier keys, under a mask.
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
ROOM = {"cpu": 1 << 20}  # bytes of a step's largest tensor, for the cache; of a GPU: MOST_ROOM
MOST_ROOM = 1 << 28
FEWEST = 4  # queries of a step
MEASURED = 64  # queries of a pass whose attention weight in the chosen keys is measured


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
    modules = [module for _, module in indexed_attentions(model)]
    learnings = [_learning[module] for module in modules if module in _learning]
    sums = [learning.sums for learning in learnings]
    for learning in learnings:
        learning.sums = torch.zeros_like(learning.sums)
    return sums


class AttachLoss(torch.autograd.Function):
    """Returns ``output`` as it is; its backward pass adds the loss's gradients of ``inputs``.

    Each of ``inputs`` gets ``factor`` times its tensor in ``gradients``.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, factor: float, gradients: tuple[Tensor, ...], *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.factor, ctx.dtypes = factor, [t.dtype for t in inputs]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return grads[0], None, None, *((t * ctx.factor).to(dtype) for t, dtype in pairs)


# Documents, and a few queries of one


class QuerySpan(NamedTuple):
    """Queries ``begin`` to ``end`` of the document that starts at ``first``: all, or some.

    ``counts`` is False for filler.
    """

    first: int
    begin: int
    end: int
    counts: bool = True

    @property
    def rows(self) -> slice:
        """Returns the place of the queries in the row."""
        return slice(self.begin, self.end)

    @property
    def keys(self) -> slice:
        """Returns the place of the keys that a query of the span may have."""
        return slice(self.first, self.end)

    @property
    def length(self) -> int:
        """Returns the number of those keys; for a document, of its tokens."""
        return self.end - self.first

    def later(self, device: torch.device) -> Tensor:
        """Returns True (queries, keys) for keys behind a query."""
        shape = self.end - self.begin, self.length
        return torch.ones(shape, dtype=torch.bool, device=device).triu(self.begin - self.first + 1)


class Row(NamedTuple):
    """A row of tokens for attention, all documents end to end.

    ``read`` (T, ...) are hidden states, the query's latent, cosines and sines. ``query`` is (T,
    heads, nope + rotary), ``latent`` (T, latent), ``shared`` (T, rotary).
    """

    read: tuple[Tensor, ...]
    query: Tensor
    latent: Tensor
    shared: Tensor
    documents: list[QuerySpan]

    def cut(self, documents: list[QuerySpan]) -> Row:
        """Returns the row of consecutive ``documents`` alone."""
        start, end = documents[0].first, documents[-1].end
        moved = [
            QuerySpan(d.first - start, d.begin - start, d.end - start, d.counts) for d in documents
        ]
        read = tuple(t[start:end] for t in self.read)
        query, latent, shared = (t[start:end] for t in (self.query, self.latent, self.shared))
        return Row(read, query, latent, shared, moved)


def documents_of(lengths: tuple[int, ...], fillers: int = 0, rows: int = 1) -> list[QuerySpan]:
    """Returns the documents of equal rows, end to end; a row's last ``fillers`` don't count."""
    counts = [*[True] * (len(lengths) - fillers), *[False] * fillers] * rows
    starts = itertools.accumulate(lengths * rows, initial=0)
    documents = zip(starts, lengths * rows, counts, strict=False)
    return [QuerySpan(start, start, start + n, count) for start, n, count in documents if n]


def _steps(count: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Yields slices of ``count`` rows; a slice with ``row_bytes`` for each row has few bytes."""
    step = max(ROOM.get(device.type, MOST_ROOM) // row_bytes, FEWEST)
    return (slice(begin, min(begin + step, count)) for begin in range(0, count, step))


def _parts(
    documents: list[QuerySpan], token_bytes: int, device: torch.device
) -> Iterator[QuerySpan]:
    """Yields parts of each document with few bytes, at ``token_bytes`` for a query and a key."""
    for d in documents:
        for rows in _steps(d.length, d.length * token_bytes, device):
            yield QuerySpan(d.first, d.first + rows.start, d.first + rows.stop, d.counts)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a @ b`` in at least float32: scores aren't rounded to a half format."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return a @ b
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


# The choice


class RowIndexer:
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
    for columns in _steps(len(keys), FEWEST * key_bytes, query.device):
        factor = keys[columns].mT
        for rows in _steps(len(query), key_bytes * factor.shape[1], query.device):
            products = (query[rows] @ factor).relu_()
            torch.bmm(weight[rows, None], products, out=out[rows, None, columns])
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
def choose(indexer: RowIndexer, documents: list[QuerySpan]) -> Tensor:
    """Returns the chosen keys (T, topk) int32 of each query in increasing order, -1 for none.

    Queries of which all have at most ``topk`` keys aren't scored.
    """
    keys, topk = indexer.keys, indexer.topk
    chosen = torch.empty(documents[-1].end, topk, dtype=torch.int32, device=keys.device)
    for part in _parts(documents, 8, keys.device):
        mask = ~part.later(keys.device)
        if part.length > topk:
            query, weight = indexer.queries(part.rows), indexer.weights(part.rows)
            index = scores(query, weight, keys[part.keys])
            mask = taken(index.masked_fill_(~mask, -torch.inf), topk)
        chosen[part.rows] = _listed(mask, part.first, topk)
    return chosen


# Attention over the chosen keys

Watch = Callable[
    [QuerySpan, Tensor, Tensor], None
]  # gets the chosen keys and the heads' mean weights
Layout = tuple[list[QuerySpan], float, Watch | None]  # documents, scale of the scores


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


def _by_heads(x: Tensor, matrices: Tensor) -> Tensor:
    """Returns ``x`` (C, heads, m) times a matrix (m, n) of each head."""
    return (x.transpose(0, 1) @ matrices).transpose(0, 1)


class _Latents:
    """The tensors of `_Gathered`: ``up`` is (heads, nope + value, latent)."""

    def __init__(self, query: Tensor, keys: Tensor, up: Tensor, scale: float) -> None:
        self.query, self.keys, self.scale, self.width = query, keys, scale, up.shape[-1]
        self.nope = query.shape[-1] - keys.shape[-1] + up.shape[-1]
        self.up_key, self.up_values = up[:, : self.nope], up[:, self.nope :]
        self.sums = torch.promote_types(query.dtype, torch.float32)

    def absorbed(self, rows: slice | Tensor) -> Tensor:
        """Returns queries for latent keys (C, heads, latent + rotary), times the scale."""
        query = self.query[rows]
        plain = _by_heads(query[..., : self.nope], self.up_key)
        return torch.cat((plain, query[..., self.nope :]), -1).mul_(self.scale)

    def gathered(self, part: QuerySpan, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the chosen latents (C, k, latent + rotary), and True (C, 1, k) for no key."""
        no_key = None
        if part.begin - part.first < chosen.shape[1] - 1:  # fewer keys than are chosen at most
            no_key, chosen = (chosen < 0).unsqueeze(1), chosen.clamp(min=0)
        latents = self.keys.index_select(0, chosen.flatten())
        return latents.view(*chosen.shape, -1), no_key

    def parts(self, documents: list[QuerySpan], topk: int) -> Iterator[QuerySpan]:
        """Yields a few queries at a time."""
        row_bytes = topk * (self.keys.shape[1] + self.query.shape[1]) * self.keys.element_size()
        for d in documents:
            for rows in _steps(d.length, row_bytes, self.keys.device):
                yield QuerySpan(d.first, d.first + rows.start, d.first + rows.stop, d.counts)


class _Gathered(torch.autograd.Function):
    """Attention over gathered latents.

    ``query`` (T, heads, nope + rotary), ``keys`` (T, latent + rotary), ``up`` (heads, nope +
    value, latent); the output is (T, heads, value).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, up: Tensor, chosen: Tensor, layout: Layout
    ) -> Tensor:
        documents, scale, watch = layout
        tensors = _Latents(query, keys, up, scale)
        out = query.new_empty(*query.shape[:2], tensors.up_values.shape[1])
        lse = query.new_empty(query.shape[:2], dtype=tensors.sums)
        for part in tensors.parts(documents, chosen.shape[1]):
            rows, listed = part.rows, chosen[part.rows, : part.length]
            latents, no_key = tensors.gathered(part, listed)
            score = _product(tensors.absorbed(rows), latents.mT)
            weights, lse[rows] = _weighed(score, no_key)
            mixed = weights.to(keys.dtype) @ latents[..., : tensors.width]
            out[rows] = _by_heads(mixed, tensors.up_values.mT)
            if watch is not None:
                watch(part, listed, weights.mean(1))
        ctx.save_for_backward(query, keys, up, chosen, out, lse)
        ctx.layout = documents, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, up, chosen, out, lse = ctx.saved_tensors
        documents, scale = ctx.layout
        tensors = _Latents(query, keys, up, scale)
        width, nope = tensors.width, tensors.nope
        dquery, dkeys = torch.empty_like(query), torch.zeros_like(keys, dtype=tensors.sums)
        dup = torch.zeros_like(up, dtype=tensors.sums) if ctx.needs_input_grad[2] else None
        for part in tensors.parts(documents, chosen.shape[1]):
            rows, listed = part.rows, chosen[part.rows, : part.length]
            absorbed, grad = tensors.absorbed(rows), grads[0][rows]
            latents, no_key = tensors.gathered(part, listed)
            values, dmixed = latents[..., :width], _by_heads(grad, tensors.up_values)
            weights = _weighed_again(_product(absorbed, latents.mT), no_key, lse[rows])
            delta = (grad * out[rows]).sum(-1, keepdim=True, dtype=lse.dtype)
            dscore = _product(dmixed, values.mT).sub_(delta).mul_(weights)
            weights, dscore = weights.to(keys.dtype), dscore.to(keys.dtype)
            dlatents = dscore.mT @ absorbed
            dlatents[..., :width].baddbmm_(weights.mT, dmixed)
            dkeys.index_add_(0, listed.clamp(min=0).flatten(), dlatents.flatten(0, 1).to(lse.dtype))
            dabsorbed = (dscore @ latents).mul_(scale)
            dquery[rows, :, :nope] = _by_heads(dabsorbed[..., :width], tensors.up_key.mT)
            dquery[rows, :, nope:] = dabsorbed[..., width:]
            if dup is not None:
                plain, mixed = query[rows, :, :nope], weights @ values
                dup[:, :nope] += plain.permute(1, 2, 0) @ dabsorbed[..., :width].transpose(0, 1)
                dup[:, nope:] += grad.permute(1, 2, 0) @ mixed.transpose(0, 1)
        return dquery, dkeys.to(keys.dtype), None if dup is None else dup.to(up.dtype), None, None


def _pairs(query: Tensor, key: Tensor) -> Tensor:
    """Returns the heads' scores (heads, C, n) of queries (C, heads, d) and keys (n, heads, d)."""
    return _product(query.transpose(0, 1), key.permute(1, 2, 0))


class _Masked(torch.autograd.Function):
    """Attention under masks: ``query`` and ``key`` (T, heads, d), ``values`` (T, heads, dv)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, values: Tensor, chosen: Tensor, layout: Layout
    ) -> Tensor:
        documents, scale, watch = layout
        sums = torch.promote_types(query.dtype, torch.float32)
        out, lse = torch.empty_like(values), query.new_empty(query.shape[1::-1], dtype=sums)
        for part in _masked_parts(documents, query):
            rows, keys = part.rows, part.keys
            score = _pairs(query[rows] * scale, key[keys])
            weights, lse[:, rows] = _weighed(score, _unchosen(chosen[rows], keys))
            out[rows] = (weights.to(values.dtype) @ values[keys].transpose(0, 1)).transpose(0, 1)
            if watch is not None:
                listed = chosen[rows, : part.length]
                columns = (listed - part.first).clamp_(min=0).long()
                watch(part, listed, weights.mean(0).gather(1, columns).masked_fill_(listed < 0, 0))
        ctx.save_for_backward(query, key, values, chosen, out, lse)
        ctx.layout = documents, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, values, chosen, out, lse = ctx.saved_tensors
        documents, scale = ctx.layout
        dquery = torch.empty_like(query)
        dkey, dvalues = (torch.zeros_like(t, dtype=lse.dtype) for t in (key, values))
        for part in _masked_parts(documents, query):
            rows, keys, scaled = part.rows, part.keys, query[part.rows] * scale
            hidden, grad = _unchosen(chosen[rows], keys), grads[0][rows]
            weights = _weighed_again(_pairs(scaled, key[keys]), hidden, lse[:, rows])
            delta = (grad * out[rows]).sum(-1, dtype=lse.dtype).T.unsqueeze(-1)
            dscore = _pairs(grad, values[keys]).sub_(delta).mul_(weights)
            dscore, weights = dscore.to(key.dtype), weights.to(key.dtype)
            dquery[rows] = (dscore @ key[keys].transpose(0, 1)).mul_(scale).transpose(0, 1)
            dkey[keys] += (dscore.mT @ scaled.transpose(0, 1)).transpose(0, 1)
            dvalues[keys] += (weights.mT @ grad.transpose(0, 1)).transpose(0, 1)
        return dquery, dkey.to(key.dtype), dvalues.to(values.dtype), None, None


def _masked_parts(documents: list[QuerySpan], query: Tensor) -> Iterator[QuerySpan]:
    return _parts(documents, query.shape[1] * query.element_size(), query.device)


def _unchosen(chosen: Tensor, keys: slice) -> Tensor:
    """Returns True (C, n) for the keys that aren't in ``chosen`` (C, topk)."""
    count = keys.stop - keys.start
    mask = torch.ones(len(chosen), count + 1, dtype=torch.bool, device=chosen.device)
    columns = (chosen - keys.start).masked_fill_(chosen < 0, count)
    return mask.scatter_(1, columns.long(), False)[:, :count]


# The indexer's loss


class _Loss:
    """Sums up the divergence and its gradients for an indexer's weights."""

    def __init__(self, module: Any, learning: IndexerLearning) -> None:
        self.learning = learning
        self._of_keys = [*module.wk.parameters(), *module.k_norm.parameters()]
        self._inputs: list[Tensor] = [module.wq_b.weight, module.weights_proj.weight]
        self._gradients = [
            torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
            for w in self._inputs
        ]
        self.total = torch.zeros_like(self._gradients[0][0, 0])
        self.queries = 0

    def begin(self, indexer: RowIndexer) -> None:
        """Begins with the documents of another row of tokens."""
        self.indexer = indexer
        self._inputs.append(indexer.graph)
        self._gradients.append(torch.zeros_like(indexer.keys))

    def watch(self, part: QuerySpan, chosen: Tensor, target: Tensor) -> None:
        """Adds the loss over the chosen keys; called by the attention's forward pass."""
        self.add(part, chosen, target, chosen < 0)

    def add(self, part: QuerySpan, chosen: Tensor | None, target: Tensor, hidden: Tensor) -> None:
        """Adds the loss of a few queries.

        ``target`` (C, n) are the heads' mean weights of the keys ``chosen`` (C, n), or of all keys
        of the part. They are zero for ``hidden`` (C, n) ones.
        """
        if not part.counts:
            return
        indexer, of_keys = self.indexer, self._gradients[-1]
        query, weight = indexer.queries(part.rows), indexer.weights(part.rows)
        dquery, dweight = torch.empty_like(query), torch.empty_like(weight)
        row_bytes = query.shape[1] * target.shape[1] * query.element_size()
        for rows in _steps(len(query), row_bytes, query.device):
            keys = indexer.keys[part.keys]
            if chosen is not None:
                at = chosen[rows].clamp(min=0)
                keys = indexer.keys.index_select(0, at.flatten()).view(*at.shape, -1)
            products = (query[rows] @ keys.mT).relu_()  # (C, heads, n)
            index = torch.bmm(weight[rows, None], products)[:, 0]
            log = index.masked_fill_(hidden[rows], -torch.inf).log_softmax(-1)
            p = target[rows].to(log.dtype)
            self.total += (p.xlogy(p) - p * log.masked_fill(hidden[rows], 0)).sum()
            grad = log.exp_().sub_(p)
            dweight[rows] = torch.bmm(products, grad.unsqueeze(-1)).squeeze(-1)
            passed = torch.ops.aten.threshold_backward(grad.unsqueeze(1), products, 0)
            dquery[rows] = (passed @ keys).mul_(weight[rows, :, None])
            weighed = query[rows] * weight[rows, :, None]
            if chosen is None:
                of_keys[part.keys].addmm_(passed.flatten(0, 1).T, weighed.flatten(0, 1))
            else:
                of_keys.index_add_(0, at.flatten(), (passed.mT @ weighed).flatten(0, 1))
        self.queries += len(query)
        of_query, of_weight = self._gradients[:2]
        latent, states = (t[part.rows].to(of_query.dtype) for t in (indexer.latent, indexer.hidden))
        dquery = indexer.turned_back(dquery, part.rows)
        of_query.addmm_(dquery.T.to(of_query.dtype), latent)
        of_weight.addmm_(dweight.T.to(of_query.dtype), states, alpha=indexer.scale)

    def attached_to(self, output: Tensor) -> Tensor:
        """Returns the output; the indexer gets the loss's gradient in its backward pass."""
        self.learning.add(self.total, self.queries)
        if len(self._inputs) == 2:  # only short fillers: replicas wait for each weight's gradient
            self._inputs += self._of_keys
            self._gradients += [torch.zeros_like(w) for w in self._of_keys]
        attached: Tensor = AttachLoss.apply(
            output, self.learning.factor, tuple(self._gradients), *self._inputs
        )
        return attached


Dense = Callable[[Tensor, Tensor, Tensor, list[QuerySpan]], Tensor]


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


def _way(module: Any, learns: bool, document: QuerySpan) -> str:
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
    indexer, scale = RowIndexer(module.indexer, row, loss is not None), module.scaling
    function: Any = _Gathered if way == "gathered" else _Masked
    if way == "gathered":
        up = module.kv_b_proj.weight.unflatten(0, (row.query.shape[1], -1))
        tensors = in_autocast(row.query, torch.cat((row.latent, row.shared), -1), up)
    else:
        tensors = in_autocast(row.query, *expanded(module, row))
    with torch.autocast(row.query.device.type, enabled=False):
        chosen = choose(indexer, row.documents)
        if loss is None:
            alone: Tensor = function.apply(*tensors, chosen, (row.documents, scale, None))
            return alone
        loss.begin(indexer)
        out: Tensor = function.apply(*tensors, chosen, (row.documents, scale, loss.watch))
        query, key, factor = tensors
        if way == "gathered":  # all heads read the latents
            latents = _Latents(query, key, factor, scale)
            key = key.unsqueeze(1).expand(-1, query.shape[1], -1)
            _measure(loss, row.documents, chosen, latents.absorbed, key)
        else:
            _measure(loss, row.documents, chosen, lambda rows: query[rows] * scale, key)
    return out


def _warm_up(module: Any, row: Row, dense: Dense, loss: _Loss | None) -> Tensor:
    """Computes dense attention, and the loss over all earlier keys of each query."""
    query, key, values = in_autocast(row.query, *expanded(module, row))
    out = dense(query, key, values, row.documents)
    if loss is None:
        return out
    loss.begin(RowIndexer(module.indexer, row, True))
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        for part in _masked_parts([d for d in row.documents if d.counts], query):
            later = part.later(query.device)
            score = _pairs(query[part.rows] * module.scaling, key[part.keys])
            loss.add(part, None, _weighed(score, later)[0].mean(0), later)
        _measure(loss, row.documents, None, lambda rows: query[rows] * module.scaling, key)
    return out


@torch.no_grad()
def _measure(
    loss: _Loss,
    documents: list[QuerySpan],
    chosen: Tensor | None,
    query_of: Callable[[Tensor], Tensor],
    key: Tensor,
) -> None:
    """Adds the attention weight in the chosen keys of some queries, and in the best keys."""
    indexer, device = loss.indexer, key.device
    for document, rows in measured_queries(documents, indexer.topk):
        every = torch.arange(rows.start, rows.stop, rows.step, device=device)
        tokens = torch.arange(document.first, document.end, device=device)
        for some in _steps(len(every), key.shape[1] * document.length * 4, device):
            at = every[some]
            later = tokens > at[:, None]
            weights = _weighed(_pairs(query_of(at), key[document.keys]), later)[0].mean(0)
            if chosen is None:
                queries = indexer.queries(at), indexer.weights(at)
                index = scores(*queries, indexer.keys[document.keys])
                mask = taken(index.masked_fill_(later, -torch.inf), indexer.topk)
            else:
                mask = ~_unchosen(chosen[at], document.keys)
            best = weights.topk(indexer.topk, dim=-1).values
            loss.learning.add(0, 0, (weights * mask).sum(), best.sum(), len(at))


def measured_queries(documents: list[QuerySpan], topk: int) -> Iterator[tuple[QuerySpan, range]]:
    """Yields at most `MEASURED` queries that have more than ``topk`` keys, evenly spread."""
    long = [d for d in documents if d.counts and d.length > topk]
    stride = -(-sum(d.length - topk for d in long) // MEASURED)
    skip = 0
    for document in long:
        rows = range(document.first + topk + skip, document.end, stride)
        if rows:
            yield document, rows
        skip = (skip - document.length + topk) % stride
