"""Processes that are forked: they are what a fresh one is, and none outlives who asked for them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hasten.core.plan import Plan
from hasten.measure import nursery as nursery_module
from hasten.measure.crew import Crew, CrewFailedError
from hasten.measure.nursery import Nursery, nursery
from hasten.measure.trial import ENTRY, Trial, TrialFailedError
from hasten.recipe.prepare import ready
from hasten.recipe.schema import recipe_from
from hasten.techniques.threads import Threads
from material import small
from offspring import children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and asks the kernel")

MEMBER = """
import json, os, signal, sys, time
from hasten.machine.processes import end_with_parent
from hasten.measure.zygote import forked
end_with_parent()
task = forked(int(sys.argv[-1]))
if task is None:
    sys.exit(0)
inbox, outbox = os.fdopen(task.pipes[0]), os.fdopen(task.pipes[1], "w", buffering=1)
def say(**found):
    outbox.write(json.dumps(found) + "\\n")
started = open("/proc/self/environ").read().split("\\0")
say(task=task.task, pid=os.getpid(), parent=os.getppid(), group=os.getpgid(0),
    started_with=[entry for entry in started if entry.startswith("KIND=")])
for line in inbox:
    do = json.loads(line)["do"]
    if do == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "hangs":
        time.sleep(600)
    if do == "ends":
        print("last words", flush=True)
        sys.exit(7)
    say(heard=do)
"""
PARENT = """
import sys, tempfile, time
from hasten.measure.crew import Crew
from hasten.measure.nursery import Nursery
young = Nursery(["-c", sys.argv[1]], tempfile.TemporaryFile())
crew = Crew(young.starting(None), [{}], [tempfile.TemporaryFile()])
said = crew.answers(60)[0]
print(said["pid"], said["parent"], flush=True)
time.sleep(60)
"""


@pytest.fixture
def young(tmp_path: Path) -> Iterator[Nursery]:
    with (tmp_path / "nursery.log").open("wb") as log:
        found = Nursery(["-c", MEMBER], log)
        yield found
        found.close()


@contextlib.contextmanager
def crew(young: Nursery, log: Path, task: Any = None, **environ: str) -> Iterator[Crew]:
    with log.open("w+b") as words:
        found = Crew(young.starting(task), [environ], [words])
        try:
            yield found
        finally:
            found.end(at_once=True)


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def free(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def stopped(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def wait_until(true: Callable[[int], bool], pid: int) -> None:
    deadline = time.monotonic() + 60
    while not true(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_child_has_its_task_a_group_of_its_own_and_sleeps_between_orders(
    young: Nursery, tmp_path: Path
) -> None:
    with crew(young, tmp_path / "log", ["recipe", "plan"]) as found:
        said = found.answers(60)[0]
        assert said["task"] == ["recipe", "plan"]
        assert said["group"] == said["pid"] != said["parent"]
        wait_until(stopped, said["pid"])
        for do in ("steps", "evaluate"):
            assert found.ask({"do": do}, 60) == [{"heard": do}]
            wait_until(stopped, said["pid"])
        found.end()
        wait_until(free, said["pid"])  # it was waited for
        assert psutil.pid_exists(said["parent"])  # the next one's


def test_there_is_a_zygote_for_each_environment_and_it_was_started_with_it(
    young: Nursery, tmp_path: Path
) -> None:
    parents, variables = [], []
    for number, kind in enumerate(("a", "b", "a")):
        with crew(young, tmp_path / f"log-{number}", KIND=kind) as found:
            said = found.answers(60)[0]
            parents.append(said["parent"])
            variables += said["started_with"]
    assert variables == ["KIND=a", "KIND=b", "KIND=a"]
    assert parents[0] == parents[2] != parents[1]


def test_the_oldest_zygote_goes_unless_a_child_of_it_lives(young: Nursery, tmp_path: Path) -> None:
    young._most = 2
    parents = []
    with crew(young, tmp_path / "log-first", KIND="first") as first:
        parents.append(first.answers(60)[0]["parent"])
        for kind in ("b", "c"):
            with crew(young, tmp_path / f"log-{kind}", KIND=kind) as found:
                parents.append(found.answers(60)[0]["parent"])
        with crew(young, tmp_path / "log-d", KIND="d") as found:
            found.answers(60)
            assert [gone(parent) for parent in parents] == [False, True, True]
        assert first.ask({"do": "steps"}, 60) == [{"heard": "steps"}]


def test_a_nursery_can_be_told_beforehand_what_will_be_asked_for(
    young: Nursery, tmp_path: Path
) -> None:
    before = children()
    assert not young.ready({"KIND": "a"})
    young.prepare({"KIND": "a"})
    assert young.ready({"KIND": "a"})
    (prepared,) = {*children()} - {*before}
    assert not young.ready({"KIND": "b"})
    with crew(young, tmp_path / "log", KIND="a") as found:
        assert found.answers(60)[0]["parent"] == prepared.pid
    prepared.kill()
    wait_until(gone, prepared.pid)
    assert not young.ready({"KIND": "a"})


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("ends", "the process ended with code 7: last words"),
        ("killed", "the process ended with code -9: killed, most likely for want of memory"),
        ("hangs", "no answer within 1 s: it hangs"),
    ],
)
def test_how_a_child_fails_is_said_as_of_any_process(
    young: Nursery, tmp_path: Path, do: str, words: str
) -> None:
    with crew(young, tmp_path / "other") as other, crew(young, tmp_path / "log") as found:
        other.answers(60)
        found.answers(60)
        with pytest.raises(CrewFailedError) as caught:
            found.ask({"do": do}, 1.0 if do == "hangs" else 60.0)
        assert str(caught.value) == words
        assert other.ask({"do": "steps"}, 60) == [{"heard": "steps"}]


def test_a_child_s_number_stays_its_own_until_it_has_been_waited_for(
    young: Nursery, tmp_path: Path
) -> None:
    (orders, no_orders), (no_reader, answers) = os.pipe(), os.pipe()  # so that it waits for one
    with (tmp_path / "log").open("w+b") as log:
        child = young.process(None, {}, (orders, answers), log)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.1)
        os.kill(child.pid, signal.SIGTERM)
        wait_until(gone, child.pid)
        assert psutil.pid_exists(child.pid)
        assert child.returncode is None
        assert child.wait() == -signal.SIGTERM == child.poll()
        assert child.pid not in child._zygote.codes  # it may be the next one's
        wait_until(free, child.pid)
    for descriptor in (orders, no_orders, no_reader, answers):
        os.close(descriptor)


def test_a_zygote_that_is_killed_takes_its_children_along_and_is_replaced(
    young: Nursery, tmp_path: Path
) -> None:
    with crew(young, tmp_path / "log") as found:
        said = found.answers(60)[0]
        os.kill(said["parent"], signal.SIGKILL)
        wait_until(gone, said["pid"])  # though it was stopped
        with pytest.raises(CrewFailedError, match="killed, most likely for want of memory"):
            found.ask({"do": "steps"}, 60)
    with crew(young, tmp_path / "next") as found:
        assert found.answers(60)[0]["parent"] != said["parent"]


def test_a_zygote_that_never_comes_to_fork_is_a_failed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "nursery.log").open("wb") as log:
        broken = Nursery(["-c", "raise SystemExit(3)"], log)
        raising = pytest.raises(CrewFailedError, match="ended with code 3")
        with crew(broken, tmp_path / "log") as found, raising:
            found.answers(60)
        monkeypatch.setattr(nursery_module, "BIRTH_SECONDS", 0.2)
        hanging = Nursery(["-c", "import time; time.sleep(600)"], log)
        raising = pytest.raises(CrewFailedError, match="it hangs")
        with crew(hanging, tmp_path / "log") as found, raising:
            found.answers(0.1)
        hanging.close()


def test_the_end_of_a_nursery_is_that_of_all_its_processes(young: Nursery, tmp_path: Path) -> None:
    with crew(young, tmp_path / "log") as found:
        said = found.answers(60)[0]
        young.close()
        for pid in (said["pid"], said["parent"]):
            wait_until(gone, pid)


def test_nobody_outlives_a_controller_that_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, MEMBER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(parent.pid, signal.SIGKILL)
    for pid in pids:
        wait_until(gone, pid)


@pytest.mark.parametrize(("free", "most"), [(100e9, 6), (16e9, 4), (8e9, 2), (1e9, 1)])
def test_small_machines_have_fewer_zygotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, most: int
) -> None:
    monkeypatch.setattr(nursery_module.processes, "available_bytes", lambda limit: int(free))
    with nursery(["-c", MEMBER], tmp_path / "log", "cpu") as found:
        assert found is not None
        assert found._most == most


def test_there_are_none_for_an_accelerator_nor_for_several_ranks(tmp_path: Path) -> None:
    with nursery(["-c", MEMBER], tmp_path / "log", "cuda") as found:
        assert found is None
    with nursery(["-c", MEMBER], tmp_path / "log", "cpu", ranks=2) as found:
        assert found is None
    with nursery(["-c", MEMBER], tmp_path / "log", "cpu") as found:
        assert found is not None


@pytest.mark.slow
def test_an_arm_that_is_forked_trains_as_one_that_was_started(tmp_path: Path) -> None:
    recipe = recipe_from(small(tmp_path, plan=[], max_steps=9), "test")
    ready(recipe, lambda text: None)
    path, plan = tmp_path / "recipe.yaml", Plan([Threads(count=2)])
    path.write_text(recipe.to_yaml())
    environ = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}

    def losses(young: Nursery | None, name: str) -> list[float]:
        with Trial(path, plan, environ, tmp_path / name, nursery=young) as trial:
            assert trial.answer()["ready"]
            steps = trial.ask("steps", count=4)["steps"]
            acted = trial.ask("finish")["acted"]
        assert [found["acted"] for found in acted] == [True]
        return [step["loss"] for step in steps]

    with nursery([*ENTRY, str(path)], tmp_path / "nursery.log", "cpu") as young:
        forked = [losses(young, f"forked-{number}") for number in range(2)]
        path.write_text("no recipe")
        raising = pytest.raises(TrialFailedError, match="recipe")
        with Trial(path, plan, environ, tmp_path / "log", nursery=young) as trial, raising:
            trial.answer()
    path.write_text(recipe.to_yaml())
    assert forked == [losses(None, "started")] * 2
    assert not list((tmp_path / "out").glob("arm-*"))
