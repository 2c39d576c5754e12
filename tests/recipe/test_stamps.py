"""Whatever changes in a file or folder that a recipe names is seen; what a run writes is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hasten.errors import InputError
from hasten.recipe import prepared_data as module
from hasten.recipe.prepared_data import stamps


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_deep_in_a_folder_counts_and_one_deeper_does_not(tmp_path: Path) -> None:
    data, output = tmp_path / "data", tmp_path / "out"
    deep = write(data / "a" / "b" / "c" / "d" / "part.arrow")
    before = stamps([str(data)], output)
    write(deep, "longer")
    after = stamps([str(data)], output)
    assert before != after
    write(data / "a" / "b" / "c" / "d" / "e" / "part.arrow")
    assert stamps([str(data)], output) == after


def test_a_file_of_the_same_size_that_was_written_later_is_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "one")
    before = stamps([str(path)], tmp_path / "out")
    later = path.stat().st_mtime_ns + 1000
    write(path, "two")
    os.utime(path, ns=(later, later))
    assert stamps([str(path)], tmp_path / "out") != before


def test_what_runs_write_and_hidden_folders_do_not_count(tmp_path: Path) -> None:
    data = tmp_path
    write(data / "train.jsonl")
    before = stamps([str(data)], data / "runs" / "mine")
    write(data / "runs" / "mine" / "data" / "index.json")
    write(data / "runs" / "theirs" / "recipe.yaml")
    write(data / "runs" / "theirs" / "metrics.jsonl")
    write(data / ".git" / "HEAD")
    assert stamps([str(data)], data / "runs" / "mine") == before


def test_a_circle_of_links_ends_and_a_link_to_nothing_is_a_name(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.jsonl")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "lost").symlink_to(tmp_path / "nowhere")
    found = stamps([str(tmp_path / "data")], tmp_path / "out")
    assert [str(tmp_path / "data" / "lost")] in found


def test_names_that_no_file_can_have_are_stamped_by_name() -> None:
    for name in ("a\0b", "x" * 5000, "no/such/file"):
        assert stamps([name], Path("out")) == [[name]]


def test_a_folder_of_too_many_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 3)
    for number in range(4):
        write(tmp_path / f"{number}.jsonl")
    with pytest.raises(InputError, match="more than 3: name the files"):
        stamps([str(tmp_path)], Path("out"))
