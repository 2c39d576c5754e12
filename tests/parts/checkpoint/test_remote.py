"""Checkpoints at an address: whole once the manifest is there, verified like any other."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from hasten.parts.checkpoint import MANIFEST, STATE, SmartCheckpointer
from hasten.parts.checkpoint.remote import Address


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.name}"


def at(address: str, model: nn.Module, **settings: Any) -> SmartCheckpointer:
    keeper = SmartCheckpointer(1, folder=address, **{"max_checkpoints": 2, **settings})
    return keeper.protect(model=model)


def saved(address: str, steps: int, **settings: Any) -> nn.Module:
    model = nn.Linear(40, 40)
    with at(address, model, **settings) as keeper:
        for step in range(1, steps + 1):
            torch.nn.init.constant_(model.weight, step)
            keeper.save(step)
    return model


@pytest.mark.parametrize("compression", [False, "shuffle"])
def test_a_machine_without_the_folder_finds_the_newest(address: str, compression: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* is slow: ")  # a busy disk may be
        saved(address, 4, compression=compression)  # its name has brackets
    names = Address(address).names()
    assert names == ["step-00000003", "step-00000004"]
    other = nn.Linear(40, 40)
    with at(address, other) as keeper:
        keeper.restore()
        assert keeper.step == 4
    assert torch.equal(other.weight, torch.full((40, 40), 4.0))


def test_a_local_folder_can_be_an_address(tmp_path: Path) -> None:
    saved(f"file://{tmp_path}", 3, compression=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_what_has_no_manifest_there_is_no_checkpoint(address: str) -> None:
    saved(address, 2)
    files = fsspec.filesystem("memory")
    files.rm_file(f"/{address.removeprefix('memory://')}/step-00000002/{MANIFEST}")
    other = nn.Linear(40, 40)
    with at(address, other) as keeper:
        keeper.restore()
        assert keeper.step == 1


def test_damage_there_is_found_and_the_one_before_is_used(address: str) -> None:
    saved(address, 2)
    files = fsspec.filesystem("memory")
    path = f"/{address.removeprefix('memory://')}/step-00000002/{STATE}"
    data = bytearray(files.cat_file(path))
    data[-3] ^= 1
    files.pipe_file(path, bytes(data))
    other = nn.Linear(40, 40)
    with at(address, other) as keeper:
        with pytest.warns(UserWarning, match="step-00000002 is damaged"):
            keeper.restore()
        assert keeper.step == 1
        keeper.save(2)
    with at(address, other) as again:
        again.restore()
        assert again.step == 2


def cut(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def put_file(*given: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", put_file)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_place_that_can_not_be_reached_is_an_alarm(
    kind: type[Exception], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, kind("connection reset"))
    model = nn.Linear(3, 3)
    keeper = at(address, model)
    keeper.save(1)
    with pytest.warns(UserWarning, match="no checkpoint could be written to memory:.*reset"):
        keeper.close()


def test_an_earlier_run_s_and_a_stranger_s_are_not_deleted_there(tmp_path: Path) -> None:
    address = f"file://{tmp_path}"
    saved(address, 2, compression=False)
    strange = tmp_path / "step-00000001"
    (strange / MANIFEST).write_text("a cargo of bananas")
    with pytest.warns(UserWarning, match="set aside"):
        saved(address, 3, compression=False)
    assert (strange / f"{MANIFEST}.aside").read_text() == "a cargo of bananas"
    assert Address(address).names() == ["step-00000002", "step-00000003"]
    (tmp_path / "step-00000000").mkdir()
    (tmp_path / "step-00000000" / MANIFEST).write_text("more of them")
    Address(address).prune(1, lambda name, reason: None)
    assert Address(address).names() == ["step-00000000", "step-00000003"]


def test_a_place_that_stays_away_does_not_fill_the_local_folder(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, OSError("unplugged"))
    keeper = at(address, nn.Linear(3, 3))
    keeper.save(1)
    for step in range(2, 6):
        with pytest.warns(UserWarning, match="unplugged"):
            keeper.save(step)
    with pytest.warns(UserWarning, match="unplugged"):
        keeper.close()
    assert [path for path in keeper.saver.folder.rglob("*") if path.is_file()] == []
    assert fsspec.filesystem("memory").find(address.removeprefix("memory:/")) == []


def failing_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The first call of this function of an address finds nobody there."""
    real, calls = getattr(Address, name), []

    def call(self: Address, *given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise OSError("unplugged")
        return real(self, *given)

    monkeypatch.setattr(Address, name, call)


def test_nothing_is_saved_beside_checkpoints_of_another_way(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(address, 2)
    failing_once(monkeypatch, "set_aside")
    model = nn.Linear(40, 40)
    with at(address, model) as keeper:
        with pytest.warns(UserWarning, match="nothing is saved, as checkpoints after step 0"):
            keeper.save(1)
        with pytest.warns(UserWarning, match="set aside"):
            keeper.save(2)
    other = nn.Linear(40, 40)
    with at(address, other) as again:
        again.restore()
    assert torch.equal(other.weight, model.weight)
