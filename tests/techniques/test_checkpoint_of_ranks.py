"""Ranks that save their own parts: no message while they write, and no fault loses a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.launch.ranks import ANSWER_SECONDS
from hasten.machine.environment import World
from hasten.parts.checkpoint import MANIFEST, checkpoints, load
from hasten.parts.checkpoint import ranks as parts
from hasten.parts.checkpoint.commit import Folder
from hasten.parts.checkpoint.format import Disk, manifest_text
from hasten.parts.checkpoint.ranks import SignOfLife, wait_for_parts
from hasten.parts.checkpoint.state import of_all_ranks
from hasten.techniques import checkpoint as technique
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.fsdp import FSDP2
from ranks import once_on_ranks
from techniques.checkpoint_address_jobs import faulty, missing_there, of_hosts, of_one_host
from techniques.expert_checkpoint_jobs import shared_folder
from tiny import language_job, session_of, tiny_model
from told import refusal

LONGEST = 10.0  # seconds that a rank may wait for another one that is gone
QUICK = 2.0  # the same in this test
DELAY = 0.3  # seconds that a rank needs longer
WIDE = 4  # bytes of a number in float32


class SlowDisk(Disk):
    """Writes only when it is allowed to."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def write(self, descriptor: int, block: memoryview) -> None:
        self.open.wait(60)
        super().write(descriptor, block)


class FullDisk(Disk):
    def write(self, descriptor: int, block: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class LastDisk(Disk):
    """The rank is gone in the middle of its first block."""

    def write(self, descriptor: int, block: memoryview) -> None:
        os.write(descriptor, block[: len(block) // 2])
        (Path(sys.argv[2]) / f"rank-{dist.get_rank()}.json").write_text("{}")
        os._exit(0)


def session_on(world: World, folder: Path, every: int = 1, **changes: Any) -> Session:
    job = language_job(**{"steps": 4, **changes})
    plan = (Checkpoints(every, compression=False), FSDP2())
    return session_of(job, *plan, folder=folder, world=world)


def beside_steps(world: World) -> dict[str, Any]:
    """Saves that are held up while steps go on; the threads that exchange something."""
    folder, disk = shared_folder(), SlowDisk()
    session = session_on(world, folder, every=2)
    kept: Any = session.setup.checkpoint
    kept.keeper.saver.local.disk = disk
    names: set[str] = set()
    calls = 0

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            names.add(threading.current_thread().name)
            return function(*given, **named)

        return call

    patched = ("all_reduce", "gather_object", "scatter_object_list", "all_gather_object")
    before = {name: getattr(dist, name) for name in patched}
    for name, function in before.items():
        setattr(dist, name, noted(function))
    steps = training(session)
    after = [next(steps).step for _ in range(3)]  # the save of step 2 hasn't written a byte
    begun = [path.name for path in checkpoints(folder)]
    disk.open.set()
    after += [metrics.step for metrics in steps]
    for name, function in before.items():
        setattr(dist, name, function)
    local = sum(p.to_local().numel() for p in session.loss_module.parameters())  # type: ignore[operator]
    saver = kept.keeper.saver
    copies = (*saver._staging._kept.values(), *saver._late_staging._kept.values())
    staged = sum(tensor.nbytes for tensor in copies)
    return {
        "steps": after,
        "begun": begun,
        "saved": [path.name for path in checkpoints(folder)],
        "threads": sorted(names),
        "calls": calls,
        "exchanges": kept._plan.exchanges,
        "staged": staged / (3 * WIDE * local),
        "files": sorted(p.name for p in checkpoints(folder)[-1].iterdir()) if world.is_main else [],
    }


def slowest(world: World) -> list[float]:
    """Rank 1 needs longer for its state, before anything is copied."""
    usual = technique.state_of

    def slow(session: Session) -> Any:
        time.sleep(DELAY * world.rank)
        return usual(session)

    technique.state_of = slow
    session = session_on(world, shared_folder(), steps=1)
    list(training(session))
    technique.state_of = usual
    kept: Any = session.setup.checkpoint
    return list(kept.keeper.interval.blocked)


def full_disk(world: World) -> dict[str, Any]:
    """The disk of one rank is full at one of three saves."""
    folder = shared_folder()
    session = session_on(world, folder)
    saver: Any = session.setup.checkpoint.keeper.saver  # type: ignore[union-attr]
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for metrics in training(session):
            saver.wait_for_writer()  # the disk is full for the save of step 2 alone
            saver.local.disk = FullDisk() if metrics.step == 1 and world.rank else Disk()
            dist.barrier()
    return {
        "alarms": saver.alarms,
        "saved": [int(path.name[-1]) for path in checkpoints(folder)],
        "seconds": time.monotonic() - began,
        "rest": [p.name for p in folder.iterdir() if p.name.startswith(".writing")],
    }


def cut(path: Path) -> None:
    file = path / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def missing(path: Path) -> None:
    (path / "rank-00001.safetensors").unlink()


def undescribed(path: Path) -> None:
    (path / "rank-00000.json").unlink()


def former(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_bytes())
    del manifest["seal"]
    (path / MANIFEST).write_bytes(manifest_text({**manifest, "format": 2}))


DAMAGES = {"cut": cut, "missing": missing, "undescribed": undescribed}


def damaged(world: World) -> dict[str, Any]:
    """The newest of two checkpoints is damaged: all ranks use the one before, or are told."""
    found: dict[str, Any] = {}
    for name, damage in DAMAGES.items():
        folder = shared_folder()
        list(training(session_on(world, folder, steps=2)))
        dist.barrier()
        newest = folder / "step-00000002"
        if world.is_main:
            damage(newest)
        dist.barrier()
        again = session_on(world, folder)
        said = refusal(again.setup.checkpoint.resume, again, newest)  # type: ignore[union-attr]
        again = session_on(world, folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = again.setup.checkpoint.resume(again)  # type: ignore[union-attr]
        again.setup.checkpoint.keeper.close()  # type: ignore[union-attr]
        aside = [p.name for p in folder.iterdir() if p.name.startswith(".damaged")]
        found[name] = {"said": said, "used": path.name if path else None, "aside": len(aside)}
        dist.barrier()
    return found


def refused(world: World) -> dict[str, str]:
    """Sentences for checkpoints of others, and for a folder that one rank doesn't see."""
    folder = shared_folder()
    list(training(session_on(world, folder, steps=1)))
    dist.barrier()
    wider = session_on(world, folder, model=lambda: tiny_model("qwen2"))
    found = {"model": refusal(wider.setup.checkpoint.resume, wider)}  # type: ignore[union-attr]
    if world.is_main:
        former(folder / "step-00000001")
    dist.barrier()
    again = session_on(world, folder)
    found["format"] = refusal(again.setup.checkpoint.resume, again)  # type: ignore[union-attr]
    usual, seen = technique.check_shared, technique.SEEN_WITHIN
    if world.rank:
        technique.SEEN_WITHIN = 0.1
        technique.check_shared = lambda board, *given: usual(Folder(Path("else")), *given)
    again = session_on(world, shared_folder())
    found["folder"] = refusal(next, training(again))
    technique.check_shared, technique.SEEN_WITHIN = usual, seen
    return found


def gone(world: World) -> dict[str, Any]:
    """A rank dies while it writes: the first one gives up soon, and the older checkpoint stays."""
    folder = shared_folder()
    session = session_on(world, folder)
    kept: Any = session.setup.checkpoint
    steps = training(session)
    next(steps)
    kept.keeper.saver.wait()
    dist.barrier()
    parts.PATIENCE = QUICK
    if world.rank:
        kept.keeper.saver.local.disk = LastDisk()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        began = time.monotonic()
        with contextlib.suppress(RuntimeError):  # gloo's, if the rank is gone already
            next(steps)
        if world.rank:
            time.sleep(60)  # the thread ends the process
        kept.keeper.saver.wait_for_writer()
    seconds = time.monotonic() - began
    steps_left = [path.name for path in checkpoints(folder)]
    load(folder / steps_left[-1])
    return {
        "seconds": seconds,
        "saved": steps_left,
        "said": [str(warning.message) for warning in said],
        "rest": [p.name for p in folder.iterdir() if p.name.startswith(".writing")],
    }


def everything(world: World) -> dict[str, Any]:
    torch.manual_seed(0)
    jobs = (beside_steps, slowest, full_disk, damaged, refused)
    at_address = (of_hosts, of_one_host, faulty, missing_there)
    found: dict[str, Any] = {job.__name__: job(world) for job in jobs}
    found |= {job.__name__: of_all_ranks(job(world)) for job in at_address}
    return {**found, "gone": gone(world)}  # the second rank has no answer after that


two = once_on_ranks(everything)


def test_no_rank_exchanges_anything_while_it_writes(two: list[Any]) -> None:
    case = two[0]["beside_steps"]
    assert case["steps"] == [1, 2, 3, 4]
    assert case["begun"] == []
    assert case["saved"] == ["step-00000002", "step-00000004"]
    assert case["threads"] == ["MainThread"]
    assert case["calls"] > 0


def test_ranks_agree_on_the_chunks_once_and_copy_only_their_own(two: list[Any]) -> None:
    case = two[0]["beside_steps"]
    assert case["exchanges"] == 1, "two saves of the same names and shapes"
    assert case["staged"] == pytest.approx(1.0, abs=0.1)
    assert case["files"] == [
        *("manifest.json", "rank-00000.json", "rank-00000.safetensors"),
        *("rank-00001.json", "rank-00001.safetensors"),
    ]


def test_a_save_costs_what_the_slowest_rank_waits(two: list[Any]) -> None:
    [seconds] = two[0]["slowest"]
    assert seconds >= DELAY


@pytest.mark.parametrize("rank", range(2))
def test_hosts_need_nothing_but_the_address_in_common(two: list[Any], rank: int) -> None:
    case, own = two[0]["of_hosts"][rank], f"rank-0000{rank}"
    assert case["own"], "each rank sends from its own temporary folder"
    assert case["sent"] == [f"{own}.safetensors", f"{own}.json"] * 2
    assert case["rest"] == []
    assert case["folders"] == ["step-00000001", "step-00000002"]
    assert case["files"] == two[0]["beside_steps"]["files"]
    assert case["from"] == "step-00000002"
    assert case["equal"]


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_fetches_what_it_needs(two: list[Any], rank: int) -> None:
    case, own = two[0]["of_hosts"][rank], f"rank-0000{rank}.safetensors"
    described = ["rank-00000.json", "rank-00001.json"]
    assert case["fetched"] == sorted([*described, own]), "the same layout: its own part"
    assert case["all"] == [
        *("rank-00000.json", "rank-00000.safetensors"),
        *("rank-00001.json", "rank-00001.safetensors"),
    ]


def test_ranks_of_one_host_fetch_each_file_once(two: list[Any]) -> None:
    fetched = [name for names in two[0]["of_one_host"] for name in names]
    assert sorted(fetched) == two[0]["of_hosts"][0]["all"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("lost", "rank-00001.safetensors of step-00000002 was sent and hasn't arrived"),
        ("cut", "rank 1 couldn't write its part: connection reset"),
        ("dead", "rank 1 stopped while it wrote its part"),
    ],
)
def test_a_part_that_does_not_arrive_costs_one_checkpoint(
    two: list[Any], fault: str, said: str
) -> None:
    case = two[0]["faulty"][0][fault]
    assert case["saved"] == [1, 3]
    [alarm] = [text for text in case["alarms"] if " is slow: " not in text]
    assert re.search(said, alarm)
    assert "the earlier checkpoints are unchanged" in alarm
    assert case["rest"] == []
    assert case["parts"] == []
    assert case["from"] == "step-00000003"


@pytest.mark.parametrize("rank", range(2))
def test_what_is_wrong_at_an_address_is_an_answer_of_all_ranks(two: list[Any], rank: int) -> None:
    case = two[0]["missing_there"][rank]
    assert case["missing"] == "step-00000001"
    assert re.search("checkpoints at bucket:.* can't be read: .*connection reset", case["cut"])
    assert "rank 1 on" in case["apart"]
    assert "can't use the address bucket:" in case["apart"]


def test_a_full_disk_of_one_rank_costs_one_checkpoint(two: list[Any]) -> None:
    case = two[0]["full_disk"]
    assert case["saved"] == [1, 3, 4]
    assert any("rank 1 couldn't write its part: No space left" in text for text in case["alarms"])
    assert case["rest"] == []


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_of_one_file_is_an_answer_of_all_ranks(two: list[Any], name: str) -> None:
    case = two[0]["damaged"][name]
    assert "rank-0000" in case["said"]
    assert case["used"] == "step-00000001"
    assert case["aside"] == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model", "the checkpoint is of another model"),
        ("format", "has format 2 and this version reads 3"),
        ("folder", "can't use the folder"),
    ],
)
def test_what_can_not_be_used_is_one_sentence(two: list[Any], name: str, said: str) -> None:
    assert said in two[0]["refused"][name]
    assert "\n" not in two[0]["refused"][name]


def test_a_rank_that_dies_in_a_save_is_not_waited_for(two: list[Any]) -> None:
    case = two[0]["gone"]
    assert case["seconds"] < QUICK + LONGEST - parts.PATIENCE
    assert case["saved"] == ["step-00000001"]
    assert case["rest"] == []
    assert any("rank 1 stopped while it wrote its part" in text for text in case["said"])


def ticks(step: float) -> Iterator[float]:
    return itertools.count(0.0, step)  # type: ignore[return-value]


def test_a_rank_that_shows_signs_of_life_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "each", 0.01)
    life = SignOfLife(Folder(tmp_path), 0)
    long = threading.Timer(0.3, lambda: (tmp_path / "rank-00000.json").write_text("{}"))
    long.start()
    clock = ticks(0.4)  # each look is 0.4 s later: the file's changes count, not the time
    wait_for_parts(Folder(tmp_path), 1, lambda: next(clock))
    life.stop()
    assert not (tmp_path / "rank-00000.alive").exists()
    assert next(clock) > parts.PATIENCE


def test_a_dead_rank_is_noticed_in_time_to_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LOOK", 0.001)
    clock = ticks(Folder.each)  # the longest time from one look to the next
    with pytest.raises(OSError, match="rank 0 stopped while it wrote its part"):
        wait_for_parts(Folder(tmp_path), 1, lambda: next(clock))
    assert next(clock) + Folder.each + ANSWER_SECONDS < LONGEST
