"""Writes a safetensors file in one pass over its bytes: to the disk and through two hashes.

    8 bytes: length of the header | header: JSON of name -> dtype, shape, place | the bytes

The safetensors library copies every tensor into a Python object before it writes; here blocks of
the tensors' own memory are written, which takes no memory and lets other threads run meanwhile.
Files are read with the library. The format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from hasten.parts.checkpoint.disk import Disk

BLOCK = 1 << 23
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMES = {name: dtype for dtype, name in DTYPES.items()}


class Digest:
    """Size and two hashes of what passes: a fast one for every read, sha256 for the record."""

    def __init__(self) -> None:
        self._bytes, self._fast, self._slow = 0, xxhash.xxh3_128(), hashlib.sha256()

    def update(self, block: memoryview) -> None:
        self._bytes += len(block)
        self._fast.update(block)
        self._slow.update(block)

    def found(self) -> dict[str, Any]:
        return {
            "bytes": self._bytes,
            "xxh3_128": self._fast.hexdigest(),
            "sha256": self._slow.hexdigest(),
        }


def write_tensors(path: Path, tensors: Mapping[str, Tensor], disk: Disk) -> dict[str, Any]:
    """Write the tensors into a new file, durably; its size and hashes.

    Raises:
        ValueError: a tensor's dtype has no name in safetensors, or a tensor is sparse.
        OSError: the disk is full, or doesn't take the file.
    """
    host = {name: on_host(name, tensor) for name, tensor in tensors.items()}
    # Wide ones first, so that every tensor lies at a multiple of its own width.
    order = sorted(host, key=lambda name: (-host[name].element_size(), name))
    return write_blocks(path, _blocks({name: host[name] for name in order}), disk)


def write_blocks(path: Path, blocks: Iterator[memoryview], disk: Disk) -> dict[str, Any]:
    """A new file out of blocks, durable when this returns; its size and hashes."""
    digest = Digest()
    descriptor = disk.open_new(path)
    try:
        for block in blocks:
            digest.update(block)
            disk.write(descriptor, block)
    finally:
        os.close(descriptor)
    disk.sync(path)
    return digest.found()


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's memory."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def on_host(name: str, tensor: Tensor) -> Tensor:
    """The tensor in one piece of host memory, without a copy where it is that already.

    Raises:
        ValueError: its dtype has no name in safetensors, or it is sparse.
    """
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors can't hold; "
            "convert it before it is saved"
        )
    plain = tensor.detach()
    return plain.to("cpu").resolve_conj().resolve_neg().contiguous()


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    header: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        whole = bytes_of(tensor)
        for start in range(0, len(whole), BLOCK):
            yield whole[start : start + BLOCK]
