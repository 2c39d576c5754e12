"""Compiles hasten's C++ kernels on first use, for this very processor, and keeps the result.

A kernel file has plain C functions over pointers and no header of torch or Python, so that it
compiles in a second or two and outlives either's next release. The library is built under a
temporary name and moved into place in one rename: a build that was killed leaves nothing that a
later one would wait for, and two processes that build at once both end with a whole file. A file
ends with its own checksum, because loading a damaged one can end the process without a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
FOLDER = Path("~/.cache/hasten/kernels")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math"),
    "-fno-thread-jumps",  # a clamped number would become a branch, and its loop no vectors
)
WIDE = "-mprefer-vector-width=512"  # GCC takes half of what these processors have by itself
KEPT = 8  # libraries of the same sources: other versions, compilers, virtual environments
SECONDS = 300  # a compiler that takes longer is given up
CHECKSUM = hashlib.sha256


@dataclass(frozen=True)
class Built:
    """A library that is loaded, or one sentence on why it can't be."""

    library: ctypes.CDLL | None
    reason: str = ""


@functools.cache
def built(*names: str, folder: Path | None = None) -> Built:
    """The library of the named source files, compiled if nobody has compiled it here before.

    ``folder`` keeps it for the next process: by default ``.cache/hasten/kernels`` in the user's
    home, or a temporary folder of this process where that can't be written.
    """
    compiler = next((found for c in COMPILERS if (found := shutil.which(c))), None)
    if compiler is None:
        return Built(None, f"no C++ compiler was found ({', '.join(COMPILERS)}): install one")
    place = _writable(folder or FOLDER)
    path = place / f"{'-'.join(names)}-{_key(compiler, names)}.so"
    if not _whole(path):
        # It stays in its place until the new one takes it: another process may be faster.
        if path.exists():
            warnings.warn(f"{path} is damaged and compiled again", stacklevel=2)
        complaint = _compile(compiler, [SOURCES / f"{n}.cpp" for n in names], path)
        if complaint:
            return Built(None, f"{compiler} can't compile the kernels here: {complaint}")
    try:
        loaded = Built(ctypes.CDLL(str(path)))
        _keep_few(path)
        return loaded
    except OSError as error:
        return Built(None, f"the compiled kernels can't be loaded: {error}")


def _keep_few(path: Path) -> None:
    """The library was used today; of the same sources' others only the latest few stay."""
    stem = path.name.rpartition("-")[0]
    with contextlib.suppress(OSError):  # another process sweeps as well, or the folder is read-only
        os.utime(path)
        others = path.parent.glob(f"{stem}-{'?' * 16}.so")
        for old in sorted(others, key=lambda p: p.stat().st_mtime, reverse=True)[KEPT:]:
            old.unlink()  # a process that has it loaded keeps it


def _compile(compiler: str, sources: list[Path], path: Path) -> str:
    """The compiler's complaint, or nothing when ``path`` is there."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as name:
            library = Path(name) / path.name
            for command in _commands(compiler, sources, library):
                found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
                if found.returncode:
                    lines = [line for line in found.stderr.splitlines() if "error" in line]
                    return (lines or found.stderr.splitlines() or ["no reason given"])[0].strip()
            content = library.read_bytes()
            library.write_bytes(content + CHECKSUM(content).digest())  # the loader ignores the end
            os.replace(library, path)
    except subprocess.TimeoutExpired:
        return f"it did not finish within {SECONDS} seconds"
    except OSError as error:
        return str(error)
    return ""


def _commands(compiler: str, sources: list[Path], library: Path) -> list[list[str]]:
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    commands = [
        [compiler, *_flags(), "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    # Two OpenMP runtimes in one process would each keep threads and let them spin against each
    # other: link the one that torch has loaded.
    runtime = _loaded("libgomp") or "-fopenmp"
    return [*commands, [compiler, "-shared", *map(str, objects), runtime, "-o", str(library)]]


def _whole(path: Path) -> bool:
    """Whether the file is as it was written; a cut one would end the process when it is loaded."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    size = CHECKSUM().digest_size
    return content[-size:] == CHECKSUM(content[:-size]).digest()


def _flags() -> tuple[str, ...]:
    return (*FLAGS, WIDE) if "avx512f" in processor_flags() else FLAGS


def _key(compiler: str, names: tuple[str, ...]) -> str:
    """Of everything the machine code depends on: sources, compiler, flags, processor, runtime."""
    digest = hashlib.sha256()
    for source in sorted([*(SOURCES / f"{n}.cpp" for n in names), *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    stamp = Path(compiler).resolve().stat()
    digest.update(repr((compiler, stamp.st_size, stamp.st_mtime_ns, _flags())).encode())
    digest.update(repr((sorted(processor_flags()), _loaded("libgomp"))).encode())
    return digest.hexdigest()[:16]


@functools.cache
def processor_flags() -> frozenset[str]:
    """The instruction sets this processor says it has; empty where the system doesn't tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _loaded(name: str) -> str | None:
    """Path of the shared library of that name that this process already has."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in lines if name in line)
    return next((p for p in paths if Path(p).name.startswith(name)), None)


def _writable(folder: Path) -> Path:
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # the latter where the user has no home
        return _own_folder()


@functools.cache
def _own_folder() -> Path:
    own = tempfile.TemporaryDirectory(prefix="hasten-kernels-")
    _KEPT.append(own)
    return Path(own.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
