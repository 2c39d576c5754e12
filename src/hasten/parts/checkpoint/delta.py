"""Compression of checkpoints: byte shuffle and zstd, or difference to an earlier one.

    shuffle:    all first bytes of a tensor's numbers, then all second bytes -> zstd 1
    difference: the bits that differ from the base -> shuffle -> zstd, level 1

Signs and exponents of trained weights repeat and their mantissas don't. So sorting
bytes by their position makes them compressible for zstd (Alted, "Why modern CPUs are
starving", 2010; blosc). It is useful if the disk or the network is slow. ``choose``
measures that and reports the result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hasten.formatting import number_text
from hasten.parts.checkpoint.format import DTYPES, NAMES, bytes_of

PLAIN, SHUFFLE, DIFFERENCE = "plain", "shuffle", "difference"
SMALLEST = 1 << 12  # bytes of a tensor below which nothing is gained
SAMPLE = 1 << 22  # bytes that a measurement packs
LARGEST_RATIO = 64  # of a whole checkpoint, so that a reader knows how much memory to expect
Coded = tuple[dict[str, Tensor], dict[str, Any]]


def encode(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor] | None = None) -> Coded:
    """The tensors with those that get smaller as packed bytes, and how each of these was packed.

    Args:
        base: take differences to these where name, dtype and shape are the same.
    """
    stored: dict[str, Tensor] = {}
    coded: dict[str, Any] = {}
    for name, tensor in tensors.items():
        other = (base or {}).get(name)
        if other is not None and (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            other = None
        packed = _pack(tensor, other) if _worth_a_look(tensor) else None
        if packed is None:
            stored[name] = tensor
            continue
        stored[name] = packed
        coded[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "bytes": tensor.numel() * tensor.element_size(),
            "difference": other is not None,
        }
    total_bytes = sum(how["bytes"] for how in coded.values())
    if total_bytes > decoded_limit(sum(stored[name].numel() for name in coded)):
        return dict(tensors), {}  # nearly all zeros: small enough to be rare, too good to be read
    return stored, coded


def decode(stored: Tensor, how: Mapping[str, Any], base: Tensor | None) -> Tensor:
    """Returns the tensor that ``encode`` packed.

    Raises:
        ValueError: the description is invalid, or the bytes don't match it.
    """
    dtype, shape = NAMES[how["dtype"]], [int(n) for n in how["shape"]]
    size = torch.Size(shape).numel() * dtype.itemsize
    if min(shape, default=1) < 0 or size != how["bytes"] or stored.dtype != torch.uint8:
        raise ValueError(f"{shape} of {how['dtype']} doesn't have {how['bytes']} bytes")
    raw = pa.Codec("zstd").decompress(memoryview(bytes_of(stored)), size)
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    decoded = np.ascontiguousarray(planes.T).reshape(-1)
    if how["difference"]:
        if base is None or base.dtype != dtype or list(base.shape) != shape:
            raise ValueError("what it differs from has another form")
        decoded ^= np.frombuffer(bytes_of(base.contiguous()), np.uint8)
    return torch.from_numpy(decoded).view(dtype).reshape(shape)


def decoded_limit(stored_bytes: int) -> int:
    """Bytes that packed tensors of a file may have when they are whole."""
    return LARGEST_RATIO * stored_bytes + (1 << 26)


@dataclass(frozen=True)
class DeltaChoice:
    """How the next checkpoints are packed, and why, in one sentence with the figures."""

    kind: str
    reason: str


def choose(
    tensors: Mapping[str, Tensor], base: Mapping[str, Tensor] | None, bytes_per_second: float
) -> DeltaChoice:
    """Measures on a sample if packing makes a checkpoint reach its target earlier.

    Args:
        base: an earlier checkpoint's tensors, if differences are allowed.
        bytes_per_second: measured speed of plain bytes.
    """
    pieces = _sample(tensors)
    total_bytes = sum(t.numel() * t.element_size() for t in pieces.values())
    if not total_bytes:
        return DeltaChoice(PLAIN, "compression off: there is nothing large enough to pack")
    plain = total_bytes / bytes_per_second
    candidates = []
    for kind in (SHUFFLE, DIFFERENCE) if base is not None else (SHUFFLE,):
        others = _sample(base or {}, pieces) if kind == DIFFERENCE else None
        began = time.perf_counter()
        packed = encode(pieces, others)[0]
        seconds = time.perf_counter() - began
        size = sum(t.numel() * t.element_size() for t in packed.values())
        candidates.append((seconds + size / bytes_per_second, kind, total_bytes / max(size, 1)))
    taken, kind, ratio = min(candidates)
    speed = f"{bytes_per_second / 1e9:.2f} GB/s"
    if taken < plain:
        return DeltaChoice(
            kind,
            f"compression {kind}: {number_text(ratio, 'amount')} times smaller, "
            f"{plain / taken:.2f} times faster to a place that takes {speed}",
        )
    return DeltaChoice(
        PLAIN,
        f"compression off: {kind} is {number_text(ratio, 'amount')} times smaller but takes "
        f"{taken / plain:.2f} times as long to a place that takes {speed}",
    )


def _pack(tensor: Tensor, base: Tensor | None) -> Tensor | None:
    """The packed bytes, or None where they aren't fewer."""
    flat = np.frombuffer(bytes_of(tensor.detach().contiguous()), np.uint8)
    if base is not None:
        flat = flat ^ np.frombuffer(bytes_of(base.contiguous()), np.uint8)
    planes = np.ascontiguousarray(flat.reshape(-1, tensor.element_size()).T)
    packed = pa.Codec("zstd", 1).compress(planes.reshape(-1))
    if len(packed) >= len(flat):
        return None
    return torch.from_numpy(np.frombuffer(packed, np.uint8).copy())


def _worth_a_look(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES and tensor.numel() * tensor.element_size() >= SMALLEST


def _sample(
    tensors: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The beginnings of the largest tensors, a megabyte or two in all."""
    names = list(like or sorted(tensors, key=lambda n: -tensors[n].numel())[:16])
    share = SAMPLE // max(len(names), 1)
    return {
        name: tensors[name].reshape(-1)[: share // tensors[name].element_size()]
        for name in names
        if name in tensors and _worth_a_look(tensors[name])
    }
