"""Whatever changes in a file or folder that a recipe names is seen; what a run writes is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hasten.data import content_hashes as module
from hasten.data.content_hashes import ContentHashes, content_stamps
from hasten.errors import InputError


def stamps(names: list[str], output: Path) -> list[list[Any]]:
    return content_stamps(names, output, ContentHashes(output / "contents.json"))


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


def test_a_newer_file_of_the_same_size_and_time_is_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "one")
    time = path.stat().st_mtime_ns
    before = stamps([str(path)], tmp_path / "out")
    write(tmp_path / "new", "two").replace(path)
    os.utime(path, ns=(time, time))
    assert stamps([str(path)], tmp_path / "out") != before


def test_the_same_content_with_another_time_is_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "one")
    before = stamps([str(path)], tmp_path / "out")
    os.utime(path, ns=(1, 1))
    assert stamps([str(path)], tmp_path / "out") == before


def test_a_settled_file_is_read_once_and_again_when_its_inode_or_ctime_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    digest = module.xxhash.xxh3_128

    def counting() -> Any:
        opened.append(path)
        return digest()

    path, kept = write(tmp_path / "a.jsonl", "one"), tmp_path / "contents.json"
    monkeypatch.setattr(module.xxhash, "xxh3_128", counting)
    monkeypatch.setattr(module, "SETTLED_NS", -1_000_000_000)  # as if it were written long ago

    def content() -> tuple[str | None, int]:
        opened.clear()
        hashes = ContentHashes(kept)
        found = hashes.of(path)
        hashes.save()
        return found, len(opened)

    first = content()
    assert first[1] == 1
    assert content() == (first[0], 0)
    time = path.stat().st_mtime_ns
    path.write_text("two")
    os.utime(path, ns=(time, time))  # mtime is set back, ctime can't be
    second = content()
    assert second[1] == 1
    assert second[0] != first[0]
    kept.write_text("damaged")
    assert content() == second


def test_a_file_that_was_written_just_now_is_not_remembered(tmp_path: Path) -> None:
    hashes = ContentHashes(tmp_path / "contents.json")
    assert hashes.of(write(tmp_path / "a.jsonl")) is not None
    hashes.save()
    assert not (tmp_path / "contents.json").exists()


def test_the_weights_next_to_a_tokenizer_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "model" / "tokenizer.json")
    hashes = ContentHashes(tmp_path / "contents.json")

    def found() -> list[list[Any]]:
        folder = [str(tmp_path / "model")]
        return content_stamps(folder, tmp_path / "out", hashes, without=module.WEIGHT_FILES)

    before = found()
    write(tmp_path / "model" / "model-00001-of-00002.safetensors")
    assert found() == before


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
