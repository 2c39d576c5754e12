"""Disks that are full, read-only, damaged, or lose their power during a save."""

from __future__ import annotations

import errno
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fault_kit import EVERY, CountedDisk, FullDisk, Tell, VolatileDisk, damage, killed, train
from hasten.parts.checkpoint import (
    MANIFEST,
    STATE,
    FolderInUseError,
    SmartCheckpointer,
    checkpoints,
    load,
)
from hasten.parts.checkpoint.format import Disk, write_blocks
from hasten.parts.checkpoint.saver import Saver
from saved import load_latest, save

CALLS = 18  # of a save before its rename, at which the disk may be full


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def state(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((300,), step)}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("call", range(1, CALLS + 1))
def test_a_disk_that_fills_up_at_any_call_leaves_what_there_was(
    call: int, asynchronous: bool, tmp_path: Path
) -> None:
    disk = FullDisk(call)
    disk.call = None
    saver = Saver(tmp_path, 2, False, asynchronous, disk)
    saver.save(1, state(1), {"n": 1})
    saver.wait_for_writer()
    disk.call = disk.calls + call
    if asynchronous:
        saver.save(2, state(2), {"n": 2})
    next_look = (
        saver.wait_for_writer if asynchronous else partial(saver.save, 2, state(2), {"n": 2})
    )
    with pytest.warns(UserWarning, match="No space left on device; training continues"):
        next_look()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert load(tmp_path / "step-00000001")[1] == {"n": 1}
    disk.call = None  # somebody made room
    saver.save(3, state(3), {"n": 3})
    saver.close()
    assert load(checkpoints(tmp_path)[-1])[1] == {"n": 3}


def test_the_calls_above_are_those_of_a_save(tmp_path: Path) -> None:
    disk = CountedDisk()
    saver = Saver(tmp_path, 2, False, False, disk)
    saver.save(1, state(1), {})
    before = disk.calls
    saver.save(2, state(2), {})
    assert disk.calls - before >= CALLS


class LyingDisk(Disk):
    """Writes another last byte into one file than it is given."""

    def __init__(self, name: str) -> None:
        self.name, self.lies = name, False

    def open_new(self, path: Path) -> int:
        self.lies = path.name == self.name
        return super().open_new(path)

    def write(self, descriptor: int, block: memoryview) -> None:
        last = bytes([block[-1] ^ self.lies])
        super().write(descriptor, memoryview(bytes(block[:-1]) + last))


@pytest.mark.parametrize("name", [STATE, "rank-00000.json.new", MANIFEST])
def test_a_disk_that_returns_other_bytes_costs_the_checkpoint_and_no_older_one(
    name: str, tmp_path: Path
) -> None:
    saver = Saver(tmp_path, 1)
    saver.save(1, state(1), {})
    saver.wait_for_writer()
    saver.local.disk = LyingDisk(name)
    saver.save(2, state(2), {})
    with pytest.warns(UserWarning, match="no checkpoint could be written to"):
        saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.filterwarnings("ignore:no checkpoint could be written")
def test_training_goes_on_and_the_alarm_comes_within_a_step(tmp_path: Path) -> None:
    lines: list[str] = []
    undisturbed: list[str] = []
    train(tmp_path / "plain", 12, undisturbed.append)
    keeper = train(tmp_path / "full", 12, lines.append, FullDisk(1), asynchronous=False)
    losses = [line for line in lines if line.startswith("L")]
    assert losses == [line for line in undisturbed if line.startswith("L")]
    assert len(keeper.alarms) == 4, "one for each save"
    assert not checkpoints(tmp_path / "full")


def test_a_run_is_refused_where_two_checkpoints_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(1000, 100)
    keeper = SmartCheckpointer(folder=tmp_path).protect(
        model=model, optimizer=torch.optim.AdamW(model.parameters())
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2_300_000))
    with pytest.raises(ValueError, match=r"two checkpoints of 0\.00 GB don't fit into"):
        keeper.restore()  # 3 x 400,400 bytes each, the moments among them
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2_500_000))
    assert keeper.restore() is model


def test_what_a_killed_save_left_takes_no_room_at_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / ".writing-step-00000003-99"
    left.mkdir()
    (left / "state.safetensors").write_bytes(b"half")
    keeper = SmartCheckpointer(folder=tmp_path)
    keeper.open()
    assert not left.exists()
    left.mkdir()  # of a save under way
    keeper.open()
    assert left.exists()
    keeper.close()


def test_a_folder_that_can_not_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"can't be written into .*file: File exists; "):
        SmartCheckpointer(folder=tmp_path / "file").open()

    def refuse(*args: Any, **settings: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"can't be written into .*Read-only file system; choose"):
        SmartCheckpointer(folder=tmp_path / "run").open()


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    first = SmartCheckpointer(1, folder=tmp_path).protect(model=model)
    first.save(1)

    def ask(tell: Tell) -> None:
        try:
            saver = Saver(tmp_path)
            saver.open()
            saver.close()
            tell("taken")
        except FolderInUseError as error:
            tell(str(error))

    assert " ".join(killed(ask, None)[0][0]) == (
        f"{tmp_path} is in use by another run; give this one a folder of its own, or end the "
        "other first"
    )
    with pytest.raises(FolderInUseError):
        SmartCheckpointer(1, folder=tmp_path).protect(model=model).restore()
    first.close()
    assert killed(ask, None)[0] == [["taken"]]


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
        found = load_latest(left / folder.relative_to(root))
        step = found[1]["step"] if found else 0
        assert step in (finished, finished + 1), f"{place}: {step} after {finished}"
        if found:
            assert torch.equal(found[0]["x"], values(step)["x"])

    disk = VolatileDisk(root, cut)
    for step in (1, 2, 3):
        save(folder, step, values(step), {"step": step}, disk=disk)
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
    found = load_latest(left / "runs" / "one")
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
    save(root, 1, values(1), {"step": 1}, disk=disk)
    assert load_latest(disk.left(tmp_path / "left", False)) is None
    assert load_latest(disk.left(tmp_path / "ahead", True)) is None


def test_a_file_is_on_the_disk_before_its_hash_is_told(tmp_path: Path) -> None:
    forced: list[Path] = []

    class Watched(Disk):
        def sync(self, path: Path) -> None:
            forced.append(path)
            super().sync(path)

    write_blocks(tmp_path / "file", iter([memoryview(b"bytes")]), Watched())
    assert forced == [tmp_path / "file"]


KINDS = ("flip", "page", "cut", "grow", "delete", "swap")


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(70, 64)


@pytest.fixture(scope="module", params=[False, "shuffle"])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, plain and packed; the second may differ from the first."""
    folder = tmp_path_factory.mktemp("two")
    saver = Saver(folder, 3, request.param)
    for step in (1, 2):
        saver.save(step, {f"w/{k}": v for k, v in model(step).state_dict().items()}, {"n": step})
    saver.close()
    return folder


def test_a_hundred_damages_are_all_found_and_cost_one_checkpoint(two: Path, tmp_path: Path) -> None:
    draw = random.Random(3)
    for case in range(100):
        folder = tmp_path / str(case)
        shutil.copytree(two, folder)
        kind = KINDS[min(case // 10, 9) % len(KINDS)] if case < 60 else "flip"
        name = draw.choice((STATE, STATE, STATE, MANIFEST))
        damage(folder / "step-00000002" / name, kind, draw)
        damaged: list[str] = []
        found = load_latest(folder, damaged)
        assert found is not None, (case, kind, name)
        assert found[1]["n"] == 1
        assert torch.equal(found[0]["w/weight"], model(1).state_dict()["weight"])
        assert [text.partition(" ")[0] for text in damaged] == ["step-00000002"]
