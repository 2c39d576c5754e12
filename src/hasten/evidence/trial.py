"""A trial seen from outside: an arm's process, its orders and answers, and how it failed if it did.

Python alone takes seconds to import torch and transformers, so an arm's process stays alive between
its turns. It is stopped meanwhile (SIGSTOP): threads that spin while they wait, or that read ahead,
would take cores from the arm whose turn it is, or work that its own next turn should pay for.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hasten.core import facts
from hasten.core.plan import Plan
from hasten.errors import InputError

ENTRY = ("-m", "hasten.trial")  # what the interpreter runs
PATIENCE_SECONDS = 1800.0  # for a start, of which nothing is known


class TrialFailedError(RuntimeError):
    """The arm's process died, hung, or reported an error; the message says which."""


class Trial:
    """One arm's process.

    Args:
        recipe: path of a resolved recipe whose data is ready.
        plan: the arm's techniques.
        environ: variables that the techniques want before the process starts.
        log: where the process's own words go.
        entry: the interpreter's arguments that name the program; for programs that speak as
            ``hasten.trial`` does.
    """

    def __init__(
        self,
        recipe: Path,
        plan: Plan,
        environ: Mapping[str, str],
        log: Path,
        entry: Sequence[str] = ENTRY,
    ) -> None:
        self.log = log
        orders_read, orders_write = os.pipe()
        answers_read, answers_write = os.pipe()
        arguments = [str(recipe), json.dumps(plan.to_list()), str(orders_read), str(answers_write)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, *entry, *arguments],
                pass_fds=(orders_read, answers_write),
                env=facts.child_environment(environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        os.close(orders_read)
        os.close(answers_write)
        self._orders = orders_write
        self._answers = answers_read
        self._unread = b""

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.end()

    def ask(self, what: str, patience: float = PATIENCE_SECONDS, **details: Any) -> dict[str, Any]:
        """Give an order and wait for its answer, so many seconds at most.

        Raises:
            TrialFailedError: there is no answer to be had.
        """
        self._signal("SIGCONT")
        try:
            os.write(self._orders, (json.dumps({"do": what, **details}) + "\n").encode())
        except OSError as error:
            raise TrialFailedError(self._last_words()) from error
        return self.answer(patience)

    def answer(self, patience: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """The next answer (the first, after the start, says that the arm is ready)."""
        deadline = time.monotonic() + patience
        while b"\n" not in self._unread:
            ready, _, _ = select.select(
                [self._answers], [], [], max(deadline - time.monotonic(), 0)
            )
            if not ready:
                raise TrialFailedError(f"no answer within {patience:.0f} s: it hangs")
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                raise TrialFailedError(self._last_words())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise TrialFailedError(f"its answer can't be read: {line[:80]!r}") from error
        if "failed" in found:
            # An InputError is a sentence for the user; of other errors the kind says more.
            raise TrialFailedError(found["failed"].removeprefix(f"{InputError.__name__}: "))
        self._signal("SIGSTOP")
        return found

    def end(self, at_once: bool = False) -> None:
        """End the process, ``at_once`` if it hangs; harmless when it has ended."""
        self._signal("SIGCONT")
        for descriptor in (self._orders, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._orders = self._answers = -1
        if at_once:
            self._process.kill()
        try:
            self._process.wait(timeout=5)  # an end of orders lets it leave by itself
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _signal(self, name: str) -> None:
        """Stop the process or let it go on, where the system can."""
        if hasattr(signal, name) and self._process.poll() is None:
            self._process.send_signal(getattr(signal, name))

    def _last_words(self) -> str:
        try:
            code: object = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = "unknown"
        words = self.log.read_text(errors="replace").strip().splitlines()
        why = words[-1] if words else "it said nothing"
        if code == -9:
            why = "killed, most likely for want of memory"
        return f"the process ended with code {code}: {why}"
