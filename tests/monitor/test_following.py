"""Every whole line arrives once and in order, whatever happens to the file."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.monitor import run
from hasten.monitor.run import FollowedFile


def drain(follow: FollowedFile) -> tuple[list[dict[str, Any]], bool]:
    lines, anew = [], False
    while True:
        look = follow.look()
        if look.anew:
            lines, anew = [], True
        lines += look.lines
        if not look.more:
            return lines, anew


texts = st.text(max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.dictionaries(texts, st.integers() | texts, max_size=3), max_size=30),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
    limit=st.integers(1, 64),
)
def test_lines_written_in_any_pieces_arrive_once_and_in_order(
    values: list[dict[str, Any]], cuts: list[int], limit: int
) -> None:
    data = b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    before = run.LOOK_BYTES
    run.LOOK_BYTES = max(limit, max((len(json.dumps(v)) * 6 + 8 for v in values), default=1))
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lines.jsonl"
            follow, found = FollowedFile(path), []
            for start, end in itertools.pairwise(edges):
                with path.open("ab") as file:
                    file.write(data[start:end])
                lines, anew = drain(follow)
                assert not anew
                found += lines
                assert follow.torn == (not data[:end].endswith(b"\n"))
            assert found == values
            assert follow.unreadable == 0
    finally:
        run.LOOK_BYTES = before


def test_a_file_that_is_not_there_yet_has_no_lines(tmp_path: Path) -> None:
    follow = FollowedFile(tmp_path / "later.jsonl")
    assert drain(follow) == ([], False)
    follow.path.write_text('{"a": 1}\n')
    assert drain(follow) == ([{"a": 1}], False)


def test_a_replaced_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    follow = FollowedFile(path)
    drain(follow)
    other = tmp_path / "other"
    other.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    other.replace(path)
    assert drain(follow) == ([{"a": 1}, {"a": 2}, {"a": 3}], True)


@pytest.mark.parametrize("text", ['{"a": 9}\n', '{"b": 1}\n{"b": 2}\n{"b": 3}\n', ""])
def test_a_file_written_over_in_place_is_read_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    follow = FollowedFile(path)
    drain(follow)
    with path.open("r+") as file:
        file.truncate()
        file.write(text)
    assert drain(follow) == ([json.loads(line) for line in text.splitlines()], True)


def test_a_file_that_vanishes_and_returns_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n')
    follow = FollowedFile(path)
    drain(follow)
    path.unlink()
    assert drain(follow) == ([], True)
    assert drain(follow) == ([], False)
    path.write_text('{"a": 2}\n')
    assert drain(follow) == ([{"a": 2}], False)


@pytest.mark.parametrize(
    "line", [b"not json", b"[1, 2]", b"\xff\xfe", b'{"a": ', b"[" * 100_000, b"null"]
)
def test_a_line_that_is_no_object_is_counted_and_left_out(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n\n{"a": 2}\n')
    follow = FollowedFile(path)
    assert drain(follow)[0] == [{"a": 1}, {"a": 2}]
    assert follow.unreadable == 1


def test_a_line_without_end_is_passed_over_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LOOK_BYTES", 4096)
    monkeypatch.setattr(run, "LONGEST_LINE", 4096)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 50_000 + b'\n{"a": 2}\n')
    follow = FollowedFile(path)
    assert drain(follow)[0] == [{"a": 1}, {"a": 2}]
    assert follow.unreadable == 1


def test_a_folder_in_its_place_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        FollowedFile(tmp_path / "lines.jsonl").look()


def test_a_pipe_in_its_place_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lines.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        FollowedFile(tmp_path / "lines.jsonl").look()
