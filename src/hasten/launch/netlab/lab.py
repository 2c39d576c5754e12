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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from hasten.errors import InputError
from hasten.launch.netlab import registry
from hasten.launch.netlab.registry import bits_per_second
from hasten.machine import environment

# A command that runs on a lab's ranks, and how each rank ended.


@dataclass(frozen=True)
class Result:
    """How a rank ended: its exit code (negative: the signal; None: never started) and its words.

    ``reason`` is empty unless the lab ended it.
    """

    rank: int
    host: int
    code: int | None
    output: str
    reason: str = ""


class RunningCommand:
    """A command that runs on a lab's ranks."""

    def __init__(
        self, ask: Callable[..., dict[str, Any]], ranks: int, job: int, place: Path
    ) -> None:
        self._ask, self._ranks, self._job, self.place = ask, ranks, job, place

    def done(self) -> bool:
        """Whether all ranks have ended."""
        return bool(self._ask("poll", job=self._job, seconds=0)["done"])

    def end(self) -> None:
        """Have all ranks ended; ``wait`` gives the results."""
        self._ask("end", job=self._job)

    def log(self, rank: int) -> Path:
        """The file into which a rank speaks, while it runs too."""
        return self.place / f"rank-{rank}.log"

    def wait(self) -> list[Result]:
        """The results, by rank. The time limit given at the start ends a job that hangs."""
        while not (found := self._ask("poll", job=self._job, seconds=2.0))["done"]:
            pass
        return [
            Result(rank, rank // self._ranks, code, self._words(rank), found["reason"])
            for rank, code in enumerate(found["codes"])
        ]

    def _words(self, rank: int) -> str:
        path = self.log(rank)
        return path.read_text(errors="replace") if path.exists() else ""


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
        noted = registry.manifest(name)
        if not registry.alive(noted):
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
        folder = registry.new_folder()
        process = os.getpid()
        owner = None if stay else {"process": process, "born": registry.born(process)}
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
            registry.clear(folder)
            last = (words.strip().splitlines() or ["its keeper ended without a word"])[-1]
            return str(answer.get("error", last))
        self.mode, self._guard = mode, guard
        self._called(folder.name)
        return ""

    def _called(self, name: str) -> None:
        self.name, self._folder = name, registry.room() / name

    def __enter__(self) -> Self:
        return self if self.name else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs in it and remove it; a lab that stays is left alone."""
        if self._guard is None or self._guard.stdin is None:
            return
        self._guard.stdin.close()
        try:
            self._guard.wait(registry.SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
            registry.clear(self._folder)
        self._guard = None

    def begin(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        seconds: float = 300.0,
        grace: float = 10.0,
        cwd: Path | None = None,
    ) -> RunningCommand:
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
        return RunningCommand(self.ask, self.ranks, found["job"], Path(found["place"]))

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


# Which kinds of lab work on this machine, found by making one of each.

ADVICE = {
    "user": "allow users their own namespaces: sysctl user.max_user_namespaces above 0, and on "
    "Ubuntu kernel.apparmor_restrict_unprivileged_userns=0",
    "root": "run it as root with CAP_SYS_ADMIN and CAP_NET_ADMIN",
}


@dataclass(frozen=True)
class LabSupport:
    """One kind of lab: what it offers, whether it works here, and if not, why and what to do."""

    mode: str
    offers: str
    works: bool
    reason: str = ""


def check() -> list[LabSupport]:
    """One finding for each kind of lab; each is made, asked for its bytes and removed."""
    kinds: list[tuple[Mode, bool]] = [
        (m, switch) for m in MODES if m != "loopback" for switch in (False, True)
    ]
    found = []
    kinds.append(("loopback", False))
    for mode, switch in kinds:
        plain = mode == "loopback"
        offers = "processes" if plain else "rate, delay, loss, cut" if switch else "rate, cut"
        rate = None if plain else "100mbit"
        try:
            with Lab(2, 1, rate, delay_ms=1.0 if switch else 0.0, mode=mode) as lab:
                lab.bytes(0)
            found.append(LabSupport(mode, offers, True))
        except InputError as error:
            reason = str(error).partition(f"({mode}: ")[2].partition("): see")[0] or str(error)
            found.append(LabSupport(mode, offers, False, f"{reason}; {_advice(mode, reason)}"))
    return found


def _advice(mode: str, reason: str) -> str:
    if "iproute2" in reason:
        return "then ask again"
    if "tun" in reason.lower():
        return "load the kernel's module tun, or give the container /dev/net/tun"
    return ADVICE.get(mode, "nothing more is needed than this Python")
