"""Compression of checkpoints: byte shuffle and zstd.

    all first bytes of a tensor's numbers, then all second bytes -> zstd, level 1

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

SMALLEST = 1 << 12  # bytes of a tensor below which nothing is gained
SAMPLE = 1 << 22  # bytes that a measurement packs
Coded = tuple[dict[str, Tensor], dict[str, Any]]


def encode(tensors: Mapping[str, Tensor]) -> Coded:
    """The tensors with those that get smaller as packed bytes, and the form of each of these."""
    stored: dict[str, Tensor] = {}
    coded: dict[str, Any] = {}
    for name, tensor in tensors.items():
        packed = _pack(tensor) if _is_large(tensor) else None
        stored[name] = tensor if packed is None else packed
        if packed is not None:
            coded[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
    return stored, coded


def decode(stored: Tensor, form: Mapping[str, Any]) -> Tensor:
    """Returns the tensor that ``encode`` packed.

    Raises:
        ValueError: the form is invalid, or the bytes don't match it.
    """
    dtype, shape = NAMES[form["dtype"]], [int(n) for n in form["shape"]]
    if min(shape, default=1) < 0 or stored.dtype != torch.uint8:
        raise ValueError(f"{shape} is no shape, or {stored.dtype} no packed bytes")
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = pa.Codec("zstd").decompress(memoryview(bytes_of(stored)), size)
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    return torch.from_numpy(np.ascontiguousarray(planes.T).reshape(-1)).view(dtype).reshape(shape)


@dataclass(frozen=True)
class CompressionChoice:
    """If the next checkpoints are packed, and why, in one sentence with the figures."""

    packs: bool
    reason: str


def choose(tensors: Mapping[str, Tensor], bytes_per_second: float) -> CompressionChoice:
    """Measures on a sample if packing makes a checkpoint reach its target earlier.

    Args:
        bytes_per_second: measured speed of plain bytes.
    """
    sample = _sample(tensors)
    total_bytes = sum(t.nbytes for t in sample.values())
    if not total_bytes:
        return CompressionChoice(False, "compression off: there is nothing large enough to pack")
    began = time.perf_counter()
    size = sum(t.nbytes for t in encode(sample)[0].values())
    packed_seconds = time.perf_counter() - began + size / bytes_per_second
    plain_seconds = total_bytes / bytes_per_second
    smaller = f"{number_text(total_bytes / max(size, 1), 'amount')} times smaller"
    target = f"to a place that takes {bytes_per_second / 1e9:.2f} GB/s"
    if packed_seconds < plain_seconds:
        faster = f"{plain_seconds / packed_seconds:.2f} times faster"
        return CompressionChoice(True, f"compression shuffle: {smaller}, {faster} {target}")
    slower = f"{packed_seconds / plain_seconds:.2f} times as long {target}"
    return CompressionChoice(False, f"compression off: shuffle is {smaller} but takes {slower}")


def _pack(tensor: Tensor) -> Tensor | None:
    """The packed bytes, or None where they aren't fewer."""
    flat = np.frombuffer(bytes_of(tensor.detach().contiguous()), np.uint8)
    planes = np.ascontiguousarray(flat.reshape(-1, tensor.element_size()).T)
    packed = pa.Codec("zstd", 1).compress(planes.reshape(-1))
    if len(packed) >= len(flat):
        return None
    return torch.from_numpy(np.frombuffer(packed, np.uint8).copy())


def _is_large(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES and tensor.nbytes >= SMALLEST


def _sample(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The beginnings of the largest tensors, a megabyte or two in all."""
    names = sorted(tensors, key=lambda name: -tensors[name].numel())[:16]
    share = SAMPLE // max(len(names), 1)
    return {
        name: tensors[name].reshape(-1)[: share // tensors[name].element_size()]
        for name in names
        if _is_large(tensors[name])
    }
