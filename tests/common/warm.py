"""Child processes of tests start from a server that has imported torch, Transformers and hasten.

Importing takes 3 to 6 s of a core in each new interpreter, and the suite starts hundreds. Here
``subprocess.Popen`` hands such a start to a server process, which forks:

  1. ``Popen`` builds its pipes as ever and calls `_start` in place of fork and exec
  2. the server gets the command, the variables and the descriptors over a socket, and forks twice
  3. the middle process ends, so that the kernel gives the child to us, its nearest subreaper:
     it has our process as its parent, as after a plain start (prctl(2))
  4. the child takes its descriptors and runs the module or script as ``__main__``

What the child can't tell from a plain start: command, variables, folder, descriptors, process
group, parent, umask, affinity. Only the samples that it writes of a model are shorter, and its
smallest presets are narrower (`narrow_presets`). What libraries read while they are loaded comes
from variables named in ``READ_WHEN_LOADED``. There is a server for each set of their values: for
our own at once, for others from the third start on. Where we have entered other namespaces than
the server, so does the middle process. Other starts stay plain: ``-c``, other programs, a
``preexec_fn`` that the child can't import. A test that is about a cold start has the mark ``cold``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.deepseek_v2.modeling_deepseek_v2",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "pyarrow",
    "pytest",
    "hypothesis",
    "pydantic.type_adapter",
    "hasten.cli.main",
    "hasten.report.runs",
    "hasten.techniques",
    "hasten.core.step",
    "hasten.recipe.build",
    "hasten.training.run",
    "hasten.measure.ablation",
)
# Programs that start no others, and need no server of their own: each fork costs 30 ms.
START_NONE = (
    "ranks.py",
    "hasten.measure.worker",
    "hasten.data.worker",
    "hasten.data.renderer",
)
# Programs whose forked child starts the processes: that child has a server of its own, too.
FORK_THEMSELVES = ("tools/netlab/keeper.py",)
READ_WHEN_LOADED = (
    *("LD_", "OMP_", "KMP_", "GOMP_", "MALLOC_", "GLIBC_", "MKL_", "ATEN_", "ONEDNN_", "DNNL_"),
    *("TORCH_", "TORCHINDUCTOR", "TORCHDYNAMO", "PYTORCH_", "PYTHON", "TRANSFORMERS_", "HF_"),
    *("TRITON_", "CUDA_", "HOME", "XDG_", "TMPDIR", "PATH"),
)
# torch takes these later, too: the first differs between ranks and others, torchrun sets the last,
# and torch itself sets the compilers' folders in a process that has compiled something.
READ_LATER = (
    *("OMP_NUM_THREADS", "TORCH_NCCL_ENABLE_MONITORING"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
THREADS = READ_LATER[0]
ANSWER_TOKENS = 6  # of samples that trainings write in tests: each takes a forward pass
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h
MADV_COLLAPSE = 25  # linux/mman.h, from Linux 6.1 on
NAME = b"warm-server"  # of a server in lists of processes
LONGEST = 1 << 17  # bytes of a request
NAMESPACES = ("user", "mnt", "net", "pid_for_children")
LOADS_TORCH = r"^\s*(import|from) (torch|hasten|transformers|tiny|ranks|measure)\b"
RESET = (signal.SIGINT, signal.SIGTERM)
HIGH = 200  # descriptors are moved above this number while they are sorted out

_plain_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_plain_start)
_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_prctl, _setns, _madvise = (
    (_libc.prctl, _libc.setns, _libc.madvise) if _libc else (None, None, None)
)


class Server:
    """Our end of a server process; only the process that made it may ask it."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self._connection, self._number, self._owner = connection, number, os.getpid()
        self._namespaces = _namespaces()
        self._lock = threading.Lock()

    @property
    def is_ours(self) -> bool:
        return self._owner == os.getpid()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """The number of a new child of this process.

        Raises:
            ConnectionResetError: the server is gone, or can't enter our namespaces.
        """
        with self._lock, contextlib.ExitStack() as opened:
            # Those of this thread, which may have moved by itself (setns(2)).
            others = [
                os.open(f"/proc/thread-self/ns/{name}", os.O_RDONLY)
                for name, there in zip(NAMESPACES, self._namespaces, strict=True)
                if os.readlink(f"/proc/thread-self/ns/{name}") != there
            ]
            for descriptor in others:
                opened.callback(os.close, descriptor)
            message = json.dumps({**request, "namespaces": len(others)}).encode()
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [message], [*others, *descriptors])
                answer = self._connection.recv(64)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not int(answer or 0):
            raise ConnectionResetError("the server of child processes is gone")
        return int(answer)

    def forget(self) -> None:
        """Its descriptor will be closed, and its number be another's: never close it again."""
        self._connection.detach()

    def end(self) -> None:
        """Let it end, where it is ours."""
        if self.is_ours:
            self._connection.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._number, 0)


_servers: dict[tuple[tuple[str, str], ...], Server] = {}
_asked: Counter[tuple[tuple[str, str], ...]] = Counter()
_lock = threading.Lock()
_cold = False
_takes_a_server = False  # whether the next child that this process forks by itself has its own


def install() -> None:
    """From now on this process's ``subprocess.Popen`` starts hasten's programs from a server."""
    if sys.platform == "linux":
        subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]


def end_servers() -> None:
    """To be called when this process ends."""
    for server in _servers.values():
        server.end()
    _servers.clear()


def serve_this_fork() -> None:
    """To be called in a fork of a process that has servers, which are not the fork's: it gets its
    own, a fork again."""
    _servers.clear()
    _give_it_a_server([])


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Inside, every start is a plain one."""
    global _cold
    _cold = True
    try:
        yield
    finally:
        _cold = False


def _start(popen: Any, *given: Any, **named: Any) -> None:
    """In place of ``Popen._execute_child``."""
    call = _signature.bind(popen, *given, **named).arguments
    given_environment = os.environ if call["env"] is None else call["env"]
    environment = {os.fsdecode(k): os.fsdecode(v) for k, v in given_environment.items()}
    server = _server(environment) if _can_be_forked(call) else None
    if server is None:
        _plain_start(popen, *given, **named)
        return
    standard = [(call["p2cread"], 0), (call["c2pwrite"], 1), (call["errwrite"], 2)]
    sources = [mine if mine != -1 else number for mine, number in standard]
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "words": [os.fsdecode(word) for word in call["args"]][1:],
        "environment": environment,
        "folder": os.fsdecode(call["cwd"] or os.getcwd()),
        "targets": [0, 1, 2, *call["pass_fds"]],
        "first": call["preexec_fn"] and _named(call["preexec_fn"]),
        "session": bool(call["start_new_session"]),
        "group": os.getpgid(0) if call["process_group"] == -1 else call["process_group"],
        "umask": umask if call["umask"] == -1 else call["umask"],
        "affinity": sorted(os.sched_getaffinity(0)),
        "ignored": [s for s in RESET if signal.getsignal(s) is signal.SIG_IGN],
    }
    try:
        popen.pid = server.fork(request, [*sources, *call["pass_fds"]])
    except ConnectionError:
        _plain_start(popen, *given, **named)
        return
    popen._child_created = True
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(call[end] for end in ends))


def _can_be_forked(call: Mapping[str, Any]) -> bool:
    """Whether it is a plain start of this interpreter with one of the project's programs."""
    words = call["args"]
    if _cold or isinstance(words, (str, bytes, os.PathLike)) or call["shell"]:
        return False
    if call["preexec_fn"] and not _named(call["preexec_fn"]):
        return False
    if call["executable"] not in (None, words[0], os.fsencode(words[0])):
        return False
    if os.fspath(words[0]) != sys.executable or any(
        call[name] not in (None, [], -1) for name in ("gid", "gids", "uid") if name in call
    ):
        return False
    program = _program([os.fsdecode(word) for word in words[1:]])
    return program is not None


def _named(function: Any) -> list[str] | None:
    """Its module and name, where the child can import it."""
    module = function.__module__
    found = getattr(sys.modules.get(module), function.__qualname__, None)
    ours = module.startswith(("hasten.", "netlab."))
    return [module, function.__qualname__] if ours and found else None


def _program(words: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """How it is named ("-m" or "script"), the module or script, and its arguments."""
    words = list(words)
    while words[:1] == ["-u"] or words[:2] == ["-W", "ignore"]:
        words = words[1 if words[0] == "-u" else 2 :]  # others must be real: -P and -s isolate
    if (
        len(words) > 1
        and words[0] == "-m"
        and words[1].split(".")[0] in ("hasten", "torch", "pytest")
    ):
        return "-m", words[1], words[2:]
    if words and words[0].endswith(".py") and _loads_torch(words[0]):
        return "script", words[0], words[1:]
    return None


def _loads_torch(script: str) -> bool:
    """Others are up sooner by themselves than by copying a process of 450 MB."""
    with contextlib.suppress(OSError), open(script) as file:
        return re.search(LOADS_TORCH, file.read(), re.MULTILINE) is not None
    return False


def _server(environment: Mapping[str, str]) -> Server | None:
    """The server for these variables; None where a plain start is as fast."""
    key = _key(environment)
    with _lock:
        server = _servers.get(key)
        if server is not None:
            return server if server.is_ours else None
        _asked[key] += 1
        if _asked[key] <= 2 and key != _key(os.environ):
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        with theirs, cold():
            child = subprocess.Popen(
                command, env=dict(environment), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        child.returncode = 0  # `end` waits for it
        server = _servers[key] = Server(ours, child.pid)
        return server


def _key(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    read = (k for k in environment if k.startswith(READ_WHEN_LOADED) and k not in READ_LATER)
    return tuple(sorted((name, environment[name]) for name in read))


def _namespaces() -> list[str]:
    return [os.readlink(f"/proc/thread-self/ns/{name}") for name in NAMESPACES]


# What runs in the server, and in the children forked there.


def serve(connection: socket.socket) -> None:
    """Fork children until the other end of the socket is closed."""
    _prctl(PR_SET_NAME, NAME)
    gc.freeze()  # a child looks for garbage in what is its own
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 64)
        if not message:
            os._exit(0)
        connection.send(str(_forked(json.loads(message), descriptors, connection)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _take_large_pages() -> None:
    """Each fork copies the table of pages, which large pages shorten: it takes half of the time.

    What can't be joined stays as it is: no child depends on it.
    """
    with open("/proc/self/maps") as maps:
        mappings = [line.split() for line in maps]
    for addresses, rights, *_, name in ([*words, ""][:6] for words in mappings):
        if rights == "rw-p" and name in ("", "[heap]"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            _madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def _forked(request: dict[str, Any], descriptors: list[int], connection: socket.socket) -> int:
    """Fork twice; the number of the second child, once it is no longer ours. 0: it can't be."""
    numbers, number = os.pipe()
    placed, place = os.pipe()  # the child writes when it has its process group
    orphaned, alive = os.pipe()  # the child reads its end when the middle process is gone
    middle = os.fork()
    if middle == 0:
        try:
            child = _fork_in(descriptors[: request["namespaces"]])
        except OSError:
            child = -1
        if child:
            os.close(place)
            os.read(placed, 1)
            os.write(number, str(max(child, 0)).encode())
            os._exit(0)
        _join_group(request)
        os.write(place, b".")
        os.close(alive)
        os.read(orphaned, 1)
        for descriptor in (numbers, number, placed, place, orphaned):
            os.close(descriptor)
        connection.close()
        _live(request, descriptors[request["namespaces"] :])
    for descriptor in (number, placed, place, orphaned):
        os.close(descriptor)
    child = int(os.read(numbers, 32))
    os.waitpid(middle, 0)
    os.close(alive)
    os.close(numbers)
    return child


def _join_group(request: dict[str, Any]) -> None:
    if request["session"]:
        os.setsid()
    elif request["group"] is not None:
        with contextlib.suppress(OSError):
            os.setpgid(0, request["group"])


def _fork_in(namespaces: Sequence[int]) -> int:
    for descriptor in namespaces:
        if _setns(descriptor, 0):
            raise OSError("setns")
        os.close(descriptor)
    return os.fork()


def _live(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be the program that was asked for, and end as an interpreter ends."""
    code = 1
    try:
        _settle_in(request, descriptors)
        code = _run(request["words"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
            end_servers()
        os._exit(code)


def _settle_in(request: dict[str, Any], descriptors: list[int]) -> None:
    """Descriptors, variables, folder and signals are those of the request."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in descriptors]
    for server in _servers.values():
        server.forget()
    _servers.clear()
    os.closerange(0, HIGH)
    for source, target in zip(high, request["targets"], strict=True):
        os.dup2(source, target, inheritable=True)
    for source in high:
        if source not in request["targets"]:
            os.close(source)
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["affinity"])
    for number in RESET:
        ignored = number in request["ignored"]
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if request["first"]:
        _call(*request["first"])
    if not any(word.endswith(START_NONE) for word in request["words"][:4]):
        _give_it_a_server(request["targets"])
    _prctl(PR_SET_NAME, b"python")
    import numpy as np
    import torch

    np.random.seed()  # as in a fresh process; Python's own generator is seeded at each fork
    if THREADS in os.environ:
        torch.set_num_threads(int(os.environ[THREADS]))


def _call(module: str, function: str) -> None:
    if module.startswith("netlab."):
        sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "tools"))
    getattr(importlib.import_module(module), function)()


def _give_it_a_server(keep: Sequence[int]) -> None:
    """A child starts processes too: from a server of its own, forked before it has any thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number in {0, 1, 2, *keep}:
            os.dup2(null, number)
        serve(theirs)
    theirs.close()
    _servers.clear()
    _asked.clear()
    _servers[_key(os.environ)] = Server(ours, child)
    install()


def _take_a_server() -> None:
    global _takes_a_server
    if _takes_a_server:
        _takes_a_server = False
        _give_it_a_server([])


def _run(words: Sequence[str]) -> int:
    """Run it as ``__main__``; its exit code."""
    how, what, arguments = _program(words) or ("", "", [])
    sys.argv = [what, *arguments]
    sys.orig_argv = [sys.executable, *words]
    if list(words[:2]) == ["-W", "ignore"]:
        import warnings

        warnings.simplefilter("ignore")
    if list(words[:1]) == ["-u"]:
        for name, number in (("stdout", 1), ("stderr", 2)):
            raw: Any = io.FileIO(number, "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, write_through=True))
    code = 0
    try:
        if what.endswith(FORK_THEMSELVES):
            global _takes_a_server
            _takes_a_server = True
            os.register_at_fork(after_in_child=_take_a_server)
        if how == "-m":
            sys.path[0] = os.getcwd()
            sys.modules.pop(what, None)
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(what))
            runpy.run_path(what, run_name="__main__")
    except SystemExit as leaving:
        code = _code(leaving)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    import atexit

    atexit._run_exitfuncs()
    return code


def _code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("hasten.recipe.sample").ANSWER_TOKENS = ANSWER_TOKENS
    importlib.import_module("narrow_presets").narrow()
    with contextlib.suppress(ImportError):  # a table that takes a second when a model is saved
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


if __name__ == "__main__":
    import warm  # the functions that children run are a module's, not those of ``__main__``

    warm._preload()
    warm._take_large_pages()
    warm.serve(socket.socket(fileno=int(sys.argv[1])))
