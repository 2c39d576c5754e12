"""The power goes at any call of a save: what was forced to the disk is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fault_kit import EVERY, VolatileDisk, train
from hasten.parts import checkpoint
from hasten.parts.checkpoint.format import Disk, write_blocks


def values(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((1000,), step), "y": torch.arange(7.0) + step}


@pytest.mark.parametrize("names_got_ahead", [False, True])
@pytest.mark.parametrize("new_folder", [False, True])
def test_no_cut_loses_a_finished_checkpoint_or_shows_half_a_one(
    names_got_ahead: bool, new_folder: bool, tmp_path: Path
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    folder = root / "runs" / "one" if new_folder else root
    finished, cuts = 0, 0

    def cut(place: str) -> None:
        nonlocal cuts
        cuts += 1
        left = disk.left(tmp_path / f"left-{cuts}", names_got_ahead)
        found = checkpoint.load_latest(left / folder.relative_to(root))
        step = found[1]["step"] if found else 0
        assert step in (finished, finished + 1), f"{place}: {step} after {finished}"
        if found:
            assert torch.equal(found[0]["x"], values(step)["x"])

    disk = VolatileDisk(root, cut)
    for step in (1, 2, 3):
        checkpoint.save(folder, step, values(step), {"step": step}, disk=disk)
        finished = step
        cut("done")
    assert cuts > 60


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_makes_its_own_folder_does_not_lose_it_with_all_that_is_in_it(
    asynchronous: bool, tmp_path: Path
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    (root / "runs").mkdir()  # by somebody who forced nothing
    disk = VolatileDisk(root, lambda place: None)
    train(root / "runs" / "one", 2 * EVERY, lambda line: None, disk, asynchronous)
    left = disk.left(tmp_path / "left", False)
    found = checkpoint.load_latest(left / "runs" / "one")
    assert found is not None
    assert found[2].name == f"step-{2 * EVERY:08d}"


class Forgetful(VolatileDisk):
    """Forces nothing."""

    def force(self, path: Path) -> None:
        if path == self.root and self.calls == 0:
            super().force(path)


def test_the_kit_finds_a_save_that_forces_nothing(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Forgetful(root, lambda place: None)
    checkpoint.save(root, 1, values(1), {"step": 1}, disk=disk)
    assert checkpoint.load_latest(disk.left(tmp_path / "left", False)) is None
    assert checkpoint.load_latest(disk.left(tmp_path / "ahead", True)) is None


def test_a_file_is_on_the_disk_before_its_hash_is_told(tmp_path: Path) -> None:
    forced: list[Path] = []

    class Watched(Disk):
        def sync(self, path: Path) -> None:
            forced.append(path)
            super().sync(path)

    write_blocks(tmp_path / "file", iter([memoryview(b"bytes")]), Watched())
    assert forced == [tmp_path / "file"]
