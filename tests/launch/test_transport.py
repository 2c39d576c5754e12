"""Transport variables: what a recipe may set, what is shown, and which hints are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hasten.errors import InputError
from hasten.launch.transport import PREFIXES, checked, hints, shown
from hasten.recipe.schema import recipe_from

LEAST = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 1}


def interfaces(root: Path, **speeds: int) -> None:
    for name, speed in {"lo": 0, **speeds}.items():
        folder = root / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text("up\n")
        (folder / "speed").write_text(f"{speed}\n")


def found(wanted: dict[str, str], on_gpu: bool, root: Path) -> str:
    return " | ".join(hints(wanted, on_gpu, root, lambda name: None))


def test_values_become_text() -> None:
    given_values = {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": 1, "UCX_TLS": "rc", "NCCL_X": True}
    assert checked(given_values) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_DISABLE": "1",
        "UCX_TLS": "rc",
        "NCCL_X": "1",
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"LD_PRELOAD": "x.so"}, "must begin with GLOO_"),
        ({"PATH": "/tmp"}, "must begin with GLOO_"),
        ({"nccl_debug": "INFO"}, "isn't a variable's name"),
        ({"NCCL_NET_PLUGIN": "x"}, "set it in the shell"),
        ({"UCX_MODULE_DIR": "/x"}, "set it in the shell"),
        ({"NCCL_DEBUG": ["a"]}, "a text or a number"),
        ({"NCCL_DEBUG": "a\nb"}, "on one line"),
        ({3: "a"}, "isn't a variable's name"),
    ],
    ids=str,
)
def test_what_belongs_to_no_transport_is_refused(values: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked(values)
    if all(isinstance(name, str) for name in values):
        with pytest.raises(InputError, match=words):
            recipe_from({**LEAST, "transport": values}, "a recipe")


@given(some.dictionaries(some.text(max_size=20), some.text(max_size=20), max_size=3))
def test_nothing_but_names_with_the_prefixes_gets_through(values: dict[str, str]) -> None:
    try:
        through = checked(values)
    except ValueError:
        return
    assert all(name.startswith(PREFIXES) for name in through)
    assert all("\n" not in value and "\0" not in value for value in through.values())


def test_a_recipe_keeps_its_variables() -> None:
    recipe = recipe_from({**LEAST, "transport": {"NCCL_IB_DISABLE": 1}}, "a recipe")
    assert recipe.transport == {"NCCL_IB_DISABLE": "1"}
    assert "NCCL_IB_DISABLE=1 (recipe)" in shown(recipe.transport)


def test_an_interface_that_is_not_there_is_named(tmp_path: Path) -> None:
    interfaces(tmp_path, eth0=1000)
    text = found({"GLOO_SOCKET_IFNAME": "eth9"}, False, tmp_path)
    assert "no such interface; there are eth0, lo" in text
    assert found({"GLOO_SOCKET_IFNAME": "eth0"}, False, tmp_path) == ""
    assert "docker0" not in found({"NCCL_SOCKET_IFNAME": "^docker0"}, True, tmp_path)
    assert found({}, False, tmp_path) == ""


def test_several_interfaces_are_listed_with_their_speed(tmp_path: Path) -> None:
    interfaces(tmp_path, eth0=1000, ib0=-1)
    text = found({}, False, tmp_path)
    assert "eth0 1 Gbit/s, ib0" in text
    assert "GLOO_SOCKET_IFNAME should name one" in text


def test_cards_that_are_switched_off_or_need_an_address_are_hinted_at(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("Ethernet\n")
    text = found({"NCCL_IB_DISABLE": "1"}, True, tmp_path)
    assert "while mlx5_0 is there" in text
    assert "mlx5_0 is RoCE" in text
    assert found({"NCCL_IB_DISABLE": "1"}, False, tmp_path) == ""  # gloo doesn't care
