"""Codecs on the processor: ``codec.cpp``, with the signatures of ``codec_reference.py``.

Nothing is checked here; :mod:`hasten.parts.comm.codecs` has checked shapes and formats before it
calls.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from hasten.parts.kernels.build import LoadedLibrary, build_library
from hasten.parts.kernels.codec_reference import key_of, rule_of
from hasten.parts.kernels.operators import address

WORTH_THREADS = 32_768  # numbers below which one thread ends before a second wakes up


class _Rule(ctypes.Structure):
    _fields_ = (
        ("share", c_float),
        *((name, ctypes.c_int32) for name in ("low", "cap", "most", "dice")),
        ("key", ctypes.c_uint32),
    )


def library() -> LoadedLibrary:
    """Returns the compiled loops, or the reason why there are none."""
    return build_library("codec")


def rule_for(bits: int, seed: int | None) -> _Rule:
    """Returns the rule for codes of so many bits; with a ``seed`` they are rounded at random."""
    if bits == 1:
        return _Rule()  # signs have no codes to round
    rule = rule_of(bits)
    dice = (0, 0) if seed is None else (1, key_of(seed))
    return _Rule(rule.share, rule.low, rule.cap, rule.most, *dice)


def _call(name: str, count: int, *arguments: Any, of: LoadedLibrary | None = None) -> Any:
    threads = torch.get_num_threads() if count >= WORTH_THREADS else 1
    return (of or library()).function(name)(*arguments, c_int(threads))


def _rows(tensor: Tensor) -> tuple[c_void_p, c_int64]:
    """Returns the address of the first rank's row, and the bytes to the next row."""
    return address(tensor), c_int64(tensor.stride(0) * tensor.itemsize)


def _half(tensor: Tensor) -> c_int:
    return c_int(tensor.dtype == torch.bfloat16)


def finite(flat: Tensor, residual: Tensor | None, limit: int) -> bool:
    """Returns True if all of ``flat + residual`` are below ``limit`` in magnitude."""
    n = len(flat)
    arguments = (c_int64(n), ctypes.c_int32(limit), _half(flat))
    return bool(_call("codec_finite", n, address(flat), address(residual), *arguments))


def encode(
    flat: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    block: int,
    bits: int,
    seed: int | None,
) -> None:
    """Encodes ``flat + residual`` and writes the error to ``residual_out``, in one pass."""
    n = len(flat)
    tensors = (address(t) for t in (flat, residual, residual_out, codes, scales))
    sizes = (
        c_int64(n),
        c_int64(block),
        c_int(bits),
        ctypes.byref(rule_for(bits, seed)),
        _half(flat),
    )
    _call("codec_encode", n, *tensors, *sizes)


def decode(
    codes: Tensor, scales: Tensor, out: Tensor, block: int, bits: int, factor: float, add: bool
) -> None:
    """Sums the messages (ranks, ...) in their order, times ``factor``, into ``out``."""
    n, ranks = len(out), len(codes)
    sizes = (c_int64(ranks), c_int64(n), c_int64(block), c_int(bits))
    where = (c_float(factor), c_int(add), address(out))
    _call("codec_decode", n * ranks, *_rows(codes), *_rows(scales), *sizes, *where)


def topk_encode(
    flat: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    places: Tensor,
    sent: Tensor,
    k: int,
) -> None:
    """Writes the k largest of each chunk to places and values, the rest to ``residual_out``."""
    n = len(flat)
    tensors = (address(t) for t in (flat, residual, residual_out, places, sent))
    _call("codec_topk_encode", n, *tensors, c_int64(n), c_int(k), _half(flat))


def topk_decode(
    places: Tensor, sent: Tensor, out: Tensor, k: int, factor: float, add: bool
) -> None:
    """Sums the messages (ranks, ...) in their order, times ``factor``, into ``out``."""
    n, ranks = len(out), len(places)
    sizes = (c_int64(ranks), c_int64(n), c_int(k))
    where = (c_float(factor), c_int(add), address(out))
    _call("codec_topk_decode", n * ranks, *_rows(places), *_rows(sent), *sizes, *where)


# Weights and their anchor: ``drift.cpp``, one pass over each number.
# :mod:`hasten.parts.comm.local_sgd` uses it if it supports the weights.


def drift() -> LoadedLibrary:
    """Returns the compiled loops, or the reason why there are none."""
    return build_library("drift")


class FlatWeights:
    """Float32 weights of several parameters, one after the other, each part contiguous."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        count = len(parts)
        self.numbers = sum(p.numel() for p in parts)
        self._at = (c_void_p * count)(*(p.data_ptr() for p in parts))
        starts = itertools.accumulate((p.numel() for p in parts), initial=0)
        self._starts = (c_int64 * (count + 1))(*starts)
        self._parts = list(parts)  # keeps their memory alive
        self._given = (self._at, self._starts, c_int64(count))

    def encode(self, anchor: Tensor, codes: Tensor, scales: Tensor, block: int, bits: int) -> bool:
        """Encodes ``weights - anchor`` into codes and scales; True if all of it is finite."""
        sizes = (c_int64(self.numbers), c_int64(block), c_int(bits))
        rule = ctypes.byref(rule_for(bits, None))
        tensors = (address(t) for t in (anchor, codes, scales))
        arguments = (*self._given, *tensors, *sizes, rule)
        return bool(_call("drift_encode", self.numbers, *arguments, of=drift()))

    def apply_messages(
        self,
        anchor: Tensor,
        codes: Tensor,
        scales: Tensor,
        shares: Sequence[float],
        own_rank: int,
        block: int,
        bits: int,
    ) -> None:
        """Moves anchor and weights by the messages times shares; weights without ``own_rank``'s."""
        ranks = len(shares)
        sizes = (
            c_int64(ranks),
            c_int64(own_rank),
            c_int64(self.numbers),
            c_int64(block),
            c_int(bits),
        )
        _call(
            "drift_take",
            ranks * self.numbers,
            *self._given,
            address(anchor),
            address(codes),
            c_int64(codes.stride(0)),
            address(scales),
            (c_float * ranks)(*shares),
            *sizes,
            of=drift(),
        )
