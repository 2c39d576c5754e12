"""Workers reply, are stopped between requests, fail one by one, and none outlives its pool."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from covering import covering
from hasten.measure import workers as workers_module
from hasten.measure.workers import Worker, WorkerError, WorkerPool, WorkerSpec, merge_replies
from measure.loop_jobs import SPIN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops processes, reads /proc")
FORKED = pytest.mark.parametrize("fork", [False, True], ids=["spawned", "forked"])
PARENT = """
import sys, time
from pathlib import Path
from hasten.measure.workers import WorkerPool, WorkerSpec
pool = WorkerPool(Path(sys.argv[1]), fork=bool(int(sys.argv[2])))
said = pool.start(WorkerSpec("simulate_job:members", {"thread": True}), "worker").ready(60)
print(said["pid"], said["parent"], flush=True)
time.sleep(60)
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WorkerPool]:
    with WorkerPool(tmp_path) as found:
        yield found
        found.close(kill=True)


@pytest.fixture
def forking(tmp_path: Path) -> Iterator[WorkerPool]:
    with WorkerPool(tmp_path, fork=True) as found:
        yield found
        found.close(kill=True)


def member(*, ranks: int = 1, environ: dict[str, str] | None = None, **given: Any) -> WorkerSpec:
    return WorkerSpec("simulate_job:members", given, environ or {}, ranks)


def fail(worker: Worker, *hows: Sequence[str], timeout: float = 60.0) -> Any:
    """Ask each rank to fail its way."""
    return worker.request("fail", timeout, hows=[list(how) for how in hows])


def stopped(pids: Sequence[int]) -> bool:
    """Whether all threads of all processes have come to their stop, not the first ones alone."""
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
    states = [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads]
    return set(states) == {"T"}


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def wait_until(true: Callable[..., bool], *arguments: object) -> None:
    deadline = time.monotonic() + 60
    while not true(*arguments):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def busy_seconds(pids: Sequence[int]) -> list[float]:
    return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]


@FORKED
def test_a_worker_with_its_threads_and_children_is_stopped_between_requests(
    tmp_path: Path, fork: bool
) -> None:
    with WorkerPool(tmp_path, fork=fork) as pool:
        worker = pool.start(member(spin=SPIN, thread=True), "worker")
        said = worker.ready(60)
        assert said["given"] == {"spin": SPIN, "thread": True}
        assert said["group"] == said["pid"]
        pids = [said["pid"], *said["beside"]]
        assert len(pids) == 2
        wait_until(stopped, pids)
        before = busy_seconds(pids)
        time.sleep(0.3)
        assert busy_seconds(pids) == before
        for op in ("steps", "evaluate"):
            assert worker.request(op, 60) == {"heard": op}
            wait_until(stopped, pids)
        worker.close()
        worker.close()  # harmless
        for pid in pids:
            wait_until(gone, pid)


def test_all_ranks_are_stopped_together(pool: WorkerPool) -> None:
    worker = pool.start(member(ranks=2, spin=SPIN), "worker")
    worker.ready(60)
    group: Any = worker._group
    pids = [process.pid for process in group._all]
    assert len(pids) == 2
    wait_until(stopped, pids)
    assert not worker.can_slice
    assert worker.request("steps", 60) == {"heard": "steps"}
    wait_until(stopped, pids)


@FORKED
def test_a_request_is_done_in_slices_with_the_worker_stopped_between_them(
    tmp_path: Path, fork: bool
) -> None:
    after = tmp_path / "now"
    with WorkerPool(tmp_path, fork=fork) as pool:
        worker = pool.start(member(), "worker")
        pids = [worker.ready(60)["pid"]]
        assert worker.can_slice
        worker.submit("fail", hows=[["waits", str(after)]])
        wait_until(stopped, pids)
        for _ in range(3):
            assert worker.run_for(0.1) is None
            wait_until(stopped, pids)
        after.touch()
        assert worker.run_for(60.0) == {"heard": "fail"}
        wait_until(stopped, pids)
        assert worker.request("more", 60.0) == {"heard": "more"}


@FORKED
def test_the_clock_of_a_worker_stands_still_while_it_is_stopped(tmp_path: Path, fork: bool) -> None:
    with WorkerPool(tmp_path, fork=fork) as pool:
        worker = pool.start(WorkerSpec("simulate_job:clocks", {}), "worker")
        worker.ready(60)
        worker.submit("work", seconds=0.15)
        stops, said = [], worker.run_for(0.05)
        while said is None:
            stops.append(time.perf_counter())
            time.sleep(0.1)
            said = worker.run_for(0.05)
    # The first slices may end before the worker, on a busy machine, has heard the request.
    slept = 0.1 * sum(stop > said["began"] for stop in stops)
    assert slept > 0
    assert said["wall"] - said["own"] >= 0.9 * slept
    assert said["own"] < 0.15 + 0.2  # not a moment more than a slice may be late
    assert not list(tmp_path.glob(".clock-*"))


FAILURES = {
    "ends": "the process ended with code 7: last words",
    "killed": "the process ended with code -9: killed, most likely for want of memory",
    "hangs": "no answer within 1 s: it hangs",
    "garbles": "its answer can't be read: 'no JSON'",
    "refuses": "the data has too few examples",
    "memory": "MemoryError: can't allocate memory",
}


@pytest.mark.parametrize(("fork", "how"), covering([False, True], FAILURES))
def test_a_failure_is_reported_and_other_workers_go_on(
    tmp_path: Path, fork: bool, how: str
) -> None:
    with WorkerPool(tmp_path, fork=fork) as pool:
        other, worker = pool.start(member(), "other"), pool.start(member(), "worker")
        other.ready(60)
        pid = worker.ready(60)["pid"]
        with pytest.raises(WorkerError) as caught:
            fail(worker, [how], timeout=1.0 if how == "hangs" else 60.0)
        assert str(caught.value) == FAILURES[how]
        assert caught.value.out_of_memory == (how in ("killed", "memory"))
        worker.close(kill=True)
        wait_until(gone, pid)
        assert other.request("steps", 60) == {"heard": "steps"}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "killed",
            "rank 1: the process ended with code -9: killed, most likely for want of memory",
        ),
        ("ends", "rank 1: the process ended with code 7: last words"),
        ("refuses", "rank 1: the data has too few examples"),
        ("hangs", "no answer within 60 s: rank 1 didn't answer"),
    ],
)
def test_the_rank_that_fails_is_named(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    worker = pool.start(member(ranks=3), "worker")
    worker.ready(60)
    if how == "hangs":
        monkeypatch.setattr(Worker, "_hear", until_two_were_heard(Worker._hear))
    with pytest.raises(WorkerError, match=words):
        fail(worker, ["answers"], [how], ["answers"])
    worker.close(kill=True)


def until_two_were_heard(hear: Any) -> Any:
    """The time is up as soon as only one is left to be heard, however slow the others are."""

    def heard_or_late(self: Worker, heard: dict[int, Any], deadline: float) -> bool:
        return bool(hear(self, heard, deadline if len(heard) < 2 else time.monotonic()))

    return heard_or_late


def test_a_rank_that_was_killed_is_named_before_one_that_complains_of_it(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, failure = tmp_path / "told", Worker._failure

    def complained(self: Worker, heard: dict[int, Any]) -> WorkerError:
        told.touch()  # from here on the other one dies, in its own time
        return failure(self, heard)

    monkeypatch.setattr(Worker, "_failure", complained)
    monkeypatch.setattr(workers_module, "SETTLE_SECONDS", 60.0)
    worker = pool.start(member(ranks=2), "worker")
    worker.ready(60)
    with pytest.raises(WorkerError, match=r"rank 1: .* code -9"):
        fail(worker, ["complains"], ["killed", str(told)])


def test_a_pool_that_is_closed_leaves_no_descriptor_and_no_process(tmp_path: Path) -> None:
    with WorkerPool(tmp_path) as pool:
        pool.start(member(), "first").ready(60)  # tests start processes by a helper of their own
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with WorkerPool(tmp_path, fork=True) as pool:
        said = [pool.start(member(ranks=ranks), f"worker-{ranks}").ready(60) for ranks in (1, 2)]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    for pid in (said[0]["pid"], said[0]["parent"], said[1]["pid"]):
        wait_until(gone, pid)
    assert not list(tmp_path.glob(".ranks-*"))


@pytest.mark.parametrize("fork", ["0", "1"], ids=["spawned", "forked"])
def test_a_stopped_worker_ends_with_a_parent_that_is_killed(tmp_path: Path, fork: str) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path), fork]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        wait_until(stopped, pids[:1])
        os.kill(parent.pid, signal.SIGKILL)
    for pid in pids:
        wait_until(gone, pid)


# Fork servers.


def test_there_is_a_fork_server_for_each_environment_and_it_was_started_with_it(
    forking: WorkerPool,
) -> None:
    said = []
    for number, kind in enumerate(("a", "b", "a")):
        with forking.start(member(environ={"KIND": kind}), f"worker-{number}") as worker:
            said.append(worker.ready(60))
    assert [one["kind"] for one in said] == ["a", "b", "a"]
    parents = [one["parent"] for one in said]
    assert parents[0] == parents[2] != parents[1]


def test_the_oldest_server_ends_unless_a_worker_of_it_lives(forking: WorkerPool) -> None:
    forking._most = 2
    parents = []
    with forking.start(member(environ={"KIND": "first"}), "first") as first:
        parents.append(first.ready(60)["parent"])
        for kind in ("b", "c", "d"):
            with forking.start(member(environ={"KIND": kind}), kind) as worker:
                parents.append(worker.ready(60)["parent"])
        assert [gone(parent) for parent in parents] == [False, True, True, False]
        assert first.request("steps", 60) == {"heard": "steps"}


def test_a_worker_is_forked_from_the_server_that_was_prepared(forking: WorkerPool) -> None:
    forking.warm_up({"KIND": "a"})
    (server,) = forking._servers.values()
    prepared = server._process.pid
    with forking.start(member(environ={"KIND": "a"}), "worker") as worker:
        assert worker.ready(60)["parent"] == prepared


def test_a_server_that_is_killed_takes_its_workers_along_and_is_replaced(
    forking: WorkerPool,
) -> None:
    with forking.start(member(), "worker") as worker:
        said = worker.ready(60)
        os.kill(said["parent"], signal.SIGKILL)
        wait_until(gone, said["pid"])  # though it was stopped
        with pytest.raises(WorkerError, match="killed, most likely for want of memory"):
            worker.request("steps", 60)
    with forking.start(member(), "next") as worker:
        assert worker.ready(60)["parent"] != said["parent"]


def test_a_worker_that_hangs_while_it_is_built_is_given_up(forking: WorkerPool) -> None:
    with forking.start(member(hangs=True), "worker") as worker:
        with pytest.raises(WorkerError, match="it hangs"):
            worker.ready(0.5)
        worker.close(kill=True)


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import time; time.sleep(600)"])
def test_a_server_that_never_forks_is_a_failed_worker(
    forking: WorkerPool, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(workers_module, "PROGRAM", ("-c", program))
    monkeypatch.setattr(workers_module, "LEAVE_SECONDS", 0.5)
    with forking.start(member(), "worker") as worker:
        with pytest.raises(WorkerError, match=r"code -9|it hangs"):
            worker.ready(1.0)
        (server,) = forking._servers.values()
        worker.close(kill=True)
        assert not server.alive


@pytest.mark.parametrize(("free", "most"), [(100e9, 6), (16e9, 4), (8e9, 2), (1e9, 1)])
def test_small_machines_have_fewer_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, most: int
) -> None:
    monkeypatch.setattr(workers_module.processes, "available_bytes", lambda limit: int(free))
    assert WorkerPool(tmp_path, fork=True)._most == most


def test_nothing_is_forked_for_an_accelerator_nor_for_several_ranks(tmp_path: Path) -> None:
    assert not WorkerPool(tmp_path, "cuda", fork=True).forks
    with WorkerPool(tmp_path, fork=True) as pool:
        said = pool.start(member(ranks=2), "worker").ready(60)
        assert said["parent"] == os.getpid()


# What several ranks say together.

STEP = {"step": 1, "loss": 2.0, "tokens": 100, "positions": 120, "peak_memory_bytes": 5}


def step(seconds: float, **changes: Any) -> dict[str, Any]:
    return {**STEP, "step_seconds": seconds, "tokens_per_second": 100 / seconds, **changes}


def test_a_step_is_as_long_as_on_the_slowest_rank() -> None:
    ranks = [
        {"steps": [step(1.0), step(4.0)]},
        {"steps": [step(2.0, peak_memory_bytes=9), step(1.0)]},
    ]
    found = merge_replies(ranks)["steps"]
    assert [s["step_seconds"] for s in found] == [2.0, 4.0]
    assert [s["tokens_per_second"] for s in found] == [50.0, 25.0]
    assert [s["peak_memory_bytes"] for s in found] == [9, 5]
    assert merge_replies(ranks[:1]) is ranks[0]
    assert "turn_seconds" not in merge_replies(ranks)


def test_ranks_apart_count_their_mean_tokens_and_the_slowest_turn() -> None:
    ranks = [
        {"steps": [step(1.0, tokens=90), step(4.0, tokens=110)], "apart": True},
        {"steps": [step(2.0, tokens=110), step(1.0, tokens=91)], "apart": True},
    ]
    found = merge_replies(ranks)
    assert found["turn_seconds"] == 5.0  # not 2 + 4
    assert [s["tokens"] for s in found["steps"]] == [100, 100]


def test_other_replies_are_the_first_rank_s() -> None:
    assert merge_replies([{"eval_loss": 2.0}, {"eval_loss": 2.5}]) == {"eval_loss": 2.0}
