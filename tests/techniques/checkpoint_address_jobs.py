"""Ranks whose checkpoints are at an address: a store of objects, and no folder in common."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.machine.environment import World
from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.checkpoint import ranks as parts
from hasten.parts.checkpoint.ranks import SignOfLife
from hasten.techniques import checkpoint as technique
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from techniques.expert_checkpoint_jobs import shared_folder
from tiny import language_job, session_of
from told import refusal

SECOND = "rank-00001.safetensors"
QUICK = 1.5  # seconds of patience in these tests


class ConnectionCutError(Exception):
    """An error of a library, which isn't the system's."""


class Bucket(LocalFileSystem):
    """A store of objects: nothing can be renamed, and listings are remembered until they aren't."""

    protocol = "bucket"
    cachable = False
    root = ""  # another place than that of other ranks
    cut = False
    loses = ""  # the object that is accepted, and isn't there
    sent: ClassVar[list[str]] = []
    fetched: ClassVar[list[str]] = []

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._listings: dict[str, Any] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        name = str(path).removeprefix("bucket://")
        return f"{cls.root}{name}" if cls.root and not name.startswith(cls.root) else name

    def mv_file(self, *given: Any, **named: Any) -> None:
        raise NotImplementedError("objects have no rename")

    def ls(self, path: Any, detail: bool = False, **named: Any) -> Any:
        key = f"{path} {detail}"
        if key not in self._listings:
            self._listings[key] = super().ls(path, detail=detail, **named)
        return self._listings[key]

    def invalidate_cache(self, path: Any = None) -> None:
        self._listings.clear()

    def put_file(self, lpath: Any, rpath: Any, *given: Any, **named: Any) -> None:
        if self.cut:
            raise ConnectionCutError("connection reset")
        self.sent.append(str(lpath))
        if not self.loses or not str(rpath).endswith(self.loses):
            super().put_file(lpath, rpath, *given, **named)

    def get_file(self, rpath: Any, lpath: Any, *given: Any, **named: Any) -> None:
        if self.cut:
            raise ConnectionCutError("connection reset")
        self.fetched.append(Path(rpath).name)
        super().get_file(rpath, lpath, *given, **named)


fsspec.register_implementation("bucket", Bucket, clobber=True)


@contextlib.contextmanager
def own_host(alone: bool = True) -> Iterator[Path]:
    """A rank with a temporary folder and a home of its own; ``alone``: no other rank sees them."""
    usual, home, sees = tempfile.tempdir, os.environ.get("HOME", ""), technique.sees
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["HOME"] = folder
        if alone:
            technique.sees = lambda path: Path(folder) in path.parents and sees(path)
        try:
            yield Path(folder)
            dist.barrier()  # a rank of this host may still read there
        finally:
            tempfile.tempdir, os.environ["HOME"], technique.sees = usual, home, sees


def session_at(world: World, folder: Path, layout: Any = None, **changes: Any) -> Session:
    plan = (Checkpoints(1, compression=False, folder=f"bucket://{folder}"), layout or FSDP2())
    job = language_job(**{"steps": 2, **changes})
    return session_of(job, *plan, folder=folder, world=world)


def resumed(session: Session) -> str:
    kept: Any = session.setup.checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = kept.resume(session)
    kept.keeper.close()
    return path.name if path else ""


def weights(session: Session) -> list[Any]:
    tensors = session.loss_module.parameters()
    return [(t.to_local() if is_dtensor(t) else t).detach().tolist() for t in tensors]


def committed(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[-1]) for path in folder.glob("step-*/manifest.json"))


def of_hosts(world: World) -> dict[str, Any]:
    """Two steps, and what comes back, on hosts that have nothing but the address in common."""
    folder = shared_folder()
    Bucket.sent.clear()
    with own_host() as own:
        session = session_at(world, folder)
        list(training(session))
        dist.barrier()
        mine = all(own in Path(path).parents for path in Bucket.sent)
        sent = [Path(path).name.removesuffix(".new") for path in Bucket.sent]
        rest = [p.name for p in own.rglob("*") if p.is_file() and p.name.startswith("rank-")]
        Bucket.fetched.clear()
        again = session_at(world, folder)
        name = resumed(again)
        fetched = list(Bucket.fetched)
        Bucket.fetched.clear()
        other = session_at(world, folder, DDP())
        resumed(other)
        both = list(Bucket.fetched)
    return {
        "from": name,
        "equal": weights(again) == weights(session),
        "sent": sent,
        "own": mine,
        "rest": rest,
        "fetched": sorted(fetched),
        "all": sorted(both),
        "folders": sorted(path.name for path in folder.iterdir()),
        "files": sorted(path.name for path in (folder / "step-00000002").iterdir()),
    }


def of_one_host(world: World) -> list[str]:
    """Ranks that see each other's temporary folder: what this one fetched."""
    folder = shared_folder()
    with own_host(alone=False):
        list(training(session_at(world, folder)))
        dist.barrier()
        Bucket.fetched.clear()
        resumed(session_at(world, folder, DDP()))
    return list(Bucket.fetched)


FAULTS = ("lost", "cut", "dead")


def faulty(world: World) -> dict[str, Any]:
    """Rank 1 has a fault at the second of three saves."""
    found: dict[str, Any] = {}
    fail, patience = SignOfLife.fail, parts.PATIENCE
    for fault in FAULTS:
        folder = shared_folder()
        with own_host(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            session = session_at(world, folder, steps=3)
            kept: Any = session.setup.checkpoint
            longest = 0.0
            for metrics in training(session):
                kept.keeper.saver.wait()
                dist.barrier()
                began = time.monotonic()
                if world.rank and metrics.step == 1:
                    Bucket.loses = SECOND if fault == "lost" else ""
                    Bucket.cut = fault != "lost"
                    if fault == "dead":  # it gives no more signs, and no reason
                        SignOfLife.fail = lambda self, reason: self.stop()  # type: ignore[method-assign]
                else:
                    Bucket.loses, Bucket.cut = "", False
                    SignOfLife.fail = fail  # type: ignore[method-assign]
                parts.PATIENCE = QUICK if fault == "dead" else patience
                longest = max(longest, time.monotonic() - began)
            dist.barrier()
            again = session_at(world, folder, steps=3)
            found[fault] = {
                "alarms": kept.keeper.saver.alarms,
                "saved": committed(folder),
                "rest": [p.name for p in folder.iterdir() if p.name.startswith(".writing")],
                "parts": [p.name for p in folder.glob("step-00000002/*")],
                "from": resumed(again),
            }
    parts.PATIENCE = patience
    return found


def missing_there(world: World) -> dict[str, Any]:
    """A part of the newest checkpoint is gone; the address is cut; ranks have other places."""
    folder = shared_folder()
    found: dict[str, Any] = {}
    with own_host():
        list(training(session_at(world, folder)))
        dist.barrier()
        if world.is_main:
            (folder / "step-00000002" / SECOND).unlink()
        dist.barrier()
        found["missing"] = resumed(session_at(world, folder))
        Bucket.cut = bool(world.rank)
        again = session_at(world, folder)
        found["cut"] = refusal(again.setup.checkpoint.resume, again)  # type: ignore[union-attr]
        again.setup.checkpoint.keeper.close()  # type: ignore[union-attr]
        Bucket.cut = False
        seen, technique.SEEN_WITHIN = technique.SEEN_WITHIN, 0.1
        Bucket.root = tempfile.mkdtemp() if world.rank else ""
        found["apart"] = refusal(next, training(session_at(world, shared_folder())))
        technique.SEEN_WITHIN, Bucket.root = seen, ""
    return found
