"""``hasten monitor`` and ``hasten env`` as a user meets them, and what they refuse."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hasten.monitor.alerts import KINDS
from told import Hasten
from watched import TOKEN, append, get, step_line, write_run

pytestmark = pytest.mark.waits


def test_a_finished_run_is_shown_in_the_terminal(hasten: Hasten, tmp_path: Path) -> None:
    code, out, err = hasten("monitor", write_run(tmp_path / "run", 20, finished=True), "--terminal")
    assert (code, err) == (0, "")
    assert "run  done" in out


def test_the_printed_address_opens_the_page_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 20)
    words = [sys.executable, "-m", "hasten", "monitor", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        port, _, token = address.removeprefix("http://127.0.0.1:").partition("/?token=")
        try:
            assert len(token) >= 32
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
            connection.request("GET", f"/?token={token}")
            assert connection.getresponse().status == 303
            status, _, body = get(int(port), "/", authorization=f"Bearer {token}")
            assert status == 200
            assert body.startswith(b"<!doctype html>")
            assert get(int(port), "/metrics")[0] == 401
        finally:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err


def teller(folder: Path) -> tuple[str, Path]:
    """A command for alerts that writes each sentence to a file, and the file."""
    out = folder / "told"
    code = f"import sys; open({str(out)!r}, 'a').write(sys.argv[1] + chr(10))"
    return json.dumps([sys.executable, "-c", code]), out


def until(out: Path, *words: str) -> list[str]:
    """The sentences told, once each of the words begins one."""
    deadline = time.monotonic() + 60
    while True:
        told = out.read_text().splitlines() if out.exists() else []
        if all(any(line.startswith(word) for line in told) for word in words):
            return told
        assert time.monotonic() < deadline, told
        time.sleep(0.05)


def test_every_alert_reaches_the_command_of_a_monitor_that_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1)
    quick = [step_line(step, step_seconds=0.01) for step in (2, 3, 4)]
    append(run / "metrics.jsonl", *quick)  # or 20 steps would take longer than --stall-seconds
    command, out = teller(tmp_path)
    limits = ["--alert", command, "--stall-seconds", "2", "--disk-gb", "2", "--slow-rank", "1.5"]
    words = [sys.executable, "-m", "hasten", "monitor", str(run), "--port", "0", "--token", TOKEN]
    with subprocess.Popen(
        [*words, *limits], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        port = int(address.removeprefix("http://127.0.0.1:").partition("/")[0])
        try:
            while b"hasten_loss" not in get(port, "/metrics")[2]:
                time.sleep(0.05)
            append(run / "machine.jsonl", {"step": 3, "disk_free_bytes": 10**9})
            (run / "ranks").mkdir()
            for rank, seconds in enumerate((1.0, 1.0, 2.0)):
                line = json.dumps({"own_seconds": seconds})
                (run / "ranks" / f"{rank}.json").write_text(line)
            until(out, "disk: ", "slow_rank: ")
            append(run / "metrics.jsonl", step_line(5, loss=None, skipped=True))
            until(out, "nan: ", "stall: ")
            started = {**json.loads((run / "run.json").read_text()), "pid": 2**22 + 1}
            (run / "run.json").write_text(json.dumps(started))
            told = until(out, "ended: ")
        finally:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert {line.partition(":")[0] for line in told} == set(KINDS)
    assert "disk: run: 1.0 GB are free where it writes" in told
    assert "slow_rank: run: rank 2 takes 2.0 times as long as the others" in told
    assert "Traceback" not in err


def test_a_single_look_waits_for_its_alerts(hasten: Hasten, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    append(run / "machine.jsonl", {"step": 3, "disk_free_bytes": 10**9})
    command, out = teller(tmp_path)
    code, _, err = hasten("monitor", run, "--terminal", "--alert", command)
    assert (code, err) == (0, "")
    assert out.read_text() == "disk: run: 1.0 GB are free where it writes\n"


def test_a_port_in_use_is_said_in_one_sentence(hasten: Hasten, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = hasten("monitor", write_run(tmp_path), "--port", port)
    assert code == 2
    assert err.startswith(f"hasten: the monitor can't listen at 127.0.0.1, port {port}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--token", "short"], "--token must be 16 to 200"),
        (["--token", "with blanks and $(signs) in it"], "--token must be 16 to 200"),
        (["--alert", "notify-send hasten"], "give the command as a list"),
        (["--alert", "[a: b"], "--alert"),
        (["--alert", "[*x]"], "--alert"),
        (["--host", "300.1.1.1"], "can't listen at 300.1.1.1"),
        (["--host", "192.0.2.1"], "can't listen at 192.0.2.1"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(
    hasten: Hasten, tmp_path: Path, words: list[str], said: str
) -> None:
    code, out, err = hasten("monitor", write_run(tmp_path), "--port", 0, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_a_folder_that_is_no_run_is_refused(hasten: Hasten, tmp_path: Path, terminal: bool) -> None:
    for place, said in ((tmp_path, "no run is in it"), (tmp_path / "x", "no such folder")):
        code, out, err = hasten("monitor", place, *["--terminal"][: int(terminal)])
        assert (code, out) == (2, "")
        assert said in err
        assert err.count("\n") == 1


def test_without_the_extra_the_command_that_brings_it_is_named(
    hasten: Hasten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = hasten("monitor", write_run(tmp_path))
    assert code == 2
    assert "pip install 'starlette>=0.45' 'uvicorn>=0.34'" in err


def test_the_monitor_imports_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path, finished=True)
    code = (
        "import sys; from hasten.cli.main import app\n"
        f"try: app(['monitor', {str(tmp_path)!r}, '--terminal'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'uvicorn') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip().endswith("[]")


def test_hardware_shows_disks_network_kernels_and_limits(hasten: Hasten, tmp_path: Path) -> None:
    code, out, _ = hasten("env", "--disk", tmp_path)
    assert code == 0
    words = " ".join(out.replace("│", " ").split())
    assert "training pass torch, float32 4.167 GFLOP/s 1.0e-06 2e-05" in words
    assert "hasten, bf16 10 GFLOP/s 2.40× [2.40, 2.40]" in words
    lines = {line[:16].strip() for line in out.splitlines()}
    assert {"CPU", "memory", "limits", "disk speed", "torch"} <= lines
    assert f"{tmp_path}: writes " in out
    assert list(tmp_path.iterdir()) == []
    code, out, _ = hasten("env", "--json", "--no-measure")
    found = json.loads(out)
    assert found["disk_speed"] is None
    assert {"cpu", "numa", "disks", "network", "limits", "gpus", "versions"} <= set(found)


def test_a_disk_that_cannot_be_measured_is_refused_where_it_was_named(
    hasten: Hasten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = hasten("env", "--disk", tmp_path / "missing")
    assert code == 2
    assert err.startswith("hasten: --disk: ")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, out, _ = hasten("env")
    assert code == 0
    assert "disk speed       not measured: " in out
