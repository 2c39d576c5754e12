"""A disk is measured with a file that is gone afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hasten.machine import benchmark
from hasten.machine.benchmark import PIECE, measure_disk


def test_rates_are_positive_and_nothing_is_left(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, 4 * PIECE)
    assert found.bytes == 4 * PIECE
    assert found.write > 0
    assert found.read is None or found.read > 0
    assert found.flush_seconds >= 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_stays_in_memory_has_no_rate_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_resident", lambda handle, size: 1.0)
    assert measure_disk(tmp_path, PIECE).read is None


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs Linux")
def test_pages_in_memory_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * PIECE)
    with path.open("r+b") as file:
        file.read()
        assert benchmark._resident(file.fileno(), PIECE) > 0.9


def test_a_folder_that_takes_no_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its disk can't be measured") as error:
        measure_disk(tmp_path / "missing")
    assert "\n" not in str(error.value)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(benchmark.os, "write", full)
    with pytest.raises(ValueError, match="No space left"):
        measure_disk(tmp_path, PIECE)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
