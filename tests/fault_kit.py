"""Disks that fail, and a small training loop to put on them: the tools of ``tests/faults``."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from hasten.parts.checkpoint import SmartCheckpointer
from hasten.parts.checkpoint.disk import Disk
from hasten.parts.checkpoint.saver import Saver

EVERY = 3  # steps from save to save
Tell = Callable[[str], None]


class CountedDisk(Disk):
    """Calls ``at`` before every call, in the middle of a write, and after it."""

    def __init__(self) -> None:
        self.calls = 0

    def at(self, name: str) -> None:
        self.calls += 1

    def make_folder(self, path: Path) -> None:
        self.at("make")
        super().make_folder(path)
        self.at("made")

    def open_new(self, path: Path) -> int:
        self.at("open")
        return super().open_new(path)

    def write(self, descriptor: int, block: memoryview) -> None:
        half = len(block) // 2
        self.at("write")
        super().write(descriptor, block[:half])
        self.at("half")
        super().write(descriptor, block[half:])
        self.at("written")

    def sync(self, path: Path) -> None:
        self.at("sync")
        super().sync(path)
        self.at("synced")

    def rename(self, old: Path, new: Path) -> None:
        self.at("rename")
        super().rename(old, new)
        self.at("renamed")


class DeadlyDisk(CountedDisk):
    """Kills its process at one call, without a word."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call = call

    def at(self, name: str) -> None:
        super().at(name)
        if self.calls == self.call:
            os.kill(os.getpid(), signal.SIGKILL)


class FullDisk(CountedDisk):
    """Has no space from one call on, until somebody makes room."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call: int | None = call

    def at(self, name: str) -> None:
        super().at(name)
        taking = name in ("make", "open", "write", "half", "sync")
        if self.call is not None and self.calls >= self.call and taking:
            raise OSError(errno.ENOSPC, "No space left on device")


class VolatileDisk(CountedDisk):
    """Remembers what would be left if the power went now: only what was forced to the disk.

    Files are their inode's bytes when it was last forced, folders their names when they were.
    """

    def __init__(self, root: Path, at_cut: Callable[[str], None]) -> None:
        super().__init__()
        self.root, self.at_cut = root, at_cut
        self.bytes: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.force(root)

    def at(self, name: str) -> None:
        super().at(name)
        self.at_cut(f"{name} {self.calls}")

    def sync(self, path: Path) -> None:
        self.force(path)
        super().sync(path)

    def force(self, path: Path) -> None:
        inode = path.stat().st_ino
        if path.is_dir():
            self.names[inode] = {p.name: p.stat().st_ino for p in path.iterdir()}
        else:
            self.bytes[inode] = path.read_bytes()

    def left(self, to: Path, names_got_ahead: bool) -> Path:
        """What is on the disk after a cut. Names may have reached it unasked, bytes have not."""
        live = {p.stat().st_ino: p for p in (self.root, *self.root.rglob("*"))}

        def build(inode: int, place: Path) -> None:
            path = live.get(inode)
            if inode in self.names or (path is not None and path.is_dir()):
                place.mkdir()
                kept = dict(self.names.get(inode, {}))
                if names_got_ahead and path is not None:
                    kept = {p.name: p.stat().st_ino for p in path.iterdir()}
                for name, child in kept.items():
                    build(child, place / name)
            else:
                place.write_bytes(self.bytes.get(inode, b""))

        build(self.root.stat().st_ino, to)
        return to


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=generator)
    return x, x[:, :4].argmax(1)


def train(
    folder: Path, steps: int, tell: Tell, disk: Disk | None = None, asynchronous: bool = True
) -> SmartCheckpointer:
    """Restore, then train and save; tells ``R`` step, ``L`` step loss, and ``C`` committed step."""
    torch.set_num_threads(1)
    model, optimizer = build()
    keeper = SmartCheckpointer(EVERY, 2, folder=folder, compression=False)
    keeper.saver = Saver(folder, 2, False, asynchronous, disk or Disk())
    keeper.protect(model=model, optimizer=optimizer).restore()
    tell(f"R {keeper.step}")
    for step in range(keeper.step + 1, steps + 1):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(f"L {step} {loss.item().hex()}")
        before = keeper.step
        if keeper.after_step(step):
            tell(f"C {before if asynchronous else step}")  # a save waits for the one before it
    keeper.close()
    return keeper


def reference(folder: Path, steps: int) -> dict[int, str]:
    """Every step's loss of a run that nothing disturbs."""
    lines: list[str] = []
    train(folder, steps, lines.append)
    return {int(s): loss for kind, s, *rest in map(str.split, lines) for loss in rest}


def killed(work: Callable[[Tell], None], after: float | None) -> tuple[list[list[str]], bool]:
    """Run ``work`` in a fork and kill that after some seconds; its lines, and if it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            work(lambda line: os.write(writer, f"{line}\n".encode()) and None)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    timer = threading.Timer(after or 60, os.kill, (child, signal.SIGKILL))
    timer.start()
    with os.fdopen(reader) as lines:
        told = [line.split() for line in lines if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    timer.cancel()
    timer.join()
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, told
    return told, os.WIFSIGNALED(status)
