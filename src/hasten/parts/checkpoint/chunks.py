"""Chunks of a state: which rank writes which of them, and how any part is read again.

A state is ``{name: DTensor or tensor}``. A rank holds one chunk of each tensor that it has.

- saving: a chunk that several ranks hold is written once, and such chunks are dealt out. Small
  ones, such as an optimizer's counters, are written by each of them. So a rank that resumes in the
  same layout reads its own file only. ``torch.distributed.checkpoint`` has a planner for this too.
  It exchanges an object for each chunk, which took most of the time of a first save.
- reading: a wanted part is read from the saved chunks that overlap with it.

So the layout and the number of ranks may change between the two. A chunk is rectangular, or
of a :class:`FlatShard` contiguous in the flattened tensor. All chunks of a tensor are of one kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.checkpoint.flat import FlatShard, Size, box_from_flat, flat_from_boxes
from hasten.parts.checkpoint.format import NAMES, TENSORS, decode, part_name, sound

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Window = tuple[slice, ...]
SMALL = 256  # bytes of a chunk that each rank writes which has it


@dataclass(frozen=True)
class ChunkPosition:
    """The position of a chunk in its tensor."""

    shape: Size  # the full tensor has it
    offset: Size  # the chunk's first element is there; one number for a flat chunk


def is_part(tensor: Tensor) -> TypeGuard[DTensor | FlatShard]:
    """Returns True if this rank has a part of the tensor, which may be all of it."""
    return is_dtensor(tensor) or isinstance(tensor, FlatShard)


def local_part(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that is on this rank; a plain tensor is on it as a whole."""
    if isinstance(tensor, FlatShard):
        return tensor.local
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # else each call is an operation of autograd
        local: Tensor = tensor.to_local()
    return local


def position_of(tensor: Tensor) -> ChunkPosition:
    """Returns the position of this rank's chunk."""
    if isinstance(tensor, FlatShard):
        return ChunkPosition(tuple(tensor.shape), (tensor.start,))
    if not is_dtensor(tensor):
        return ChunkPosition(tuple(tensor.shape), (0,) * tensor.ndim)
    return _position(tensor.shape, tensor.device_mesh, tensor.placements)


@functools.lru_cache(4096)  # a model has many weights of the same shape
def _position(shape: torch.Size, mesh: Any, placements: Any) -> ChunkPosition:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    # Without communication: it follows from the mesh's coordinates.
    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return ChunkPosition(tuple(shape), tuple(offset))


def place_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Returns ``local``, which is laid out like this rank's shard of a parameter, as DTensor.

    Raises:
        ValueError: the tensor has another shape than the shard.
    """
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    shard = parameter.to_local()
    if local.shape != shard.shape:
        raise ValueError(
            f"a state of {tuple(local.shape)} for a piece of {tuple(shard.shape)} has no place in "
            "the full tensor"
        )
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class ChunkPlan:
    """Decides which chunks of a state this rank writes.

    The plan needs an exchange of names, shapes and positions, on the main thread and over the group
    of all ranks. The result is kept while names, shapes and formats of all ranks stay the same.
    The thread that writes needs no collective operation. Messages can't be mixed up by a save
    during a slow step, or by two saves in a row.
    """

    def __init__(self, ranks: int) -> None:
        self.exchanges, self._ranks = 0, ranks
        self._forms: list[Any] | None = None
        self._positions: dict[str, ChunkPosition] = {}

    def changed(self, tensors: Mapping[str, Tensor]) -> bool:
        """Returns True if this rank needs another exchange; then all ranks must run one."""
        return self._forms != _forms(tensors)

    def exchange(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes a new plan with all ranks; ValueError on each if chunks don't fit together."""
        positions = {name: position_of(tensor) for name, tensor in tensors.items()}
        local = {name: local_part(tensor) for name, tensor in tensors.items()}
        chunks = [
            (name, tensor.dtype, positions[name].shape, positions[name].offset, (*tensor.shape,))
            for name, tensor in local.items()
        ]
        received: list[Any] = [[*local]]
        if self._ranks > 1:
            rows: list[Any] | None = [None] * self._ranks if dist.get_rank() == 0 else None
            dist.gather_object(chunks, rows)
            dist.scatter_object_list(received, None if rows is None else _dealt(rows))
        if isinstance(received[0], str):
            raise ValueError(received[0])
        small = [name for name, tensor in local.items() if tensor.nbytes <= SMALL]
        self._positions = {name: positions[name] for name in (*received[0], *small)}
        self._forms = _forms(tensors)
        self.exchanges += 1

    def chunks_of(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, ChunkPosition]]:
        """Returns the chunks that this rank writes, and their positions."""
        chunks = {name: local_part(tensors[name]) for name in self._positions}
        return chunks, dict(self._positions)


Chunk = tuple[str, torch.dtype, Size, Size, Size]  # name, dtype, full shape, offset, own shape


def _dealt(ranks: Sequence[Sequence[Chunk]]) -> list[Any]:
    """Returns the names that each rank writes; for each rank the same text if that can't be.

    A chunk that several ranks have is written by the one of them with the fewest bytes so far.
    """
    forms: dict[str, tuple[torch.dtype, Size]] = {}
    holders: dict[tuple[str, Size, Size], list[int]] = {}
    for rank, chunks in enumerate(ranks):
        for name, dtype, shape, offset, sizes in chunks:
            if forms.setdefault(name, (dtype, shape)) != (dtype, shape):
                return [f"the ranks' states don't fit together: {name} differs"] * len(ranks)
            holders.setdefault((name, offset, sizes), []).append(rank)
    elements = dict.fromkeys(forms, 0)
    dealt: list[list[str]] = [[] for _ in ranks]
    written = [0] * len(ranks)
    for (name, _, sizes), owners in sorted(holders.items(), key=lambda item: len(item[1])):
        count = math.prod(sizes)
        rank = min(owners, key=lambda rank: written[rank])
        dealt[rank].append(name)
        written[rank] += count * forms[name][0].itemsize
        elements[name] += count
    for name, (_, shape) in forms.items():
        if elements[name] != math.prod(shape):
            text = f"{name} has {elements[name]} elements instead of {math.prod(shape)}"
            return [f"the ranks' states don't fit together: {text}"] * len(ranks)
    return dealt


def _forms(tensors: Mapping[str, Tensor]) -> list[Any]:
    return [
        (name, t.shape, t.dtype, t.placements if is_dtensor(t) else getattr(t, "start", None))
        for name, t in tensors.items()
    ]


@dataclass(frozen=True)
class Form:
    """Shape and format of a saved tensor."""

    shape: Size
    dtype: torch.dtype


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each read when it is requested; see ``opened``.

    Raises:
        ValueError, KeyError, TypeError: the description of a rank's part has another form.
    """

    def __init__(
        self,
        path: Path,
        parts: Sequence[Mapping[str, Any]],
        prefers: int = 0,
        fetch: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.forms: dict[str, Form] = {}
        self._path, self._prefers, self._fetch = path, prefers, fetch
        # By offset and shape: the rank that wrote it, and True if it is packed.
        self._chunks: dict[str, dict[tuple[Size, Size], tuple[int, bool]]] = {}
        self._files: dict[int, Any] = {}
        self._last: tuple[Any, Tensor] | None = None  # last unpacked chunk
        for rank, part in enumerate(parts):
            for name, entry in part["tensors"].items():
                self._add(rank, name, entry)
        for name, form in self.forms.items():
            elements = sum(math.prod(shape) for _, shape in self._chunks[name])
            if elements != math.prod(form.shape):
                raise ValueError(
                    f"{name} has {elements} elements instead of {math.prod(form.shape)}"
                )

    def _add(self, rank: int, name: str, entry: Mapping[str, Any]) -> None:
        shape = _size(entry["shape"])
        form = Form(shape, NAMES[entry["dtype"]])
        offset = _size(entry.get("offset", [0] * len(shape)))
        sizes = _size(entry.get("sizes", shape))
        chunks = self._chunks.setdefault(name, {})
        extent = shape if len(offset) == len(shape) else (math.prod(shape),)
        inside = all(o + s <= n for o, s, n in zip(offset, sizes, extent, strict=True))
        one_kind = all(len(other) == len(offset) for other, _ in chunks)
        if self.forms.setdefault(name, form) != form or not inside or not one_kind:
            raise ValueError(f"the chunks of {name} don't fit together")
        if (offset, sizes) not in chunks or rank == self._prefers:
            chunks[offset, sizes] = rank, bool(entry.get("packed"))

    def __getitem__(self, name: str) -> Tensor:
        shape = self.forms[name].shape
        return self.part(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)

    def __contains__(self, name: object) -> bool:
        return name in self.forms  # the one of Mapping reads the tensor

    def part(self, name: str, offset: Size, sizes: Size) -> Tensor:
        """Returns a part of a tensor, read from the chunks that overlap with it.

        With one number each, offset and sizes are of contiguous elements.

        Raises:
            DamagedCheckpointError: a file holds something else than its description.
        """
        chunks, full_shape = self._chunks[name], self.forms[name].shape
        saved_dimensions = len(next(iter(chunks))[0])
        if len(offset) != saved_dimensions:
            read = functools.partial(self.part, name)
            if saved_dimensions == 1:
                return box_from_flat(read, full_shape, offset, sizes)
            return flat_from_boxes(read, full_shape, *offset, *sizes)
        with sound(self._path):
            if (offset, sizes) in chunks:
                return self._read(name, offset, sizes)
            target = torch.empty(sizes, dtype=self.forms[name].dtype)
            for start, shape in chunks:
                of_both = zip(offset, sizes, start, shape, strict=True)
                shared = [range(max(o, s), min(o + n, s + m)) for o, n, s, m in of_both]
                if all(shared):
                    values = self._read(name, start, shape, _window(shared, start))
                    target[_window(shared, offset)] = values
            return target

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the part of a saved tensor that a tensor has on this rank, as a plain tensor."""
        return self.part(name, position_of(tensor).offset, tuple(local_part(tensor).shape))

    def _read(self, name: str, start: Size, shape: Size, window: Window | None = None) -> Tensor:
        """Returns a chunk, or a window of it."""
        rank, packed = self._chunks[name][start, shape]
        if rank not in self._files:
            file = part_name(rank, TENSORS)
            self._fetch(file)
            self._files[rank] = safe_open(self._path / file, "pt")
        file, form = self._files[rank], Form(shape, self.forms[name].dtype)
        if window is not None:
            form = Form(tuple(w.stop - w.start for w in window), form.dtype)
        if packed:
            if self._last is None or self._last[0] != (rank, name):
                self._last = (rank, name), decode(file.get_tensor(name), form.dtype, shape)
            values = self._last[1] if window is None else self._last[1][window]
        else:
            values = file.get_tensor(name) if window is None else file.get_slice(name)[window]
        if Form(tuple(values.shape), values.dtype) != form:
            raise ValueError(
                f"{name} has the shape {[*values.shape]} in {values.dtype}, and {[*form.shape]} in "
                f"{form.dtype} was expected"
            )
        return values


def _window(spans: Sequence[range], origin: Size) -> Window:
    return tuple(slice(s.start - o, s.stop - o) for s, o in zip(spans, origin, strict=True))


def _size(numbers: Any) -> Size:
    size = tuple(numbers)
    if any(type(n) is not int or n < 0 for n in size):
        raise ValueError(f"{numbers!r} is no size")
    return size
