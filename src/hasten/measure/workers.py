"""Workers: processes that build a job and answer requests.

A worker is stopped between two requests:

    with WorkerPool(folder) as pool:
        worker = pool.start(WorkerSpec("recipe", {"recipe": path, "plan": []}),
        "baseline")
        worker.ready(timeout=600)
        worker.request("steps", timeout=60, count=4)

A worker (`hasten.measure.worker`) is one process for each rank of its job. Requests go
to all of them as JSON lines; a request is done when each rank has replied. Then the
whole process group is stopped (SIGSTOP) until the next request (SIGCONT). Otherwise
threads in a busy wait, and data loaders that read ahead, would take cores from the
active worker. Ranks are stopped together, so none waits for a stopped one.

Imports take seconds of a core for each process. A pool may therefore keep fork servers.
These are processes that have imported everything, and fork a worker in milliseconds.
Settings that libraries read while they are loaded (allocator, OpenMP) can't change
afterwards. Therefore each set of environment variables has a server of its own. Jobs of
several ranks, or on accelerators, are never forked.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from hasten.errors import InputError
from hasten.machine import environment, processes

PROGRAM = ("-m", "hasten.measure.worker")
BUILD_SECONDS = 1800.0  # timeout of a build, of which nothing is known
LEAVE_SECONDS = 5.0  # for processes to end by themselves once there are no more requests
SETTLE_SECONDS = 0.3  # after a first failure among ranks, for the rank that caused it to show
LOG_BYTES = 1 << 16  # of a log's end that are read
CONSEQUENCE = -signal.SIGABRT  # gloo aborts ranks whose peer is gone: seldom the first cause
MOST_SERVERS = 6
SERVER_BYTES = 0.45e9  # memory of a fork server: torch, transformers and hasten
SERVERS_SHARE = 0.12  # of the free memory, for all fork servers
# What processes say when memory is gone: torch's allocator, the C++ library, Python, the kernel.
OUT_OF_MEMORY = (
    "out of memory",
    "want of memory",
    "can't allocate memory",
    "bad_alloc",
    "memoryerror",
)
# Of a check's reply: how far the result of a rank is off.
ERRORS = ("error", "worst", "loss_error", "change")
Reply = dict[str, Any]


class WorkerError(RuntimeError):
    """A worker died, timed out, or reported an error; the message has the reason."""

    @property
    def out_of_memory(self) -> bool:
        return any(word in str(self).lower() for word in OUT_OF_MEMORY)


@dataclass(frozen=True)
class WorkerSpec:
    """The job and the process settings of a worker.

    Args:
        job: a name of `hasten.measure.worker.JOBS`, or ``module:function`` of such a
            function.
        arguments: arguments of the job; plain values.
        environ: environment variables of its processes, in addition to those of this
            process.
        ranks: number of processes.
        slices: True if it may be stopped within a request. Set False if it waits for work
            that continues while it is stopped.
    """

    job: str
    arguments: Mapping[str, Any]
    environ: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    slices: bool = True


class WorkerPool:
    """Starts workers; when closed, it ends those that still run.

    Args:
        folder: folder for logs, and for the rendezvous of ranks; created if it doesn't
            exist.
        device: device of the jobs. If it isn't a CPU, workers are neither forked nor
            stopped within a request.
        fork: keep fork servers, if the system has fork.
        recipe: a recipe with a model module that fork servers import.
    """

    def __init__(
        self, folder: Path, device: str = "cpu", fork: bool = False, recipe: Path | None = None
    ) -> None:
        self.folder, self._recipe = folder, recipe
        self.on_cpu = device.startswith("cpu")
        self.forks = fork and self.on_cpu and sys.platform == "linux"
        self._servers: dict[frozenset[tuple[str, str]], _ForkServer] = {}  # the newest last
        self._workers: list[Worker] = []
        self._most = MOST_SERVERS
        if self.forks:
            from hasten.machine import host  # loads torch: planning, which loads this, must not

            free = processes.available_bytes(host.hardware().memory_limit_bytes)
            self._most = max(1, min(MOST_SERVERS, int(SERVERS_SHARE * free / SERVER_BYTES)))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(kill=error[0] is not None)

    def close(self, kill: bool = False) -> None:
        """End all workers and fork servers; ``kill`` doesn't wait for workers to leave."""
        for worker in self._workers:
            worker.close(kill)
        while self._servers:
            self._servers.popitem()[1].end()

    def start(self, spec: WorkerSpec, name: str) -> Worker:
        """Starts a worker, which builds in the background; its log is ``NAME.log``.

        Use `Worker.ready` to wait for it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._workers = [worker for worker in self._workers if not worker.closed]
        with contextlib.ExitStack() as stack:
            ranks: Sequence[Mapping[str, str]] = ({},)
            if spec.ranks > 1:
                from hasten.launch.ranks import rank_variables
                from hasten.machine import host

                meeting = tempfile.TemporaryDirectory(dir=self.folder, prefix=".ranks-")
                rendezvous_dir = Path(stack.enter_context(meeting))
                ranks = rank_variables(spec.ranks, host.hardware().usable_cores, rendezvous_dir)
            logs = [
                stack.enter_context((self.folder / f"{name}{suffix}.log").open("w+b"))
                for suffix in ("", *(f"-rank-{rank}" for rank in range(1, len(ranks))))
            ]
            clock = None
            sliced = self.on_cpu and spec.ranks == 1 and spec.slices
            if sliced and hasattr(signal, "SIGSTOP"):
                clock = stack.enter_context(_StoppedTime(self.folder))
            program = {"job": spec.job, "arguments": dict(spec.arguments)}
            if clock is not None:
                program["clock"] = str(clock.path)
            spec_json = json.dumps(program)
            group: _Spawned | _Forked = _Spawned(spec_json)
            if self.forks and spec.ranks == 1:
                group = _Forked(spec_json, self._server(spec.environ))
            members = _started(group, [{**rank, **spec.environ} for rank in ranks], logs)
            worker = Worker(name, group, members, clock, stack.pop_all())
        self._workers.append(worker)
        return worker

    def warm_up(self, environ: Mapping[str, str]) -> None:
        """Let a fork server import everything for workers with these variables."""
        if self.forks:
            self._server(environ)

    def _server(self, environ: Mapping[str, str]) -> _ForkServer:
        key = frozenset(environ.items())
        fork_server = self._servers.pop(key, None)
        idle = [key for key, server in self._servers.items() if not server.workers]
        for old in idle[: max(len(self._servers) + 1 - self._most, 0)]:
            self._servers.pop(old).end()
        if fork_server is None or not fork_server.alive:
            fork_server = _ForkServer(environ, self.folder / "fork-server.log", self._recipe)
        self._servers[key] = fork_server
        return fork_server


class Worker:
    """One worker, just started by a `WorkerPool`.

    Attributes:
        name: name in messages and of its log.
        can_slice: True if it may be stopped within a request (`run_for`). That requires
            that no accelerator and no other rank continues its work while it is stopped.
    """

    def __init__(
        self,
        name: str,
        group: _Spawned | _Forked,
        members: Sequence[_Member],
        clock: _StoppedTime | None,
        files: contextlib.ExitStack,
    ) -> None:
        self.name, self.can_slice, self._clock = name, clock is not None, clock
        self._group, self._members, self._files = group, members, files
        self._heard: dict[int, Reply | str] = {}  # by rank, of the replies that are still to come
        self.closed = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(kill=error[0] is not None)

    def ready(self, timeout: float = BUILD_SECONDS) -> Reply:
        """The first reply: the job is built.

        Raises:
            WorkerError: it isn't built, or not within so many seconds.
        """
        reply = self._reply(timeout)
        if self._clock is not None:
            self._clock.path.unlink(missing_ok=True)  # the worker has it open
        return reply

    def request(self, op: str, timeout: float, **arguments: Any) -> Reply:
        """Send a request and wait for its reply.

        Raises:
            WorkerError: there is no reply.
        """
        self._go_on()
        self.submit(op, **arguments)
        return self._reply(timeout)

    def submit(self, op: str, **arguments: Any) -> None:
        """Send a request, on which the worker works whenever it runs (`run_for`).

        Raises:
            WorkerError: a process has ended.
        """
        line = (json.dumps({"op": op, **arguments}) + "\n").encode()
        for rank, member in enumerate(self._members):
            try:
                os.write(member.requests, line)
            except OSError:
                raise self._failure({rank: self._last_words(rank)}) from None

    def run_for(self, seconds: float) -> Reply | None:
        """Run for so long, or until the reply; then stop. None: the reply is still to come.

        Raises:
            WorkerError: there is no reply.
        """
        self._go_on()
        replies = self._heard_within(seconds)
        if replies is None:
            self._stop()
            return None
        return merge_replies(replies)

    def close(self, kill: bool = False) -> None:
        """End all processes, ``kill`` if they may hang; harmless when they have ended."""
        if self.closed:
            return
        self.closed = True
        if kill:
            self._group.signal("SIGKILL")
        self._group.signal("SIGCONT")
        for member in self._members:
            os.close(member.requests)  # the end of requests lets a process leave by itself
            os.close(member.replies)
        deadline = time.monotonic() + LEAVE_SECONDS
        for rank in range(len(self._members)):
            self._group.wait(rank, max(deadline - time.monotonic(), 0.0))
        self._group.signal("SIGKILL")
        self._group.reap()
        self._files.close()

    def _go_on(self) -> None:
        if self._clock is not None:
            self._clock.went_on()
        self._group.signal("SIGCONT")

    def _stop(self) -> None:
        self._group.signal("SIGSTOP")
        if self._clock is not None:
            self._clock.stopped()

    def _reply(self, timeout: float) -> Reply:
        replies = self._heard_within(timeout)
        if replies is None:
            silent = "it hangs"
            if len(self._members) > 1:
                names = [str(rank) for rank in range(len(self._members)) if rank not in self._heard]
                ranks = "ranks" if len(names) > 1 else "rank"
                silent = f"{ranks} {' and '.join(names)} didn't answer"
            raise WorkerError(f"no answer within {timeout:.0f} s: {silent}")
        return merge_replies(replies)

    def _heard_within(self, seconds: float) -> list[Reply] | None:
        """The replies, once each rank has given its own and all are stopped; None: too late."""
        deadline = time.monotonic() + seconds
        while len(self._heard) < len(self._members):
            if not self._hear(self._heard, deadline):
                return None
            if any(isinstance(reply, str) for reply in self._heard.values()):
                raise self._failure(self._heard)
        self._stop()
        heard, self._heard = self._heard, {}
        replies = (heard[rank] for rank in range(len(self._members)))
        return [reply for reply in replies if not isinstance(reply, str)]

    def _hear(self, heard: dict[int, Reply | str], deadline: float) -> bool:
        """Note one more reply, or some bytes of it; a failure is noted as text. False: too late."""
        waiting = [rank for rank in range(len(self._members)) if rank not in heard]
        for rank in waiting:
            member = self._members[rank]
            line, end, remainder = member.unread.partition(b"\n")
            if end:
                member.unread = remainder
                heard[rank] = _understood(line.decode(errors="replace"))
                return True
        pipes = {self._members[rank].replies: rank for rank in waiting}
        ready, _, _ = select.select(list(pipes), [], [], max(deadline - time.monotonic(), 0))
        for pipe in ready:
            if not self._members[pipes[pipe]].read():
                heard[pipes[pipe]] = self._last_words(pipes[pipe])
        return bool(ready)

    def _failure(self, heard: dict[int, Reply | str]) -> WorkerError:
        """The error of the rank to name if several fail: killed ranks come first."""
        if len(self._members) == 1:
            return WorkerError(str(heard[0]))
        failed = [rank for rank, reply in heard.items() if isinstance(reply, str)]
        until = time.monotonic() + SETTLE_SECONDS
        while len(heard) < len(self._members) and self._hear(heard, until):
            pass
        failed += [r for r, reply in heard.items() if isinstance(reply, str) and r not in failed]
        codes = {rank: self._group.wait(rank, 0.0) or 0 for rank in failed}
        killed = [rank for rank, code in codes.items() if code < 0 and code != CONSEQUENCE]
        cause = (killed or failed)[0]
        return WorkerError(f"rank {cause}: {heard[cause]}")

    def _last_words(self, rank: int) -> str:
        code = self._group.wait(rank, LEAVE_SECONDS)
        log = self._members[rank].log.fileno()
        output = os.pread(log, LOG_BYTES, max(0, os.fstat(log).st_size - LOG_BYTES))
        lines = output.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else "it said nothing"
        if code == -signal.SIGKILL:
            why = "killed, most likely for want of memory"
        return f"the process ended with code {'unknown' if code is None else code}: {why}"


@dataclass
class _Member:
    """The pipes and the log of one rank's process."""

    requests: int  # descriptors of this end
    replies: int
    log: IO[bytes]
    unread: bytes = b""

    def read(self) -> bool:
        """Take in what has come, to be called when something has; False: no more ever will."""
        chunk = os.read(self.replies, 1 << 16)
        self.unread += chunk
        return bool(chunk)


class _StoppedTime:
    """How long a worker was stopped so far, in a file that the worker reads (`running_time`)."""

    def __init__(self, folder: Path) -> None:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".clock-")
        self.path = Path(name)
        os.write(descriptor, bytes(8))
        self._map = mmap.mmap(descriptor, 8)
        self._seconds = memoryview(self._map).cast("d")
        os.close(descriptor)
        self._since: float | None = None

    def __enter__(self) -> _StoppedTime:
        return self

    def __exit__(self, *error: object) -> None:
        self._seconds.release()
        self._map.close()
        self.path.unlink(missing_ok=True)

    def stopped(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def went_on(self) -> None:
        if self._since is not None:
            self._seconds[0] += time.perf_counter() - self._since
            self._since = None


class _Spawned:
    """Processes of the interpreter; the first one leads the process group of all."""

    def __init__(self, spec: str) -> None:
        self._spec, self._all = spec, list[subprocess.Popen[bytes]]()

    def add(self, environ: Mapping[str, str], pipes: tuple[int, int], log: IO[bytes]) -> None:
        """Start one more, with the pipes of requests and of replies."""
        self._all.append(
            subprocess.Popen(
                [sys.executable, *PROGRAM, self._spec, *map(str, pipes)],
                pass_fds=pipes,
                env=environment.child_environment(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=self._all[0].pid if self._all else 0,
            )
        )

    def signal(self, name: str) -> None:
        """Signal all of them and what they have started, where the system can."""
        # A process that hasn't been waited for keeps the group's number from being used again.
        number = getattr(signal, name, None)
        if number is not None and any(process.returncode is None for process in self._all):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._all[0].pid, number)

    def wait(self, rank: int, seconds: float) -> int | None:
        """The exit code of one (a signal's number negative); None: it hasn't ended by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._all[rank].wait(timeout=seconds)
        return None

    def reap(self) -> None:
        """Wait until all have ended, after SIGKILL."""
        for process in self._all:
            process.wait()


class _Forked:
    """One process, forked by a fork server; as `_Spawned`."""

    def __init__(self, spec: str, server: _ForkServer) -> None:
        self._spec, self._server, self._number = json.loads(spec), server, -1

    def add(self, environ: Mapping[str, str], pipes: tuple[int, int], log: IO[bytes]) -> None:
        self._number = self._server.fork(self._spec, (*pipes, log.fileno()))

    def signal(self, name: str) -> None:
        self._server.send({"worker": self._number, "signal": getattr(signal, name)})

    def wait(self, rank: int, seconds: float) -> int | None:
        return self._server.wait(self._number, seconds)

    def reap(self) -> None:
        if self._server.wait(self._number, LEAVE_SECONDS) is None:
            self._server.end()  # it hangs, in an import; the kernel ends its workers with it


class _ForkServer:
    """This process's end of a fork server, which forks and reports by `worker.fork_server`."""

    def __init__(self, environ: Mapping[str, str], log: Path, recipe: Path | None) -> None:
        local_socket, other = socket.socketpair()
        with other, log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, *PROGRAM, "--fork-server", str(other.fileno())),
                    *([] if recipe is None else [str(recipe)]),
                ],
                pass_fds=[other.fileno()],
                env=environment.child_environment(environ),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._channel = Connection(local_socket.detach())
        self._requested = 0
        self.workers: set[int] = set()  # that haven't ended
        self.codes: dict[int, int] = {}

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, spec: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Ask for a worker; its number here."""
        self._requested += 1
        request = {"worker": self._requested, "spec": spec, "descriptors": len(descriptors)}
        self.send(request)
        with contextlib.suppress(OSError):  # it is dead, which `wait` will see
            for descriptor in descriptors:
                reduction.send_handle(self._channel, descriptor, self._process.pid)
        self.workers.add(self._requested)
        return self._requested

    def send(self, request: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the same
            self._channel.send(dict(request))

    def wait(self, number: int, seconds: float) -> int | None:
        """A worker's exit code; None: it hasn't ended by then."""
        deadline = time.monotonic() + seconds
        while number not in self.codes:
            try:
                if self._channel.poll(max(deadline - time.monotonic(), 0.0)):
                    message = self._channel.recv()
                    if "code" in message:
                        self.codes[message["worker"]] = message["code"]
                        self.workers.discard(message["worker"])
                    continue
            except (EOFError, OSError):
                self.end()
            if not self.alive:  # its workers have been killed with it
                self.codes.update(dict.fromkeys(self.workers, -signal.SIGKILL))
                self.workers.clear()
            if time.monotonic() >= deadline:
                break
        return self.codes.get(number)

    def end(self) -> None:
        """At once; the kernel ends its workers with it."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


def _started(
    group: _Spawned | _Forked, environs: Sequence[Mapping[str, str]], logs: Sequence[IO[bytes]]
) -> list[_Member]:
    members: list[_Member] = []
    try:
        for environ, log in zip(environs, logs, strict=True):
            requests_read, requests_write = os.pipe()
            replies_read, replies_write = os.pipe()
            members.append(_Member(requests_write, replies_read, log))
            try:
                group.add(environ, (requests_read, replies_write), log)
            finally:
                os.close(requests_read)
                os.close(replies_write)
    except BaseException:
        for member in members:
            os.close(member.requests)
            os.close(member.replies)
        group.signal("SIGKILL")
        raise
    return members


def _understood(line: str) -> Reply | str:
    try:
        reply: Reply = json.loads(line)
        failed = reply.get("failed")
    except (ValueError, AttributeError):
        return f"its answer can't be read: {line[:80]!r}"
    # An InputError is a sentence for the user; of other errors the kind says more.
    return reply if failed is None else str(failed).removeprefix(f"{InputError.__name__}: ")


def merge_replies(replies: Sequence[Reply]) -> Reply:
    """Merges the replies of a worker's ranks into one.

    A step has the duration of the slowest rank, and the peak memory of the rank that needs
    most. Ranks with local steps count their own tokens times the number of ranks, so the
    mean of these counts is correct. They don't wait for each other in each step. Their turn
    therefore takes as long as the slowest rank's turn, which is less than the sum of the
    slowest steps: ``turn_seconds``.

    For a check, the reply of the rank with the largest error counts. If one rank refuses a
    check, the check has failed.
    """
    first, *others = replies
    if "steps" in first and isinstance(first["steps"], list):
        if not others:
            return first
        steps = zip(*(reply["steps"] for reply in replies), strict=True)
        merged = {**first, "steps": [_slowest(step) for step in steps]}
        if first.get("apart"):
            turns = [[step["step_seconds"] for step in reply["steps"]] for reply in replies]
            merged["turn_seconds"] = max(map(math.fsum, turns))
        return merged
    refused = next((reply for reply in replies if "refused" in reply), None)
    if refused is not None:
        return {"failed": refused["refused"]}

    def error_of(reply: Reply) -> float:
        errors = [float(reply[name]) for name in ERRORS if name in reply]
        return math.inf if any(map(math.isnan, errors)) else max(errors)

    judged = [reply for reply in replies if any(name in reply for name in ERRORS)]
    merged = first | max(judged, key=error_of) if judged else dict(first)
    if "weights" in merged:
        merged["weights"] = [reply["weights"] for reply in replies]
    return merged


def _slowest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(ranks[0])
    for name in ("step_seconds", "peak_memory_bytes"):
        merged[name] = max(step[name] for step in ranks)
    for name in ("tokens", "positions"):
        merged[name] = round(sum(step[name] for step in ranks) / len(ranks))
    merged["tokens_per_second"] = merged["tokens"] / merged["step_seconds"]
    return merged
