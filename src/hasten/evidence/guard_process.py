"""Proofs made in processes of their own: orders go out as a file, answers come back line by line.

Threads, allocators and the variables a process starts with can't be taken back, so orders that
differ in them are obeyed by different processes. A process that dies has answered what it had
done; the order that ended it is answered with the reason, and the rest goes on in a fresh one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.core import facts
from hasten.core.plan import Plan
from hasten.core.slot import Slot

Answer = dict[str, Any]
PROCESS_WIDE = (Slot.THREADS, Slot.ALLOCATOR)


@dataclass(frozen=True)
class Order:
    """One proof to be made of a plan; ``start`` is the plan that its process is started for."""

    do: str
    plan: Plan
    start: Plan
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"do": self.do, "plan": self.plan.to_list(), **self.details}


Perform = Callable[[Sequence[Order]], list[Answer]]


class Processes:
    """Obeys orders on a recipe's job.

    Args:
        recipe: a resolved recipe whose data lies ready.
        folder: for logs, orders, answers, and what proofs write.
        environ: variables that a plan wants before its process starts.
        patience_seconds: longest wait for all orders of one process.
    """

    def __init__(
        self,
        recipe: Path,
        folder: Path,
        environ: Callable[[Plan], Mapping[str, str]],
        patience_seconds: float = 3600.0,
    ) -> None:
        self._recipe, self._folder, self._environ = recipe, folder, environ
        self._patience = patience_seconds
        self._started = 0

    def __call__(self, orders: Sequence[Order]) -> list[Answer]:
        """The answers, in the order of the orders."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, order in enumerate(orders):
            groups.setdefault(self._kind(order.start), []).append(index)
        found: list[Answer] = [{} for _ in orders]
        for members in groups.values():
            answers = self._obeyed([orders[i] for i in members])
            for index, answer in zip(members, answers, strict=True):
                found[index] = answer
        return found

    def _kind(self, plan: Plan) -> tuple[Any, ...]:
        """What decides whether two orders may share a process."""
        wide = tuple(str(t) for t in plan if t.slot in PROCESS_WIDE)
        return (*sorted(self._environ(plan).items()), *wide)

    def _obeyed(self, orders: Sequence[Order]) -> list[Answer]:
        found: list[Answer] = []
        while len(found) < len(orders):
            answers, why = self._run(orders[len(found) :])
            found += answers
            if len(found) < len(orders):
                found.append({"failed": why})
        return found

    def _run(self, orders: Sequence[Order]) -> tuple[list[Answer], str]:
        """The answers of one process, and how it ended."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._started += 1
        names = ("orders.json", "answers.jsonl", "log")
        asked, answered, log = (self._folder / f"{self._started}-{name}" for name in names)
        asked.write_text(json.dumps([order.to_dict() for order in orders]))
        answered.write_text("")
        arguments = [str(path) for path in (self._recipe, self._folder, asked, answered)]
        why = ""
        with log.open("wb") as file:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "hasten.guarding", *arguments],
                    env=facts.child_environment(self._environ(orders[0].start)),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=self._patience,
                )
                why = _ended(done.returncode, log)
            except subprocess.TimeoutExpired:
                why = f"no answer within {self._patience:.0f} s: it hangs"
        lines = answered.read_text().split("\n")[:-1]  # the last is empty, or was cut off
        return [json.loads(line) for line in lines], why


def _ended(code: int, log: Path) -> str:
    words = log.read_text(errors="replace").strip().splitlines()
    last = words[-1] if words else "it said nothing"
    why = "killed, most likely for want of memory" if code == -9 else last
    return f"the guard's process ended with code {code}: {why}"
