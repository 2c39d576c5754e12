"""The commands of ``tools/netlab``: check, labs for one command, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hasten.errors import InputError
from hasten.launch import lab as own
from labs import lab_with_links
from netlab.__main__ import app

pytestmark = pytest.mark.waits


@pytest.fixture(autouse=True)
def own_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    room = tmp_path / "room"
    room.mkdir(mode=0o700)
    monkeypatch.setattr(own, "room", lambda: room)
    monkeypatch.setattr(own, "SECONDS_TO_END", 60.0)  # a busy machine's watchdog is slow
    return room


def netlab(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_check_says_of_each_kind_whether_it_works_or_what_is_missing() -> None:
    found = json.loads(netlab("check", "--json"))
    assert [f["mode"] for f in found] == ["user", "user", "root", "root", "loopback"]
    assert all(f["works"] != bool(f["reason"]) for f in found)
    assert found[-1]["works"]


@pytest.mark.cold  # other variables would have a server of their own
def test_check_names_the_missing_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lab_with_links()
    monkeypatch.setenv("PATH", str(tmp_path))
    words = netlab("check")
    assert words.count("not here: the command ip is missing: install iproute2") == 4


def test_run_makes_a_lab_for_one_command_and_names_the_rank_that_failed(own_room: Path) -> None:
    words = netlab("run", "--mode", "loopback", "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert words == "rank 0 of 2\n"
    script = "test $RANK = 0 || { echo no disk; exit 5; }"
    words = netlab("run", "--mode", "loopback", "--", "sh", "-c", script, code=5)
    assert words == "rank 1 on host 1 ended with 5: no disk\n"
    assert list(own_room.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "fast"], "'fast' is no rate"),
        (["--mode", "cloud"], "--mode cloud"),
        (["--mode", "loopback", "--rate", "1mbit"], "no lab works here"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        netlab("run", *arguments, "--", "true")
