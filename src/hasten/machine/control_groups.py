"""The memory that Linux's control groups leave this process (admin-guide/cgroup-v2 and -v1).

In a container a process sees its own group as the topmost. Elsewhere, as in a job of Slurm or a
service of systemd, its group lies deeper, and each group above limits it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

NONE = 1 << 62  # bytes: version 1 says a number beyond it where there is no limit


def memory_limit(root: Path = Path("/")) -> int | None:
    """The strictest limit in bytes; None where there is none or nothing says so.

    ``root`` is where the kernel's files are looked for.
    """
    texts = [_text(place) for place in _places(root)]
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < NONE), default=None)


def _places(root: Path) -> Iterator[Path]:
    top = root / "sys/fs/cgroup"
    yield top / "memory.max"
    yield top / "memory/memory.limit_in_bytes"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if ".." in Path(path).parts:  # of another view of the tree: not under ``top``
            continue
        for inside in (group for group in (Path(path), *Path(path).parents) if group.name):
            below = str(inside).lstrip("/")
            if number == "0":
                yield top / below / "memory.max"
            elif "memory" in controllers.split(","):
                yield top / "memory" / below / "memory.limit_in_bytes"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
