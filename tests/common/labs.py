"""Labs for tests: ``lab_with_links`` gives one with links, or skips and says what is missing.

``places`` and ``enter`` put a process of one's own on a lab's host, for what has to stay a child of
the test: a supervisor's ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from hasten.errors import InputError
from netlab import Lab
from netlab import network as system

TOOLS = Path(__file__).parents[2] / "tools"
JOBS = Path(__file__).with_name("netlab_jobs.py")


def lab_with_links(**settings: Any) -> Lab:
    """A lab to be entered, with links whose rate can be set, or a skip with the reason."""
    switch = bool(settings.get("delay_ms") or settings.get("loss"))
    if reason := missing(switch):
        pytest.skip(reason)
    return Lab(**settings)


@functools.cache
def missing(switch: bool = False) -> str:
    """Why this machine has no lab with links; empty where it has."""
    try:
        with Lab(2, 1, "1gbit", delay_ms=0.1 if switch else 0.0):
            return ""
    except InputError as error:
        return str(error)


def job(name: str, *numbers: float) -> list[str]:
    """The command line of a function in ``netlab_jobs``."""
    return [sys.executable, "-W", "ignore", str(JOBS), name, *map(str, numbers)]


Place = tuple[int, int]  # descriptors of a host's namespaces: of users, of the network


def places(lab: Lab) -> list[Place]:
    """Where each host of a lab with one rank a host is, found by a process that sleeps there."""
    assert lab._watchdog is not None
    sleeping = lab.begin(["sleep", "900"], seconds=900)
    found: dict[int, int] = {}
    end = time.monotonic() + 60
    while len(found) < lab.hosts:
        assert time.monotonic() < end, f"{len(found)} of {lab.hosts} hosts are seen"
        for process in psutil.Process(lab._watchdog.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, KeyError):
                if process.name() == "sleep":
                    found[int(process.environ()["RANK"])] = process.pid
        time.sleep(0.02)
    opened = [
        (os.open(f"/proc/{pid}/ns/user", os.O_RDONLY), os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
        for _, pid in sorted(found.items())
    ]
    sleeping.end()
    return opened


def enter(place: Place) -> None:
    """Move this process, which has a single thread, to a host."""
    user, network = place
    here = os.stat("/proc/self/ns/user")
    if not os.path.samestat(here, os.fstat(user)):
        system._call("setns", ctypes.c_int(user), ctypes.c_int(system.NEW_USER))
    system._call("setns", ctypes.c_int(network), ctypes.c_int(system.NEW_NET))
