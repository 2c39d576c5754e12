"""Freed memory stays where it should; libraries, modes and page faults are read as they are."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.machine import memory, processes

glibc = pytest.mark.skipif(not memory.is_glibc(), reason="glibc alone has these settings")
# A fault fills a page, or 2 MiB where huge pages are given to everybody.
ALWAYS_HUGE = memory.huge_page_mode() == "always"
PAGES = memory.BLOCK // (2 * 2**20 if ALWAYS_HUGE else mmap.PAGESIZE)


def in_a_process(folder: Path, code: str, **variables: str) -> object:
    """What another process prints as JSON: the allocator's settings can't be taken back."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    script = folder / "faults.py"
    script.write_text("from hasten.machine import memory\nimport json\n" + code)
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(found.stdout)


@glibc
def test_a_freed_block_faults_again_until_memory_is_kept(tmp_path: Path) -> None:
    before, settled, after = in_a_process(  # type: ignore[misc]
        tmp_path, "f = memory.faults_per_block\nprint(json.dumps([f(), memory.keep(), f()]))"
    )
    assert settled is True
    assert before > 0.9 * PAGES
    assert after < 0.1 * PAGES


@glibc
def test_the_variables_do_what_the_call_does(tmp_path: Path) -> None:
    code = "print(json.dumps(memory.faults_per_block()))"
    found = in_a_process(tmp_path, code, **memory.keeping())
    assert isinstance(found, int)
    assert found < 0.1 * PAGES


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("always [madvise] never\n", "madvise"),
        ("[always] madvise never\n", "always"),
        ("", "unknown"),
    ],
)
def test_the_mode_of_huge_pages_is_the_one_in_brackets(
    tmp_path: Path, text: str, mode: str
) -> None:
    (tmp_path / "enabled").write_text(text)
    assert memory.huge_page_mode(str(tmp_path / "enabled")) == mode


def test_a_kernel_that_says_nothing_has_an_unknown_mode(tmp_path: Path) -> None:
    assert memory.huge_page_mode(str(tmp_path / "none")) == "unknown"


def test_a_library_is_found_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LIBRARY_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(memory, "_on_loaders_path", lambda name: None)
    assert memory.library("jemalloc") is None
    (tmp_path / "libjemalloc.so.2").touch()
    assert memory.library("jemalloc") == str(tmp_path / "libjemalloc.so.2")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux says what is mapped")
def test_what_is_loaded_is_told_from_what_is_not() -> None:
    assert Path(processes.loaded_library("libtorch")).exists()
    assert processes.loaded_library("libnobodyhasthis") == ""


@glibc
def test_freed_blocks_between_used_ones_go_back(tmp_path: Path) -> None:
    """Every second of a hundred blocks of 4 MiB, all from the heap; the others stay as they are."""
    code = """
import torch
from hasten.machine.processes import resident_bytes
memory.keep()
blocks = [torch.ones(2**20) for _ in range(100)]
del blocks[::2]
before = resident_bytes()
memory.release_freed()
print(json.dumps([before - resident_bytes(), float(sum(b.sum() for b in blocks))]))
"""
    freed, total = in_a_process(tmp_path, code)  # type: ignore[misc]
    assert freed > 40 * 2**22
    assert total == 50 * 2**20


@glibc
def test_large_blocks_between_used_ones_go_back_as_they_are_freed(tmp_path: Path) -> None:
    """Once a block of 28 MiB was freed, glibc by itself keeps smaller ones in its heap."""
    code = """
import torch
from hasten.machine.processes import resident_bytes
torch.ones(7 * 2**20)
memory.return_large_blocks()
blocks = [torch.ones(2**21) for _ in range(40)]
before = resident_bytes()
del blocks[::2]
print(json.dumps(before - resident_bytes()))
"""
    assert in_a_process(tmp_path, code) > 16 * 2**23  # type: ignore[operator]
