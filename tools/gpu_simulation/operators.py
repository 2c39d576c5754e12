"""Simulated cost of an operator on a GPU: kernels launched, bytes moved, FLOPs.

Bytes are the minimum: every operand is read once, every result is written once. A cache
reduces them if operands are small, and a poor kernel increases them. An operator counts
as one launch, or as many as torch's sources contain for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gpu_simulation.roofline import ATTENTION, FP8, HALF, SINGLE, CallCost

# No kernel: memory that is only reserved, or only looked at.
FREE = frozenset(
    {*("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh")}
    | {*("detach", "alias", "_unsafe_view", "_reshape_alias", "view_as", "set_")}
)
# Kernels of operators that take several (aten/src/ATen/native/cuda, and profiles of others).
KERNELS: dict[str, int] = {
    **dict.fromkeys(("topk", "cumsum", "linalg_vector_norm", "_grouped_mm"), 2),
    **dict.fromkeys(("native_layer_norm_backward", "rms_norm_backward"), 2),
    "_fused_rms_norm_backward": 2,
    "histc": 3,
    **dict.fromkeys(("float8_both", "float8_columns"), 3),  # the largest numbers begin as zeros
    **dict.fromkeys(("_varlen_attn_backward", "_flash_attention_backward"), 3),
    **{
        f"_scaled_dot_product_{kernel}_attention_backward": 3
        for kernel in ("flash", "efficient", "cudnn")
    },
    "adamw_": 3,  # of hasten's; two are copies of its tables
    **dict.fromkeys(("nonzero", "bincount"), 4),
    "masked_select": 5,
    **dict.fromkeys(("sort", "argsort", "index_put", "index_put_", "_index_put_impl_"), 6),
    **dict.fromkeys(("embedding_dense_backward", "_unique2"), 8),
}
# Numbers of a multi-tensor kernel's chunk; chunks and tensors of a launch (MultiTensorApply.cuh).
CHUNK, CHUNKS, TENSORS = 65536, 320, 48
OVERWRITES = frozenset({"zero_", "fill_", "copy_", "random_", "normal_", "uniform_", "bernoulli_"})
TAKES = frozenset({"embedding", "index_select", "index", "gather"})  # reads what it gives, no more
NOT_READ = frozenset({"copies"})  # arguments of hasten's operators that are only written
READS_TWICE = frozenset({"float8_both", "float8_columns"})  # scales come before numbers
PUTS = frozenset({"scatter_add_", "scatter_", "index_add_", "index_copy_", "index_fill_"})


def cost(func: Any, args: Any, kwargs: Any, out: Any, documents: Sequence[int]) -> CallCost:
    """Cost of one call, from its arguments and its result.

    Args:
        documents: lengths of the documents in a packed row; attention cost uses their
            squares.
    """
    name = func._schema.name.split("::")[1]
    inputs = _tensors((args, kwargs))
    made = _tensors(out)
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None for r in returns)
    is_free = name in FREE or (made and is_view and not func._schema.is_mutable)
    if is_free or not (inputs or made):
        return CallCost()
    flops, unit = _flops(func, name, args, kwargs, out, inputs, documents)
    return CallCost(_launches(name, args), _moved(func, name, args, inputs, made), flops, unit)


def touched(tensor: Tensor) -> int:
    """Bytes of a tensor that lie in memory: an expanded dimension counts once."""
    count: int = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


def _tensors(values: Any) -> list[Tensor]:
    tensors = {id(t): t for t in tree_leaves(values) if isinstance(t, Tensor)}
    return list(tensors.values())


def _moved(func: Any, name: str, args: Any, inputs: list[Tensor], made: list[Tensor]) -> int:
    if name in TAKES:
        return 2 * sum(map(touched, made)) + sum(map(touched, inputs[1:]))
    if name in PUTS:
        return 3 * sum(map(touched, inputs[1:]))  # of what is changed, so much and no more
    read = sum(map(touched, inputs)) * (2 if name in READS_TWICE else 1)
    if not func._schema.is_mutable:
        return read + sum(map(touched, made))
    arguments = list(zip(args, func._schema.arguments, strict=False))
    written = sum(map(touched, _tensors([a for a, s in arguments if s.is_write])))
    unread = [a for a, s in arguments if s.name in NOT_READ]
    unread += [inputs[0]] if name in OVERWRITES else []
    return written + read - sum(map(touched, _tensors(unread)))


def _launches(name: str, args: Any) -> int:
    if not name.startswith(("_foreach", "_fused_adam", "_amp_foreach")):
        return KERNELS.get(name, 1)
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    if not lists:
        return 1
    chunks = sum(ceil(t.numel() / CHUNK) for t in lists[0])
    several: int = max(ceil(chunks / CHUNKS), ceil(len(lists[0]) / TENSORS))
    return several + (name == "_foreach_norm")  # partial sums are added up by another


def _flops(
    func: Any,
    name: str,
    args: Any,
    kwargs: Any,
    out: Any,
    inputs: list[Tensor],
    documents: Sequence[int],
) -> tuple[float, str]:
    if "attn" in name or "attention" in name:
        return _attention(name, inputs, documents), ATTENTION
    if name == "_scaled_mm":
        return 2.0 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1], FP8
    if name == "_grouped_mm":  # (rows, k) x (experts, k, n), or (m, rows) x (rows, n)
        width = args[1].shape[-1]
        return 2.0 * args[0].shape[0] * args[0].shape[1] * width, HALF
    counted = flop_registry.get(func._overloadpacket)
    if counted is None:
        return 0.0, HALF
    wide = any(t.dtype in (torch.float32, torch.float64) for t in inputs)
    return float(counted(*args, **kwargs, out_val=out)), SINGLE if wide else HALF


def _attention(name: str, inputs: list[Tensor], documents: Sequence[int]) -> float:
    """Two products over half of the pairs; five in the backward pass (arXiv:2307.08691, 3.1)."""
    backward = "backward" in name
    query, key, value = inputs[1:4] if backward else inputs[:3]
    width: int = query.shape[-1] + value.shape[-1]
    if query.dim() == 3:  # rows of all documents one after another: (rows, heads, width)
        pairs: float = query.shape[1] * sum(n * n for n in documents) / 2
    else:  # (examples, heads, rows, width)
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] / 2
    return 2.0 * pairs * width * (2.5 if backward else 1.0)
