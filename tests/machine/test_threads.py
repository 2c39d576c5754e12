"""Cores of ranks, garbage collection, and the defaults of a command and its processes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hasten.machine import environment, threads
from hasten.machine.processes import loaded_library

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="core masks are Linux's")


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


@given(st.sets(st.integers(0, 200), min_size=1, max_size=64), st.integers(1, 12))
def test_every_core_belongs_to_one_rank_and_shares_differ_by_one(
    cores: set[int], ranks: int
) -> None:
    shares = [threads.own_cores(sorted(cores), rank, ranks) for rank in range(ranks)]
    if len(cores) >= ranks:
        assert sorted(core for share in shares for core in share) == sorted(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert all(len(share) == 1 and set(share) <= cores for share in shares)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(4, 9))
def test_a_rank_stays_in_one_node_where_ranks_can_be_dealt_evenly(
    nodes: int, per_node: int, size: int
) -> None:
    split = [frozenset(range(n * size, (n + 1) * size)) for n in range(nodes)]
    everything = range(nodes * size)
    ranks = nodes * per_node
    shares = [threads.own_cores(everything, rank, ranks, split) for rank in range(ranks)]
    assert all(any(set(share) <= node for node in split) for share in shares)
    assert sorted(core for share in shares for core in share) == list(everything)


def test_a_rank_that_is_not_there_has_no_share() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2 can't have a share of 4 cores"):
        threads.own_cores(range(4), 2, 2)
    with pytest.raises(ValueError, match="0 cores"):
        threads.own_cores([], 0, 1)


@given(st.sets(st.integers(0, 300)))
def test_the_kernels_list_of_processors_is_read_back(cores: set[int]) -> None:
    assert threads.cpu_list(",".join(map(str, sorted(cores))) + "\n") == sorted(cores)


def test_ranges_and_single_processors_mix(tmp_path: Path) -> None:
    assert threads.cpu_list("0-2,8,10-11\n") == [0, 1, 2, 8, 10, 11]
    for name, text in {"node0": "0-1\n", "node1": "2-3\n", "node2": "\n"}.items():
        node = tmp_path / "sys/devices/system/node" / name
        node.mkdir(parents=True)
        (node / "cpulist").write_text(text)
    assert threads.memory_nodes(tmp_path) == [frozenset({0, 1}), frozenset({2, 3})]
    assert threads.memory_nodes(tmp_path / "none") == []


@linux
def test_a_mask_holds_for_threads_that_ran_before_it_too(tmp_path: Path) -> None:
    script = tmp_path / "masked.py"
    script.write_text(
        "import os, threading, pathlib\n"
        "from hasten.machine import threads\n"
        "done = threading.Event()\n"
        "threading.Thread(target=done.wait).start()\n"
        "one = threads.usable_cores()[:1]\n"
        "threads.keep_to(one)\n"
        "tasks = [int(p.name) for p in pathlib.Path('/proc/self/task').iterdir()]\n"
        "print(len(tasks) > 1 and all(os.sched_getaffinity(t) == set(one) for t in tasks))\n"
        "done.set()\n"
    )
    command = [sys.executable, str(script)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


@linux
def test_variables_of_the_start_are_told_from_later_ones(
    fresh: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_SET_LATER", "1")
    assert "HASTEN_SET_LATER" not in threads.started_with()
    assert fresh["early"] == "a=b"


class Node:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_waits_for_the_agreed_update_and_no_longer() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.zeros(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    quiet = threads.QuietCollector(every=3)
    quiet.attach(optimizer)
    optimizer.step()
    assert not gc.isenabled()
    gone = weakref.ref(Node())
    optimizer.step()
    assert gone() is not None
    optimizer.step()
    assert gone() is None
    assert (quiet.updates, quiet.collections) == (3, 1)


def test_python_collects_again_when_the_optimizer_is_gone() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.zeros(2)
    optimizer = torch.optim.AdamW([weight])
    threads.QuietCollector(every=5).attach(optimizer)
    optimizer.step()
    assert not gc.isenabled()
    del optimizer
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_never_collects_is_refused() -> None:
    with pytest.raises(ValueError, match="every is 0"):
        threads.QuietCollector(0)


def test_fewer_threads_hold_for_this_process_and_those_it_starts_and_end_with_the_block() -> None:
    before, variable = torch.get_num_threads(), environment.variable("OMP_NUM_THREADS")
    with threads.with_threads(1):
        assert torch.get_num_threads() == 1
        assert environment.child_environment({})["OMP_NUM_THREADS"] == "1"
    assert torch.get_num_threads() == before
    assert environment.variable("OMP_NUM_THREADS") == variable


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
from hasten.machine import environment, threads
torch.set_num_threads(2)

def spinning():
    torch.zeros(1_000_000).add_(1)
    began = time.process_time()
    time.sleep(0.5)
    return time.process_time() - began

def found(count):
    environment.BRIEF_WAITING = {"GOMP_SPINCOUNT": count}
    idle = threads.IdleThreads()
    for sooner in (False, True, False):
        idle.sleep_sooner = sooner
        time.sleep(0.1)  # the thread of the other team comes and goes
        yield idle.sleep_sooner, spinning()

early = threads.started_with().get("HASTEN_EARLY")
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
@pytest.mark.skipif(len(threads.usable_cores()) < 2, reason="idle threads need a second core")
@pytest.mark.parametrize("is_users", [False, True], ids=["default", "user's own"])
def test_idle_threads_sleep_sooner_and_spin_again(fresh: dict[str, Any], is_users: bool) -> None:
    sooner, spun = zip(*fresh["10000" if is_users else COUNT_OF_SPINS], strict=True)
    assert sooner == (False, not is_users, False)
    asleep = fresh[COUNT_OF_SPINS][1][1]
    spinning = [seconds for seconds, early in zip(spun, sooner, strict=True) if not early]
    assert min(spinning) > 10 * asleep
