"""The commands of ``tools/netlab``: check, labs that stay, labs for one command, errors."""

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


def test_a_lab_stays_from_up_to_down(own_room: Path) -> None:
    lab_with_links()
    name = netlab("up", "--rate", "50mbit", "--hosts", "3").strip()
    try:
        assert f"{name}  3 hosts x 1 ranks, 50 Mbit/s" in netlab("list")
        assert "2\n" in netlab("run", "--lab", name, "--", "sh", "-c", "echo $((RANK + 2))")
        netlab("cut", name, "1")
        netlab("heal", name, "1")
        netlab("limit", name, "1gbit")
        assert netlab("bytes", name).count("bytes sent") == 3
        with pytest.raises(InputError, match="there is no host 3"):
            netlab("cut", name, "3")
    finally:
        assert netlab("down", name) == f"{name} removed\n"
    assert netlab("list") == "no labs\n"
    assert list(own_room.iterdir()) == []


def test_down_removes_all_that_ended_and_none_that_runs(own_room: Path) -> None:
    folder = own_room / "0000000a"
    folder.mkdir()
    noted = {"kind": own.KIND, "name": folder.name, "process": 2**22, "born": 1}
    noted |= {"bits": 0, "hosts": 2, "ranks": 1, "mode": "user"}
    (folder / "manifest.json").write_text(json.dumps(noted))
    name = netlab("up", "--mode", "loopback").strip()
    assert "0000000a  2 hosts x 1 ranks, no limit, user, ended" in netlab("list")
    assert netlab("down", "--stale") == "0000000a removed\n"
    assert netlab("down", name) == f"{name} removed\n"


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
        (["down"], "say which labs"),
        (["down", "ffffffff"], "there is no lab ffffffff"),
        (["run", "--lab", "nonsense", "--", "true"], "no lab's name"),
        (["up", "--rate", "fast"], "'fast' is no rate"),
        (["up", "--mode", "cloud"], "--mode cloud"),
        (["up", "--mode", "loopback", "--rate", "1mbit"], "no lab works here"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        netlab(*arguments)
