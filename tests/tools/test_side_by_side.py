"""Files side by side give what one process gives; what ends a worker fails one test alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "test_one.py": """
        import os, pathlib, time, warnings
        import pytest
        PIDS = pathlib.Path(__file__).with_name("pids")

        @pytest.fixture(scope="module")
        def shared(tmp_path_factory):
            yield tmp_path_factory.mktemp("shared")
            PIDS.with_name("torn_down").touch()

        def test_first(shared):
            time.sleep(0.5)
            print("a printed line")
            PIDS.write_text(str(os.getpid()))
        def test_second(shared):
            assert PIDS.read_text() == str(os.getpid()) != os.environ["STARTED"]
            warnings.warn("a planted warning")
        def test_wrong(shared):
            print("before the error")
            assert [1] == [2]
        @pytest.mark.skip(reason="a reason")
        def test_left_out(): ...
    """,
    "test_two.py": """
        import os, pathlib, signal
        import pytest
        def test_before(): ...
        def test_killed(): os.kill(os.getpid(), signal.SIGKILL)
        def test_after(): ...
        def test_last(tmp_path): assert not list(tmp_path.iterdir())
        @pytest.mark.timing
        def test_alone():
            here = pathlib.Path(__file__)
            assert here.with_name("torn_down").exists()
            workers = [file.read_text() for file in here.parent.glob("ran-*")]
            assert workers.count(str(os.getpid())) > 1, "a worker that has run other tests"
    """,
    "test_three.py": "def test_three(tmp_path): (tmp_path / 'mine').touch()",
    "conftest.py": """
        import os
        def pytest_configure(): os.environ["STARTED"] = str(os.getpid())
        def pytest_runtest_setup(item):
            item.path.with_name(f"ran-{item.name}").write_text(str(os.getpid()))
    """,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        lines = [line.removeprefix("        ") for line in text.splitlines()]
        (tmp_path / name).write_text("\n".join(lines))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    waits:\n    timing:\n")
    return tmp_path


def run(folder: Path, *words: str) -> tuple[int, str]:
    left_out = ("PYTEST_", "PYTHONDONTWRITEBYTECODE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "side_by_side", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.cold
def test_two_workers_report_all_and_one_that_is_killed_fails_its_test_alone(folder: Path) -> None:
    code, printed = run(folder, "--processes", "2", "-rfs")
    assert code == 1
    failed = re.findall(r"^FAILED (\S+)", printed, re.MULTILINE)
    assert sorted(failed) == ["test_one.py::test_wrong", "test_two.py::test_killed"]
    assert "2 failed, 7 passed, 1 skipped, 1 warning" in printed
    assert "assert [1] == [2]" in printed
    assert "before the error" in printed
    assert "a printed line" not in printed
    assert "UserWarning: a planted warning" in printed
    assert "a reason" in printed
    assert "the process of this test ended with -9" in printed
    assert (folder / "torn_down").exists()


@pytest.mark.cold
def test_tests_of_timing_run_once_where_no_others_are_chosen(folder: Path) -> None:
    (folder / "torn_down").touch()
    code, printed = run(folder, "--processes", "2", "-m", "timing", "test_two.py")
    assert code == 1  # no worker has run others
    assert "1 failed, 4 deselected" in printed


@pytest.mark.cold
def test_the_last_file_is_compiled_while_the_first_one_is_collected(tmp_path: Path) -> None:
    (tmp_path / "test_last.py").write_text("def test_last(): ...")
    (tmp_path / "test_first.py").write_text(
        "import pathlib, time\n"
        "end = time.monotonic() + 60\n"
        "while not list(pathlib.Path(__file__).parent.glob('__pycache__/test_last.*-pytest-*')):\n"
        "    assert time.monotonic() < end\n"
        "    time.sleep(0.05)\n"
        "def test_first(): ...\n"
    )
    code, printed = run(tmp_path, "--processes", "2")
    assert (code, "2 passed" in printed) == (0, True), printed


@pytest.mark.cold
def test_the_first_failure_ends_the_session_if_asked_to(folder: Path) -> None:
    (folder / "test_two.py").unlink()
    (folder / "test_wait.py").write_text("import time\ndef test_wait(): time.sleep(600)")
    code, printed = run(folder, "--processes", "3", "-x")
    assert code == 1
    assert "stopping after 1 failures" in printed
