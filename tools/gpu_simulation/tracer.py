"""Runs a step's operators on the simulated device, and counts the work for a GPU.

    with Tracer(device) as tracer:
        ...  # one step, to warm up
        tracer.clear()
        ...  # the step that counts
    tracer.counts

A tensor on the device is a FakeTensor. When the host reads a number from it, that is a
synchronisation. It is recorded with the line of hasten that caused it, and the result
is 1. Small tensors that came from the host keep their numbers on the device. Counts,
flags and sizes therefore stay correct.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import hasten
from gpu_simulation.operators import cost
from gpu_simulation.roofline import CallCost, SimulatedDevice
from hasten.core.timing import BACKWARD, BETWEEN, FORWARD, OPTIMIZER

KEPT_NUMBERS = 4096  # of a tensor whose values are known on the device
ALIGNMENT = 512  # bytes; the allocator's unit
PACKAGE = str(Path(hasten.__file__).parent)
EXCHANGED = frozenset(
    {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "alltoall_base_"}
)
# Operators whose result's size depends on numbers: the host waits for them.
SIZED_BY_NUMBERS = frozenset(
    {*("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount")}
    | {*("repeat_interleave", "equal", "is_nonzero", "argwhere")}
)
# One for the process: what libraries keep on the device from one session is met in the next.
FAKES = FakeTensorMode(allow_non_fake_inputs=True)
FAKES_LOCK = threading.RLock()  # it is for one thread at a time, and a feeder has another
Key = tuple[str, str, str]  # quantity, part of the step, name


class RankMessage(NamedTuple):
    """One kind of message between ranks."""

    operation: str
    device: str  # that it left from
    where: str


class Tracer(TorchDispatchMode):
    """Counts operators; ``clear`` restarts the counts and keeps the memory in use.

    Args:
        device: the device for which seconds are counted.
        documents: lengths of the documents in a packed micro-batch.
        others: further devices; the seconds of each are a quantity of its own.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        documents: Sequence[int] = (),
        others: Sequence[SimulatedDevice] = (),
    ) -> None:
        super().__init__()
        self.device = device
        self._clocks = [("seconds", device), *((seconds_on(other), other) for other in others)]
        self.documents = tuple(documents)
        self.live = self.peak = 0
        self.devices: set[str] = set()  # that tensors lay on
        self.messages: dict[RankMessage, int] = {}
        self.counts: dict[Key, float] = defaultdict(float)
        self._pending: dict[Key, float] = defaultdict(float)
        self._sizes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._inside = threading.local()
        self._lock = threading.RLock()  # a tensor may be freed while it is held

    def clear(self) -> None:
        """Forget what was counted."""
        self.counts.clear()
        self._pending.clear()
        self.messages.clear()
        self.peak = self.live

    def mark(self, part: str) -> None:
        """Assigns the counts outside passes since the last mark to this part of the step."""
        name = OPTIMIZER if part == OPTIMIZER else BETWEEN
        for (quantity, _, what), count in self._pending.items():
            self.counts[quantity, name, what] += count
        self._pending.clear()

    @contextlib.contextmanager
    def module_call(self) -> Iterator[None]:
        """Inside, a module's call runs on this thread."""
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            yield
        finally:
            self._inside.depth -= 1

    def synchronised(self, what: str) -> None:
        """The host waited for the device."""
        self._count("syncs", f"{_where()} {what}", 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = (Tensor, torch.nn.Parameter)
        if not all(kind in plain or issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor's operator comes again with its local tensors
        space, name = func._schema.name.split("::")
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fakes = [t for t in tensors if isinstance(t, FakeTensor)]
        if tensors and (space == "c10d" or space.startswith("_c10d_functional")):
            key = RankMessage(name, str(tensors[0].device), _where())
            size = sum(t.numel() * t.element_size() for t in tensors)
            self.messages[key] = self.messages.get(key, 0) + size
        device = kwargs.get("device")
        if not fakes and (device is None or torch.device(device).type != "cuda"):
            return func(*args, **kwargs)  # the host's own
        if name == "record_stream":
            return None  # of the allocator
        if space == "c10d":
            _exchange_numbers(func, name, args, kwargs, tensors)
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            self.synchronised("item")
            return _number(fakes[0])
        if self._leaves_device(name, args, kwargs):
            return self._to_host(name, args, kwargs)
        self._note_waiting(name, args, kwargs, fakes)
        out = self._run(func, name, args, kwargs)
        self._note(func, args, kwargs, out)
        return out

    # Running.

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The operator on fakes; on known numbers too, where all of its inputs have some."""
        numbers = _with_numbers(func, args, kwargs)
        # Fakes in the place of the host's tensors, or FakeTensorMode would compute with them.
        with FAKES_LOCK, FAKES:
            fake_arguments = tree_map_only(Tensor, _faked, (args, kwargs))
            if _has_unknown_size(name, args):
                out = tree_map_only(Tensor, partial(_like, args[0]), numbers)
                out = self._longest(name, args) if numbers is None else out
            else:
                out = func(*fake_arguments[0], **fake_arguments[1])
                if name.startswith("_scaled_dot_product") and "backward" not in name:
                    out = (_of_width(out[0], args[2].shape[-1]), *out[1:])
        if numbers is None:
            if func._schema.is_mutable:
                _forget(func, args)
            if name == "all" and isinstance(out, FakeTensor):
                out.holds = True  # who asks whether all numbers are good hears yes
            if name == "topk" and out[1].numel() <= KEPT_NUMBERS:
                # A router that loads its experts evenly: each row takes the next few in turn.
                turns = torch.arange(out[1].numel()) % args[0].shape[-1]
                out[1].known_numbers = turns.view(out[1].shape)
            return out
        for fake, number in zip(tree_leaves(out), tree_leaves(numbers), strict=False):
            if isinstance(fake, FakeTensor) and isinstance(number, Tensor):
                fake.known_numbers = number
        return out

    def _longest(self, name: str, args: Any) -> Tensor:
        """A result of unknown length, as long as it can be."""
        x = args[0]
        if name == "nonzero":
            return torch.empty(x.numel(), x.dim(), dtype=torch.int64, device=x.device)
        if name == "masked_select":
            return torch.empty(x.numel(), dtype=x.dtype, device=x.device)
        mask = args[1][0]  # of the first dimensions, as in x[mask]
        shape = (mask.numel(), *x.shape[mask.dim() :])
        return torch.empty(shape, dtype=x.dtype, device=x.device)

    def _leaves_device(self, name: str, args: Any, kwargs: Any) -> bool:
        if name == "copy_":
            return isinstance(args[1], FakeTensor) and not isinstance(args[0], FakeTensor)
        device = kwargs.get("device")
        return (
            name == "_to_copy"
            and isinstance(args[0], FakeTensor)
            and device is not None
            and torch.device(device).type == "cpu"
        )

    def _to_host(self, name: str, args: Any, kwargs: Any) -> Tensor:
        source = args[1] if name == "copy_" else args[0]
        numbers = numbers_of(source)
        if numbers is None:
            numbers = torch.ones(source.shape)
        asynchronous = _asks_not_to_wait(name, args, kwargs) and (
            name == "_to_copy" or args[0].is_pinned()
        )
        if not asynchronous:
            self.synchronised("to the host")
        self._count("copies", f"{_where()} to the host", 1)
        if name == "copy_":
            result: Tensor = args[0].copy_(numbers)
            return result
        return numbers.to(kwargs.get("dtype") or source.dtype, copy=True)

    # Counting.

    def _note_waiting(self, name: str, args: Any, kwargs: Any, fakes: list[Any]) -> None:
        """Counts copies from the host, and operators with a result size that the host needs."""
        if name in SIZED_BY_NUMBERS and not kwargs.get("output_size"):
            self.synchronised(name)
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = (i for i in args[1] if i is not None)
            masked = any(i.dtype in (torch.bool, torch.uint8) for i in indices)
            if masked and not (len(args) > 2 and args[2].numel() == 1 and args[2].is_cpu):
                self.synchronised("index by a mask")  # but for one number, which is masked_fill
        source = args[1] if name == "copy_" else args[0] if name == "_to_copy" else None
        if source is None or isinstance(source, FakeTensor):
            return
        self._count("copies", f"{_where()} from the host", 1)
        if not _asks_not_to_wait(name, args, kwargs):
            self.synchronised("from the host, blocking")
        elif not source.is_pinned():
            self._count("pageable", f"{_where()} from pageable memory", 1)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._allocated(tensor)
        name = func._schema.name.split("::")[1]
        call_cost: CallCost = cost(func, args, kwargs, out, self.documents)
        if not call_cost.launches:
            self._count("views", "", 1)
            return
        self._count("calls", name, 1)
        self._count("launches", name, call_cost.launches)
        self._count("bytes", name, call_cost.bytes)
        self._count("flops", name, call_cost.flops)
        for quantity, device in self._clocks:
            self._count(quantity, name, device.seconds(call_cost))

    def _count(self, quantity: str, name: str, count: float) -> None:
        with self._lock:  # the backward pass has its own thread
            if torch._C._current_graph_task_id() != -1:
                self.counts[quantity, BACKWARD, name] += count
            elif getattr(self._inside, "depth", 0):
                self.counts[quantity, FORWARD, name] += count
            else:
                self._pending[quantity, "", name] += count

    # Memory.

    def _allocated(self, tensor: FakeTensor) -> None:
        if tensor.fake_device.type != "cuda":
            return
        self.devices.add(str(tensor.fake_device))
        storage = tensor.untyped_storage()
        with self._lock:
            if storage in self._sizes:
                return
            size = self._sizes[storage] = [0]
        weakref.finalize(storage, self._freed, size).atexit = False
        self.resized(storage)

    def resized(self, storage: Any) -> None:
        """A storage is larger or smaller than before; FSDP2 frees whole weights in this way."""
        with self._lock:
            size = self._sizes.get(storage)
            if size is not None:
                now = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
                self.live += now - size[0]
                size[0] = now
                self.peak = max(self.peak, self.live)

    def _freed(self, size: list[int]) -> None:
        with self._lock:
            self.live -= size[0]


def _faked(tensor: Tensor) -> Tensor:
    """The tensor itself, or an empty tensor with the layout of a host tensor."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def seconds_on(device: SimulatedDevice) -> str:
    """Name of the quantity that holds the seconds of an additional device."""
    return f"seconds on {device.name}"


def _has_unknown_size(name: str, args: Any) -> bool:
    if name in ("nonzero", "masked_select"):
        return True
    return (
        name == "index"
        and args[1][0] is not None
        and args[1][0].dtype is torch.bool
        and all(index is None for index in args[1][1:])
    )


def _like(x: Tensor, numbers: Tensor) -> Tensor:
    """An empty tensor on the device of ``x``, with the layout of ``numbers``."""
    return torch.empty_strided(
        numbers.shape, numbers.stride(), dtype=numbers.dtype, device=x.device
    )


def _where() -> str:
    """The innermost line of the package that led here."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _of_width(attended: Tensor, width: int) -> Tensor:
    """Attention's output as wide as the values, also where the kernel's fake takes the query's."""
    return (
        attended if attended.shape[-1] == width else attended.new_empty(*attended.shape[:-1], width)
    )


def _asks_not_to_wait(name: str, args: Any, kwargs: Any) -> bool:
    if name == "copy_":
        return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    return bool(kwargs.get("non_blocking"))


# Numbers that are known on the device. Beside a fake lie its numbers on the host; a view of the one
# is a view of the other, so that what is written in place is seen through all views.

_stale: weakref.WeakSet[Any] = weakref.WeakSet()  # storages on the host with outdated numbers


def numbers_of(tensor: FakeTensor) -> Tensor | None:
    """The numbers of a tensor on the device; None where they aren't known."""
    numbers: Tensor | None = getattr(tensor, "known_numbers", None)
    return None if numbers is None or numbers.untyped_storage() in _stale else numbers


def _number(tensor: FakeTensor) -> Any:
    """The value that the host receives: the known number, else 1; flags report success."""
    numbers = numbers_of(tensor)
    if numbers is not None:
        return numbers.item()
    if tensor.dtype is torch.bool:
        return getattr(tensor, "holds", False)
    return 1.0 if tensor.is_floating_point() else 1


def _with_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """The operator on the numbers of its inputs; None where it can't be known or they are many."""
    if not func._schema.name.startswith("aten::") or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if any(t.numel() > KEPT_NUMBERS for t in inputs):
        return None
    if any(isinstance(t, FakeTensor) and numbers_of(t) is None for t in inputs):
        return None
    if not inputs:  # a new tensor, whose size the meta device tells
        made = func(*args, **{**kwargs, "device": torch.device("meta")})
        if not isinstance(made, Tensor) or made.numel() > KEPT_NUMBERS:
            return None
    on_host = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
    args, kwargs = tree_map_only(FakeTensor, numbers_of, (args, on_host))
    try:
        out = func(*args, **kwargs)
    except NotImplementedError:  # a GPU counts integers (histc), a processor doesn't
        wide = tree_map_only(Tensor, lambda t: t.double(), (args, kwargs))
        out = func(*wide[0], **wide[1]).to(args[0].dtype)
    if "empty" in func._schema.name:
        out.zero_()  # not what happened to lie there: a trace says the same each time
    return out


def _forget(func: Any, args: Any) -> None:
    """Marks the numbers of written tensors as unknown, in all of their views."""
    written = [a for a, s in zip(args, func._schema.arguments, strict=False) if s.is_write]
    for tensor in tree_leaves(written):
        _forget_one(tensor)


def _forget_one(tensor: Any) -> None:
    numbers = getattr(tensor, "known_numbers", None)
    if numbers is not None:
        _stale.add(numbers.untyped_storage())


def _exchange_numbers(func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
    """Send numbers that all ranks know by way of the host; where one doesn't, none is known after.

    Every rank of the group comes here with tensors of the same sizes.
    """
    if name not in EXCHANGED or any(t.numel() > KEPT_NUMBERS for t in tensors):
        for tensor in tensors:
            _forget_one(tensor)
        return
    import torch.distributed as dist

    numbers = [numbers_of(t) if isinstance(t, FakeTensor) else t for t in tensors]
    group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
    all_present = torch.tensor([float(all(n is not None for n in numbers))])
    least = dist.AllreduceOptions()
    least.reduceOp = dist.ReduceOp.MIN
    group.allreduce([all_present], least).wait()
    if not all_present.item():
        for tensor in tensors:
            _forget_one(tensor)
        return
    sent = func(*tree_map_only(FakeTensor, numbers_of, args), **kwargs)
    work = sent[-1] if isinstance(sent, tuple) else sent
    dist.Work.unbox(work).wait()
