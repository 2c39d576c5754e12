"""Recomputation: backward computes a model's blocks again instead of storing activations.

A block stores every tensor that its backward pass will read. With recomputation it
stores only its input. The other tensors are computed again, block by block, when
backward needs them. Sources: Chen et al., Training Deep Nets with Sublinear Memory
Cost, arXiv:1604.06174; ``torch.utils.checkpoint`` without reentrance. Random state is
restored for the second pass, so dropout uses the same positions and gradients keep
their bits. The choices are:

- every block (the default): one input per block stays.
- ``segments=k``: k segments of consecutive blocks; one input per segment is stored. The
  last segment is stored fully, as ``torch.utils.checkpoint.checkpoint_sequential`` does.
- ``budget=b``: as few blocks as needed to store at most the share ``b`` of the blocks'
  bytes, which the first pass measures. These are the first blocks, because backward
  reaches them last, when the memory of the others is free again.
- ``offload=True``: no block. Stored tensors move to the host and return for backward.

Forwards are bound to the blocks of this one model (:mod:`hasten.parts.nn.rebind`).
``remove()`` removes them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import checkpoint_sequential as torch_checkpoint_sequential

from hasten.errors import require_whole
from hasten.parts.nn import rebind
from hasten.parts.nn.causal_lm import holds_cache, is_cache

Forward = Callable[..., Any]


def decoder_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the list of modules of one class with the most parameters: the model's layers.

    In a model without such a list, children of one class that are attributes (``block1``,
    ``block2``) are used.

    Raises:
        ValueError: no two neighbouring modules are of one class.
    """
    lists = [
        list(candidate)
        for candidate in module.modules()
        if isinstance(candidate, nn.ModuleList | nn.Sequential)
        and len(candidate) > 1
        and len({type(member) for member in candidate}) == 1
    ]
    lists = lists or [
        alike for candidate in module.modules() for alike in _alike_children(candidate)
    ]
    if not lists:
        raise ValueError(
            "the model has no two neighbouring blocks of one class, so none can be recomputed; "
            "name them with blocks=, or leave recomputation out"
        )
    return max(lists, key=lambda members: sum(_parameters(m) for m in members))


def _alike_children(module: nn.Module) -> list[list[nn.Module]]:
    """Returns lists of direct children of one class, for classes with two or more of them."""
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return []
    kinds: dict[type[nn.Module], list[nn.Module]] = {}
    for child in module.children():
        if _parameters(child):
            kinds.setdefault(type(child), []).append(child)
    return [members for members in kinds.values() if len(members) > 1]


def _named_blocks(names: tuple[str, ...], module: nn.Module) -> list[nn.Module]:
    """Returns the modules of these names.

    Raises:
        ValueError: the model has no module of a name.
    """
    modules = dict(module.named_modules())
    wrong = [name for name in names if name not in modules]
    if wrong or not names:
        children = ", ".join(name for name, _ in module.named_children())
        raise ValueError(
            f"blocks has {wrong[0] if wrong else 'no name'!r}, which this model has no module for; "
            f"its children are {children}"
        )
    return [modules[name] for name in names]


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Forward],
    segments: int,
    input: Any,
    use_reentrant: bool = False,
    *,
    preserve_rng_state: bool = True,
) -> Any:
    """Runs ``torch.utils.checkpoint.checkpoint_sequential`` without reentrance.

    With reentrance, and data as the input, only the last segment's layers get gradients.

    Raises:
        ValueError: ``use_reentrant`` is True, or there are fewer functions than segments.
    """
    require_whole(segments=segments)
    if not 1 <= segments <= len(functions):
        raise ValueError(
            f"segments is {segments}; give at least 1, and at most one for each of the "
            f"{len(functions)} functions"
        )
    if use_reentrant:
        raise ValueError(
            "use_reentrant=True leaves most layers without a gradient where the input is data; "
            "leave it out, or take torch.utils.checkpoint.checkpoint_sequential"
        )
    return torch_checkpoint_sequential(
        functions, segments, input, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )


class BlockRecompute:
    """Recomputes a model's blocks; a call with the model installs it.

    ``blocks`` are names of modules of the model, in their order. They replace those of
    :func:`decoder_blocks`.
    """

    def __init__(
        self,
        segments: int | None = None,
        budget: float | None = None,
        offload: bool = False,
        blocks: Sequence[str] | None = None,
    ) -> None:
        if sum((segments is not None, budget is not None, offload)) > 1:
            raise ValueError("give segments, budget or offload, one of them at most")
        if segments is not None and segments < 2:
            raise ValueError(f"segments is {segments}; give at least 2, since the last is kept")
        if budget is not None and not 0 <= budget <= 1:
            raise ValueError(f"budget is {budget}; it is a share, from 0 to 1")
        self.segments, self.budget, self.offload = segments, budget, offload
        # Finds the blocks; replaced on ranks that have only some of the layers.
        self.among: Callable[[nn.Module], list[nn.Module]] = decoder_blocks
        if blocks is not None:
            self.among = partial(_named_blocks, tuple(blocks))
        self.blocks: list[nn.Module] = []
        self.passes = 0  # number of blocks' passes that were recomputed or offloaded
        self.recomputed: set[int] = set()  # recomputed blocks (or first blocks of segments)
        self._measured: dict[int, tuple[int, int]] = {}  # bytes by block: (stored, recomputed)
        self._held: list[Tensor] | None = None  # stored inputs, during a measurement
        self.resting = False  # True: recomputation is off
        self._open: tuple[dict[str, Any], Any] | None = None  # (arguments, output) of a segment

    def __call__(self, module: nn.Module) -> None:
        """Binds recomputation to the module's blocks.

        Raises:
            ValueError: there is no block, or there are fewer blocks than segments.
        """
        self.blocks = self.among(module)
        count = len(self.blocks)
        if self.segments is not None and self.segments > count:
            raise ValueError(f"segments is {self.segments}, but the model has {count} blocks")
        size = count // self.segments if self.segments else 1
        regions = self.segments - 1 if self.segments else count
        self.recomputed = {region * size for region in range(regions)}
        for position, block in enumerate(self.blocks):
            inside = position < regions * size
            segment = (
                _SegmentPosition(self, position - position % size, position, size)
                if inside
                else None
            )
            rebind.bind(block, _recomputed, segment)

    def remove(self) -> None:
        """Restores the blocks' own forwards."""
        for block in self.blocks:
            rebind.unbind(block, _recomputed)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy of the model, without data of a pass."""
        return {**vars(self), "_open": None, "_held": None}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Turns recomputation off inside."""
        before, self.resting = self.resting, True
        try:
            yield
        finally:
            self.resting = before

    def saved_bytes(self, forward: Callable[[], Any], without: nn.Module) -> int:
        """Returns the bytes that a forward pass stores for its backward pass.

        Every storage counts once; those of ``without``'s parameters aren't counted.
        """
        self._held = []
        try:
            return saved_bytes(forward, without, extra=self._held)
        finally:
            self._held = None

    def first(
        self, segment: _SegmentPosition, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs all blocks of a segment, in the call of the first one."""
        if self.resting or not torch.is_grad_enabled():
            self._open = None
            return self._usual(segment.position)(*args, **kwargs)
        kwargs = _without_cache(kwargs)
        output = self._region(segment.start, segment.size, args, kwargs)
        self._open = (kwargs, output) if segment.size > 1 else None
        return output

    def through(
        self, segment: _SegmentPosition, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the segment's output unchanged, in the calls of the other blocks."""
        if self._open is None:
            return self._usual(segment.position)(*args, **kwargs)
        named, output = self._open
        kwargs = _without_cache(kwargs)
        same = named.keys() == kwargs.keys() and all(named[k] is kwargs[k] for k in named)
        if len(args) != 1 or args[0] is not output or not same:
            raise ValueError(
                "this model doesn't call its blocks one after the other with the same arguments, "
                "so they can't be recomputed in segments; leave segments out"
            )
        if segment.position == segment.start + segment.size - 1:
            self._open = None
        return output

    def _usual(self, position: int) -> Forward:
        return rebind.usual_of(self.blocks[position], _recomputed)

    def _region(self, start: int, size: int, args: Any, kwargs: dict[str, Any]) -> Any:
        def run(hidden: Any, *more: Any, **named: Any) -> Any:
            for position in range(start, start + size):
                hidden = self._usual(position)(hidden, *more, **named)
            return hidden

        if self.offload:
            self.passes += 1
            pinned = isinstance(args[0], Tensor) and args[0].device.type != "cpu"
            with save_on_cpu(pin_memory=pinned, device_type=args[0].device.type):
                return run(*args, **kwargs)
        if self.budget is not None and len(self._measured) < len(self.blocks):
            self._measure(start, run, args, kwargs)
        elif start not in self.recomputed:
            return run(*args, **kwargs)
        self.passes += 1
        if self._held is not None:
            self._held += [a for a in args if isinstance(a, Tensor)]
        return checkpoint(_mark_first_pass(run), *args, use_reentrant=False, **kwargs)

    def _measure(self, start: int, run: Forward, args: Any, kwargs: dict[str, Any]) -> None:
        """Measures the bytes that this block would store, in a pass without side effects."""
        hidden = args[0]
        devices, kind = [hidden.device], hidden.device.type
        if kind == "cpu":
            devices, kind = [], "cuda"  # fork_rng needs a device type
        shared = [v for v in _tensors(list(kwargs.values())) if v is not hidden]
        with torch.random.fork_rng(devices=devices, device_type=kind):
            stored_bytes = saved_bytes(
                lambda: run(*args, **kwargs), self.blocks[start], aside=shared
            )
        self._measured[start] = (stored_bytes, hidden.untyped_storage().nbytes())
        if len(self._measured) == len(self.blocks):
            assert self.budget is not None
            self.recomputed = blocks_to_recompute(list(self._measured.values()), self.budget)


class _SegmentPosition(NamedTuple):
    """A block's position in its segment."""

    owner: BlockRecompute
    start: int  # first block of its segment
    position: int
    size: int  # number of blocks in the segment


def _recomputed(block: nn.Module, usual: Forward, *args: Any, **kwargs: Any) -> Any:
    segment: _SegmentPosition | None = rebind.state_of(block, _recomputed)
    if segment is None:
        return usual(*args, **kwargs)
    call = segment.owner.first if segment.position == segment.start else segment.owner.through
    return call(segment, args, kwargs)


_first_pass = threading.local()


def is_thrown_away() -> bool:
    """Returns True in a pass with saved tensors that are discarded, since backward runs it again.

    The pass must save tensors with the same shapes, formats and devices as the second pass.
    """
    compiling = torch.compiler.is_compiling()  # a graph contains the pass once
    return not compiling and bool(getattr(_first_pass, "now", False))


def _mark_first_pass(run: Forward) -> Forward:
    """Wraps ``run`` so that ``is_thrown_away`` is true in its first call."""
    was_called = False

    def marked_run(*args: Any, **kwargs: Any) -> Any:
        nonlocal was_called
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        before, _first_pass.now = is_thrown_away(), not was_called
        was_called = True
        try:
            return run(*args, **kwargs)
        finally:
            _first_pass.now = before

    return marked_run


def blocks_to_recompute(sizes: list[tuple[int, int]], budget: float) -> set[int]:
    """Returns the fewest first blocks to recompute for stored bytes within the budget.

    If that isn't possible, these are all blocks.
    """
    stays = sum(stored for stored, _ in sizes)
    bound = budget * stays
    for position, (stored, recomputed) in enumerate(sizes):
        if stays <= bound:
            return set(range(position))
        stays -= stored - min(recomputed, stored)
    return set(range(len(sizes)))


def saved_bytes(
    forward: Callable[[], Any],
    without: nn.Module,
    *,
    extra: list[Tensor] | None = None,
    aside: list[Tensor] | None = None,
) -> int:
    """Returns the bytes of the storages that autograd saves in a forward pass, each counted once.

    Storages of ``without``'s parameters and of ``aside`` aren't counted. Those of ``extra``, which
    is read after the pass, are.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())  # a saved result that refers to its node would never be freed
        return saved[-1]

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    excluded = {_place(p) for p in _pieces([*without.parameters(), *(aside or [])])}
    sizes = {_place(t): t.untyped_storage().nbytes() for t in _pieces([*saved, *(extra or [])])}
    del result  # kept until here, because a freed storage's address would be reused
    return sum(size for storage, size in sizes.items() if storage not in excluded)


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Removes a key-value cache, which would receive a block's keys twice."""
    if not holds_cache(kwargs):
        return kwargs
    without = {name: None if is_cache(name, value) else value for name, value in kwargs.items()}
    return {**without, "use_cache": False} if "use_cache" in kwargs else without


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the local parts of tensors that may be sharded (DTensor) or composed."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            inner = (getattr(tensor, name) for name in names)  # a mesh may be among them
            yield from _pieces(t for t in inner if isinstance(t, Tensor))
        else:
            yield tensor


def _place(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # fake tensors have no memory
    return address


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
