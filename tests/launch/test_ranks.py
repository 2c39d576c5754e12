"""Two ranks train as one process does; a failing rank takes the others along and is named."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.launch.ranks import LinkError, rank_environment, start_ranks
from hasten.machine.environment import World
from hasten.machine.signals import StopSignal
from rank_jobs import CASES, train_all
from ranks import on_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(train_all, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_all(World())


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process_does(
    found: list[Any], alone: dict[str, Any], case: str
) -> None:
    ours, theirs = found[0][case], alone[case]
    tolerance = 2e-2 if "masters" in case else 1e-6
    assert ours["replicated"]
    assert ours["sends buffers"] is False  # rotary tables are computed, not sent
    assert not theirs["replicated"]
    assert ours["tokens"] == theirs["tokens"]
    assert ours["trained"] == theirs["trained"]
    for key in ("losses", "norms", "weights"):
        assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=tolerance)
    assert ours["eval_data"] == pytest.approx(theirs["eval_data"], rel=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_replicas_stay_identical_and_report_the_same(found: list[Any], case: str) -> None:
    assert found[0][case] == found[1][case]


def test_a_stop_asked_of_one_rank_stops_all_after_the_same_step(found: list[Any]) -> None:
    assert [rank["stopped by one rank"] for rank in found] == [2, 2]


def test_a_failing_rank_ends_the_others_and_gives_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _instead_of_hasten(
        monkeypatch,
        tmp_path,
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('the disk is gone', file=sys.stderr); sys.exit(7)\n"
        "time.sleep(60)\n",
    )
    assert start_ranks([], 3, tmp_path, 2) == 7
    assert "rank 1 failed: the disk is gone" in capfd.readouterr().err


def test_a_rank_that_a_signal_ended_is_named_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _instead_of_hasten(
        monkeypatch,
        tmp_path,
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n",
    )
    assert start_ranks([], 2, tmp_path, 2) == LinkError.code == 7
    assert "rank 1 failed: it was ended by SIGKILL, as the kernel" in capfd.readouterr().err


def test_ranks_that_a_signal_ended_before_they_could_save_are_no_failed_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _instead_of_hasten(
        monkeypatch,
        tmp_path,
        "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nsignal.pause()",
    )
    with pytest.raises(StopSignal, match="SIGTERM"):
        start_ranks([], 2, tmp_path, 2)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "until this process has ended"
    assert capfd.readouterr().err == ""


def test_a_rank_that_does_not_leave_when_rank_0_is_done_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _instead_of_hasten(
        monkeypatch,
        tmp_path,
        "import os, pathlib, time\n"
        "time.sleep(60 * int(os.environ['RANK']))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'left-' + os.environ['RANK']).touch()\n",
    )
    monkeypatch.setattr("hasten.launch.ranks.GRACE_SECONDS", 0.5)
    assert start_ranks([], 2, tmp_path, 2) == 0
    assert [p.name for p in tmp_path.glob("left-*")] == ["left-0"]


def test_a_failure_after_rank_0_is_done_is_still_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _instead_of_hasten(
        monkeypatch,
        tmp_path,
        "import os, sys, time; r = int(os.environ['RANK']); time.sleep(r); sys.exit(5 * r)",
    )
    monkeypatch.setattr("hasten.launch.ranks.GRACE_SECONDS", 60.0)
    assert start_ranks([], 2, tmp_path, 2) == 5


def test_ranks_share_the_cores_and_know_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _instead_of_hasten(
        monkeypatch,
        tmp_path,
        "import os, pathlib\n"
        "e = os.environ\n"
        f"pathlib.Path({str(tmp_path)!r}, 'said-' + e['RANK']).write_text(\n"
        "    ' '.join([e['WORLD_SIZE'], e['LOCAL_RANK'], e['OMP_NUM_THREADS']]))\n",
    )
    assert start_ranks([], 2, tmp_path, 6) == 0
    assert [(tmp_path / f"said-{r}").read_text() for r in range(2)] == ["2 0 3", "2 1 3"]
    assert not list(tmp_path.glob(".ranks-*"))


def _instead_of_hasten(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Let the starter run some code where it would run ``python -m hasten``."""
    import subprocess

    script = folder / "ranks.py"
    script.write_text(code)
    real = subprocess.Popen

    def popen(command: list[str], **settings: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "hasten"]
        return real([sys.executable, str(script)], **settings)

    monkeypatch.setattr("hasten.launch.ranks.subprocess.Popen", popen)


def test_ranks_of_a_relative_folder_meet_at_an_absolute_place() -> None:
    found = rank_environment(0, 2, Path("runs/here"), threads=1)
    assert found["HASTEN_RENDEZVOUS"] == str(Path.cwd() / "runs/here/rendezvous")
