"""Runs are found, their lines arrive once and in order, series lose no extreme."""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.monitor import run, watching
from hasten.monitor.run import FollowedFile
from hasten.monitor.series import Series
from hasten.monitor.watching import check_places, find_runs
from watched import write_run


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
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 50_000 + b'\n{"a": 2}\n')
    follow = FollowedFile(path)
    assert drain(follow)[0] == [{"a": 1}, {"a": 2}]
    assert follow.unreadable == 13  # reads


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_pipe_in_its_place_is_an_error_of_the_system(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "lines.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        FollowedFile(tmp_path / "lines.jsonl").look()


numbers = st.none() | st.floats(-1e6, 1e6).map(lambda v: round(v, 2))


def merged(old: dict[str, Any] | None, part: dict[str, Any]) -> dict[str, Any]:
    """What the page does with a part, written down once more."""
    if old is None or part["start"] == 0 or old["generation"] != part["generation"]:
        return part
    start, columns = part["start"], {}
    for name, lists in part["columns"].items():
        before = old["columns"].get(name) or [[None] * start] * len(lists)
        columns[name] = [b[:start] + a for b, a in zip(before, lists, strict=True)]
    return {**part, "start": 0, "x": old["x"][:start] + part["x"], "columns": columns}


@given(values=st.lists(numbers, max_size=200), most=st.integers(1, 9), every=st.integers(1, 20))
def test_parts_put_together_are_the_whole(
    values: list[float | None], most: int, every: int
) -> None:
    series = Series(("v", "w"), most)
    held, cursor = None, (0, 0)
    for index, value in enumerate(values):
        series.add(index, {"v": value, "w": 1 if index > 50 else None})
        if index % every == 0:
            held = merged(held, series.since(*cursor))
            cursor = (series.generation, max(len(series) - 1, 0))
            assert held == series.since(0, 0)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), most=st.integers(1, 9))
def test_extremes_and_the_mean_survive_any_number_of_joins(values: list[float], most: int) -> None:
    series = Series(("v",), most)
    for index, value in enumerate(values):
        series.add(index, {"v": value})
    assert len(series) <= 2 * most
    cells = [bucket.cells[0] for bucket in series._buckets]
    assert min(c[2] for c in cells if c) == min(values)
    assert max(c[3] for c in cells if c) == max(values)
    assert sum(c[0] for c in cells if c) == len(values)
    assert sum(c[1] for c in cells if c) == pytest.approx(math.fsum(values), rel=1e-9, abs=1e-6)


def test_what_is_sent_is_json_even_at_the_ends_of_float64() -> None:
    series = Series(("v",), 1)
    for index in range(8):
        series.add(index, {"v": 1.7e308 * (-1) ** index})
        series.add(index, {"v": 1.7e308})
    json.dumps(series.since(0, 0), allow_nan=False)


def test_a_column_without_numbers_is_not_sent() -> None:
    series = Series(("v", "w"))
    series.add(1, {"v": 1})
    assert set(series.since(0, 0)["columns"]) == {"v"}


def test_a_run_is_named_by_its_folder_and_one_below_by_the_way(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "more" / "two")
    assert find_runs([one]) == {"one": one}
    assert find_runs([tmp_path]) == {"more/two": two, "one": one}


def test_runs_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")
    assert find_runs([one, two]) == {"run": one, str(two): two}
    assert find_runs([one, one]) == {"run": one}


def test_what_lies_inside_a_run_is_no_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_run(run / "previous" / "1")
    write_run(tmp_path / "previous" / "1")
    write_run(tmp_path / ".hidden")
    assert find_runs([tmp_path]) == {"run": run}


def test_links_are_not_followed(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "circle").symlink_to(tmp_path)
    assert set(find_runs([tmp_path])) == {"run"}


def test_of_very_many_runs_the_newest_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MOST_RUNS", 2)
    for age in range(4):
        write_run(tmp_path / str(age))
        for file in (tmp_path / str(age)).iterdir():
            os.utime(file, (age, age))
    assert set(find_runs([tmp_path])) == {"2", "3"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "there is no such folder"),
        (lambda p: p.write_text(""), "can't be looked into"),
        (lambda p: p.mkdir(), "no run is in it"),
        (lambda p: (p / "a/b/c/d/e/f").mkdir(parents=True), "no run is in it"),
    ],
)
def test_a_place_without_a_run_is_refused_in_one_sentence(
    tmp_path: Path, make: object, words: str
) -> None:
    place = tmp_path / "place"
    assert callable(make)
    make(place)
    with pytest.raises(InputError, match=words) as error:
        check_places([place])
    assert "\n" not in str(error.value)
