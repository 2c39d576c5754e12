"""A process with limits for chat templates: `python -m hasten.data.renderer FD ...`.

The templates were written by others. They may loop for ever, keep many texts, or let one
call of the interpreter run for hours. So templates are rendered by a process that the
kernel ends or refuses memory:

  (1) the first `ask` of a process starts it. FD is a socket between the two; when it
      ends, the process ends.
  (2) each question is a function, its arguments, and the processor time that their size
      explains.
  (3) over all questions together it may take `SECONDS` more than that, and `MEMORY` at
      any time.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

from hasten.errors import InputError

Answer = TypeVar("Answer")
SECONDS = 30  # processor time
WAIT_SECONDS = 45.0  # wall time, including the start of the process
SLOWDOWN = 20.0
MEMORY = 2 << 30  # bytes of address space beyond that of the process at the first question


class _Renderer(NamedTuple):
    owner: int  # a fork has a copy of this, and the process is not its own
    process: subprocess.Popen[bytes]
    link: Connection


_lock = threading.Lock()
_renderer: _Renderer | None = None


def ask(
    location: str, explained: float, function: Callable[..., Answer], *arguments: object
) -> Answer:
    """Returns the result of a module's function in the process with limits.

    Raises InputError if the function does, or if it exceeds the limits. The error names
    `location`. The processor time that the arguments explain is `explained`, in seconds.
    """
    if os.name != "posix":
        return function(*arguments)
    with _lock:
        renderer = _started()
        try:
            renderer.link.send((explained, function, arguments))
            wait = WAIT_SECONDS + SLOWDOWN * explained
            if not renderer.link.poll(wait):
                stop()
                raise InputError(
                    f"the tokenizer's chat template takes over {wait:.0f} s at {location}: correct "
                    "the template or the example, or try again on a machine that is less busy"
                )
            users, reply = renderer.link.recv()
        except (EOFError, ConnectionError):
            code = renderer.process.wait()
            stop()
            raise InputError(_ended(location, code)) from None
        except BaseException:  # after an interrupt, its answer belongs to an old question
            stop()
            raise
    if users is None:
        answer: Answer = reply
        return answer
    raise InputError(reply) if users else RuntimeError(reply)


def stop() -> None:
    """Ends the process, if there is one; the next question starts another."""
    global _renderer
    if _renderer is not None and _renderer.owner == os.getpid():
        _renderer.link.close()
        _renderer.process.kill()
        _renderer.process.wait()
    _renderer = None


def _started() -> _Renderer:
    global _renderer
    if _renderer is None or _renderer.owner != os.getpid():
        # Ctrl-C must reach only the owner; if the owner leads a session, both are killed together.
        own_session = os.getsid(0) != os.getpid()
        process, link = start_child(
            "hasten.data.renderer", str(SECONDS), str(MEMORY), own_session=own_session
        )
        _renderer = _Renderer(os.getpid(), process, link)
        atexit.register(stop)
    return _renderer


def start_child(
    module: str, *arguments: str, own_session: bool = True
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts ``python -m module FD ARGUMENTS``, by default in a session without Ctrl-C."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=own_session,
        )
    return process, Connection(ours.detach())


def end_words(code: int) -> str:
    """Returns a phrase on the end of a process with this exit code."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _ended(location: str, code: int) -> str:
    if code == -signal.SIGXCPU:
        return (
            f"the tokenizer's chat template takes over {SECONDS} s of processor time more than the "
            f"texts explain at {location}: correct the template or the example"
        )
    how = end_words(code)
    return f"the process that renders the chat template {how} at {location}: correct the template"


def main(handle: int, seconds: int, memory: int) -> None:
    """Answers questions until the socket is closed."""
    import resource

    allowed, limited = time.process_time() + seconds, False
    with Connection(handle) as caller:
        while True:
            with suppress(EOFError, ConnectionError):
                explained, function, arguments = caller.recv()
                allowed += explained
                with suppress(OSError, ValueError):  # not every system has these limits
                    _lower(resource.RLIMIT_CPU, math.ceil(allowed))
                    if not limited:  # after the import of the function's module
                        with open("/proc/self/statm") as file:
                            has = int(file.read().split()[0]) * resource.getpagesize()
                        _lower(resource.RLIMIT_AS, has + memory)
                        _lower(resource.RLIMIT_CORE, 0)
                limited = True
                caller.send(_answer(function, arguments, memory))
                continue
            return


def _answer(
    function: Callable[..., Any], arguments: tuple[Any, ...], memory: int
) -> tuple[bool | None, Any]:
    """Returns None and the function's result; or True for a user's error, and its message."""
    try:
        return None, function(*arguments)
    except InputError as error:
        return True, str(error)
    except MemoryError:
        return True, f"the chat template takes more than {memory >> 20:,} MiB: correct the template"
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def _lower(kind: int, most: int) -> None:
    """Sets the soft limit; the hard one stays, so that this process may raise the limit again."""
    import resource

    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
