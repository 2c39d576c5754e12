"""A child forked from the server is what a plain start would have made; other starts stay plain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server is for Linux")
LOADS = "if False:\n    import torch\n"
TELL = (
    LOADS
    + """
import json, os, sys
told = {
    "words": sys.argv, "folder": os.getcwd(), "parent": os.getppid(), "group": os.getpgid(0),
    "session": os.getsid(0), "variable": os.environ.get("KIND"), "home": os.environ.get("HOME"),
    "umask": os.umask(0), "torch": "torch" in sys.modules, "path": sys.path[0],
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
}
"""
)
PRINT = "print(json.dumps(told), flush=True)\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(TELL + PRINT + "sys.exit(7)\n")
    return path


@pytest.fixture(autouse=True)
def _server_is_there(script: Path) -> None:
    """The first start with these variables may be a plain one."""
    for _ in range(2):
        subprocess.run([sys.executable, str(script)], stdout=subprocess.DEVNULL, check=False)


def told(command: list[Any], **settings: Any) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **settings)
    return done.returncode, json.loads(done.stdout)


def test_it_has_the_place_that_a_plain_start_gives(script: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "KIND": "a"}, "umask": 0o27}
    code, forked = told([sys.executable, str(script), "word"], **settings)
    with warm.cold():
        plain_code, plain = told([sys.executable, str(script), "word"], **settings)
    assert code == plain_code == 7
    assert forked.pop("torch") is True
    assert plain.pop("torch") is False
    assert len(forked.pop("descriptors")) == len(plain.pop("descriptors")) + 1  # to its own server
    assert forked == plain
    assert forked["parent"] == os.getpid()


def test_it_can_lead_a_group_or_a_session_of_its_own(script: Path) -> None:
    command = [sys.executable, str(script)]
    for settings in ({"start_new_session": True}, {"process_group": 0}):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **settings)
        said = json.loads(process.communicate()[0])
        assert said["group"] == process.pid
        assert (said["session"] == process.pid) is ("start_new_session" in settings)


def test_pipes_and_passed_descriptors_reach_it(tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(
        LOADS + "import os, sys\nos.write(int(sys.argv[1]), sys.stdin.read().encode())\n"
    )
    read, write = os.pipe()
    command = [sys.executable, str(script), str(write)]
    subprocess.run(command, input="words", text=True, pass_fds=[write], check=True)
    os.close(write)
    assert os.read(read, 100) == b"words"
    os.close(read)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_as_any_process(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    # Not one long wait: a signal just before it begins is seen only at its end.
    wait = "for _ in range(600):\n    time.sleep(0.1)\n"
    script.write_text(LOADS + "import time\nprint('up', flush=True)\n" + wait)
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(number)
    assert process.wait(30) == -number
    process.stdout.close()
    assert not psutil.pid_exists(process.pid)


def test_an_error_is_printed_and_is_exit_code_1(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        LOADS + "import atexit\natexit.register(print, 'last')\nraise ValueError('why')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "last\n")
    assert done.stderr.splitlines()[-1] == "ValueError: why"


def test_what_torchrun_starts_is_forked_and_its_output_is_not_held_back(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        LOADS + "import os, sys\nprint('torch' in sys.modules, end='')\nos._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-u", str(script)],
        env={**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "True")


def test_what_it_starts_is_its_own_child_and_forked_too(script: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer.py"
    start = "import subprocess\nsubprocess.run([sys.executable, sys.argv[1]])\n"
    outer.write_text(TELL + "told['me'] = os.getpid()\n" + PRINT + start)
    done = subprocess.run(
        [sys.executable, str(outer), str(script)], capture_output=True, text=True, check=True
    )
    above, below = map(json.loads, done.stdout.splitlines())
    assert below["parent"] == above["me"]
    assert below["torch"]


def test_code_on_the_command_line_and_other_libraries_settings_start_plainly(
    script: Path, tmp_path: Path
) -> None:
    code, found = told([sys.executable, "-c", TELL + PRINT])
    assert (code, found["torch"]) == (0, False)
    code, found = told([sys.executable, str(script)], env={**os.environ, "HOME": str(tmp_path)})
    assert (found["torch"], found["home"]) == (False, str(tmp_path))


def test_a_folder_that_torch_names_once_it_has_compiled_needs_no_other_server(
    script: Path, tmp_path: Path
) -> None:
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    before = len(warm._servers)
    with temporary_cache_dir(str(tmp_path)):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
        assert told([sys.executable, str(script)])[1]["torch"] is True
    assert len(warm._servers) == before


@pytest.mark.cold
def test_the_mark_cold_starts_plainly(script: Path) -> None:
    assert told([sys.executable, str(script)])[1]["torch"] is False
