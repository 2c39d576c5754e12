"""``hasten checkpoint``: lists, verifies and compares, and writes into no folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from hasten.cli.main import app
from hasten.errors import InputError
from hasten.parts.checkpoint import MANIFEST, STATE
from hasten.parts.checkpoint.saver import Saver
from saved import load_latest


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of steps 1 to 3, packed, without 4 frozen weights; they differ in one weight."""
    saver = Saver(tmp_path / "run" / "checkpoints", 5, "shuffle")
    saver.open()
    for step in (1, 2, 3):
        weight = torch.arange(3000.0)
        weight[7] += step
        tensors = {"model/w": weight, "optimizer/0/m": torch.ones(2000), "flag": torch.tensor(True)}
        saver.save(step, tensors, {"base": {"weights": 4, "hash": "f0" if step < 3 else "f1"}})
    saver.close()
    return tmp_path / "run" / "checkpoints"


def test_ls_names_each_with_its_size_and_what_it_lacks(folder: Path) -> None:
    for place in (folder, folder.parent):
        lines = call("ls", place).stdout.splitlines()
        assert [line.split()[0] for line in lines] == [f"step-0000000{n}" for n in (1, 2, 3)]
        assert lines[2].endswith("packed  without 4 frozen weights")


def test_ls_shows_what_was_set_aside_and_why(folder: Path) -> None:
    (folder / "step-00000003" / STATE).write_bytes(b"x")
    (folder / "step-00000002" / MANIFEST).write_bytes(b"x")
    load_latest(folder)
    for place in (folder, folder.parent):
        lines = call("ls", place).stdout.splitlines()
        assert len(lines) == 3
        assert lines[1].startswith(".damaged-step-00000002")
        assert "bytes instead of" in lines[2]


def test_verify_finds_damage_and_moves_nothing(folder: Path) -> None:
    found = call("verify", folder)
    assert (found.exit_code, found.stdout.count("complete")) == (0, 3)
    data = bytearray((folder / "step-00000003" / STATE).read_bytes())
    data[-1] ^= 1
    (folder / "step-00000003" / STATE).write_bytes(data)
    found = call("verify", folder)
    assert found.exit_code == 4
    assert "step-00000003  DAMAGED" in found.stdout
    assert call("verify", folder / "step-00000001").exit_code == 0
    assert (folder / "step-00000003").is_dir()


def test_diff_names_what_differs_and_by_how_much(folder: Path) -> None:
    lines = call("diff", folder / "step-00000001", folder / "step-00000002").stdout.splitlines()
    assert lines == [
        "model/w  differs by 1 at most, in 1 of 3000",
        "2 tensors are equal bit for bit",
    ]
    lines = call("diff", folder / "step-00000001", folder).stdout.splitlines()
    assert lines[0] == "base  the frozen weights differ; neither checkpoint contains them"


def test_what_can_not_be_done_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words, sentence in (
        (("ls", tmp_path / "empty"), "holds no checkpoint"),
        (("verify", tmp_path / "missing"), "holds no checkpoint"),
    ):
        error = call(*words).exception
        assert isinstance(error, InputError)
        assert sentence in str(error)
    (folder / "step-00000003" / STATE).write_bytes(b"x")
    assert "bytes instead of" in str(call("diff", folder, folder / "step-00000002").exception)
