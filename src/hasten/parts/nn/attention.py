"""Causal attention inside each document of a packed row, without work between documents.

Plain SDPA needs a dense block mask for a packed row, and computes every pair of tokens.
Here each document attends to itself alone. If the device has a variable-length kernel
(``torch.nn.attention.varlen``; on processors hasten's own, for float32 and bf16), it is
called once per row. Otherwise causal SDPA is called once per document.

The function `attend` is registered as ``hasten_documents`` in Transformers' public
registry of attentions. Only the model instance that selects it is affected. The steps:

1. The decoder's forward (`_by_documents`) detects the documents of the rows, by
   Transformers' own rule for ``sdpa`` and ``eager``. It passes ``document_lengths`` as a
   keyword argument, which models hand on to their attention. Rows of hasten's own
   collation already have them (:func:`hasten.parts.data.collate.packed`), so the host
   never waits for a GPU.
2. The call uses the model's former attention, with the mask that Transformers builds for
   it, in four cases: the documents can't be detected, there is a cache, a mask hides
   tokens, or it isn't training.
3. Each layer calls `attend`, which reads only ``document_lengths``.

A document can also attend to the first tokens of the document before it, ``prefixes`` of
them. So two answers to one prompt are computed with the prompt once
(:func:`hasten.parts.data.pairs.packed_pairs`). Keys and values of the prefix are then copied
before those of the document, which has more keys than queries.

DeepSeek-V3.2 attends to the ``index_topk`` keys that an indexer chooses for each query. So
the forward of its attention is replaced (`_sparse_forward`): the indexer chooses among the
keys of the query's document (:mod:`hasten.parts.nn.sparse_attention`). In a document of at
most ``index_topk`` tokens every key is chosen. Then the indexer isn't run, and the kernels
above are used.

DeepSeek-V4's attention runs on each document (:mod:`hasten.parts.nn.compressed_attention`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.machine.lazy_torch import not_compiled
from hasten.parts.kernels import products
from hasten.parts.kernels.registry import LEAST_CAPABILITY, is_refused
from hasten.parts.nn import compressed_attention, fused_functions, rebind, sparse_attention
from hasten.parts.nn.causal_lm import holds_cache
from hasten.parts.nn.sparse_attention import has_indexer

NAME = "hasten_documents"
UNCOMPILED = f"{NAME}_apart"  # name of the same attention, run outside of compiled graphs
USUAL = ("sdpa", "eager")  # attentions of a model that may be replaced
SHARES_PROMPTS = ("llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")  # no indexer
ARCHITECTURES = (*SHARES_PROMPTS, "deepseek_v32", compressed_attention.ARCHITECTURE)
VARLEN = "varlen_attention"  # name of the kernel in the registry
WIDEST_HEAD = 256  # widest head of the variable-length kernel (FlashAttention-2)
SHARED = (
    "a shared prompt needs one packed row and a model without an indexer; lay the prompt out with "
    "each answer"
)
NO_CACHE = (
    "document attention has neither a cache nor a sliding window; leave document_lengths out of "
    "this call"
)
LONG = 1024  # mean tokens per document from which one call per document is faster on Hopper


def use_document_attention(model: Any) -> None:
    """Makes a Hugging Face causal LM train document by document; only ``model`` is changed.

    To undo it, call ``model.set_attn_implementation`` with the former attention's name.

    Raises:
        ValueError: see `why_not`.
    """
    reason = why_not(model.config)
    if reason:
        raise ValueError(f"document attention isn't used: {reason}")
    _register()
    name = _name(NAME, usual_of(model.config))
    model.set_attn_implementation(name)
    for module in model.modules():  # a copied layer has its own config
        if isinstance(getattr(module, "config", None), type(model.config)):
            module.config._attn_implementation = name
    rebind.bind(getattr(model, model.base_model_prefix, model), _by_documents)
    for module in model.modules():
        if has_indexer(module):
            rebind.bind(module, _sparse_forward)
        elif compressed_attention.is_compressed_attention(module):
            rebind.bind(module, compressed_attention.attend_apart)


def why_not(config: Any) -> str:
    """Returns why a model with this config can't use document attention; "" if it can."""
    kinds = getattr(config, "layer_types", None) or ()
    windows = any(str(kind).startswith(("sliding", "chunked")) for kind in kinds)
    windows |= getattr(config, "sliding_window", None) is not None
    if windows and not compressed_attention.has_compressed_keys(config):
        return "layers of the model attend through a window"
    if config.model_type == "deepseek_v32" and getattr(config, "attention_dropout", 0):
        return "attention over chosen keys has no dropout; set attention_dropout to 0"
    return why_not_over(usual_of(config))


def why_not_over(usual: str) -> str:
    """Returns why document attention can't replace the attention ``usual``; "" if it can."""
    if usual in USUAL:
        return ""
    return (
        f"the model attends with {usual}, which isn't sdpa or eager and may keep documents apart "
        'itself; call model.set_attn_implementation("sdpa") first, or leave document_attention out'
    )


def by_documents(config: Any) -> bool:
    """Returns True if a model with this config attends document by document."""
    return str(config._attn_implementation).startswith(NAME)


def usual_of(config: Any) -> str:
    """Returns the attention that the model has, or had before `use_document_attention`."""
    name = config._attn_implementation or "eager"
    if not by_documents(config):
        return str(name)
    return next((usual for usual in USUAL if name.endswith(f"_over_{usual}")), USUAL[0])


def outside_graphs(config: Any) -> None:
    """Makes the attention of a model with this config run outside of compiled graphs."""
    config._attn_implementation = _name(UNCOMPILED, usual_of(config))


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
    indices: Any = None,
    prefixes: tuple[int, ...] | None = None,
    **other: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention of ``query`` (B, heads, T, d) over ``key``, ``value`` (B, kv heads, T, d).

    ``document_lengths`` add up to T if all rows have the same documents, or to B T for all
    rows end to end. None: the model's former attention runs, with ``attention_mask``.
    ``prefixes`` are the tokens of the document before to which each document attends too.

    ``indices`` (B, T, top-k) are the keys that an indexer chose, without ``document_lengths``
    only. Returns (B, T, heads, d).

    Raises:
        ValueError: documents with fewer queries than keys, or with a sliding window.
    """
    if document_lengths is None:
        if indices is not None:
            assert attention_mask is not None  # such models always build one
            attention_mask = with_chosen_keys(attention_mask, indices, query.dtype)
        more = {"scaling": scaling, "dropout": dropout, **other}
        output: tuple[Tensor, Tensor | None] = _usual(module)(
            module, query, key, value, attention_mask, **more
        )
        return output
    if query.shape[2] != key.shape[2] or other.get("sliding_window") is not None:
        raise ValueError(NO_CACHE)
    batch, _, length, _ = query.shape
    if batch > 1 and sum(document_lengths) == batch * length:
        query, key, value = (_end_to_end(t, 2) for t in (query, key, value))
    if prefixes is not None and any(prefixes):
        if batch > 1:
            raise ValueError(SHARED)
        out = _with_prefixes((query, key, value), document_lengths, prefixes, scaling, dropout)
        return out, None
    out = _documents((query, key, value), document_lengths, boundaries, scaling, dropout)
    return out.reshape(batch, length, *out.shape[2:]), None


def _documents(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[int, ...],
    boundaries: Tensor | None,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """Returns the attention (B, T, heads, d), by the fastest kernel that supports the inputs."""
    query, key, value = tensors
    if not dropout and products.fits_attention(query, key, value):
        return _on_processor(tensors, lengths, scaling)
    if len(lengths) == 1:
        return _causal(query, key, value, scaling, dropout).transpose(1, 2)
    if _may_be_rows(tensors, lengths, dropout):
        q, k, v = (t[0].unflatten(1, (len(lengths), -1)).transpose(0, 1) for t in tensors)
        return _causal(q, k, v, scaling, dropout).transpose(1, 2).flatten(0, 1).unsqueeze(0)
    if _are_long(tensors, lengths, dropout):
        return _one_by_one(tensors, lengths, scaling, dropout)
    kernel = _varlen() if len(query) == 1 else None
    if kernel and boundaries is not None and _fits_varlen(query, value, dropout):
        place = boundaries, max(lengths)
        return _one_kernel(kernel, tensors, (place, place), scaling)
    return _one_by_one(tensors, lengths, scaling, dropout)


def _with_prefixes(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[int, ...],
    prefixes: tuple[int, ...],
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Returns the attention (1, T, heads, d) of documents with a part of the one before."""
    query = tensors[0][0].transpose(0, 1)  # (T, heads, d)
    key, value = (_PrefixCopies.apply(t[0].transpose(0, 1), lengths, prefixes) for t in tensors[1:])
    keys = tuple(length + prefix for length, prefix in zip(lengths, prefixes, strict=True))
    if not dropout and products.fits_attention(query, key, value):
        starts, key_starts = (tuple(itertools.accumulate(n, initial=0)) for n in (lengths, keys))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return fused_functions.attend(query, key, value, starts, scale, key_starts).unsqueeze(0)
    rows = [t.transpose(0, 1).unsqueeze(0) for t in (query, key, value)]
    kernel = _varlen()
    if kernel and _fits_varlen(rows[0], rows[2], dropout):
        places = tuple((_boundaries(n, query.device), max(n)) for n in (lengths, keys))
        return _one_kernel(kernel, tuple(rows), places, scale)
    pieces = (t.split(n, dim=2) for t, n in zip(rows, (lengths, keys, keys), strict=True))
    outputs = []
    for q, k, v in zip(*pieces, strict=True):
        shape, prefix = (q.shape[2], k.shape[2]), k.shape[2] - q.shape[2]
        mask = q.new_ones(shape, dtype=torch.bool).tril(prefix) if prefix else None
        outputs.append(_causal(q, k, v, scale, dropout, mask))
    return torch.cat(outputs, dim=2).transpose(1, 2)


@functools.lru_cache(maxsize=16)  # each layer needs the same ones
def _boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    starts = itertools.accumulate(lengths, initial=0)
    return torch.tensor([*starts], dtype=torch.int32).to(device, non_blocking=True)


class _PrefixCopies(torch.autograd.Function):
    """Copies the first rows of a document before the rows of the next."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, lengths: tuple[int, ...], prefixes: tuple[int, ...]
    ) -> Tensor:
        ctx.layout = lengths, prefixes
        documents = rows.split(lengths)
        pieces: list[Tensor] = []
        for index, (document, prefix) in enumerate(zip(documents, prefixes, strict=True)):
            pieces += [documents[index - 1][:prefix], document] if prefix else [document]
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        lengths, prefixes = ctx.layout
        sizes = [n for pair in zip(prefixes, lengths, strict=True) for n in pair]
        pieces = grads[0].split(sizes)
        rows = torch.cat(pieces[1::2])
        for before, copy in zip(rows.split(lengths), pieces[2::2], strict=False):
            before[: len(copy)] += copy
        return rows, None, None


def _end_to_end(t: Tensor, side: int) -> Tensor:
    """Joins all rows: (B, ..., T, d) becomes (1, ..., B T, d), with T at ``side``."""
    return t.movedim(side, 1).flatten(0, 1).unsqueeze(0).movedim(1, side)


def with_chosen_keys(mask: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``mask`` (B, 1, T, keys) limited to the keys in ``indices`` (B, T, top-k).

    The mask is bool, or has numbers of ``dtype`` that are added to the scores.
    """
    chosen = indices.new_zeros((*indices.shape[:2], mask.shape[-1]), dtype=torch.bool)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(dtype).min)


# Document lengths from a decoder's arguments


def is_no_mask(mask: Tensor | None) -> bool:
    """Returns True for the empty mask that marks separation by document lengths."""
    return mask is not None and mask.numel() == 0


def _by_documents(decoder: Any, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs the decoder's forward, with document lengths for document attention.

    Then the mask is an empty tensor of four dimensions. Transformers passes such masks on
    unchanged, so it neither builds one nor reads the positions, which would wait for a GPU.
    """
    if not by_documents(decoder.config):
        return usual(*args, **kwargs)
    inputs = kwargs
    if args:
        inputs = inspect.signature(usual).bind_partial(*args).arguments | kwargs
    states = inputs.get("input_ids")
    if states is None:
        states = inputs.get("inputs_embeds")
    if states is None:
        return usual(**inputs)
    has_lengths = inputs.get("document_lengths") is not None
    if has_lengths:
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.numel() and not bool(mask.all()):
            raise ValueError(
                "document_lengths define which tokens attend to each other, and an attention_mask "
                "that hides tokens was given too; leave one of them out"
            )
    else:
        inputs = {**inputs, **_detected_documents(decoder, states, inputs)}
        has_lengths = "document_lengths" in inputs
    if has_lengths:
        inputs["attention_mask"] = states.new_empty((1, 1, 0, 0), dtype=torch.bool)
        if decoder.config.model_type == "deepseek_v32":  # the sparse attention fills no cache
            inputs["use_cache"] = False
    if has_lengths and compressed_attention.has_compressed_keys(decoder.config):
        lengths, tokens = inputs["document_lengths"], states.shape[1]
        positions = compressed_attention.positions_of(lengths, tokens, states.device)
        inputs["position_ids"] = positions
        inputs["use_cache"] = False  # it would stay empty
    return usual(**inputs)


def _detected_documents(decoder: Any, states: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``document_lengths`` and ``boundaries`` detected from a training pass's inputs.

    The dict is empty if they can't be detected. The rule is that of Transformers for ``sdpa``
    and ``eager``. Without a mask and a cache, a document begins where a position isn't one
    more than the position before. Otherwise each row is one document.
    """
    config = decoder.config
    weights = inputs.get("output_attentions", getattr(config, "output_attentions", False))
    is_training = decoder.training or torch.is_grad_enabled()  # Lightning may leave eval mode on
    if not is_training or weights or holds_cache(inputs):
        return {}
    batch, length = states.shape[:2]
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    is_traced = torch.compiler.is_compiling()  # a graph can't read tensor values
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != (batch, length) or is_traced:
            return {}
        return {"document_lengths": (length,)} if bool(mask.all()) else {}
    use_cache = inputs.get("use_cache")
    fills_cache = config.use_cache if use_cache is None else use_cache
    if fills_cache and compressed_attention.has_compressed_keys(config):
        return {}
    if positions is None or fills_cache:
        return {"document_lengths": (length,)}
    if positions.ndim != 2 or is_traced:
        return {}
    begins = positions.diff(prepend=positions[:, :1] - 1) != 1
    begins[:, 0] = True
    starts = begins.expand(batch, -1).flatten().nonzero().flatten()
    ends = torch.cat([starts, starts.new_full((1,), batch * length)]).int()
    lengths = tuple(ends.diff().tolist())
    if lengths == (length,) * batch:
        return {"document_lengths": (length,)}
    return {"document_lengths": lengths, "boundaries": ends}


# Attention with an indexer


def _sparse_forward(
    self: Any,
    usual: Callable[..., Any],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs DeepSeek-V3.2's attention by documents, with the projections of Transformers."""
    if not is_no_mask(attention_mask):
        return usual(  # type: ignore[no-any-return]
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **other,
        )
    residual = self.q_a_layernorm(self.q_a_proj(hidden_states))
    query = self.q_b_proj(residual).unflatten(-1, (-1, self.qk_head_dim))
    plain, turned = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    latent, shared = self.kv_a_proj_with_mqa(hidden_states).split(
        [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
    )
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb_interleave
    turned, shared = rotate(turned, shared.unsqueeze(2), *position_embeddings, unsqueeze_dim=2)
    query = torch.cat((plain, turned), dim=-1)
    read = hidden_states, residual, *position_embeddings
    return indexed(self, read, (query, self.kv_a_layernorm(latent), shared.squeeze(2)), other)


def indexed(
    module: Any,
    read: tuple[Tensor, ...],
    tensors: tuple[Tensor, Tensor, Tensor],
    arguments: Mapping[str, Any],
) -> tuple[Tensor, None]:
    """Returns the output of an attention with an indexer, of known documents.

    ``read`` are the hidden states, the query's latent, cosines and sines. The ``tensors`` are
    query, the latent of keys and values, and the keys' rotary columns. All are (B, T, ...).

    Raises:
        ValueError: documents that share a prompt, or a cache.
    """
    if holds_cache(arguments):
        raise ValueError(NO_CACHE)
    if any(arguments.get("prefixes") or ()):
        raise ValueError(SHARED)
    batch, length = read[0].shape[:2]
    lengths, fillers = arguments["document_lengths"], arguments.get("fillers") or 0
    rows = batch if sum(lengths) == length else 1
    documents = sparse_attention.documents_of(lengths, fillers, rows)
    read = tuple(t.expand(batch, -1, -1).flatten(0, 1) for t in read)
    query, latent, shared = (t.flatten(0, 1) for t in tensors)
    row = sparse_attention.Row(read, query, latent, shared, documents)

    def dense(
        query: Tensor, key: Tensor, values: Tensor, documents: list[sparse_attention.QuerySpan]
    ) -> Tensor:
        rows = [t.transpose(0, 1).unsqueeze(0) for t in (query, key, values)]
        lengths = tuple(d.length for d in documents)
        boundaries = _boundaries(lengths, query.device)
        return _documents((rows[0], rows[1], rows[2]), lengths, boundaries, module.scaling, 0.0)[0]

    out = sparse_attention.attend(module, row, dense)
    return module.o_proj(out.reshape(batch, length, -1)), None


# Documents of a pass with compiled layers. A tuple of lengths in a graph's arguments would compile
# it again at each step. So an attention's documents are stored here, outside of the graphs.

_documents_of: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
DOCUMENTS = ("document_lengths", "boundaries", "prefixes", "fillers")


def lead_around(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Moves the document arguments out of an attention's arguments, for `attend_uncompiled`."""
    _documents_of[module] = {name: arguments.pop(name) for name in DOCUMENTS if name in arguments}


def lead_through(module: nn.Module) -> None:
    """Removes the stored documents of an attention module."""
    _documents_of.pop(module, None)


@not_compiled
def attend_uncompiled(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **other: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs `attend` outside of compiled graphs, with the documents stored for ``module``."""
    return attend(
        module, query, key, value, attention_mask, **{**_documents_of.get(module, {}), **other}
    )


# Registration with Transformers


def _name(ours: str, usual: str) -> str:
    return ours if usual == USUAL[0] else f"{ours}_over_{usual}"


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for usual in USUAL:
        for ours, function in ((NAME, attend), (UNCOMPILED, attend_uncompiled)):
            AttentionInterface.register(_name(ours, usual), function)
            AttentionMaskInterface.register(_name(ours, usual), _usual_mask)


_by_documents.unpickled = _register  # type: ignore[attr-defined]  # see hasten.parts.nn.rebind


def _usual_mask(*args: Any, config: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS[usual_of(config)](*args, config=config, **kwargs)


def _usual(module: Any) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual = usual_of(module.config)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(usual, eager)
    return function


def _one_by_one(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: Sequence[int],
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Runs one causal SDPA call per document."""
    pieces = zip(*(t.split(tuple(lengths), dim=2) for t in tensors), strict=True)
    outputs = [_causal(query, key, value, scale, dropout) for query, key, value in pieces]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _on_processor(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[int, ...],
    scale: float | None,
) -> Tensor:
    """Runs all rows end to end in one call of hasten's kernel for processors."""
    batch, _, length, width = tensors[0].shape
    query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in tensors)
    starts = tuple(itertools.accumulate(tuple(lengths) * batch, initial=0))
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
    """Runs causal SDPA, or SDPA with ``mask``, which must be causal."""
    more = {"dropout_p": dropout, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **more)


def _may_be_rows(
    tensors: tuple[Tensor, Tensor, Tensor], lengths: tuple[int, ...], dropout: float
) -> bool:
    """Returns True if all documents have one length and can be rows of an SDPA batch on a GPU.

    SDPA chooses among torch's kernels. On Hopper it runs cuDNN's, which was up to 2.4 times
    as fast as FlashAttention-2, the kernel for uneven documents. Values that are narrower than
    their keys (latent attention) are supported by recent cuDNN alone.
    """
    query, key, value = tensors
    alike = len(set(lengths)) == 1 and sum(lengths) == query.shape[2]
    if len(query) > 1 or not alike or not query.is_cuda:
        return False
    return query.shape[-1] == value.shape[-1] or _cudnn_takes(query, key, value, dropout)


def _are_long(
    tensors: tuple[Tensor, Tensor, Tensor], lengths: tuple[int, ...], dropout: float
) -> bool:
    """Returns True if one call of cuDNN's kernel per document is faster: long ones on Hopper.

    On an H200, 17 documents of 964 tokens on average took 2.6 ms forward and backward. The
    kernel for uneven documents took 3.5 ms. For 4 of 4,096 tokens it was 4.6 and 7.4 ms.
    """
    one = tensors[0]
    if not one.is_cuda or len(one) > 1 or sum(lengths) < LONG * len(lengths):
        return False
    return _cudnn_takes(*tensors, dropout) and _is_hopper(one.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _cudnn_takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    if torch.compiler.is_compiling():  # a compiler can't measure
        return False
    grouped = query.shape[1] != key.shape[1]
    call = torch.backends.cuda.SDPAParams(query, key, value, None, dropout, True, grouped)
    return bool(torch.backends.cuda.can_use_cudnn_attention(call))


def _fits_varlen(query: Tensor, value: Tensor, dropout: float) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    narrow = _kernel_width(query, value) <= WIDEST_HEAD
    takes = query.is_cuda and half and narrow and not dropout
    return takes and not is_refused(VARLEN) and _has_varlen(query.device)


@functools.cache
def _has_varlen(device: torch.device) -> bool:
    """Returns True if the kernel, FlashAttention-2, runs on a GPU: from Ampere on.

    ROCm has its own version that was never tested with this code.
    """
    capable = torch.version.hip is None
    return capable and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def _kernel_width(query: Tensor, value: Tensor) -> int:
    """Returns the head width for the kernel: the widest of the tensors, padded to 8."""
    widest = int(max(query.shape[-1], value.shape[-1]))
    return -(-widest // 8) * 8


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    """Returns torch's causal variable-length kernel, or None if torch has none.

    Causality is a window in recent releases of torch and a flag in the first ones.
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
    """Returns True if the kernel supports fewer key heads than query heads; not in torch 2.11."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _one_kernel(
    kernel: Callable[..., Any],
    tensors: tuple[Tensor, ...],
    places: tuple[tuple[Tensor, int], ...],
    scale: float | None,
) -> Tensor:
    """Computes the row in one call of the variable-length kernel, on (tokens, heads, d).

    ``places`` are the boundaries of the documents and the longest one's tokens, for queries and
    for keys. If a document has more keys, its queries are those of its last tokens.

    The kernel supports one head width. If query and value have different widths (latent
    attention: 192 and 128), columns of zeros fill the narrower one. In query and key they
    add nothing to a score. In the value they give zeros, which are cut off, as are their
    gradients.
    """
    query, key, value = (t[0].transpose(0, 1) for t in tensors)
    groups, more = query.shape[1] // key.shape[1], {}
    if groups > 1 and _groups_heads(kernel):
        more = {"enable_gqa": True}
    elif groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale  # from the width without padding
    value_width, width = value.shape[-1], _kernel_width(query, value)
    query, key, value = (
        t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))
        for t in (query, key, value)
    )
    (boundaries, longest), (key_boundaries, most_keys) = places
    out: Tensor = kernel(
        query, key, value, boundaries, key_boundaries, longest, most_keys, scale=scale, **more
    )
    return out[..., :value_width].unsqueeze(0)
