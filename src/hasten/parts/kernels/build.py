"""Compiles hasten's C++ kernels on first use, for this processor, and stores them.

A kernel file has plain C functions over pointers and no header of torch or Python. So
it compiles in a second or two and survives new releases of both. The library is built
in a temporary folder and moved to its path in one rename. So a killed build leaves
nothing that a later one would wait for. Of simultaneous processes one compiles and the
others wait.

A file ends with its own checksum, because loading a damaged one can end the process
without a message. A file or folder that other users may write to is not loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.machine.cache import is_private
from hasten.machine.host import isa_limit, processor_flags
from hasten.machine.locks import HeldLock, LockedError
from hasten.machine.processes import loaded_library

SOURCES = Path(__file__).parent / "cpu"
FOLDER = Path("~/.cache/hasten/kernels")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math"),
    "-fno-thread-jumps",  # otherwise a clamped number becomes a branch, which prevents vectors
)
WIDE = "-mprefer-vector-width=512"  # GCC uses half of the width by default
KEPT = 8  # libraries of the same sources: other versions, compilers, virtual environments
SECONDS = 300  # limit of a compiler's time
WAIT_SECONDS = SECONDS  # wait for another process that compiles
CHECKSUM = hashlib.sha256


@dataclass(frozen=True)
class LoadedLibrary:
    """A loaded library, or one sentence on why there is none."""

    library: ctypes.CDLL | None
    reason: str = ""

    def function(self, name: str) -> Any:
        """Returns one of its functions; raises RuntimeError with the reason without a library."""
        if self.library is None:
            raise RuntimeError(self.reason)
        return getattr(self.library, name)


@dataclass(frozen=True)
class _Target:
    """Inputs of a library build."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    depends: tuple[str, ...]  # other text that affects the machine code, such as linked libraries


@functools.cache
def build_library(
    *names: str, folder: Path | None = None, sources: Path | None = None
) -> LoadedLibrary:
    """Returns the library of the named files of ``sources``, compiled if it isn't yet.

    ``folder`` stores it for the next process. The default is ``.cache/hasten/kernels`` in
    the user's home. If that can't be written, or others can write it, a temporary folder of
    this process is used.
    """
    target = _kernels(*names, folder=sources)
    compiler = next((path for c in COMPILERS if (path := shutil.which(c))), None)
    if compiler is None:
        return LoadedLibrary(
            None, f"no C++ compiler was found ({', '.join(COMPILERS)}): install one"
        )
    with _opened(folder or FOLDER) as folder_fd:
        name = f"{target.name}-{_key(compiler, target)}.so"
        file, complaint = _whole(name, folder_fd), ""
        if file is None:
            with _one_compiler(folder_fd):
                file = _whole(name, folder_fd)
                if file is None:
                    complaint = _compile(compiler, target, name, folder_fd)
                    file = _whole(name, folder_fd)
        if complaint or file is None:
            complaint = complaint or f"{name} is not what was written"
            return LoadedLibrary(None, f"{compiler} can't compile the kernels here: {complaint}")
        try:
            # The open file was checked; its path may refer to another file by now. It stays open,
            # because the loader takes a reused number for the same library.
            loaded = LoadedLibrary(ctypes.CDLL(f"/proc/self/fd/{file}"))
        except OSError as error:
            os.close(file)
            return LoadedLibrary(None, f"the compiled kernels can't be loaded: {error}")
        _keep_few(name, folder_fd)
        return loaded


def _kernels(*names: str, folder: Path | None = None) -> _Target:
    folder = folder or SOURCES
    # Two OpenMP runtimes in one process would keep separate threads that spin against each other,
    # so the one that torch has loaded is linked.
    runtime = loaded_library("libgomp")
    wide = (WIDE,) if "avx512f" in processor_flags() else ()
    return _Target(
        name="-".join(names),
        sources=tuple(folder / f"{name}.cpp" for name in names),
        flags=(*FLAGS, *isa_limit().compiler_flags, *wide),
        libraries=(runtime or "-fopenmp",),
        # A library names the runtime without its folder, so virtual environments share it.
        depends=(*(h.read_text() for h in sorted(folder.glob("*.h"))), Path(runtime).name),
    )


@contextlib.contextmanager
def _one_compiler(folder: int) -> Iterator[None]:
    """Makes other processes wait that need kernels of the open folder.

    Without locks, or after `WAIT_SECONDS`, both compile: each writes a complete file.
    """
    with contextlib.ExitStack() as locks:
        with contextlib.suppress(LockedError, OSError):
            lock = HeldLock(Path(f"/proc/self/fd/{folder}/compiling.lock"), WAIT_SECONDS)
            locks.enter_context(contextlib.closing(lock))
        yield


def _keep_few(name: str, folder: int) -> None:
    """Marks the library as used today; removes all but the latest few of the same sources."""
    pattern = f"{name.rpartition('-')[0]}-{'?' * 16}.so"
    with contextlib.suppress(OSError):  # another process may clean up too, or the folder is locked
        os.utime(name, dir_fd=folder)
        others = fnmatch.filter(os.listdir(folder), pattern)
        age = {other: os.stat(other, dir_fd=folder).st_mtime for other in others}
        for old in sorted(others, key=age.__getitem__, reverse=True)[KEPT:]:
            os.unlink(old, dir_fd=folder)  # a process that has loaded it keeps it


def _compile(compiler: str, target: _Target, name: str, folder: int) -> str:
    """Compiles into the open folder; returns the compiler's error, or an empty string."""
    try:
        with tempfile.TemporaryDirectory(prefix="hasten-building-") as building:
            library = Path(building) / name
            *objects, linked = _commands(compiler, target, library)
            with ThreadPoolExecutor() as threads:  # each waits for a compiler
                complaints = [*threads.map(_complaint, objects)]
            if complaint := next(filter(None, complaints), "") or _complaint(linked):
                return complaint
            content = library.read_bytes()
        _put(content + CHECKSUM(content).digest(), name, folder)  # the loader ignores the end
    except subprocess.TimeoutExpired:
        return f"it did not finish within {SECONDS} seconds"
    except OSError as error:
        return str(error)
    return ""


def _complaint(command: list[str]) -> str:
    """Runs a compiler; returns the first line about an error, empty without one."""
    completed = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if not completed.returncode:
        return ""
    lines = completed.stderr.splitlines() or ["no reason given"]
    return next((line for line in lines if "error" in line), lines[0]).strip()


def _put(content: bytes, name: str, folder: int) -> None:
    part = f".{name}.{os.getpid()}.part"
    with contextlib.suppress(FileNotFoundError):  # left by a killed process with this number
        os.unlink(part, dir_fd=folder)
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700, dir_fd=folder)
    with open(file, "wb") as stream:
        stream.write(content)
    os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)


def _commands(compiler: str, target: _Target, library: Path) -> list[list[str]]:
    objects = [library.with_name(f"{source.stem}.o") for source in target.sources]
    commands = [
        [compiler, *target.flags, "-c", str(source), "-o", str(file)]
        for source, file in zip(target.sources, objects, strict=True)
    ]
    linked = [compiler, "-shared", *map(str, objects), *target.libraries, "-o", str(library)]
    return [*commands, linked]


def _whole(name: str, folder: int) -> int | None:
    """Returns the open file if it is private and complete; loading a cut one ends the process.

    What anybody can write, with a checksum too, would be run here.
    """
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"{name}: {error.strerror}; it is compiled again", stacklevel=3)
        return None
    fault = "is damaged"
    if not is_private(os.fstat(file)):
        fault = "may be written by other users"
    elif stat.S_ISREG(os.fstat(file).st_mode):
        with open(file, "rb", closefd=False) as stream:
            content = stream.read()
        size = CHECKSUM().digest_size
        if content[-size:] == CHECKSUM(content[:-size]).digest():
            return file
    os.close(file)
    # The old file stays until the new one replaces it, because another process may be faster.
    warnings.warn(f"{name} {fault} and compiled again", stacklevel=3)
    return None


def _key(compiler: str, target: _Target) -> str:
    """Key of everything that affects the machine code.

    These are sources, compiler, flags, processor and libraries.
    """
    digest = hashlib.sha256()
    for source in target.sources:
        digest.update(source.read_bytes())
    stamp = Path(compiler).resolve().stat()
    digest.update(repr((compiler, stamp.st_size, stamp.st_mtime_ns, target.flags)).encode())
    digest.update(repr((sorted(processor_flags()), target.depends)).encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Opens the folder if only this user can write to it, else a temporary one.

    Everything is done relative to this open folder, so it can't be exchanged meanwhile.
    """
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, RuntimeError):  # the latter without a home
        folder_fd = os.open(_own_folder(), os.O_RDONLY | os.O_DIRECTORY)
    if not is_private(os.fstat(folder_fd)):
        os.close(folder_fd)
        warnings.warn(
            f"{folder} belongs to another user or may be written by others. So hasten doesn't load "
            "kernels from it and compiles them for this process alone. Make it your own, with mode "
            "700",
            stacklevel=4,
        )
        folder_fd = os.open(_own_folder(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


@functools.cache
def _own_folder() -> Path:
    temporary = tempfile.TemporaryDirectory(prefix="hasten-kernels-")
    _KEPT.append(temporary)
    return Path(temporary.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
