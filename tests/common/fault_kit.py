"""Disks that fail, a small training loop to put on them, and what judges it: tools of the faults.

``tests/faults`` takes a sample of each, ``benchmarks/campaign`` the full counts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer does so: here once, and not for seconds in each fork
from torch import Tensor, nn

from hasten.parts.checkpoint import SmartCheckpointer
from hasten.parts.checkpoint.format import Disk
from hasten.parts.checkpoint.saver import Saver
from hasten.parts.nn.losses import WholeLogitsLoss

EVERY = 3  # steps from save to save
PAGE = 4096
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
        if not path.is_relative_to(self.root):
            return  # above the disk
        inode = path.stat().st_ino
        if path.is_dir():
            self.names[inode] = {p.name: p.stat().st_ino for p in path.iterdir()}
            self.bytes.pop(inode, None)  # numbers of what was deleted are given out again
        else:
            self.bytes[inode] = path.read_bytes()
            self.names.pop(inode, None)

    def left(self, to: Path, names_got_ahead: bool) -> Path:
        """What is on the disk after a cut. Names may have reached it unasked, bytes have not."""
        for _ in range(100):
            with contextlib.suppress(FileNotFoundError):  # another thread took a file away
                return self._left(to, names_got_ahead)
            shutil.rmtree(to, ignore_errors=True)
        return self._left(to, names_got_ahead)

    def _left(self, to: Path, names_got_ahead: bool) -> Path:
        live = {p.stat().st_ino: p for p in (self.root, *self.root.rglob("*"))}

        def build(inode: int, place: Path) -> None:
            path = live.get(inode)
            if inode in self.names if path is None else path.is_dir():
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
    return losses_in([line.split() for line in lines])


def losses_in(told: Sequence[Sequence[str]]) -> dict[int, str]:
    """The losses that a life told, by step."""
    return {int(s): loss for kind, s, *rest in told if kind == "L" for loss in rest}


class Account:
    """What every life of a run told, against the run that nothing disturbed."""

    def __init__(self, losses: Mapping[int, str]) -> None:
        self.losses, self.reached, self.committed = losses, 0, 0

    def life(self, told: Sequence[Sequence[str]]) -> None:
        """Another life; AssertionError where it lost more than it may, or did another step."""
        for kind, step, *rest in told:
            if kind == "R":
                assert int(step) >= self.committed, "a finished checkpoint was lost"
                assert self.reached - int(step) <= 2 * EVERY, "one being written, and one interval"
            elif kind == "L":
                assert rest == [self.losses.get(int(step))], f"step {step} is another"
                self.reached = int(step)
            elif kind == "C":
                self.committed = int(step)


def killed(work: Callable[[Tell], None], after: float | None) -> tuple[list[list[str]], bool]:
    """Run ``work`` in a fork and kill that after some seconds; its lines, and if it was killed."""
    told, code = forked(work, after)
    assert code <= 0, told
    return told, code < 0


def forked(work: Callable[[Tell], None], after: float | None) -> tuple[list[list[str]], int]:
    """The same, and its exit code, below 0 the signal; an error is its last line, ``E`` and why."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1

        def tell(line: str) -> None:
            os.write(writer, f"{line}\n".encode())

        try:
            os.close(reader)
            work(tell)
            code = 0
        except BaseException as error:
            tell(f"E {type(error).__name__} {str(error)[:300]!r}")
        finally:
            os._exit(code)
    os.close(writer)
    timer = threading.Timer(after or 60, os.kill, (child, signal.SIGKILL))
    timer.start()
    with os.fdopen(reader) as lines:
        told = [line.split() for line in lines if line.endswith("\n")]
    timer.cancel()  # before the child is reaped: its number may be another's then
    timer.join()
    _, status = os.waitpid(child, 0)
    return told, os.waitstatus_to_exitcode(status)


def damage(file: Path, kind: str, draw: random.Random) -> None:
    """Do to a file what media do; ``swap``: another checkpoint's file of the same name."""
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "page":
        start = at // PAGE * PAGE
        data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    elif kind == "cut":
        del data[at:]
    elif kind == "grow":
        data.append(0)
    elif kind == "swap":
        data = bytearray((file.parent.parent / "step-00000001" / file.name).read_bytes())
    file.unlink()
    if kind != "delete":
        file.write_bytes(data)


class PlantedLoss(nn.Module):
    """The usual loss; on some calls another number is added to it."""

    def __init__(self, model: nn.Module, calls: Mapping[int, float]) -> None:
        super().__init__()
        self.inner, self.calls, self.count = WholeLogitsLoss(model), calls, 0

    def forward(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        self.count += 1
        loss, labels = self.inner(**inputs)
        return loss + self.calls.get(self.count, 0.0), labels
