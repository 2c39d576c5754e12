"""The compiler of the kernels: what fails is one sentence, and never a half-written library.

The sources are a toy of one function, so that a build takes a moment; the real ones are compiled by
the tests of the kernels.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hasten.machine.locks import HeldLock
from hasten.parts.kernels import build, products, rowwise
from hasten.parts.nn.fused_layers import fuse_layers
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.layers import FusedLayers
from hasten.techniques.loss import LabelledTokenLoss
from tiny import examples, job_context, language_job, run, session_of, tiny_model

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler"
)
# Builds the toy in a process of its own and prints what it answers.
PROGRAM = """
import sys
from pathlib import Path
from hasten.parts.kernels import build
build.SOURCES, folder = Path(sys.argv[1]), Path(sys.argv[2])
build.COMPILERS = tuple(sys.argv[3:]) or build.COMPILERS
print("ready", flush=True)
found = build.build_library("toy", folder=folder)
print(found.library.answer() if found.library else found.reason)
"""


@pytest.fixture
def toy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., build.LoadedLibrary]]:
    """Builds ``answer()`` into a folder of the test, without the memory of an earlier build."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "toy.cpp").write_text('extern "C" int answer() { return 7; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)

    def make(folder: Path = tmp_path / "kernels") -> build.LoadedLibrary:
        build.build_library.cache_clear()
        return build.build_library("toy", folder=folder)

    yield make
    build.build_library.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a shell script in the compiler's place."""

    def take(script: str) -> Path:
        path = tmp_path / "strange-c++"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(build, "COMPILERS", (str(path),))
        return path

    return take


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(build, "COMPILERS", ("c++-that-is-nowhere",))
    build.build_library.cache_clear()
    yield
    build.build_library.cache_clear()


def plant(toy: Callable[..., build.LoadedLibrary], tmp_path: Path) -> Path:
    """Puts a whole library that answers 666 in the place of the toy's."""
    toy()
    (path,) = (tmp_path / "kernels").iterdir()
    other = tmp_path / "other.cpp"
    other.write_text('extern "C" int answer() { return 666; }\n')
    path.unlink()
    compiler = next(filter(None, map(shutil.which, build.COMPILERS)))
    subprocess.check_call([compiler, "-shared", "-fPIC", str(other), "-o", str(path)])
    content = path.read_bytes()
    path.write_bytes(content + build.CHECKSUM(content).digest())
    path.chmod(0o700)
    return path


def libraries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.so"))


def test_a_library_is_built_once_and_found_again(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path, compiler: Callable[[str], Path]
) -> None:
    assert toy().library.answer() == 7
    (name,) = libraries(tmp_path / "kernels")
    written = (tmp_path / "kernels" / name).stat().st_ino
    assert toy().library.answer() == 7
    assert libraries(tmp_path / "kernels") == [name]
    assert (tmp_path / "kernels" / name).stat().st_ino == written
    assert [p.name for p in (tmp_path / "kernels").iterdir()] == [name], "nothing else is left"


def test_the_name_is_the_same_in_every_process() -> None:
    code = (
        "from hasten.parts.kernels.build import _kernels, _key, COMPILERS\n"
        "import shutil; compiler = next(filter(None, map(shutil.which, COMPILERS)))\n"
        "print(_key(compiler, _kernels('rows')))"
    )
    names = {
        subprocess.check_output(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": s}
        )
        for s in ("1", "2")
    }
    assert len(names) == 1


def test_a_changed_source_gets_a_new_name(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path
) -> None:
    toy()
    (tmp_path / "sources" / "toy.cpp").write_text('extern "C" int answer() { return 8; }\n')
    assert toy().library.answer() == 8
    (tmp_path / "sources" / "shared.h").write_text("// a header counts too\n")
    toy()
    assert len(libraries(tmp_path / "kernels")) == 3


def test_libraries_nobody_uses_any_more_are_swept_and_foreign_files_are_not(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    others = [folder / name for name in ("notes.txt", "toy-mine.so", f"rows-{'0' * 16}.so")]
    old = [folder / f"toy-{number:016x}.so" for number in range(12)]
    for path in (*others, *old):
        path.write_bytes(b"")
        os.utime(path, (0, old.index(path) if path in old else 0))
    assert toy().library.answer() == 7
    assert [p for p in old if p.exists()] == old[-build.KEPT + 1 :]
    assert all(p.exists() for p in others)


def test_without_a_compiler_the_reason_is_one_sentence(without_compiler: None) -> None:
    assert rowwise.library().library is None
    reason = rowwise.library().reason
    assert reason == "no C++ compiler was found (c++-that-is-nowhere): install one"
    assert not products.fits(torch.zeros(2, 2, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        rowwise.swiglu(torch.zeros(2), torch.zeros(2))


def test_without_a_compiler_fused_layers_say_so(without_compiler: None) -> None:
    (sentence,) = FusedLayers().unsupported_reasons(job_context(language_job()))
    assert "no C++ compiler was found" in sentence
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        fuse_layers(tiny_model())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_compiler_training_goes_the_plain_way(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Loss and attention fall back; a step's loss is the same within the format."""

    def losses() -> list[float]:
        job = language_job(lambda: tiny_model(dtype=dtype), data=examples(8), lr=1e-3)
        session = session_of(job, Packed(), DocumentAttention(), LabelledTokenLoss(chunk=16))
        return [m.loss for m in run(session)]

    expected = losses()
    request.getfixturevalue("without_compiler")
    assert rowwise.library().library is None
    assert losses() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-2)


def test_a_compiler_that_fails_is_quoted_in_one_sentence(
    toy: Callable[..., build.LoadedLibrary], compiler: Callable[[str], Path], tmp_path: Path
) -> None:
    compiler('echo "In file:" >&2; echo "toy.cpp:1:2: error: no such thing" >&2; exit 1')
    found = toy()
    assert found.library is None
    assert found.reason.endswith(
        "can't compile the kernels here: toy.cpp:1:2: error: no such thing"
    )
    compiler("exit 3")
    assert toy().reason.endswith("no reason given")
    compiler("exit 0")  # says it worked and wrote nothing
    assert "No such file" in toy().reason
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_compiler_that_hangs_is_given_up(
    toy: Callable[..., build.LoadedLibrary],
    compiler: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler("exec sleep 30")
    monkeypatch.setattr(build, "SECONDS", 0.3)
    assert toy().reason.endswith("it did not finish within 0.3 seconds")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_compiler_that_cannot_be_run_is_a_reason(
    toy: Callable[..., build.LoadedLibrary], compiler: Callable[[str], Path]
) -> None:
    path = compiler("")
    path.write_text("#!/nowhere/interpreter\n")
    assert "No such file" in toy().reason


def start(tmp_path: Path, *compilers: str) -> subprocess.Popen[str]:
    folders = (str(tmp_path / "sources"), str(tmp_path / "kernels"))
    program = tmp_path / "program.py"
    if not program.exists():  # an earlier process may be reading it
        program.write_text(PROGRAM)
    command = [sys.executable, str(program), *folders, *compilers]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_build_blocks_nobody(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path, compiler: Callable[[str], Path]
) -> None:
    slow = tmp_path / "slow-c++"
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec sleep 3\n")
    slow.chmod(0o755)
    process = start(tmp_path, str(slow))
    end = time.monotonic() + 120
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert libraries(tmp_path / "kernels") == []
    assert toy().library.answer() == 7


def test_of_processes_that_build_at_once_one_compiles_and_all_get_a_whole_library(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path, compiler: Callable[[str], Path]
) -> None:
    real = next(filter(None, map(shutil.which, build.COMPILERS)))
    counting = compiler(f'echo >> {tmp_path}/runs; sleep 1; exec {real} "$@"')
    processes = [start(tmp_path, str(counting)) for _ in range(3)]
    answers = [[*p.communicate(timeout=240)[0].split(), p.returncode] for p in processes]
    assert answers == [["ready", "7", 0]] * 3
    assert len(libraries(tmp_path / "kernels")) == 1
    assert (tmp_path / "runs").read_text() == "\n" * 2  # an object, then the library


def test_a_build_that_keeps_the_folder_for_too_long_is_waited_for_no_more(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy()
    (tmp_path / "sources" / "toy.cpp").write_text('extern "C" int answer() { return 8; }\n')
    monkeypatch.setattr(build, "WAIT_SECONDS", 0.3)
    with closing(HeldLock(tmp_path / "kernels" / "compiling.lock")):
        assert toy().library.answer() == 8


def test_environments_with_the_same_runtime_share_a_library(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy()
    (runtime,) = build._kernels("toy").libraries
    if not Path(runtime).exists():
        pytest.skip("torch has another OpenMP library")
    elsewhere = tmp_path / "elsewhere" / Path(runtime).name
    elsewhere.parent.mkdir()
    shutil.copy(runtime, elsewhere)
    monkeypatch.setattr(build, "loaded_library", lambda name: str(elsewhere))
    assert toy().library.answer() == 7
    assert len(libraries(tmp_path / "kernels")) == 1
    other = elsewhere.rename(elsewhere.with_name("libgomp-of-another.so"))
    monkeypatch.setattr(build, "loaded_library", lambda name: str(other))
    toy()
    assert len(libraries(tmp_path / "kernels")) == 2


def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert toy(tmp_path / "file" / "kernels").library.answer() == 7
    assert (tmp_path / "file").read_text() == ""

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert toy().library.answer() == 7
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize("damage", ["emptied", "cut", "one bit", "other bytes"])
def test_a_damaged_library_is_reported_and_built_again(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path, damage: str
) -> None:
    toy()
    path = next((tmp_path / "kernels").glob("*.so"))
    content = bytearray(path.read_bytes())
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    path.unlink()  # this process still has the old one in its memory
    damaged = {"emptied": b"", "cut": content[: len(content) // 2], "one bit": flipped}
    path.write_bytes(damaged.get(damage, b"other bytes"))
    with pytest.warns(UserWarning, match="is damaged and compiled again"):
        assert toy().library.answer() == 7
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert toy().library.answer() == 7  # and no second warning


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_library_in_a_folder_that_others_may_write_to_is_not_loaded(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path, mode: int
) -> None:
    plant(toy, tmp_path)
    (tmp_path / "kernels").chmod(mode)
    with pytest.warns(UserWarning, match="may be written by others") as said:
        assert toy().library.answer() == 7
    assert len(said) == 1


@pytest.mark.parametrize("way", ["writable", "link", "pipe", "folder of another user"])
def test_a_library_that_others_may_have_made_is_not_loaded(
    toy: Callable[..., build.LoadedLibrary],
    tmp_path: Path,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted = plant(toy, tmp_path)
    if way == "writable":
        planted.chmod(0o720)
    elif way == "link":
        planted.symlink_to(planted.rename(tmp_path / "elsewhere.so"))
    elif way == "pipe":
        planted.unlink()
        os.mkfifo(planted, 0o700)
    else:
        built_by, own = (tmp_path / "kernels").stat().st_ino, build.is_private
        monkeypatch.setattr(build, "is_private", lambda s: s.st_ino != built_by and own(s))
    with pytest.warns(UserWarning, match="compile"):
        assert toy().library.answer() == 7


def test_the_folder_and_its_libraries_are_made_for_the_user_alone(
    toy: Callable[..., build.LoadedLibrary], tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        toy()
    finally:
        os.umask(before)
    (library,) = (tmp_path / "kernels").iterdir()
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "kernels", library)]
    assert modes == [0o700, 0o700]
