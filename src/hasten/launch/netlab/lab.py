"""A lab as its user sees it: start, run commands on the hosts' ranks, disturb links, read bytes.

with Lab(hosts=2, ranks=2, rate="100mbit") as lab:
    results = lab.run([sys.executable, "job.py"])
    sent, received = lab.bytes(0)
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from hasten.errors import InputError
from hasten.launch.netlab import naming
from hasten.launch.netlab.rates import bits_per_second
from hasten.launch.netlab.running import Result, Running
from hasten.machine import environment

Mode = Literal["auto", "user", "root", "loopback"]
MODES: tuple[Mode, ...] = ("user", "root", "loopback")
START_SECONDS = 60.0  # the first switch in user space is compiled, and the machine may be busy
MOST_RANKS = 64


class Lab:
    """Hosts with ranks on this machine, from ``start`` (or ``with``) to ``close``.

    ``rate`` limits each host's link, each way. ``delay_ms`` (one way) and ``loss`` (a share of
    packets) take a switch in user space. ``mode``: a user's own namespaces, root's, or plain
    processes on the loopback interface, which have no links; auto takes the first that works and,
    where links were asked for, has them. ``cores`` are shared out among the ranks.
    """

    def __init__(
        self,
        hosts: int = 2,
        ranks: int = 1,
        rate: str | float | None = None,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        mtu: int = 1500,
        mode: Mode = "auto",
        cores: int | None = None,
    ) -> None:
        if hosts < 1 or ranks < 1 or hosts * ranks > MOST_RANKS:
            raise InputError(
                f"{hosts} hosts with {ranks} ranks each: at least 1 of both and at most "
                f"{MOST_RANKS} ranks in all"
            )
        if not 0 <= delay_ms <= 10_000 or not 0 <= loss < 1:
            raise InputError(
                f"delay_ms={delay_ms:g} and loss={loss:g}: a delay is 0 to 10,000 ms, a loss is a "
                "share below 1"
            )
        if not 576 <= mtu <= 65_000:
            raise InputError(f"mtu={mtu}: 576 to 65,000 bytes are possible")
        if mode not in ("auto", *MODES):
            raise InputError(f"mode={mode!r}: it is one of auto, {', '.join(MODES)}")
        self.hosts, self.ranks, self.asked = hosts, ranks, mode
        self.mode: Mode = mode
        self.name = ""
        self._folder = Path()
        self._guard: subprocess.Popen[bytes] | None = None
        self._spec: dict[str, Any] = {
            "hosts": hosts,
            "ranks": ranks,
            "mtu": mtu,
            "bits": bits_per_second(rate),
            "delay": delay_ms / 1000,
            "loss": loss,
            "switch": bool(delay_ms or loss),
            "cores": cores or _cores(),
        }

    @classmethod
    def attach(cls, name: str) -> Lab:
        """A lab that ``hasten netlab up`` left running; ``close`` leaves it as it is."""
        noted = naming.manifest(name)
        if not naming.alive(noted):
            raise InputError(f"the lab {name} has ended: hasten netlab down {name} clears it away")
        lab = cls(noted["hosts"], noted["ranks"], mode=noted["mode"])
        lab._called(name)
        return lab

    def start(self, stay: bool = False) -> Self:
        """Build it. With ``stay`` it lasts until ``hasten netlab down``, not just this process."""
        links = self._spec["bits"] or self._spec["switch"]
        tried = []
        for mode in MODES if self.asked == "auto" else (self.asked,):
            if mode == "loopback" and links:
                tried.append("loopback: plain processes have no links to limit or delay")
                continue
            complaint = self._try(mode, stay)
            if not complaint:
                return self
            tried.append(f"{mode}: {complaint}")
        raise InputError(f"no lab can be made here ({'; '.join(tried)}): see hasten netlab check")

    def _try(self, mode: Mode, stay: bool) -> str:
        """Build it in one mode; the complaint if it can't be."""
        if mode != "loopback" and sys.platform != "linux":
            return "network namespaces are Linux's"
        folder = naming.new_folder()
        process = os.getpid()
        owner = None if stay else {"process": process, "born": naming.born(process)}
        spec = {**self._spec, "mode": mode, "owner": owner}
        (folder / "spec.json").write_text(json.dumps(spec))
        with (folder / "keeper.log").open("wb") as log:
            guard = subprocess.Popen(
                [sys.executable, "-m", "hasten.launch.netlab.keeper", str(folder)],
                stdin=subprocess.DEVNULL if stay else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        answer = _first_line(guard)
        if not answer.get("ready"):
            words = (folder / "keeper.log").read_text() if folder.exists() else ""
            guard.terminate()
            guard.wait()
            naming.clear(folder)
            last = (words.strip().splitlines() or ["its keeper ended without a word"])[-1]
            return str(answer.get("error", last))
        self.mode, self._guard = mode, guard
        self._called(folder.name)
        return ""

    def _called(self, name: str) -> None:
        self.name, self._folder = name, naming.room() / name

    def __enter__(self) -> Self:
        return self if self.name else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs in it and remove it; a lab that stays is left alone."""
        if self._guard is None or self._guard.stdin is None:
            return
        self._guard.stdin.close()
        try:
            self._guard.wait(naming.SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
            naming.clear(self._folder)
        self._guard = None

    def begin(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        seconds: float = 300.0,
        grace: float = 10.0,
        cwd: Path | None = None,
    ) -> Running:
        """Start a command on every rank, with this process's variables and ``env`` on top.

        It is ended after ``seconds``, or ``grace`` seconds after a rank has failed.
        """

        found = self.ask(
            "start",
            command=list(command),
            inherited=environment.child_environment({}),
            env=dict(env or {}),
            cwd=str(cwd or Path.cwd()),
            limit=seconds,
            grace=grace,
        )
        return Running(self.ask, self.ranks, found["job"], Path(found["place"]))

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        seconds: float = 300.0,
        grace: float = 10.0,
        cwd: Path | None = None,
    ) -> list[Result]:
        """``begin`` and wait; the results by rank."""
        return self.begin(command, env, seconds, grace, cwd).wait()

    def bytes(self, host: int) -> tuple[int, int]:
        """Bytes a host's interface has (sent, received) since the lab began.

        On plain loopback processes: what ranks counted under ``netlab.counting.counting``.
        """
        found = self.ask("counted", host=self._host(host))
        return int(found["sent"]), int(found["received"])

    def cut(self, host: int) -> None:
        """Cut a host's link: what is sent is lost until ``heal``."""
        self.ask("cut", host=self._host(host), cut=True)

    def heal(self, host: int) -> None:
        """Join a host's link again."""
        self.ask("cut", host=self._host(host), cut=False)

    def limit(self, rate: str | float | None) -> None:
        """Change the rate of all links; None: no limit."""
        self.ask("limit", bits=bits_per_second(rate))

    def _host(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise InputError(f"there is no host {host}: the lab has {self.hosts}, counted from 0")
        return host

    def ask(self, verb: str, **details: Any) -> dict[str, Any]:
        """One request to the keeper; its complaint becomes an InputError."""
        if not self.name:
            raise InputError("the lab has not been started: use it in a with statement")
        try:
            with socket.socket(socket.AF_UNIX) as talk:
                talk.settimeout(START_SECONDS)
                talk.connect(str(self._folder / "socket"))
                talk.sendall(json.dumps({"verb": verb, **details}).encode() + b"\n")
                with talk.makefile("rb") as lines:
                    line = lines.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("it went before its answer was whole")
        except OSError as error:
            raise InputError(
                f"the lab {self.name} doesn't answer, it has ended ({error})"
            ) from None
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise InputError(f"the lab {self.name}: {answer['error']}")
        return answer


def _first_line(guard: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the keeper says when it stands, or nothing if it ends or takes too long."""
    assert guard.stdout is not None
    end = time.monotonic() + START_SECONDS
    with selectors.DefaultSelector() as waiting, guard.stdout as lines:
        waiting.register(lines, selectors.EVENT_READ)
        if waiting.select(max(0.0, end - time.monotonic())):
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.loads(lines.readline())
                return found
    return {}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
