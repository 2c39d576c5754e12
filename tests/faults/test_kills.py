"""A training process killed at any instant: the next one goes on bit for bit, by itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fault_kit import EVERY, Account, CountedDisk, DeadlyDisk, Tell, killed, reference, train
from hasten.parts import checkpoint
from hasten.parts.checkpoint.commit import Folder

STEPS = 150


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return reference(tmp_path_factory.mktemp("reference"), STEPS)


@pytest.mark.parametrize("most", [8, pytest.param(40, marks=pytest.mark.long)])
def test_kills_at_random_instants(most: int, undisturbed: dict[int, str], tmp_path: Path) -> None:
    draw, account, kills, inside, run = random.Random(8), Account(undisturbed), 0, 0, 0
    while kills < most or (not inside and kills < 400):  # saves are short: most kills miss them
        folder = tmp_path / f"run-{run}"
        told, was_killed = killed(
            lambda tell, folder=folder: train(folder, STEPS, tell) and None,  # type: ignore[misc]
            draw.uniform(0.005, 0.12),
        )
        account.life(told)
        kills += was_killed
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        inside += any(name.startswith(".writing-") for name in names)
        assert not any(name.startswith(".damaged-") for name in names)
        if not was_killed:
            run, account = run + 1, Account(undisturbed)
    assert inside, "no kill fell into a save"


@pytest.mark.parametrize(
    ("asynchronous", "apart"),
    [
        (True, 6),
        pytest.param(True, 1, marks=pytest.mark.long),
        pytest.param(False, 1, marks=pytest.mark.long),
    ],
)
def test_kills_at_calls_of_a_save(
    asynchronous: bool, apart: int, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """The third save of each life is the one. What a disk has at every call: ``test_disks``."""
    counted: Any = CountedDisk()
    train(tmp_path / "counted", 3 * EVERY, lambda line: None, counted, asynchronous)
    per_save = counted.calls // 3
    assert per_save > 20
    for call in range(2 * per_save + 1, 3 * per_save + 1, apart):
        folder, account = tmp_path / str(call), Account(undisturbed)

        def life(tell: Tell, call: int = call, folder: Path = folder) -> None:
            train(folder, 4 * EVERY, tell, DeadlyDisk(call), asynchronous)

        told, was_killed = killed(life, None)
        assert was_killed
        account.life(told)
        lines: list[str] = []
        train(folder, 4 * EVERY, lines.append)
        account.life([line.split() for line in lines])
        assert account.reached == 4 * EVERY
        Folder(folder).prune(2, lambda name, reason: None)
        assert [p.name for p in checkpoint.checkpoints(folder)] == [
            p.name for p in sorted(folder.iterdir())
        ], "something half done was left behind"
