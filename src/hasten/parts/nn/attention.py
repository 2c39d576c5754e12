"""Causal attention inside each document of a packed row, with no work spent between documents.

A packed row under plain SDPA needs a dense block mask: right, but it computes every pair of tokens
of the row. Here each document attends to itself alone: one variable-length kernel call where the
device has one (``torch.nn.attention.varlen``; on processors with AMX hasten's own, for bf16), else
one causal SDPA call per document.

The function is registered with Transformers under ``hasten_documents``, its public way to add an
attention; a model instance that selects it stays the only one affected. Models hand unknown keyword
arguments down to their attention, which is how ``document_lengths`` and ``boundaries`` of
:func:`hasten.parts.data.collate.packed` arrive.

DeepSeek-V3.2 attends to the ``index_topk`` keys that an indexer chooses for each query. Here the
indexer sees one document at a time, so that it chooses among the keys of that document alone. A
document of at most ``index_topk`` tokens has every key chosen: the indexer isn't run for it, and
the kernels above take it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.parts.kernels import amx
from hasten.parts.kernels.refused import LEAST_CAPABILITY, is_refused
from hasten.parts.nn import fused_functions

NAME = "hasten_documents"
APART = f"{NAME}_apart"  # the same outside of compiled graphs
ARCHITECTURES = ("llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "deepseek_v32")
NO_MASK = (
    "document attention takes neither a mask nor a sliding window; call "
    'model.set_attn_implementation("sdpa")'
)
VARLEN = "varlen_attention"  # the kernel's name where it is checked
WIDEST_HEAD = 256  # of the variable-length kernel (FlashAttention-2)


def use_document_attention(model: Any) -> None:
    """Make a Hugging Face causal LM attend document by document; ``model`` alone is changed.

    Transformers builds no mask for such an attention: a two-dimensional ``attention_mask`` never
    arrives, so that filler must stand on the right, where a causal token doesn't see it.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if has_indexer(module):
            module.forward = functools.partial(_without_mask, module)
            module.indexer.forward = functools.partial(_later, module.indexer)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    document_lengths: tuple[int, ...] | None = None,
    boundaries: Tensor | None = None,
    indices: tuple[Any, ...] | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention of ``query`` (B, heads, T, d) over ``key``, ``value`` (B, kv heads, T, d).

    Without ``document_lengths`` every row is one document. ``indices`` are what the indexer of
    ``module`` reads: hidden states, the query's latent, rotary tables. Returns (B, T, heads, d).

    Raises:
        ValueError: the call is not a training pass over whole rows (generation with a cache): give
            the model its own attention back first, ``model.set_attn_implementation("sdpa")``; or
            it asks for a mask or a sliding window, which this attention doesn't have.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            "document attention is for training passes; before generating, call "
            'model.set_attn_implementation("sdpa")'
        )
    masked = attention_mask is not None and indices is None  # that of an indexer says nothing
    if masked or other.get("sliding_window") is not None:
        raise ValueError(NO_MASK)
    lengths = (query.shape[2],) if document_lengths is None else document_lengths
    chosen = None if indices is None else _chosen(module.indexer, indices, lengths)
    if chosen is not None:
        return _one_by_one((query, key, value), lengths, scaling, dropout, chosen), None
    if not dropout and amx.fits(query, key, value):
        return _on_tiles((query, key, value), document_lengths, scaling), None
    if document_lengths is None:
        return _causal(query, key, value, scaling, dropout).transpose(1, 2), None
    kernel = _varlen()
    if kernel and boundaries is not None and _fits_varlen(query, value, dropout):
        longest = max(document_lengths)
        return _one_kernel(kernel, (query, key, value), boundaries, longest, scaling), None
    return _one_by_one((query, key, value), lengths, scaling, dropout), None


def has_indexer(module: nn.Module) -> bool:
    """Whether it is an attention whose keys an indexer chooses."""
    return type(module).__name__ == "DeepseekV32Attention"


def by_documents(config: Any) -> bool:
    """Whether a model with this config attends document by document."""
    return config._attn_implementation in (NAME, APART)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """An attention's own code, by documents where the model asks for it."""
    if has_indexer(module) and by_documents(module.config):
        return functools.partial(_without_mask, module)
    return functools.partial(type(module).forward, module)


def with_chosen_keys(mask: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """``mask`` (B, 1, T, keys) without the keys that aren't in ``indices`` (B, T, top-k).

    A mask of truth values, or one of numbers of ``dtype`` that are added to the scores.
    """
    chosen = indices.new_zeros((*indices.shape[:2], mask.shape[-1]), dtype=torch.bool)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(dtype).min)


def _without_mask(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **other: Any
) -> Any:
    """An attention with an indexer; by documents there is no mask that its own code could read."""
    if by_documents(self.config):
        if attention_mask is not None:
            raise ValueError(NO_MASK)
        attention_mask = hidden_states.new_empty((1, 1, 1, 1))
    return type(self).forward(self, hidden_states, attention_mask=attention_mask, **other)


def _later(self: Any, hidden: Tensor, latent: Tensor, tables: Any, *more: Any, **named: Any) -> Any:
    """What the indexer reads, handed on to `attend`, which knows the documents."""
    if by_documents(self.config):
        return hidden, latent, tables
    return type(self).forward(self, hidden, latent, tables, *more, **named)


@torch.no_grad()
def _chosen(
    indexer: Any, read: tuple[Any, ...], lengths: Sequence[int]
) -> list[Tensor | None] | None:
    """Of each document the keys that a query may see, (B, 1, n, n), or None: all before it.

    None in place of the list where that holds for every document.
    """
    if max(lengths) <= indexer.index_topk:
        return None
    hidden, latent, (cos, sin) = read
    pieces = zip(*(t.split(tuple(lengths), dim=1) for t in (hidden, latent, cos, sin)), strict=True)
    found: list[Tensor | None] = []
    for length, (states, query, *tables) in zip(lengths, pieces, strict=True):
        if length <= indexer.index_topk:
            found.append(None)
            continue
        causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden.device).tril()
        indices = type(indexer).forward(indexer, states, query, tuple(tables), causal[:, 0], None)
        found.append(with_chosen_keys(causal, indices, hidden.dtype))
    return found


def _one_by_one(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: Sequence[int],
    scale: float | None,
    dropout: float,
    masks: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """One SDPA call per document: causal, or within its mask."""
    pieces = zip(*(t.split(tuple(lengths), dim=2) for t in tensors), strict=True)
    every = [None] * len(lengths) if masks is None else masks
    found = [
        _causal(query, key, value, scale, dropout, mask)
        for (query, key, value), mask in zip(pieces, every, strict=True)
    ]
    return torch.cat(found, dim=2).transpose(1, 2)


def _on_tiles(
    tensors: tuple[Tensor, Tensor, Tensor],
    document_lengths: tuple[int, ...] | None,
    scale: float | None,
) -> Tensor:
    """All rows end to end in one call of the processor's own kernel."""
    batch, _, length, width = tensors[0].shape
    lengths = ((length,) if document_lengths is None else tuple(document_lengths)) * batch
    query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in tensors)
    starts = tuple(itertools.accumulate(lengths, initial=0))
    out = fused_functions.attend(query, key, value, starts, width**-0.5 if scale is None else scale)
    return out.view(batch, length, *out.shape[1:])


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    dropout: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Causal SDPA, or SDPA within a mask that is causal itself."""
    more = {"dropout_p": dropout, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **more)


def _fits_varlen(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch's variable-length kernel takes these tensors."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    narrow = _kernel_width(query, value) <= WIDEST_HEAD
    takes = query.is_cuda and half and narrow and not dropout
    return takes and not is_refused(VARLEN) and _has_varlen(query.device)


@functools.cache
def _has_varlen(device: torch.device) -> bool:
    """Whether FlashAttention-2, which the kernel is, runs on a GPU: from Ampere on.

    ROCm has one of its own that was never tried with this code.
    """
    capable = torch.version.hip is None
    return capable and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def _kernel_width(query: Tensor, value: Tensor) -> int:
    """The width at which the kernel runs: one for all three, a multiple of 8."""
    widest = int(max(query.shape[-1], value.shape[-1]))
    return -(-widest // 8) * 8


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    """Torch's variable-length kernel, told to be causal, or None where torch has none.

    A window says so in recent releases, a flag did in the first ones.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    return functools.partial(varlen_attn, **causal)


@functools.cache
def _groups_heads(kernel: Callable[..., Any]) -> bool:
    """Whether it takes fewer heads of keys than of queries: torch 2.11 has none that does."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _one_kernel(
    kernel: Callable[..., Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    boundaries: Tensor,
    longest: int,
    scale: float | None,
) -> Tensor:
    """The whole row in one call; tensors become (tokens, heads, d) and back.

    The kernel knows one width of head. Where query and value differ in theirs (latent attention:
    192 and 128) columns of zeros fill the narrower: in query and key they add nothing to a score,
    and in the value they come out as zeros, which are cut off. Their gradients are cut off too.
    """
    query, key, value = (t[0].transpose(0, 1) for t in tensors)
    groups, more = query.shape[1] // key.shape[1], {}
    if groups > 1 and _groups_heads(kernel):
        more = {"enable_gqa": True}
    elif groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale  # of the true width
    true, width = value.shape[-1], _kernel_width(query, value)
    query, key, value = (
        t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))
        for t in (query, key, value)
    )
    out: Tensor = kernel(
        query, key, value, boundaries, boundaries, longest, longest, scale=scale, **more
    )
    return out[..., :true].unsqueeze(0)
