"""A job for workers that pretends to train, without torch: what it shows, and how it fails, its
arguments say.

    {"recipe": FILE, "plan": [...]}     FILE is JSON, see below; for experiments
    {"variants": {PLAN: {"rate": 100, "fails": {"steps": "diverge"}, "after": 2}}, "log": FILE}

PLAN is the names of the plan's techniques with + between them. ``fails`` names the request and how
it fails after ``after`` times: diverge (an error is reported), killed, hang, end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.machine.processes import running_time
from hasten.measure.worker import Reply, Serve


class NotFiniteError(Exception):
    """Named as the trainer's own."""


def pretend(arguments: Mapping[str, Any], serve: Serve) -> int:
    return serve(lambda: job_of(arguments))


def job_of(arguments: Mapping[str, Any]) -> Pretended:
    told = json.loads(Path(arguments["recipe"]).read_text())
    name = "+".join(entry["technique"] for entry in arguments["plan"]) or "baseline"
    return Pretended(name, told["variants"].get(name, {}), Path(told["log"]))


class Pretended:
    def __init__(self, name: str, variant: Mapping[str, Any], log: Path) -> None:
        self.name, self.path, self.step = name, log, 0
        self.variant = {"rate": 100.0, "fails": {}, "after": 0, "tokens": 10, **variant}
        self.seen: dict[str, int] = {}
        self.log(f"start {name}")
        self.fail("start")

    def ready(self) -> Reply:
        return {"startup_seconds": {"imports": 0.1}}

    def handle(self, op: str, arguments: Mapping[str, Any]) -> Reply:
        self.fail(op)
        if op == "steps":
            found = [self.a_step() for _ in range(arguments["count"])]
            time.sleep(self.variant.get("sleep", 0.0) * arguments["count"])
            self.log(f"steps {self.name} {self.step}")
            graphs = min(self.step, self.variant.get("compiles_until", 0))
            return {"steps": found, "compiled": {"graphs": graphs, "seconds": 0.5}}
        if op == "evaluate":
            return {"eval_loss": 2.0, "tokens": self.step * self.variant["tokens"]}
        return {"effective": [], "samples": [], "ledger": {"step": None}}

    def fail(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1
        how = self.variant["fails"].get(what)
        if how is None or self.seen[what] <= self.variant["after"]:
            return
        if how == "diverge":
            raise NotFiniteError("the gradients were not finite")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(600)
        print("an error of its own", flush=True)
        os._exit(7)

    def a_step(self) -> dict[str, Any]:
        self.step += 1
        variant = self.variant
        seconds = variant["tokens"] / variant["rate"]
        return {
            "step": self.step,
            "tokens": variant["tokens"],
            "positions": variant["tokens"],
            "loss": 2.0,
            "step_seconds": seconds * (1 + variant.get("settles", 0.0) / self.step),
            "tokens_per_second": variant["rate"],
            "peak_memory_bytes": variant.get("peak", 100),
        }

    def log(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{line}\n")


def checks(arguments: Mapping[str, Any], serve: Serve) -> int:
    """Stands for the job "quality"."""
    if os.environ.get("X") == "never ready":
        sys.exit("no such data")
    return serve(Checks)


class Checks:
    """Replies who it is; some requests do what their name says, on the rank ``on``."""

    def __init__(self) -> None:
        self.rank = os.environ.get("RANK", "")

    def ready(self) -> Reply:
        return {}

    def handle(self, op: str, arguments: Mapping[str, Any]) -> Reply:
        here = arguments.get("on", self.rank) == self.rank
        if op == "die" and here:
            print("last words", flush=True)
            os._exit(7)
        if op == "killed" and here:
            os.kill(os.getpid(), signal.SIGKILL)
        if op == "hang" and here:
            time.sleep(60)
        if op == "raise" and here:
            raise ValueError("no such gradient")
        if op == "refuse" and here:
            return {"refused": "not with this plan"}
        if op == "variables":
            return {"variables": dict(os.environ)}
        error = 0.5 if self.rank == "1" else 0.1
        return {
            "pid": os.getpid(),
            "variable": os.environ.get("X"),
            "rank": self.rank,
            "error": error,
            "given": dict(arguments),
        }


def members(arguments: Mapping[str, Any], serve: Serve) -> int:
    """For tests of workers alone."""
    return serve(lambda: Member(arguments))


class Member:
    """Replies who it is; on the request ``fail`` it does what ``hows`` says of its rank."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        own, spin = str(os.getpid()), arguments.get("spin")
        self.given = dict(arguments)
        self.rank = int(os.environ.get("RANK", "0"))
        command = [sys.executable, "-c", spin, own]
        self.beside = [subprocess.Popen(command)] if spin else []
        if arguments.get("thread"):
            threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
        if arguments.get("hangs"):
            time.sleep(600)

    def ready(self) -> Reply:
        beside = [child.pid for child in self.beside]
        own = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0)}
        return {**own, "given": self.given, "kind": os.environ.get("KIND"), "beside": beside}

    def handle(self, op: str, arguments: Mapping[str, Any]) -> Reply:
        how, *details = arguments.get("hows", [["answers"]])[self.rank] if op == "fail" else [""]
        while details and not os.path.exists(details[0]):
            time.sleep(0.005)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(600)
        if how == "garbles":
            for descriptor in range(3, 64):  # whichever is the pipe of replies
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"no JSON\n")
            time.sleep(600)
        if how == "memory":
            raise MemoryError("can't allocate memory")
        if how == "refuses":
            raise InputError("the data has too few examples")
        if how == "complains":
            raise RuntimeError("connection closed by peer")
        if how == "ends":
            print("last words", flush=True)
            os._exit(7)
        return {"heard": op}


def clocks(arguments: Mapping[str, Any], serve: Serve) -> int:
    """Works for ``seconds`` of its own time at the request ``work``; tells how long that was."""
    return serve(Clocks)


class Clocks:
    def ready(self) -> Reply:
        return {}

    def handle(self, op: str, arguments: Mapping[str, Any]) -> Reply:
        began, own = time.perf_counter(), running_time()
        while running_time() - own < arguments["seconds"]:
            pass
        done = time.perf_counter()
        return {"began": began, "wall": done - began, "own": running_time() - own}
