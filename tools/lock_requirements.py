"""Writes requirements.lock: the versions of constraints.txt with the hashes of their wheels.

    python tools/lock_requirements.py

For each pinned package one request goes to the index (PEP 691). Wheels of Linux on x86-64 and
aarch64 for Python 3.11 to 3.13 are listed; a package without such a wheel is an error, since a
source distribution runs code when it is installed.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INDEX = "https://pypi.org/simple/{name}/"
JSON = {"Accept": "application/vnd.pypi.simple.v1+json"}
PLATFORMS = re.compile(r"any|(manylinux|linux)\w*_(x86_64|aarch64)")
HEAD = """\
# The versions of constraints.txt with the SHA-256 of their wheels, for
#   pip install --require-hashes --no-deps --requirement requirements.lock
# Written by tools/lock_requirements.py; change constraints.txt and run it again.
"""


def pinned(text: str) -> dict[str, str]:
    """Name and version of each line ``name==version``."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==") for line in lines if line)


def is_wanted(file: str) -> bool:
    """True for a wheel that a supported Python on Linux installs."""
    if not file.endswith(".whl"):
        return False
    python, abi, platform = file.removesuffix(".whl").split("-")[-3:]
    stable = abi in ("none", "abi3")
    versions = python.split(".")
    fits = any(
        version.startswith("py3") or version in ("cp311", "cp312", "cp313") for version in versions
    ) or (abi == "abi3" and all(_minor(version) <= 13 for version in versions))
    own = stable or abi in versions
    return fits and own and any(PLATFORMS.fullmatch(each) for each in platform.split("."))


def _minor(version: str) -> int:
    return int(version.removeprefix("cp3") or 0) if version.startswith("cp3") else 99


def hashes(name: str, version: str) -> list[str]:
    """The SHA-256 of each wanted wheel of a release, sorted.

    Raises:
        ValueError: there is none.
    """
    page = re.sub(r"[-_.]+", "-", name).lower()
    request = urllib.request.Request(INDEX.format(name=page), headers=JSON)
    with urllib.request.urlopen(request, timeout=60) as answer:
        project: dict[str, Any] = json.load(answer)
    found = {
        file["hashes"]["sha256"]
        for file in project["files"]
        if file["filename"].split("-")[1:2] == [version] and is_wanted(file["filename"])
    }
    if not found:
        raise ValueError(f"{name} {version} has no wheel for Linux")
    return sorted(found)


def lines(versions: dict[str, str]) -> Iterator[str]:
    """The lines of the lock."""
    for name, version in versions.items():
        yield f"{name}=={version} \\"
        *first, last = hashes(name, version)
        yield from (f"    --hash=sha256:{each} \\" for each in first)
        yield f"    --hash=sha256:{last}"


if __name__ == "__main__":
    versions = pinned((ROOT / "constraints.txt").read_text())
    (ROOT / "requirements.lock").write_text(HEAD + "\n".join(lines(versions)) + "\n")
