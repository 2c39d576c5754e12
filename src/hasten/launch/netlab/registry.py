"""Where a lab is noted (a folder with a manifest), whether its keeper lives, and rates in words.

Namespaces of a lab have no name anywhere: they live as long as the lab's keeper, a process. So all
that a lab can leave behind is its folder, whose name is random. A folder without a manifest of a
lab is never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import InputError

NAME = re.compile(r"[0-9a-f]{8}")
KIND = "hasten netlab"
SECONDS_TO_END = 10.0


def room() -> Path:
    """The folder of this user's labs, closed to others."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"hasten-netlab-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != user:
        raise InputError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    return folder


def new_folder() -> Path:
    """A folder for a new lab, under a name nobody has."""
    folder = room() / secrets.token_hex(4)
    folder.mkdir(mode=0o700)
    return folder


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Note that this process keeps the lab in ``folder``; whole or not at all."""
    process = os.getpid()
    noted = {"kind": KIND, "name": folder.name, "process": process, "born": born(process), **facts}
    beside = folder / "manifest.writing"
    beside.write_text(json.dumps(noted, indent=1))
    os.replace(beside, folder / "manifest.json")


def manifest(name: str) -> dict[str, Any]:
    """What is noted of a lab; an error where there is no such lab."""
    if not NAME.fullmatch(name):
        raise InputError(f"{name!r} is no lab's name: hasten netlab list shows them")
    path = room() / name / "manifest.json"
    try:
        noted = json.loads(path.read_text())
    except OSError:
        raise InputError(f"there is no lab {name}: hasten netlab list shows which are") from None
    except ValueError:
        raise InputError(f"{path} is damaged: remove the folder by hand") from None
    if not isinstance(noted, dict) or noted.get("kind") != KIND or noted.get("name") != name:
        raise InputError(f"{path} is no manifest of the lab {name}: nothing was touched")
    return noted


def labs() -> list[tuple[dict[str, Any], bool]]:
    """Manifests of all labs of this user, each with whether it is alive."""
    found = []
    for folder in sorted(room().iterdir()):
        with contextlib.suppress(InputError):
            noted = manifest(folder.name)
            found.append((noted, alive(noted)))
    return found


def alive(noted: Mapping[str, Any]) -> bool:
    """Whether the keeper lives; the number alone may be another process's by now."""
    return noted["born"] is not None and born(noted["process"]) == noted["born"]


def born(process: int) -> int | None:
    """When a process started, in clock ticks since boot, or None if there is none (proc(5))."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # a command's name may contain anything
    return None if fields[0] in "ZX" else int(fields[19])


def remove(name: str) -> None:
    """End a lab, whatever it does, and remove its folder."""
    noted = manifest(name)
    if alive(noted):
        os.kill(noted["process"], signal.SIGTERM)
        deadline = time.monotonic() + SECONDS_TO_END
        while alive(noted) and time.monotonic() < deadline:
            time.sleep(0.02)
        if alive(noted):
            os.kill(noted["process"], signal.SIGKILL)
    clear(room() / name)


def clear(folder: Path) -> None:
    """Remove a lab's folder."""
    shutil.rmtree(folder, ignore_errors=True)


# Rates as people write them: ``100mbit``, ``2.5gbit``, none for no limit; bits a second.

SEGMENT = 80 * 1024  # bytes that TCP hands down at once, with the headers of all their packets
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LOWEST, HIGHEST = 8e3, 400e9


def bits_per_second(rate: str | float | None) -> float:
    """A rate as a number of bits a second; 0 for no limit."""
    if rate is None or rate == "none":
        return 0.0
    if isinstance(rate, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)", rate.strip().lower())
        if found is None:
            raise InputError(f"{rate!r} is no rate: write 100mbit, 1gbit, 500kbit or none")
        rate = float(found[1]) * UNITS[found[2]]
    if not LOWEST <= rate <= HIGHEST:
        raise InputError(f"a link of {rate:g} bit/s can't be made: 8kbit to 400gbit can")
    return float(rate)


def burst_bytes(bits: float) -> int:
    """What may pass at once: 4 ms of the rate, and at least one segment as TCP hands it down.

    A bucket too small for that cuts each segment into packets on the sender's core, and the
    receiver is woken for every one of them, which network cards have spared hosts for long.
    """
    return max(SEGMENT, round(bits / 8 * 0.004))
