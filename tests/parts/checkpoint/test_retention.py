"""Retention: the newest few that verify stay, and what hasten did not make is never deleted."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.parts import checkpoint
from hasten.parts.checkpoint import MANIFEST, STATE, commit
from hasten.parts.checkpoint.commit import Folder
from hasten.parts.checkpoint.saver import Saver
from saved import load_latest, save


def saved(folder: Path, *steps: int) -> Path:
    for step in steps:
        save(folder, step, {"x": torch.full((50,), step)}, {"step": step})
    return folder


def prune(folder: Path, keep: int) -> None:
    Folder(folder).prune(keep, lambda name, reason: None)


def archive(folder: Path, step: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Saver(folder).discard_after(step)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    prune(saved(tmp_path, 1, 30, 200, 4), 2)
    assert names(tmp_path) == ["step-00000030", "step-00000200"]


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_damaged_checkpoint_does_not_count(name: str, tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        (tmp_path / f"step-{step:08d}" / name).write_bytes(b"x")
    told: list[str] = []
    Folder(tmp_path).prune(2, lambda name, reason: told.append(name))
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]
    assert told == ["step-00000004", "step-00000003"]
    assert sum(name.startswith(".damaged-") for name in names(tmp_path)) == 2


def test_what_verified_is_not_read_again_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = Folder(saved(tmp_path, 1, 2)), []
    real = commit.verify
    monkeypatch.setattr(commit, "verify", lambda path: (read.append(path.name), real(path)))
    for _ in range(2):
        folder.prune(2, lambda name, reason: None)
    assert read == ["step-00000002", "step-00000001"]
    (tmp_path / "step-00000002" / STATE).write_bytes(b"x")
    folder.prune(2, lambda name, reason: None)
    assert read[2:] == ["step-00000002"]
    assert len(checkpoint.checkpoints(tmp_path)) == 1


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    foreign = ["step-3", "step-00000003-best", "model", ".git", ".writing-notes", "xstep-00000001"]
    for name in foreign:
        (tmp_path / name).mkdir()
    found = load_latest(saved(tmp_path, 1, 2))
    assert found is not None
    assert found[1] == {"step": 2}
    prune(tmp_path, 1)
    assert names(tmp_path) == sorted([*foreign, "step-00000002"])


def test_a_strangers_folder_with_a_name_of_ours_is_not_deleted(tmp_path: Path) -> None:
    elsewhere = saved(tmp_path / "elsewhere", 2)
    for folder in (tmp_path, tmp_path / "run"):
        saved(folder, 5, 6)
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "thesis.txt").write_text("years")
    (tmp_path / "run" / "step-00000002").symlink_to(elsewhere / "step-00000002")
    for folder in (tmp_path, tmp_path / "run"):
        prune(folder, 1)
    assert (tmp_path / "step-00000001" / "thesis.txt").read_text() == "years"
    assert checkpoint.load(elsewhere / "step-00000002")[1] == {"step": 2}


def test_what_comes_after_a_step_is_set_aside_and_its_steps_are_free(tmp_path: Path) -> None:
    archive(saved(tmp_path, 1, 2, 3), 1)
    assert len(list(tmp_path.glob(".aside-*"))) == 2
    saved(tmp_path, 2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


def test_the_bytes_of_a_folder_are_those_of_its_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("none of ours")
    files = [p for p in saved(tmp_path, 1, 2).rglob("*") if p.is_file() and p.name != "note"]
    assert Folder(tmp_path).nbytes() == sum(p.stat().st_size for p in files)
    assert Folder(tmp_path / "missing").nbytes() == 0


def test_of_checkpoints_set_aside_as_many_are_kept_as_of_the_others(tmp_path: Path) -> None:
    for _ in range(4):  # goes back to step 1 again and again
        archive(saved(tmp_path, 1, 2), 1)
    foreign = tmp_path / ".aside-step-00000002-mine"
    empty = tmp_path / ".aside-step-00000002-1"  # by name ours, and without a manifest
    foreign.mkdir()
    empty.mkdir()
    before = sorted(tmp_path.glob(".aside-step-00000002-??*"), key=lambda p: p.name)
    prune(tmp_path, 2)
    left = set(tmp_path.glob(".aside-*"))
    assert {foreign, empty} <= left
    assert left - {foreign, empty} == set([p for p in before if p != foreign][-2:])


def test_a_process_without_a_file_left_has_not_seen_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, **options: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    before = names(saved(tmp_path, 1, 2, 3))
    monkeypatch.setattr("hasten.parts.checkpoint.format.open_regular", full)
    with pytest.raises(OSError, match="Too many open files"):
        load_latest(tmp_path)
    prune(tmp_path, 3)
    assert names(tmp_path) == before


def test_a_process_without_memory_left_has_not_seen_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, framework: str) -> None:
        raise RuntimeError(f"unable to mmap 9 bytes from file <{path}>: Cannot allocate memory")

    before = names(saved(tmp_path, 1, 2))
    monkeypatch.setattr("hasten.parts.checkpoint.chunks.safe_open", full)
    with pytest.raises(MemoryError, match="step-00000002 doesn't fit in memory"):
        load_latest(tmp_path)
    assert names(tmp_path) == before
