"""Threads, and the defaults of a command and its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from hasten.machine import environment, processes
from hasten.machine.processes import loaded_library

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="it is Linux's")


@linux
def test_variables_of_the_start_are_told_from_later_ones(
    fresh: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_SET_LATER", "1")
    assert "HASTEN_SET_LATER" not in processes.started_with()
    assert fresh["early"] == "a=b"


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
@pytest.mark.long
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
    for own, expected in ((None, "128"), ("7", "7")):
        environ = {k: v for k, v in environment.child_environment({}).items() if k != NAME}
        environ |= {} if own is None else {NAME: own}
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


COUNT_OF_SPINS = "300000000"  # the idle one of two threads spins for a second if it is let
# For each count that hasten takes for its own: does the idle thread spin?
FRESH = """
import json, sys, time, torch
from hasten.machine import environment, processes
torch.set_num_threads(2)

def spinning():
    torch.zeros(1_000_000).add_(1)
    began = time.process_time()
    time.sleep(0.5)
    return time.process_time() - began

def found(count):
    environment.BRIEF_WAITING = {"GOMP_SPINCOUNT": count}
    idle = processes.IdleThreads()
    for sooner in (False, True, False):
        idle.sleep_sooner = sooner
        time.sleep(0.1)  # the thread of the other team comes and goes
        yield idle.sleep_sooner, spinning()

early = processes.started_with().get("HASTEN_EARLY")
print(json.dumps({"early": early, **{count: [*found(count)] for count in sys.argv[1:]}}))
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    """What a fresh process finds."""
    variables = {"GOMP_SPINCOUNT": COUNT_OF_SPINS, "OMP_NUM_THREADS": "2", "HASTEN_EARLY": "a=b"}
    command = [sys.executable, "-c", FRESH, COUNT_OF_SPINS, "10000"]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@pytest.mark.skipif(not loaded_library("libgomp"), reason="torch has another OpenMP library")
@pytest.mark.skipif(len(processes.usable_cores()) < 2, reason="idle threads need a second core")
@pytest.mark.parametrize("is_users", [False, True], ids=["default", "user's own"])
def test_idle_threads_sleep_sooner_and_spin_again(fresh: dict[str, Any], is_users: bool) -> None:
    sooner, spun = zip(*fresh["10000" if is_users else COUNT_OF_SPINS], strict=True)
    assert sooner == (False, not is_users, False)
    asleep = fresh[COUNT_OF_SPINS][1][1]
    spinning = [seconds for seconds, early in zip(spun, sooner, strict=True) if not early]
    assert min(spinning) > 10 * asleep
