"""A profile of a run: its ledger, its operators and a trace, from discarded steps.

    1. Warm-up steps, which compile, allocate and read ahead.
    2. Measured steps, with only the clock of the session: times, stability, MFU, data
       stall.
    3. Memory by owner, in a separate pass.
    4. One step under torch.profiler: operators and trace. The profiler slows the step,
       so only the operators' shares are used.
    5. With several ranks: the measured examples again, on all ranks without
       communication. Then the same on one rank alone while the others sleep.

The weights change, and in 5 each rank changes its own copy. The session can't be used
afterwards.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from hasten.core.job import MicroBatch
from hasten.core.layout import NoCompression, OneProcess
from hasten.core.setup import Progress, Session, leave_model
from hasten.core.step import PlainEngine, step_outside, training
from hasten.core.timing import (
    BETWEEN,
    CHECKPOINT,
    DeviceClock,
    HostClock,
    NoPhaseTimer,
    StepMetrics,
    clock_on,
    data_stall,
    seconds_by_part,
    step_stability,
    step_total,
)
from hasten.errors import InputError
from hasten.machine import host
from hasten.parts.comm.groups import gathered_objects

# Operators of a profiled step by own time, sorted into families that a person can act on.
#
# A name decides the family, the first pattern that matches wins. Own time is what an operator spent
# outside the operators it called, so families add up. Kernels of hasten's own are called from
# functions of autograd and are found under those functions' names.

OTHER = "other"
FAMILIES: tuple[tuple[str, str], ...] = (
    ("communication", r"c10d|gloo|nccl|all_?reduce|all_?gather|reduce_scatter|all_?to_?all"),
    ("communication", r"broadcast_|barrier"),
    ("optimizer", r"Optimizer|adam|sgd|muon|lerp|addcmul|addcdiv|_foreach"),
    ("loss and head", r"log_?softmax|nll_?loss|cross_?entropy|logsumexp"),
    ("attention", r"attention|attend|flash|sdpa|softmax"),
    ("products", r"(^|[^a-z])(add|b|addb|ba)?mm_?\b|_mm\b|gemm|matmul|grouped_mm|MmBackward"),
    ("products", r"linear|addmv|::mv|::dot|product|experts|joined|einsum|mkldnn|cutlass|xmma"),
    ("copies", r"copy|::to\b|clone|contiguous|::cat\b|memcpy|memset|::empty|::zero|::fill"),
    ("copies", r"index|gather|scatter|embedding|::stack|select_backward|slice_backward|::sort"),
    ("copies", r"pin_memory|::new_|repeat|::pad|resize"),
    ("norm and elementwise", r"norm|swiglu|silu|gelu|relu|sigmoid|rotate|rotary|dropout|tanh"),
    ("norm and elementwise", r"::(mul|add|sub|div|neg|pow|rsqrt|sqrt|exp|log|sin|cos)_?\b"),
    ("norm and elementwise", r"::(mean|sum|where|masked\w*|eq|ne|lt|le|gt|ge|bitwise\w*)_?\b"),
    ("norm and elementwise", r"::(clamp\w*|cumsum|max|min|abs)_?\b|elementwise|reduce_kernel"),
    ("norm and elementwise", r"(Mul|Add|Sub|Div|Neg)Backward"),
)
_COMPILED = [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern in FAMILIES]


@dataclass(frozen=True)
class ProfiledOperator:
    """One row of the profiler: own seconds of all its calls on the device that did the work."""

    name: str
    seconds: float
    calls: int

    @property
    def family(self) -> str:
        return family_of(self.name)


def family_of(name: str) -> str:
    """The family that an operator's, function's or kernel's name puts it into."""
    return next((family for family, pattern in _COMPILED if pattern.search(name)), OTHER)


def operators(averages: Iterable[Any], on_gpu: bool) -> list[ProfiledOperator]:
    """The profiler's averages as rows with time, the longest first.

    On a GPU these are its kernels; a step there waits for them and not for the host's operators.
    """
    rows = []
    for event in averages:
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if spent > 0 and not event.key.startswith("ProfilerStep"):
            rows.append(ProfiledOperator(str(event.key), spent / 1e6, int(event.count)))
    return sorted(rows, key=lambda row: -row.seconds)


def table(rows: list[ProfiledOperator], step_seconds: float, count: int = 15) -> dict[str, Any]:
    """Families and the longest operators with their shares of all operators' own time.

    ``outside_seconds`` is the part of the profiled step in which no operator ran: Python, waiting,
    and code that the profiler doesn't see; None where several threads or streams overlapped.
    """
    total = sum(row.seconds for row in rows)
    families: dict[str, dict[str, Any]] = {}
    for row in rows:
        family = families.setdefault(row.family, {"family": row.family, "seconds": 0.0, "calls": 0})
        family["seconds"] += row.seconds
        family["calls"] += row.calls
        family["share"] = family["seconds"] / total
    outside = step_seconds - total
    return {
        "seconds": total,
        "outside_seconds": outside if outside >= 0 else None,
        "families": sorted(families.values(), key=lambda row: -row["seconds"]),
        "top": [
            {**asdict(row), "family": row.family, "share": row.seconds / total}
            for row in rows[:count]
        ],
    }


# The trace of a profiled step: Chrome's trace format, compressed, of bounded size.
#
# ``trace.json.gz`` opens in https://ui.perfetto.dev or chrome://tracing. A step with very many
# operators keeps its longest events; how many were left out is said in the profile.

NAME = "trace.json.gz"
MOST_EVENTS = 100_000  # some 2 MB compressed; a viewer in the browser stays quick


def keep_trace(export: Callable[[str], object], folder: Path) -> dict[str, Any]:
    """Let the profiler ``export``, cut what it wrote to size, and put it into ``folder``.

    The file appears complete or not at all; an earlier one is replaced.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".trace-") as temp_dir:
        raw = Path(temp_dir) / "raw.json"
        export(str(raw))
        trace = json.loads(raw.read_bytes())
        events = longest(trace["traceEvents"], MOST_EVENTS)
        dropped = len(trace["traceEvents"]) - len(events)
        part = Path(temp_dir) / NAME
        with gzip.open(part, "wt", encoding="utf-8") as file:
            json.dump({**trace, "traceEvents": events}, file)
        part.replace(folder / NAME)
    return {"file": NAME, "events": len(events), "left_out": dropped}


def longest(events: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The longest ``most`` events with a duration in their order; all names of rows are kept."""
    if len(events) <= most:
        return events
    timed = [event for event in events if event.get("ph") == "X"]
    timed.sort(key=lambda event: -event.get("dur", 0.0))
    selected = {id(event) for event in timed[:most]}
    return [event for event in events if event.get("ph") == "M" or id(event) in selected]


# Memory by owner: whose bytes they are, counted from tensors in one pass outside the training.
#
#     weights       parameters and buffers of the model as they are in memory
#     gradients     what a backward pass leaves, before it is forgotten
#     optimizer     the optimizer's state, and true weights that it keeps beside the model's
#     activations   what forward keeps for backward, vocabulary-wide tensors left out
#     logits        the largest vocabulary-wide tensor that existed
#     other         the run's peak less all of these: temporary tensors, communication buffers,
#                   fragments; on a processor also Python, its libraries, and the data
#
# Each storage counts once, however many tensors look at it, and of a sharded tensor the part that
# lies here. The pass runs the largest micro-batch of the epoch's first step; its gradients are
# forgotten and no weight moves. Other steps may be larger: compare ``other`` only within one job.

OWNERS = ("weights", "gradients", "optimizer", "activations", "logits", "other")
Storages = dict[int, int]  # address -> bytes


def memory_of(session: Session) -> dict[str, int | None]:
    """Bytes of each owner on this rank, None if unknown; all ranks call it together."""
    setup = session.setup
    peak = host.memory_peak(setup.job.device)  # before the pass below
    weights = storages([*session.module.parameters(), *session.module.buffers()])
    masters = storages(setup.precision.parameters())
    state = masters | storages(_tensors(list(session.optimizer.state.values())))
    owner_bytes: dict[str, int | None] = dict.fromkeys(OWNERS)
    owner_bytes["weights"] = sum(weights.values())
    owner_bytes["optimizer"] = sum(_without(state, weights).values())
    micro_batches = step_outside(session)
    if micro_batches is None:
        return owner_bytes
    largest = max(micro_batches, key=lambda m: m.counts.positions)
    try:
        owner_bytes |= _one_pass(session, largest, weights)
    except (RuntimeError, MemoryError):
        # Too large, or an operator that can't be watched: what was measured before stays good. On
        # several ranks the others wait in this pass, so there the run has to end.
        if setup.layout.size > 1:
            raise
        return owner_bytes
    sizes = [owner_bytes[owner] or 0 for owner in OWNERS]
    owner_bytes["other"] = peak - sum(sizes) if peak >= sum(sizes) else None
    return owner_bytes


def storages(tensors: Iterable[Tensor]) -> Storages:
    """The memory behind tensors, each piece once."""
    sizes = {}
    for tensor in tensors:
        for shard in _local(tensor):
            storage = shard.untyped_storage()
            if storage.data_ptr():  # nothing lies behind a tensor without memory
                sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def _one_pass(session: Session, micro_batch: MicroBatch, weights: Storages) -> dict[str, int]:
    setup = session.setup
    device, clock = torch.device(setup.job.device), setup.clock
    gpus = [] if device.type == "cpu" else [device.index or 0]
    watch = SavedTensors(setup.context.model.vocabulary)
    wide = WidestTensor(setup.context.model.vocabulary, weights)
    # Compiled code doesn't run under a mode: the pass would measure another program.
    watched = setup.compile is leave_model and setup.context.model.vocabulary > 0
    setup.clock = NoPhaseTimer()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(gpus, device_type=device.type))
            stack.enter_context(watch.watching())
            if watched:
                stack.enter_context(wide)
            session.engine.gradients((micro_batch,), max(micro_batch.counts.units, 1))
        owners = [*session.module.parameters(), *setup.precision.parameters()]
        gradients = storages([p.grad for p in owners if p.grad is not None])
    finally:
        session.engine.zero_grad()
        setup.clock = clock
    owner_bytes = {
        "gradients": sum(_without(gradients, weights).values()),
        "activations": sum(_without(watch.storages, weights).values()),
    }
    return {**owner_bytes, "logits": wide.bytes} if watched else owner_bytes


class SavedTensors:
    """Storages that autograd keeps while it is watched; those as wide as the vocabulary apart."""

    def __init__(self, vocabulary: int = 0) -> None:
        self.storages: Storages = {}
        self._vocabulary = vocabulary

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        if not (self._vocabulary and _is_wide(tensor, self._vocabulary)):
            self.storages |= storages([tensor])
        return tensor.detach()  # an output that held itself would never be freed


class WidestTensor(TorchDispatchMode):
    """Bytes of the largest operator result that has rows of the vocabulary's length."""

    def __init__(self, vocabulary: int, weights: Storages) -> None:
        super().__init__()
        self.bytes = 0
        self._vocabulary, self._weights = vocabulary, weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _is_wide(leaf, self._vocabulary):
                behind = storages([leaf])
                if not behind.keys() & self._weights.keys():
                    self.bytes = max(self.bytes, sum(behind.values()))
        return out


def _is_wide(tensor: Tensor, vocabulary: int) -> bool:
    """Rows of scores; a head's transposed weight or gradient has them in its columns' place."""
    return tensor.dim() > 1 and int(tensor.shape[-1]) == vocabulary and tensor.is_contiguous()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _local(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a sharded or quantised one is made of, as far as they lie here."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a mesh of ranks may be named among them
                yield from _local(inner)
    else:
        yield tensor


def _without(sizes: Storages, others: Storages) -> Storages:
    return {address: size for address, size in sizes.items() if address not in others}


# The ledger of a run: where a step's time goes, whose the memory is, how even the steps are.
#
# Times come from the clock at the step's seams (:mod:`hasten.core.timing`), which a run has to
# start with; without one nothing was counted and every time is None. Memory takes one pass of its
# own, outside the training: ask for the ledger when the run's last step is done and its techniques
# have been asked what they did.

WARMUP = 2  # first steps: they compile, allocate and read what later ones find ready


def ledger_of(session: Session, warmup: int = WARMUP) -> dict[str, Any]:
    """The keys of a variant's ``ledger`` in the report. All ranks call it together.

    Args:
        warmup: steps to leave out at the beginning, as long as others remain.
    """
    setup = session.setup
    every = list(setup.clock.steps)
    steps = every[warmup:] or every
    return {
        "step": seconds_by_part(steps, session.has_checkpoints),
        "memory": memory_of(session),
        "stability": step_stability([step_total(step) for step in steps]),
        "utilisation": utilisation(session, warmup),
    }


def utilisation(session: Session, warmup: int = WARMUP) -> float | None:
    """Share of the device's time in use: of all usable cores, or by the GPU's driver.

    On a processor it counts this process with all its threads. A thread in a busy wait
    counts as busy. Fast code and much waiting may therefore have the same figure.
    """
    clock = session.setup.clock
    if not isinstance(clock, HostClock):
        return host.device_utilisation(session.setup.job.device)
    keep = warmup if len(clock.steps) > warmup else 0
    total = sum(step_total(step) for step in list(clock.steps)[keep:])
    return sum(list(clock.busy)[keep:]) / total / host.usable_cores() if total else None


# The profile.

Tell = Callable[[str, float], None]
CANT_RUN_ALONE = "not measured: with this layout no rank can run its passes alone"


def steps_needed(warmup: int, steps: int) -> int:
    """Steps that the job has to allow: those of the warm-up, the measured, the profiled one."""
    return warmup + steps + 1


def measure(
    session: Session,
    warmup: int,
    steps: int,
    folder: Path,
    tell: Tell = lambda text, share: None,
) -> dict[str, Any]:
    """Profile a fresh session; the measured part of ``profile.json``. All ranks call it together.

    The first rank writes its trace into ``folder``.

    Raises:
        InputError: the job ends before all steps are done.
    """
    clock = session.setup.clock = clock_on(session.setup.job.device)
    run: Any = training(session)
    tell(f"{warmup} steps to warm up", 0.0)
    _take(run, warmup)
    before = replace(session.progress)
    tell(f"measuring {steps} steps", 0.2)
    measured = _take(run, steps)
    recorded_laps = clock.laps if isinstance(clock, HostClock | DeviceClock) else []
    laps = [lap for lap in recorded_laps if lap[0] not in (BETWEEN, CHECKPOINT)]
    counted = list(clock.steps)[-steps:]
    tell("counting memory", 0.5)
    ledger = ledger_of(session, warmup)
    tell("profiling one step", 0.6)
    device = session.setup.job.device
    on_gpu = device.startswith("cuda")
    wanted = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    began = time.perf_counter()
    with torch.profiler.profile(activities=wanted) as profiler:
        _take(run, 1)
        if on_gpu:
            torch.accelerator.synchronize(device)  # its last kernels belong to the step
        seconds = time.perf_counter() - began
    rows = operators(profiler.key_averages(), on_gpu)
    report = {"profiled_step_seconds": seconds, **table(rows, seconds)}
    if session.setup.context.world.is_main:
        report["trace"] = keep_trace(profiler.export_chrome_trace, folder)
    run.close()  # a feed that reads ahead ends with it
    ranks = gathered_objects(
        {
            "rank": session.setup.context.world.rank,
            "seconds": sum(m.step_seconds for m in measured),
            "data_stall_share": data_stall(counted),
            "step": seconds_by_part(counted, session.has_checkpoints),
            "communication": communication_of(measured),
        }
    )
    return {
        **_figures(measured),
        "data_stall_share": data_stall(counted),
        "ledger": ledger,
        "laps": laps,
        "operators": report,
        "ranks": ranks,
        "parallel": _parallel(session, before, measured, ranks, tell),
    }


def _take(run: Any, count: int) -> list[StepMetrics]:
    metrics = list(islice(run, count))
    if len(metrics) < count:
        raise InputError(
            f"the data ends {count - len(metrics)} steps too early for a profile; give fewer "
            "--steps, or more examples"
        )
    return metrics


def _figures(measured: Sequence[StepMetrics]) -> dict[str, Any]:
    seconds = sum(m.step_seconds for m in measured)
    mfus = [m.mfu for m in measured if m.mfu is not None]
    return {
        "measured_steps": len(measured),
        "step_seconds": statistics.median(m.step_seconds for m in measured),
        "tokens_per_second": sum(m.tokens for m in measured) / seconds,
        "padding_share": 1 - sum(m.tokens for m in measured) / sum(m.positions for m in measured),
        "mfu": statistics.median(mfus) if mfus else None,
        "peak_memory_bytes": max(m.peak_memory_bytes for m in measured),
    }


def communication_of(measured: Sequence[StepMetrics]) -> dict[str, float] | None:
    """Mean communication of this rank per step; None if the layout doesn't measure it."""
    timed_steps = [m for m in measured if m.exposed_comm_seconds is not None]
    if not timed_steps:
        return None
    names = ("comm_seconds", "exposed_comm_seconds", "hidden_communication_seconds")
    means: dict[str, float] = {}
    for name in (*names, "comm_bytes"):
        values = [getattr(m, name) for m in timed_steps]
        if all(value is not None for value in values):
            means[name] = statistics.fmean(values)
    return means


def _parallel(
    session: Session,
    before: Progress,
    measured: Sequence[StepMetrics],
    ranks: Sequence[dict[str, Any]],
    tell: Tell,
) -> dict[str, Any] | None:
    layout, engine, setup = session.setup.layout, session.engine, session.setup
    if layout.size == 1:
        return None
    if not layout.replicated or not isinstance(engine, PlainEngine):
        return {"ranks": layout.size, "text": CANT_RUN_ALONE}
    engine.module = layout.alone(session.module)
    setup.layout, setup.communication = OneProcess(), NoCompression()
    engine.sum_loads = setup.rank_sync.sum
    tell("the same examples without communication", 0.7)
    dist.barrier()
    without_comm = gathered_objects(_again(session, before, len(measured)))
    tell("one rank alone", 0.85)
    alone = _again(session, before, len(measured)) if setup.context.world.is_main else None
    dist.barrier()  # the others sleep in it
    alone = gathered_objects(alone)[0]
    return efficiency(
        tokens=sum(m.tokens for m in measured),
        seconds=max(rank["seconds"] for rank in ranks),
        without_comm=without_comm,
        alone=alone,
        steps=len(measured),
    )


def efficiency_once_more(
    session: Session, before: Progress, measured: Sequence[StepMetrics]
) -> float | None:
    """Parallel efficiency against one rank, over the examples of steps that were just measured.

    The session is afterwards what it was, but for the optimizer's moments: end its training. None
    on one rank, and where no rank can run its passes alone. All ranks call it together.
    """
    setup, engine = session.setup, session.engine
    if setup.layout.size == 1 or setup.rank_sync.diverged or not isinstance(engine, PlainEngine):
        return None
    ranks = gathered_objects({"seconds": sum(m.step_seconds for m in measured)})
    module, sum_loads, progress = engine.module, engine.sum_loads, session.progress
    layout, communication = setup.layout, setup.communication
    buffers = {name: buffer.clone() for name, buffer in session.loss_module.named_buffers()}
    with engine.holding_still():
        report = _parallel(session, before, measured, ranks, lambda text, share: None)
    engine.module, engine.sum_loads, session.progress = module, sum_loads, progress
    setup.layout, setup.communication = layout, communication
    for name, buffer in session.loss_module.named_buffers():  # those of routers move without a rate
        buffer.copy_(buffers[name])
    value = (report or {}).get("efficiency_against_one_rank")
    return None if value is None else float(value)


def efficiency(
    tokens: int,
    seconds: float,
    without_comm: Sequence[tuple[int, float]],
    alone: tuple[int, float],
    steps: int,
) -> dict[str, Any]:
    """Two efficiencies of the ranks' communication, from (tokens, seconds) of each run.

    Relative to one rank: its tokens per second alone on the machine x the number of ranks.
    Cores and memory that ranks share therefore count as a loss.

    Relative to no communication: all ranks at once, by the slowest rank's time. Uneven
    ranks count in both runs, and only communication is the difference.
    """
    ranks, slowest = len(without_comm), max(spent for _, spent in without_comm)
    one = alone[0] / alone[1]
    return {
        "ranks": ranks,
        "tokens_per_second": tokens / seconds,
        "one_rank_tokens_per_second": one,
        "efficiency_against_one_rank": tokens / seconds / (ranks * one),
        "without_communication_tokens_per_second": tokens / slowest,
        "efficiency_against_no_communication": slowest / seconds,
        "communication_seconds": max(seconds - slowest, 0.0) / steps,
    }


def _again(session: Session, before: Progress, steps: int) -> tuple[int, float]:
    """(tokens, seconds) of this rank's own passes over the same examples once more."""
    session.progress = replace(before)
    run: Any = training(session)
    metrics = _take(run, steps)
    run.close()
    return sum(m.tokens for m in metrics), sum(m.step_seconds for m in metrics)
