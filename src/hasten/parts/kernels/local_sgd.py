"""Weights beside their anchor on the processor: ``drift.cpp``, one pass over each number.

Nothing is checked here; :mod:`hasten.parts.comm.local_sgd` calls it where it fits.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from hasten.parts.kernels.build import LoadedLibrary, build_library
from hasten.parts.kernels.codec import WORTH_THREADS, rule_for


def library() -> LoadedLibrary:
    """The compiled loops, or why there are none."""
    return build_library("drift")


class FlatWeights:
    """Float32 weights of several parameters one after the other, each part without gaps."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        count = len(parts)
        self.numbers = sum(p.numel() for p in parts)
        self._at = (c_void_p * count)(*(p.data_ptr() for p in parts))
        starts = itertools.accumulate((p.numel() for p in parts), initial=0)
        self._starts = (c_int64 * (count + 1))(*starts)
        self._parts = list(parts)  # as long as this lives, their memory does
        self._given = (self._at, self._starts, c_int64(count))

    def encode(self, anchor: Tensor, codes: Tensor, scales: Tensor, block: int, bits: int) -> bool:
        """``weights - anchor`` into codes and scales; whether all of it is finite."""
        sizes = (c_int64(self.numbers), c_int64(block), c_int(bits))
        rule = ctypes.byref(rule_for(bits, None))
        tensors = (c_void_p(t.data_ptr()) for t in (anchor, codes, scales))
        does = _loops().drift_encode
        return bool(does(*self._given, *tensors, *sizes, rule, _threads(self.numbers)))

    def take(
        self,
        anchor: Tensor,
        codes: Tensor,
        scales: Tensor,
        shares: Sequence[float],
        own: int,
        block: int,
        bits: int,
    ) -> None:
        """Anchor and weights move by the messages (ranks, ...) times shares; weights not by
        ``own``, which they have done already.
        """
        ranks = len(shares)
        sizes = (c_int64(ranks), c_int64(own), c_int64(self.numbers), c_int64(block), c_int(bits))
        _loops().drift_take(
            *self._given,
            c_void_p(anchor.data_ptr()),
            c_void_p(codes.data_ptr()),
            c_int64(codes.stride(0)),
            c_void_p(scales.data_ptr()),
            (c_float * ranks)(*shares),
            *sizes,
            _threads(ranks * self.numbers),
        )


def _loops() -> ctypes.CDLL:
    found = library()
    if found.library is None:
        raise RuntimeError(found.reason)
    return found.library


def _threads(numbers: int) -> c_int:
    return c_int(torch.get_num_threads() if numbers >= WORTH_THREADS else 1)
