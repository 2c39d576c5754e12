"""Event files hold what was written, by the published formats and by TensorBoard's own reader."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.training.metric_writers import EventFile, crc32c, event, record


def records(data: bytes) -> list[bytes]:
    """TFRecord read back, checksums compared."""
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        assert data[: 16 + length] == record(body)
        data = data[16 + length :]
        found.append(body)
    return found


def fields(data: bytes) -> list[tuple[int, Any]]:
    """Protocol buffers' wire format, read by its specification."""
    found: list[tuple[int, Any]] = []
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 0:
            found.append((number, varint()))
        elif kind == 1:
            found.append((number, struct.unpack_from("<d", data, place)[0]))
            place += 8
        elif kind == 5:
            found.append((number, struct.unpack_from("<f", data, place)[0]))
            place += 4
        else:
            assert kind == 2
            length = varint()
            found.append((number, data[place : place + length]))
            place += length
    return found


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"123456789", 0xE3069283),
        (b"\x00" * 32, 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_the_checksum_is_the_published_one(data: bytes, value: int) -> None:
    assert crc32c(data) == value


@given(
    step=st.integers(-(2**63), 2**63 - 1),
    values=st.dictionaries(st.text(min_size=1), st.floats(width=32), max_size=4),
)
def test_an_event_is_read_back_by_the_wire_format(step: int, values: dict[str, float]) -> None:
    found = fields(event(12.5, step, values))
    assert found[0] == (1, 12.5)
    assert found[1] == (2, step & 0xFFFFFFFFFFFFFFFF)
    summary = fields(found[2][1]) if values else []
    assert len(summary) == len(values)
    for (number, body), (tag, value) in zip(summary, values.items(), strict=True):
        (_, name), (_, read) = fields(body)
        assert (number, name.decode()) == (1, tag)
        assert read == value or (math.isnan(read) and math.isnan(value))


def test_a_value_beyond_float32_is_infinite_and_not_an_error() -> None:
    body = fields(fields(event(0, 1, {"a": -1e300}))[2][1])[0][1]
    assert fields(body)[1] == (2, -math.inf)


def test_a_file_begins_with_its_version_and_grows_by_whole_records(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "tb")
    file.scalars(1, {"loss": 2.0})
    first, second = records(file.path.read_bytes())  # there before it is closed
    assert (3, b"brain.Event:2") in fields(first)
    assert fields(second)[1] == (2, 1)
    file.close()
    assert EventFile(tmp_path / "tb").path != file.path


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = EventFile(tmp_path)
    for step in range(100):
        file.scalars(step, {"train/loss": step / 2, "train/x": -step})
    file.close()
    reader = module.EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(e.step, e.value) for e in reader.Scalars("train/loss")] == [
        (step, step / 2) for step in range(100)
    ]
