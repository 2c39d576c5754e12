"""A process killed while it saves: its last finished checkpoint is restored, or a newer one."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch

from hasten.parts import checkpoint


def saving(folder: Path, first: int, acknowledge: int) -> None:
    """Save one checkpoint after the other, telling each that is done; never returns."""
    for step in range(first, first + 10_000):
        values = torch.from_numpy(np.full(500_000, step, np.int64))
        checkpoint.save(folder, step, {"values": values, "step": torch.tensor(step)}, {"n": step})
        checkpoint.prune(folder, 2)
        os.write(acknowledge, step.to_bytes(8, "little"))
    os._exit(0)


def killed_while_saving(folder: Path, first: int, after: float) -> int:
    """Kill a process at some instant of its saving; the last step that it said was done, or 0."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            saving(folder, first, writer)
        finally:
            os._exit(1)
    os.close(writer)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    told = b""
    while block := os.read(reader, 1 << 16):
        told += block
    os.close(reader)
    return int.from_bytes(told[-8:], "little") if told else 0


def test_a_kill_at_any_instant_loses_no_finished_checkpoint_and_restores_no_other(
    tmp_path: Path,
) -> None:
    draw, last, interrupted = random.Random(6), 0, 0
    for _ in range(15):
        done = killed_while_saving(tmp_path, last + 1, after=draw.uniform(0.01, 0.25))
        interrupted += any(".writing-" in name for name in _names(tmp_path))
        assert not any(".damaged-" in name for name in _names(tmp_path))
        found = checkpoint.load_latest(tmp_path)
        if found is None:
            assert last == done == 0
            continue
        tensors, meta, path = found
        step = meta["n"]
        assert step >= max(last, done)  # a kill between the rename and the telling adds one
        assert path.name == f"step-{step:08d}"
        assert tensors["step"] == step
        assert (tensors["values"].numpy() == step).all()
        last = step
    assert last > 0
    assert interrupted > 0, "no kill fell into a save"
    checkpoint.prune(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == [f"step-{last:08d}"]


def _names(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir()]
