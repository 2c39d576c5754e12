"""Writes the lock files: the pinned versions of all packages with the hashes of their wheels.

    python -m pip install uv
    python tools/lock_requirements.py [WHEEL...]

uv resolves the project's dependencies for all systems and Pythons that are supported, with the
versions of constraints.txt, and lists the SHA-256 of every wheel on the package index. Source
distributions are left out, since they run code when they are installed. What only torch's build
for CUDA requires has gigabytes, so it is in requirements-cuda.lock. Wheels of torch's build for
CPUs are on another index: those that are given as files are listed in requirements-cpu.lock.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
COMMAND = (
    *("uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--extra", "docs"),
    *("--constraint", "constraints.txt", "--universal", "--python-version", "3.11", "--quiet"),
    *("--generate-hashes", "--only-binary", ":all:", "--no-header", "--no-annotate"),
)
PYTHONS, MACHINES = ("3.11.0", "3.12.0", "3.13.0"), ("x86_64", "aarch64")
CUDA = re.compile(r"cuda-|nvidia-(?!ml-py)")
HEAD = """\
# Versions of constraints.txt with the SHA-256 of their wheels, for
#   pip install --require-hashes --no-deps --requirement {name}
# Written by tools/lock_requirements.py; change constraints.txt and run it again.
"""


def pinned(text: str) -> dict[str, str]:
    """Normalised name and version of each requirement ``name==version`` of a file."""
    lines = (line.strip() for line in text.replace("\\\n", " ").splitlines())
    wanted = [line.split(" --hash")[0] for line in lines if line and not line.startswith("#")]
    parsed = map(Requirement, wanted)
    return {canonicalize_name(each.name): str(each.specifier)[2:] for each in parsed}


def on_linux(requirement: Requirement) -> bool:
    """True for a requirement of one of the supported Pythons on Linux."""
    system = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    return requirement.marker is None or any(
        requirement.marker.evaluate(
            system | {"python_full_version": python, "platform_machine": machine}
        )
        for python in PYTHONS
        for machine in MACHINES
    )


def entries(text: str) -> Iterator[tuple[Requirement, list[str]]]:
    """Each requirement on Linux of uv's output, and its hashes."""
    for entry in text.replace("\\\n", " ").splitlines():
        line, *hashes = entry.split(" --hash=sha256:")
        requirement = Requirement(line.strip())
        if on_linux(requirement):
            yield requirement, [each.strip() for each in hashes]


def entry_of(wheel: Path) -> tuple[Requirement, list[str]]:
    """The requirement of a wheel with a local version, and its hash."""
    name, version, _, tags = parse_wheel_filename(wheel.name)
    tag = next(iter(tags))
    python = re.sub(r"cp(\d)(\d+)", r"\1.\2", tag.interpreter)
    machine = next(each for each in MACHINES if tag.platform.endswith(each))
    marker = f'python_version == "{python}" and platform_machine == "{machine}"'
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Requirement(f"{name}=={version}; {marker}"), [digest]


def lock_text(name: str, rows: Iterable[tuple[Requirement, list[str]]]) -> str:
    """A lock file."""
    lines = [
        " \\\n    ".join([str(requirement), *(f"--hash=sha256:{each}" for each in hashes)])
        for requirement, hashes in rows
    ]
    return HEAD.format(name=name) + "\n".join(lines) + "\n"


def main() -> None:
    done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [*entries(done.stdout)]
    for name, is_cuda in (("requirements.lock", False), ("requirements-cuda.lock", True)):
        chosen = [row for row in rows if bool(CUDA.match(row[0].name)) == is_cuda]
        (ROOT / name).write_text(lock_text(name, chosen))
    if wheels := [entry_of(Path(file)) for file in sys.argv[1:]]:
        (ROOT / "requirements-cpu.lock").write_text(lock_text("requirements-cpu.lock", wheels))


if __name__ == "__main__":
    main()
