"""The program of a worker: builds one job, then answers requests about it.

    python -m hasten.measure.worker SPEC REQUESTS REPLIES

SPEC is JSON with three keys. The key ``job`` is a name of `JOBS`, or
``module:function`` of such a function. The key ``arguments`` has its arguments. The key
``clock`` is a file with the seconds for which the worker was stopped. REQUESTS and
REPLIES are file descriptors of pipes with one JSON object per line. The first reply
reports that the job is built. Then a reply follows each request ``{"op": ...}``, until
the requests end. ``{"failed": why}`` is the last reply of a worker.

If a rank's variables are set, a worker connects to the other ranks, and all receive the
same requests. A failure is reported before the rank leaves its process group. Leaving
may block on other ranks that wait for this one.

    python -m hasten.measure.worker --fork-server CONTROL [RECIPE]

This form imports everything that a worker needs, once, and forks a worker for each
request (`hasten.measure.workers`). It may only import: neither threads nor open devices
survive a fork (fork(2), pthread_atfork(3)).
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hasten.errors import InputError
from hasten.machine import environment
from hasten.machine.processes import count_stops, end_with_parent, host_memory_peak

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from hasten.core.job import Job as TrainingJob
    from hasten.core.plan import Plan
    from hasten.core.setup import Progress
    from hasten.core.technique import Technique
    from hasten.core.timing import StepMetrics
    from hasten.measure.quality.bench import CheckContext
    from hasten.recipe.schema import Recipe

Reply = dict[str, Any]
RENDEZVOUS = "HASTEN_RENDEZVOUS"  # ranks of one start have this variable alike
SCRIPT = "__hasten_loop__"  # a script's name in a worker, so that it isn't __main__ a second time
started = time.perf_counter()


class WorkerJob(Protocol):
    """The job of a worker."""

    def ready(self) -> Reply:
        """The first reply: what building it took."""

    def handle(self, op: str, arguments: Mapping[str, Any]) -> Reply:
        """The reply to one request; all ranks are given the same."""


class Serve(Protocol):
    """Builds the job, reports that it is ready, answers all requests; returns the exit code."""

    def __call__(self, build: Callable[[], WorkerJob], ranks: bool = False) -> int:
        """``ranks``: the job is one of several ranks that have met; its failures name the rank."""


def main(spec: Mapping[str, Any], requests: int, replies: int) -> int:
    """Build the job, then answer requests until they end; the exit code."""
    if "clock" in spec:
        count_stops(Path(spec["clock"]))
    with os.fdopen(requests, "r") as inbox, os.fdopen(replies, "w", buffering=1) as outbox:

        def say(reply: Mapping[str, Any]) -> None:
            outbox.write(json.dumps(reply) + "\n")

        def serve(build: Callable[[], WorkerJob], ranks: bool = False) -> int:
            try:
                with contextlib.ExitStack() as stack:
                    if ranks:
                        from hasten.launch.ranks import naming_ranks

                        stack.enter_context(naming_ranks(environment.world()))
                    job = build()
                    say(job.ready())
                    for line in inbox:
                        request = json.loads(line)
                        say(job.handle(request.pop("op"), request))
            except Exception as error:  # whoever asked reports it
                say({"failed": f"{type(error).__name__}: {error}"})
                return 1
            return 0

        try:
            name, job = spec["job"], JOBS.get(spec["job"])
            if job is None:
                module, _, function = name.partition(":")
                job = getattr(importlib.import_module(module), function)
            return job(spec["arguments"], serve)
        except Exception as error:
            say({"failed": f"{type(error).__name__}: {error}"})
            return 1


@contextlib.contextmanager
def _ranks_of(recipe: Recipe) -> Iterator[bool]:
    """The process group of the recipe's ranks; whether there are several."""
    world = environment.world()
    if world.size == 1:
        yield False
        return
    from hasten.launch.ranks import process_group
    from hasten.recipe.build import context_of

    meeting = datetime.timedelta(seconds=recipe.link_seconds)
    with process_group(world, context_of(recipe).device, meeting, recipe.backend):
        yield True


@contextlib.contextmanager
def own_folder(within: Path) -> Iterator[Path]:
    """A folder's name in ``within``, the same on all ranks of a start; it is removed afterwards.

    Workers of one plan train at the same time; what the plan writes (checkpoints) must not be
    shared.
    """
    world = environment.world()
    meeting = environment.variable(RENDEZVOUS) if world.size > 1 else None
    mark = f"{zlib.crc32(meeting.encode()):08x}" if meeting else str(os.getpid())
    folder = within / f"variant-{mark}"
    try:
        yield folder
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


# A recipe under one plan.


def recipe_job(
    arguments: Mapping[str, Any], serve: Serve, more: Iterable[type[Technique]] = ()
) -> int:
    """Serves the training of ``recipe`` (a path) under ``plan``, with changed keys.

    The key ``changes`` has the changes of the recipe's keys.

    Changes apply to weights, order and optimizer. The data and its split stay those of the
    recipe. Losses of different changes are therefore from the same examples.

    Args:
        arguments: see above.
        serve: see `main`.
        more: techniques in addition to the catalogue's.
    """
    from hasten.recipe.schema import load_recipe

    recipe = load_recipe(Path(arguments["recipe"]))
    recipe = recipe.model_copy(update={"plan": arguments["plan"]})
    changes = arguments.get("changes", {})
    with _ranks_of(recipe) as ranks, own_folder(Path(recipe.output)) as folder:
        return serve(lambda: RecipeJob(recipe, changes, folder, more), ranks)


class RecipeJob:
    """A training in pieces; what its plan writes goes to ``folder``.

    Requests: ``steps`` with ``count``, ``evaluate``, ``finish``.
    """

    def __init__(
        self,
        recipe: Recipe,
        changes: Mapping[str, Any],
        folder: Path,
        more: Iterable[type[Technique]] = (),
    ) -> None:
        from hasten.core.setup import prepare
        from hasten.core.step import assemble, training
        from hasten.core.timing import clock_on
        from hasten.machine import host
        from hasten.recipe.build import context_of, job_of, plan_of, requested_plan
        from hasten.recipe.gpu_check import check_kernels
        from hasten.recipe.peak_flops import meter_of
        from hasten.recipe.prepared_data import prepare_data

        imported = time.perf_counter()
        self.data = prepare_data(recipe, Path(recipe.output) / "data")
        context = context_of(recipe, self.data)
        check_kernels(context, lambda text: None)  # `hasten check` and a training say what it found
        host.reset_memory_peak(context.device)
        opened = time.perf_counter()
        self.plan = plan_of(recipe, context, more=more)
        requested = requested_plan(recipe, more).techniques  # less the ranks' layout
        self._switches = [t for t in self.plan if t in requested]
        changed = recipe.model_copy(update=dict(changes))
        job = job_of(changed, self.data, context, self.plan)
        self.session = assemble(prepare(job, self.plan, context, folder))
        self.session.meter = meter_of(recipe, context, self.session.model)
        self.session.startup_seconds |= {"imports": imported - started, "data": opened - imported}
        self.session.setup.clock = clock_on(context.device)
        self._training: Any = training(self.session)
        self._last: tuple[Progress, list[StepMetrics]] | None = None  # of a turn: where it began
        self._compiling = compiled()[1]

    def ready(self) -> Reply:
        return {"startup_seconds": self.session.startup_seconds}

    def handle(self, op: str, arguments: Mapping[str, Any]) -> Reply:
        from hasten.core.loop import evaluate

        if op == "steps":
            return self._steps(arguments["count"])
        if op == "evaluate":
            job = self.session.setup.job
            pairs = {"pairs": len(job.eval_data)} if job.unit == "pairs" else {}
            return {**evaluate(self.session).to_dict(), **pairs}
        if op == "finish":
            return self._finish(arguments.get("samples", True))
        raise ValueError(f"unknown request {op!r}")

    def _steps(self, count: int) -> Reply:
        before = replace(self.session.progress)
        metrics = list(itertools.islice(self._training, count))
        if len(metrics) < count:
            raise RuntimeError(f"training ended {count - len(metrics)} steps too early")
        self._last = before, metrics
        if self.session.setup.checkpoint is not None:
            self.session.setup.checkpoint.wait_for_writer()  # other workers' turns come now
        graphs, seconds = compiled()
        earlier, self._compiling = self._compiling, seconds
        took = {"graphs": graphs, "seconds": seconds - earlier}
        diverged = self.session.setup.rank_sync.diverged  # steps of ranks don't wait for each other
        return {"steps": [m.to_dict() for m in metrics], "compiled": took, "apart": diverged}

    def _finish(self, samples: bool) -> Reply:
        from dataclasses import asdict

        from hasten.measure.profile import efficiency_once_more, ledger_of
        from hasten.recipe.sample import Sample, write_samples

        proofs = [(t.name(), t.check_effect(self.session)) for t in self._switches]
        ledger = ledger_of(self.session)
        if self._last is not None:
            self._training.close()
            ledger["parallel_efficiency"] = efficiency_once_more(self.session, *self._last)
        self.session.finish()
        written: list[Sample] = []
        if samples:  # by all ranks, in the layout
            written = write_samples(self.session, self.data.tokenizer, self.data.eval_data)
        return {
            "effective": [{"technique": name, **asdict(proof)} for name, proof in proofs],
            "samples": [asdict(sample) for sample in written],
            "ledger": ledger,
        }


def compiled() -> tuple[int, float]:
    """Graphs that torch.compile made in this process so far, and the seconds it took for them."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # nothing was compiled if nobody imported it
    if dynamo is None:
        return 0, 0.0
    spent = dynamo.calculate_time_spent()  # forward and backward graphs, by torch's own clock
    graphs = dynamo.counters["stats"]["unique_graphs"]
    return int(graphs), float(spent.get("total_wall_time", 0.0))


# A training loop of the user's own.


def loop_job(arguments: Mapping[str, Any], serve: Serve) -> int:
    """Serve the loop of the factory ``target``; ``paths`` is the caller's ``sys.path``."""
    sys.path[:] = arguments["paths"]
    return serve(lambda: LoopJob(arguments["target"]))


class LoopJob:
    """A user's step function; requests: ``steps`` with ``count``, ``finish`` (peak memory)."""

    def __init__(self, target: str) -> None:
        began = time.perf_counter()
        self._step = build_loop(target)
        self._seconds = time.perf_counter() - began

    def ready(self) -> Reply:
        return {"startup_seconds": {"build": self._seconds}}

    def handle(self, op: str, arguments: Mapping[str, Any]) -> Reply:
        if op == "steps":
            steps = []
            for _ in range(arguments["count"]):
                items, seconds, loss = timed(self._step)
                speed = {"step_seconds": seconds, "tokens_per_second": items / seconds}
                steps.append({"tokens": items, "loss": loss, **speed})
            return {"steps": steps}
        if op == "finish":
            return {"effective": [], "samples": [], "peak_memory_bytes": memory_peak()}
        raise ValueError(f"unknown request {op!r}")


def memory_peak() -> int:
    """Peak bytes of the loop's device; a loop that hasn't loaded torch needn't do so for this."""
    if "torch" not in sys.modules:
        return host_memory_peak()
    from hasten.machine import host

    return host.memory_peak(host.default_device())


def build_loop(target: str) -> Callable[[], Any]:
    """Load the factory, ``module:function`` or ``script.py:function``, and call it."""
    module_path, _, name = target.rpartition(":")
    if module_path.endswith(".py"):
        sys.path.insert(0, os.path.dirname(module_path))  # a script's neighbours, as Python has it
        spec = importlib.util.spec_from_file_location(SCRIPT, module_path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{module_path} can't be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[SCRIPT] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_path)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ValueError(f"{module_path} has no function {name}")
    step = factory()
    if not callable(step):
        raise ValueError(f"{name}() returned a {type(step).__name__}; it must return a function")
    made: Callable[[], Any] = step
    return made


def timed(step: Callable[[], Any]) -> tuple[float, float, float | None]:
    """One step: items, seconds, loss. The device has finished before the clock is read."""
    began = time.perf_counter()
    outcome = step()
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - began
    items, loss = outcome if isinstance(outcome, tuple) and len(outcome) == 2 else (outcome, None)
    try:
        count = float(items)
        value = None if loss is None else float(loss)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a step returned {outcome!r:.80}; it must return how many tokens or items it did, or "
            "(how many, loss)"
        ) from error
    if not (math.isfinite(count) and count > 0):
        raise ValueError(f"a step did {count} items; a speed needs a positive number")
    return count, seconds, value if value is not None and math.isfinite(value) else None


# Checks of equal quality.


def quality_job(arguments: Mapping[str, Any], serve: Serve) -> int:
    """Serve checks on ``recipe`` (a path); what they write goes to ``folder``."""
    from hasten.recipe.schema import load_recipe

    recipe = load_recipe(Path(arguments["recipe"]))
    with _ranks_of(recipe) as ranks:
        folder = Path(arguments["folder"])
        return serve(lambda: QualityJob(check_context(recipe, folder), not ranks), ranks)


class QualityJob:
    """Checks of plans on the recipe's job (`hasten.measure.quality`).

    Requests, each with a ``plan``: ``reference``, ``gradient``, ``leak``, ``update``,
    ``losses``, ``train``. If a check isn't possible, the answer is ``{"refused": why}``.
    With several ranks, only errors that all ranks find alike are refused. After any other
    error the state of the other ranks is unknown, and the worker ends.
    """

    def __init__(self, context: CheckContext, alone: bool = True) -> None:
        self._context, self._alone = context, alone

    def ready(self) -> Reply:
        return {}

    def handle(self, op: str, arguments: Mapping[str, Any]) -> Reply:
        from hasten.core.health import NotFiniteError
        from hasten.measure.quality.checks import gradient, leak, losses, reference, train, update

        every = (reference, gradient, leak, update, losses, train)
        checks: dict[str, Callable[..., Reply]] = {check.__name__: check for check in every}
        details = dict(arguments)
        try:
            plan = self._context.read(list(details.pop("plan", [])))
            if op not in checks:
                raise ValueError(f"unknown request {op!r}")
            return checks[op](self._context, plan, **details)
        except Exception as error:  # one check that fails doesn't prevent the next
            if not self._alone and not isinstance(error, (InputError, NotFiniteError)):
                raise
            why = f"{type(error).__name__}: {error}".removeprefix("InputError: ")
            return {"refused": why}
        finally:
            gc.collect()  # a session's parts refer to each other; the next check needs their memory


def check_context(recipe: Recipe, folder: Path) -> CheckContext:
    """A recipe's job, to be built for any plan."""
    from hasten.measure.quality.bench import CheckContext
    from hasten.recipe.build import context_of, job_of, plan_of
    from hasten.recipe.prepared_data import prepare_data

    data = prepare_data(recipe, Path(recipe.output) / "data")
    context = context_of(recipe, data)

    def read(stored: list[Any]) -> Plan:
        return plan_of(recipe.model_copy(update={"plan": stored}), context)

    def job(plan: Plan, seed: int | None, tokens: int | None) -> TrainingJob:
        changes: dict[str, Any] = {} if seed is None else {"seed": seed}
        if tokens is not None:
            changes |= {"max_tokens": tokens, "max_steps": None, "epochs": None}
        return job_of(recipe.model_copy(update=changes), data, context, plan)

    folder.mkdir(parents=True, exist_ok=True)
    return CheckContext(job, read, context, folder, recipe.nproc)


JOBS: dict[str, Callable[[Mapping[str, Any], Serve], int]] = {
    "recipe": recipe_job,
    "loop": loop_job,
    "quality": quality_job,
}


# The fork server.


def fork_server(control: int) -> None:
    """Forks a worker per request, passes on signals, and reports how each worker ended.

    A request is ``{"worker": number, "spec": ..., "descriptors": count}``, followed by that
    many descriptors (requests, replies, log). A request for a signal is
    ``{"worker": number, "signal": number}``. Signals go through the server, because the
    process number is only valid until the server reaps the worker. The server ends when the
    other end of ``control`` is closed.
    """
    import multiprocessing
    from multiprocessing import connection, reduction

    context, channel = multiprocessing.get_context("fork"), connection.Connection(control)
    workers: dict[int, BaseProcess] = {}
    while True:
        for ready in connection.wait([channel, *(w.sentinel for w in workers.values())]):
            if ready is not channel:
                number = next(n for n, worker in workers.items() if worker.sentinel == ready)
                ended = workers.pop(number)
                _signal_group(ended, signal.SIGKILL)  # what it has started, if it left any
                ended.join()
                with contextlib.suppress(OSError):
                    channel.send({"worker": number, "code": ended.exitcode})
                continue
            try:
                request = channel.recv()
            except (EOFError, OSError):
                return
            if "signal" in request:
                if request["worker"] in workers:
                    _signal_group(workers[request["worker"]], request["signal"])
                continue
            descriptors = [reduction.recv_handle(channel) for _ in range(request["descriptors"])]
            task = (os.getpid(), channel, request["spec"], descriptors)
            worker = context.Process(target=_forked, args=task)
            worker.start()
            with contextlib.suppress(OSError):
                os.setpgid(worker.pid or 0, worker.pid or 0)  # the child does so too: who is first
            for descriptor in descriptors:
                os.close(descriptor)
            workers[request["worker"]] = worker
            channel.send({"worker": request["worker"], "pid": worker.pid})


def _signal_group(worker: BaseProcess, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid or 0, number)


def _forked(server: int, channel: Any, spec: Mapping[str, Any], descriptors: list[int]) -> None:
    """In a forked worker: its process group and log are its own, and it ends with the server."""
    global started
    started = time.perf_counter()
    end_with_parent()
    if os.getppid() != server:
        os._exit(1)  # the server was gone before the kernel could be asked
    channel.close()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    requests, replies, log = descriptors
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    sys.exit(main(spec, requests, replies))


def _import_all(recipe: Path) -> None:
    """Imports everything that a worker needs, the model's own module included.

    It uses one thread: OpenMP's threads don't exist in a fork, which would wait for them
    for ever (libgomp).
    """
    import torch

    import hasten.core.loop
    import hasten.core.step
    import hasten.core.timing
    import hasten.measure.profile
    import hasten.recipe.peak_flops  # noqa: F401
    from hasten.recipe.build import context_of
    from hasten.recipe.schema import load_recipe

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        context_of(load_recipe(recipe))
    finally:
        torch.set_num_threads(threads)


def _program(arguments: Sequence[str]) -> int:
    end_with_parent()
    if arguments[0] != "--fork-server":
        return main(json.loads(arguments[0]), int(arguments[1]), int(arguments[2]))
    for recipe in arguments[2:]:
        with contextlib.suppress(Exception):  # a worker will meet it again, and report it
            _import_all(Path(recipe))
    gc.freeze()  # workers neither look through these objects nor copy their pages
    fork_server(int(arguments[1]))
    return 0


if __name__ == "__main__":
    # Under its own name, so that jobs of other modules that import it find the same module.
    from hasten.measure import worker

    worker.started = started
    code = worker._program(sys.argv[1:])
    gc.freeze()  # else the interpreter looks for garbage among all modules, for more than a second
    sys.exit(code)
