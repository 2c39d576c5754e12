"""Hosts as network namespaces on this machine, with links of a given rate, and commands on them.

    with Lab(hosts=2, ranks=2, rate="100mbit") as lab:
        results = lab.run([sys.executable, "job.py"])
        sent, received = lab.bytes(0)

``keeper`` describes the processes of a lab. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from hasten.errors import InputError
from hasten.machine import environment
from netlab.network import bits_per_second, born

Mode = Literal["auto", "user", "root", "loopback"]
MODES: tuple[Mode, ...] = ("user", "root", "loopback")
SECONDS_TO_END = 10.0
START_SECONDS = 60.0  # the first switch in user space is compiled, and the machine may be busy
MOST_RANKS = 64
KEEPER = Path(__file__).with_name("keeper.py")


# Namespaces of a lab have no name anywhere: they live as long as the lab's keeper, a process. So
# all that a lab can leave behind is its folder with its socket and its logs, whose name is random.


def room() -> Path:
    """The folder of this user's labs, closed to others."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"hasten-netlab-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != user:
        raise InputError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    return folder


@dataclass(frozen=True)
class Result:
    """How a rank ended: its exit code (negative: the signal; None: never started), its output.

    ``reason`` is empty unless the lab ended it.
    """

    rank: int
    host: int
    code: int | None
    output: str
    reason: str = ""


class RunningCommand:
    """A command that runs on a lab's ranks."""

    def __init__(self, lab: Lab, job: int, place: Path) -> None:
        self._lab, self._job, self.place = lab, job, place

    def done(self) -> bool:
        """Whether all ranks have ended."""
        return bool(self._lab.ask("poll", job=self._job, seconds=0)["done"])

    def end(self) -> None:
        """Have all ranks ended; ``wait`` gives the results."""
        self._lab.ask("end", job=self._job)

    def log(self, rank: int) -> Path:
        """The file into which a rank speaks, while it runs too."""
        return self.place / f"rank-{rank}.log"

    def wait(self) -> list[Result]:
        """The results, by rank. The time limit given at the start ends a job that hangs."""
        return self._lab.results(self._job, self.place)


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
        if mode not in ("auto", *MODES):
            raise InputError(f"mode={mode!r}: it is one of auto, {', '.join(MODES)}")
        if not 0 <= delay_ms <= 10_000 or not 0 <= loss < 1:
            raise InputError(
                f"delay_ms={delay_ms:g} and loss={loss:g}: a delay is 0 to 10,000 ms, a loss is a "
                "share below 1"
            )
        if not 576 <= mtu <= 65_000:
            raise InputError(f"mtu={mtu}: 576 to 65,000 bytes are possible")
        self.hosts, self.ranks, self.asked = hosts, ranks, mode
        self.mode: Mode = mode
        self.name = ""
        self._folder = Path()
        self._watchdog: subprocess.Popen[bytes] | None = None
        here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._spec: dict[str, Any] = {
            "hosts": hosts,
            "ranks": ranks,
            "mtu": mtu,
            "bits": bits_per_second(rate),
            "delay": delay_ms / 1000,
            "loss": loss,
            "switch": bool(delay_ms or loss),
            "cores": cores or here or 1,
        }

    def start(self) -> Self:
        """Build it."""
        links = self._spec["bits"] or self._spec["switch"]
        tried = []
        for mode in MODES if self.asked == "auto" else (self.asked,):
            if mode == "loopback" and links:
                tried.append("loopback: plain processes have no links to limit or delay")
                continue
            complaint = self.attempt(mode)
            if not complaint:
                return self
            tried.append(f"{mode}: {complaint}")
        raise InputError(f"no lab works here ({'; '.join(tried)}): see tools/netlab/README.md")

    def attempt(self, mode: Mode) -> str:
        """Build it in one mode; the complaint if it can't be."""
        if mode != "loopback" and sys.platform != "linux":
            return "network namespaces are Linux's"
        folder = room() / secrets.token_hex(4)
        folder.mkdir(mode=0o700)
        process = os.getpid()
        owner = {"process": process, "born": born(process)}
        (folder / "spec.json").write_text(json.dumps({**self._spec, "mode": mode, "owner": owner}))
        with (folder / "keeper.log").open("wb") as log:
            watchdog = subprocess.Popen(
                [sys.executable, str(KEEPER), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        answer = _first_line(watchdog)
        if not answer.get("ready"):
            log_text = ""
            with contextlib.suppress(FileNotFoundError):  # its keeper removes the folder at its end
                log_text = (folder / "keeper.log").read_text()
            watchdog.terminate()
            watchdog.wait()
            shutil.rmtree(folder, ignore_errors=True)
            last = (log_text.strip().splitlines() or ["its keeper ended without a word"])[-1]
            return str(answer.get("error", last))
        self.mode, self._watchdog = mode, watchdog
        self.name, self._folder = folder.name, folder
        return ""

    def __enter__(self) -> Self:
        return self if self.name else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs in it and remove it."""
        if self._watchdog is None:
            return
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        try:
            self._watchdog.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._watchdog = None

    def results(self, job: int, folder: Path) -> list[Result]:
        """The results, by rank, once all have ended; a job that hangs is ended at its limit."""
        while not (status := self.ask("poll", job=job, seconds=2.0))["done"]:
            pass
        logs = [folder / f"rank-{rank}.log" for rank in range(len(status["codes"]))]
        texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
        return [
            Result(rank, rank // self.ranks, code, texts[rank], status["reason"])
            for rank, code in enumerate(status["codes"])
        ]

    def begin(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        seconds: float = 300.0,
        grace: float = 10.0,
        cwd: Path | None = None,
    ) -> RunningCommand:
        """Start a command on every rank, as ``run`` does, without waiting for its end."""
        reply = self.ask(
            "start",
            command=list(command),
            inherited=environment.child_environment({}),
            env=dict(env or {}),
            cwd=str(cwd or Path.cwd()),
            limit=seconds,
            grace=grace,
        )
        return RunningCommand(self, reply["job"], Path(reply["place"]))

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        seconds: float = 300.0,
        grace: float = 10.0,
        cwd: Path | None = None,
    ) -> list[Result]:
        """Run a command on every rank, with this process's variables and ``env`` on top.

        It is ended after ``seconds``, or ``grace`` seconds after a rank has failed.
        """
        return self.begin(command, env, seconds, grace, cwd).wait()

    def cut(self, host: int) -> None:
        """Cut a host's link: what is sent is lost until ``heal``."""
        self.ask("cut", host=self.host(host), cut=True)

    def heal(self, host: int) -> None:
        """Join a host's link again."""
        self.ask("cut", host=self.host(host), cut=False)

    def limit(self, rate: str | float | None) -> None:
        """Change the rate of all links; None: no limit."""
        self.ask("limit", bits=bits_per_second(rate))

    def bytes(self, host: int) -> tuple[int, int]:
        """Bytes a host's interface has (sent, received) since the lab began."""
        counters = self.ask("counted", host=self.host(host))
        return int(counters["sent"]), int(counters["received"])

    def host(self, host: int) -> int:
        """The host's number; InputError where there is no such host."""
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


def _first_line(watchdog: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Returns the keeper's message when it is ready; empty if it ends or takes too long."""
    assert watchdog.stdout is not None
    with selectors.DefaultSelector() as waiting, watchdog.stdout as lines:
        waiting.register(lines, selectors.EVENT_READ)
        if waiting.select(START_SECONDS):
            with contextlib.suppress(ValueError):
                message: dict[str, Any] = json.loads(lines.readline())
                return message
    return {}


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
    found = []
    for mode, switch in [(m, s) for m in MODES for s in (False, True) if m != "loopback" or not s]:
        plain = mode == "loopback"
        offers = "processes" if plain else "rate, delay, loss, cut" if switch else "rate, cut"
        tried = Lab(2, 1, None if plain else "100mbit", delay_ms=float(switch), mode=mode)
        reason = tried.attempt(mode)
        if not reason:
            with tried:
                try:
                    tried.bytes(0)
                except InputError as error:
                    reason = str(error)
        if reason:
            reason = f"{reason}; {_advice(mode, reason)}"
        found.append(LabSupport(mode, offers, not reason, reason))
    return found


def _advice(mode: str, reason: str) -> str:
    if "iproute2" in reason:
        return "then ask again"
    if "tun" in reason.lower():
        return "load the kernel's module tun, or give the container /dev/net/tun"
    return ADVICE.get(mode, "nothing more is needed than this Python")
