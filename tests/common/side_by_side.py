"""Test files side by side: workers are forks of the process that has collected them.

  1. this process collects, so that tests and what they import are loaded once, and forks workers
  2. a worker runs one file after another; it asks for the next before the last test of a file
  3. its reports come over a pipe: plugins of this process see them as if the tests ran here
  4. a worker that ends during a test has failed it; a new one has the rest of the file

Files with the mark ``waits`` share a worker: they leave the processor to the others. Tests with the
mark ``timing`` come last, when no other runs: the first worker without a file waits for them, since
a new one would import everything again for its child processes.

In a fresh clone pytest rewrites each file's asserts while another core is idle: a fork does it from
the last file on, and what it has written is read (`importing_ahead`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

import warm


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes that run test files side by side [default: 1]",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("processes") > 1:
        config.pluginmanager.register(SideBySide(config.getoption("processes")))


@contextlib.contextmanager
def importing_ahead(config: pytest.Config) -> Iterator[None]:
    """Inside, another process imports the files that no pytest has compiled, from the last on."""
    folders = [Path(config.invocation_params.dir, arg.partition("::")[0]) for arg in config.args]
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    new = [f for f in files if not [*f.parent.glob(f"__pycache__/{f.stem}.*-pytest-*.pyc")]]
    if len(new) < 2 or sys.dont_write_bytecode:
        yield
        return
    number = os.fork()
    if number == 0:
        for file in reversed(new):
            sys.path.insert(0, str(file.parent))
            with contextlib.suppress(BaseException):  # pytest reports it when it comes to this file
                sys.modules.pop(file.stem, None)
                importlib.import_module(file.stem)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


def groups_of(items: Sequence[pytest.Item]) -> tuple[list[list[int]], list[int]]:
    """Numbers of the tests of each file, in the order of the first ones, and of those of timing."""
    waiting = {item.path for item in items if item.get_closest_marker("waits")}
    files: dict[Any, list[int]] = {}
    timing: list[int] = []
    for number, item in enumerate(items):
        file = files.setdefault("waits" if item.path in waiting else item.path, [])
        (timing if item.get_closest_marker("timing") else file).append(number)
    return [file for file in files.values() if file], timing


@dataclass(eq=False)
class Worker:
    """A worker as the process that started it sees it."""

    number: int  # of the process
    pipe: Connection
    tests: deque[int] = field(default_factory=deque)  # that it hasn't finished
    running: bool = False  # the first of them


class SideBySide:
    """Runs the tests of a session in several processes."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._workers: dict[Connection, Worker] = {}
        self._started = 0
        self._timing: list[int] = []
        self._kept: Worker | None = None  # it waits for the tests of timing

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Iterator[None]:
        with importing_ahead(session.config):
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        files, self._timing = groups_of(session.items)
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        gc.freeze()  # pages that nobody writes to stay shared
        try:
            self._run(session, deque(files))
            # They are left where there were no files, or the kept worker has ended.
            left, self._timing = self._timing, []
            self._run(session, deque([left] if left else []))
        finally:
            for worker in self._workers.values():
                os.kill(worker.number, signal.SIGINT)
                os.waitpid(worker.number, 0)
        return True

    def _run(self, session: pytest.Session, files: deque[list[int]]) -> None:
        for _ in range(min(self._processes, len(files))):
            self._start(session, files.popleft())
        while self._workers:
            for pipe in wait(list(self._workers)):
                self._receive(session, self._workers[pipe], files)  # type: ignore[index]
            if self._kept and len(self._workers) == 1:
                self._give(self._kept, self._timing)
                self._kept, self._timing = None, []
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)

    def _start(self, session: pytest.Session, tests: list[int]) -> None:
        ours, theirs = Pipe()
        self._started += 1
        sys.stdout.flush()
        number = os.fork()
        if number == 0:
            code = 1
            try:
                for pipe in (ours, *self._workers):
                    pipe.close()
                _work(session, theirs, self._started, tests)
                code = 0
            except KeyboardInterrupt:
                pass
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                warm.end_servers()
                os._exit(code)
        theirs.close()
        self._workers[ours] = Worker(number, ours, deque(tests))

    def _receive(self, session: pytest.Session, worker: Worker, files: deque[list[int]]) -> None:
        hook = session.config.hook
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._ended(session, worker)
            return
        if kind == "next":
            self._give(worker, files.popleft() if files else [])
        elif kind == "done":
            if self._timing and self._kept is None:
                self._kept = worker
            else:
                self._give(worker, [])
        elif kind == "running":
            worker.running = value
            if not value:
                worker.tests.popleft()
        elif kind == "warning":
            category, text, file, line, more = value
            message = warnings.WarningMessage(text, type(category, (Warning,), {}), file, line)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **more})
        else:
            report = hook.pytest_report_from_serializable(config=session.config, data=value)
            hook.pytest_runtest_logreport(report=report)

    def _give(self, worker: Worker, tests: list[int]) -> None:
        worker.tests.extend(tests)
        worker.pipe.send(tests)

    def _ended(self, session: pytest.Session, worker: Worker) -> None:
        """All is done, or the process ended during a test: that test has failed."""
        del self._workers[worker.pipe]
        if worker is self._kept:
            self._kept = None
        _, status = os.waitpid(worker.number, 0)
        left = list(worker.tests)
        if worker.running:
            item = session.items[left.pop(0)]
            code = os.waitstatus_to_exitcode(status)
            why = f"the process of this test ended with {code}"
            report = pytest.TestReport(
                *(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", why),
                when="call",
            )
            session.config.hook.pytest_runtest_logreport(report=report)
        if left:
            self._start(session, left)


def _work(session: pytest.Session, pipe: Connection, number: int, tests: list[int]) -> None:
    """The life of a worker."""
    config: Any = session.config
    _be_a_process_of_its_own(config, number)
    reporter = Reporter(config, pipe)
    config.pluginmanager.register(reporter)
    reporter.is_live = True  # warnings of the collection were given to it again
    queue = deque(tests)
    while queue:
        item = session.items[queue.popleft()]
        if not queue:
            pipe.send(("next", None))
            queue.extend(pipe.recv())
        following = session.items[queue[0]] if queue else None
        pipe.send(("running", True))
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        pipe.send(("running", False))
        if not queue:
            pipe.send(("done", None))
            queue.extend(pipe.recv())


def _be_a_process_of_its_own(config: Any, number: int) -> None:
    """What the process before the fork and its other workers must not share with this one."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"worker-{number}"
    factory._basetemp.mkdir()
    # One measurement at a time on a machine: processes that test side by side don't wait.
    above = os.environ["XDG_RUNTIME_DIR"]
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(dir=above)


class Reporter:
    """A plugin of a worker: hands on what its tests report."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe, self.is_live = config, pipe, False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if self.is_live:
            w, more = warning_message, {"when": when, "nodeid": nodeid, "location": location}
            told = (w.category.__name__, str(w.message), w.filename, w.lineno, more)
            self._pipe.send(("warning", told))
