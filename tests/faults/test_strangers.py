"""A checkpoint from a stranger: no code runs, and nothing outside is touched."""

from __future__ import annotations

import json
import os
import pickle
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save as packed
from torch import nn

from hasten.parts.checkpoint import (
    MANIFEST,
    STATE,
    DamagedCheckpointError,
    SmartCheckpointer,
    load,
)
from hasten.parts.checkpoint.commit import Folder
from hasten.parts.checkpoint.format import manifest_text
from saved import load_latest, save

SECRET = "of another user"

DESCRIBED = "rank-00000.json"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A whole checkpoint of step 4 beside files that are none of its business."""
    (tmp_path / "secret.safetensors").write_bytes(packed({"w": torch.ones(3)}))
    return save(tmp_path / "run", 4, {"w": torch.ones(2000)}, {"n": 4})


def forge(path: Path, **changes: Any) -> None:
    """Change the manifest and seal it again, as anybody who can write can."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    del manifest["seal"]
    (path / MANIFEST).write_bytes(manifest_text({**manifest, **changes}))


def files_of(path: Path) -> dict[str, Any]:
    files: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())["files"]
    return files


def listed(data: bytes) -> dict[str, Any]:
    hashes = {"xxh3_128": xxhash.xxh3_128_hexdigest(data), "sha256": sha256(data).hexdigest()}
    return {"bytes": len(data), **hashes}


@pytest.mark.parametrize(
    "name",
    [
        *("../../secret.safetensors", "../secret.safetensors", "/etc/passwd", "a/b.safetensors"),
        *("..", ".", "", ".hidden", "a\x00b", "a\\b", "x" * 300, "manifest.json", "é"),
    ],
)
def test_a_name_can_not_leave_the_folder(name: str, one: Path) -> None:
    data = (one.parent.parent / "secret.safetensors").read_bytes()
    forge(one, files={**files_of(one), name: listed(data)})
    with pytest.raises(DamagedCheckpointError, match="can't be the name"):
        load(one)


def test_a_link_or_a_pipe_in_the_place_of_a_file_is_not_opened(one: Path) -> None:
    outside = one.parent.parent / "secret.safetensors"
    (one / STATE).unlink()
    (one / STATE).symlink_to(outside)
    forge(one, files={**files_of(one), STATE: listed(outside.read_bytes())})
    with pytest.raises(DamagedCheckpointError, match="can't be read"):
        load(one)
    (one / STATE).unlink()
    os.mkfifo(one / STATE)
    with pytest.raises(DamagedCheckpointError, match="not a regular file"):
        load(one)
    (one / MANIFEST).unlink()
    os.mkfifo(one / MANIFEST)
    assert load_latest(one.parent) is None
    assert outside.exists()


@pytest.mark.parametrize(
    "changes",
    [
        *({"files": {}}, {"files": None}, {"files": {STATE: 3}}, {"files": {STATE: {}}}),
        *({"meta": 3}, {"step": "4"}, {"step": -1}, {"step": True}),
        *({"files": {STATE: {"bytes": "9", "xxh3_128": ""}}}, {"step": 10**400}),
        *({"ranks": 0}, {"ranks": 2}, {"ranks": 10**9}, {"ranks": None}),
    ],
    ids=str,
)
def test_a_sealed_manifest_of_another_shape_is_a_sentence(
    changes: dict[str, Any], one: Path
) -> None:
    forge(one, **changes)
    with pytest.raises(DamagedCheckpointError):
        load(one)


def test_a_manifest_without_end_is_not_read(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.parts.checkpoint.format.LARGEST_MANIFEST", 100)
    with pytest.raises(DamagedCheckpointError, match="larger than 100 bytes"):
        load(one)


def code(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [10], "packed": True, **changes}}


@pytest.mark.parametrize(
    "changes",
    [
        code(shape=[2**40, 2**40]),
        code(shape=[-1]),
        code(shape=[float("inf")]),
        code(dtype="OBJECT"),
        code(),
        code(packed=False),
        code(offset=[1], sizes=[10]),
        code(offset=[0], sizes=[9]),
        code(offset=[0, 0], sizes=[10]),
        code(offset=[-1], sizes=[10]),
        {"gone": {"dtype": "U8", "shape": [64]}},
        {"w": 3},
        {"w": {}},
    ],
    ids=str,
)
def test_chunks_of_another_form_are_damage(changes: dict[str, Any], one: Path) -> None:
    data = packed({"w": torch.zeros(64, dtype=torch.uint8)})
    description = json.dumps({"tensors": changes, "meta": {}}).encode()
    (one / STATE).write_bytes(data)
    (one / DESCRIBED).write_bytes(description)
    forge(one, files={STATE: listed(data), DESCRIBED: listed(description)})
    with pytest.raises(DamagedCheckpointError):
        load(one)


class Trap:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", [STATE, "state.pt", "optimizer.pt"])
def test_a_pickle_that_the_manifest_vouches_for_does_not_run(name: str, one: Path) -> None:
    sprung = one.parent / "sprung"
    data = pickle.dumps(Trap(sprung))
    (one / name).write_bytes(data)
    forge(one, files={**files_of(one), name: listed(data)})
    if name == STATE:
        with pytest.raises(DamagedCheckpointError):
            load(one)
    else:
        assert "w" in load(one)[0]  # verified, and never opened
    assert not sprung.exists()


STATES: tuple[Any, ...] = (
    {"weight": {"$tensor": "gone"}},
    {"weight": 3, "bias": 4},
    {"$items": 3},
)


@pytest.mark.parametrize(
    "objects",
    [
        *(None, 3, {}, {"other": {}}, {"model": {"kind": "Linear"}}),
        *({"model": {"kind": "Linear", "state": state}} for state in STATES),
    ],
    ids=str,
)
def test_meta_of_another_shape_changes_nothing(objects: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    save(tmp_path, 4, {"w": torch.ones(3)}, {"objects": objects})
    with (
        SmartCheckpointer(folder=tmp_path).protect(model=model) as keeper,
        pytest.raises(ValueError, match="step-00000004"),
    ):
        keeper.restore()
    assert torch.equal(model.weight, before)


def test_pruning_a_strangers_folder_touches_nothing_outside(one: Path) -> None:
    outside = one.parent.parent / "home"
    outside.mkdir()
    (outside / "letters").write_text(SECRET)
    (one.parent / "step-00000001").symlink_to(outside)
    (one.parent / ".deleting-step-00000002-1").symlink_to(outside)
    (one.parent / ".writing-step-00000003-1").symlink_to(outside)
    Folder(one.parent).prune(1, lambda name, reason: None)
    assert (outside / "letters").read_text() == SECRET
