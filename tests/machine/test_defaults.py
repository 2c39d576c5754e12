"""Defaults of a command and its processes: few compiled products, threads that wait briefly."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hasten.machine import environment, threads
from hasten.machine.memory import is_loaded

NAME = "LRU_CACHE_CAPACITY"
COUNT = (
    "import psutil, torch\n"
    "weight, rows = (torch.randn(n, 64).bfloat16() for n in (64, 900))\n"
    "here = psutil.Process()\n"
    "before = here.memory_info().rss\n"
    "for length in range(16, 900): torch.nn.functional.linear(rows[:length], weight)\n"
    "print(here.memory_info().rss - before)\n"
)
ONEDNN = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1"}  # oneDNN's own cache would keep them, too


def _grown(variables: dict[str, str]) -> int:
    """Bytes that products of 884 different lengths have left behind."""
    environ = environment.child_environment({**ONEDNN, **variables})
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=environ, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN has no bf16 on this processor",
)
@pytest.mark.cold
def test_products_of_many_lengths_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert _grown({}) < 0.5 * _grown({NAME: "1024"})


def test_a_command_sets_it_before_torch_is_loaded_and_leaves_the_users_own_number() -> None:
    code = (
        "import os, sys; from hasten.cli.main import run\n"
        "sys.argv = ['hasten', '--help']\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        f"print(os.environ[{NAME!r}], 'torch' in sys.modules)"
    )
    for given, expected in ((None, "128"), ("7", "7")):
        environ = {k: v for k, v in environment.child_environment({}).items() if k != NAME}
        environ |= {} if given is None else {NAME: given}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        assert done.stdout.split()[-2:] == [expected, "False"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=str,
)
def test_idle_threads_wait_briefly_unless_the_user_decided(
    variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.WAITING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert environment.child_environment(variables).get("GOMP_SPINCOUNT") == expected
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment.use_defaults()
    assert environment.variable("GOMP_SPINCOUNT") == expected


@pytest.mark.skipif(not is_loaded("libgomp"), reason="torch has another OpenMP library")
def test_several_threads_without_a_decision_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.WAITING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with threads.with_threads(2):
        assert "export GOMP_SPINCOUNT=10000" in threads.waiting_advice()
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
        assert threads.waiting_advice() == ""
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with threads.with_threads(1):
        assert threads.waiting_advice() == ""
