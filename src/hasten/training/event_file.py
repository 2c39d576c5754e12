"""Scalars as TensorBoard reads them: an event file, written without TensorFlow or TensorBoard.

1. a record is its length (8 bytes), a checksum of that, the data, a checksum of that (TFRecord,
   tensorflow/core/lib/io/record_writer.h)
2. a checksum is CRC-32C, turned by 15 bits and shifted by a constant, so that checksums of data
   that hold checksums stay sound (tensorflow/core/lib/hash/crc32c.h)
3. the data is an Event in protocol buffers (tensorflow/core/util/event.proto): wall_time = 1,
   step = 2, file_version = 3, summary = 5; a Summary's value = 1 has tag = 1, simple_value = 2
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

VERSION = b"brain.Event:2"
POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
SHIFT = 0xA282EAD8


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
        found.append(byte)
    return tuple(found)


TABLE = _table()


class EventFile:
    """A file of scalars that grows; a process that dies leaves whole records but for the last.

    Args:
        folder: where TensorBoard will look; it is made.
        host: part of the file's name, as TensorBoard's own writer has it.
    """

    def __init__(self, folder: Path, host: str = "hasten") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self.path = (
            folder / f"events.out.tfevents.{int(now)}.{host}.{os.getpid()}.{time.monotonic_ns()}"
        )
        self._file = self.path.open("wb", buffering=0)
        self._file.write(record(event(now, version=VERSION)))

    def scalars(
        self, step: int, values: Mapping[str, float], wall_time: float | None = None
    ) -> None:
        """Add the values of a step, by tag; they reach the file at once."""
        now = time.time() if wall_time is None else wall_time
        self._file.write(record(event(now, step, values)))

    def close(self) -> None:
        self._file.close()


def record(data: bytes) -> bytes:
    """Data with its length and checksums."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def event(
    wall_time: float, step: int = 0, values: Mapping[str, float] | None = None, version: bytes = b""
) -> bytes:
    """An Event as protocol buffers write it."""
    data = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step)
    if version:
        data += _field(3, version)
    if values:
        data += _field(5, b"".join(_field(1, _value(tag, v)) for tag, v in values.items()))
    return data


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum (RFC 3720, appendix B.4 has test vectors)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _value(tag: str, value: float) -> bytes:
    return _field(1, tag.encode()) + b"\x15" + struct.pack("<f", _float32(value))


def _float32(value: float) -> float:
    """A number too large for float32 is infinite there; struct would refuse it."""
    largest = 3.4028234663852886e38
    return value if not abs(value) > largest else float("inf") if value > 0 else float("-inf")


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF  # an int64 below 0 is written as two's complement
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    turned = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (turned + SHIFT) & 0xFFFFFFFF)
