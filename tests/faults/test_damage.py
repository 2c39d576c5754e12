"""Damaged media: every flipped bit, zeroed page and missing piece is found before it is used."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from fault_kit import damage
from hasten.parts.checkpoint import MANIFEST, STATE, SmartCheckpointer, load
from hasten.parts.checkpoint.saver import Saver

KINDS = ("flip", "page", "cut", "grow", "delete", "swap")


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(70, 64)


@pytest.fixture(scope="module", params=[False, "shuffle", "difference"])
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
        saver = Saver(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = saver.latest()
        assert found is not None, (case, kind, name)
        assert found[1]["n"] == 1
        assert torch.equal(found[0]["w/weight"], model(1).state_dict()["weight"])
        assert len(saver.alarms) == 1
        assert "step-00000002 is damaged" in saver.alarms[0]


def test_a_difference_is_no_better_than_what_it_differs_from(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 3, "difference")
    for step in (1, 2, 3):
        saver.save(step, dict(model(step).state_dict()), {})
    saver.close()
    (tmp_path / "step-00000001" / STATE).write_bytes(b"x")
    with pytest.warns(UserWarning, match="what it differs from is damaged"):
        assert Saver(tmp_path).latest() is None


def test_the_step_after_damage_is_saved_in_its_place(tmp_path: Path) -> None:
    held = model(1)
    with SmartCheckpointer(1, folder=tmp_path).protect(model=held) as keeper:
        keeper.save(1)
        keeper.save(2)
    (tmp_path / "step-00000002" / STATE).unlink()
    with SmartCheckpointer(1, folder=tmp_path).protect(model=held) as again:
        with pytest.warns(UserWarning, match=r"state\.safetensors is missing"):
            again.restore()
        assert again.step == 1
        assert again.after_step(2)
    assert again.verify()["step"] == 2
    load(tmp_path / "step-00000002")
