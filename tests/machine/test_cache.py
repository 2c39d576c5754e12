"""Results that are kept for a user: keys, damaged files, and places that can't be written."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hasten.machine import cache
from hasten.machine.cache import key_of, source_digest


def test_a_key_stands_for_all_its_parts_in_any_order() -> None:
    one = key_of({"a": 1, "b": {"c": 2.5, "d": None}})
    assert one == key_of({"b": {"d": None, "c": 2.5}, "a": 1})
    assert one != key_of({"a": 1, "b": {"c": 2.5, "d": 0}})


def test_a_changed_source_is_another_program(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = source_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("not a source")
    assert source_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert source_digest(tmp_path) != before
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.cpp").write_text("")
    assert source_digest(tmp_path) != before


def test_some_sources_alone_decide_a_digest_of_theirs(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("")
    before = source_digest(tmp_path, "a*", "none/**/*")
    (tmp_path / "b.py").write_text("x = 2")
    assert source_digest(tmp_path, "a*", "none/**/*") == before
    (tmp_path / "a.py").write_text("x = 2")
    assert source_digest(tmp_path, "a*", "none/**/*") != before


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = cache.path_of(tmp_path / "new", {"gpu": "one"}, "times-")
    assert path.name.startswith("times-")
    assert path != cache.path_of(tmp_path / "new", {"gpu": "two"}, "times-")
    assert cache.read(path, list, "it is made again") is None
    for content in ([1, 2], [3]):
        cache.write(path, content)
        assert cache.read(path, list, "it is made again") == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "1", "[" * 100_000])
def test_a_damaged_file_is_named_once_and_counts_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert cache.read(path, lambda found: found["key"], "it is made again") is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{path} can't be read (")
    assert said.endswith("): it is made again")


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "within" / "kept.json"
    cache.write(path, [1])
    assert cache.read(path, list, "it is made again") is None
