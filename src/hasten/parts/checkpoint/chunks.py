"""Chunks of a state: which rank writes which of them, and how any part is read again.

A state is ``{name: DTensor or tensor}``. A rank holds one chunk of each tensor that it has.

- saving: a chunk that several ranks hold is written once, and such chunks are dealt out. Small
  ones, such as an optimizer's counters, are written by each of them. So a rank that resumes in the
  same layout reads its own file only. ``torch.distributed.checkpoint`` has a planner for this too.
  It exchanges an object for each chunk, which took most of the time of a first save.
- reading: the planner of ``torch.distributed.checkpoint`` lists the saved chunks that overlap with
  a wanted part.

So the layout and the number of ranks may change between the two. A chunk is rectangular, or
of a :class:`FlatShard` contiguous in the flattened tensor. All chunks of a tensor are of one kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.checkpoint.flat import FlatShard, Size, box_from_flat, flat_from_boxes
from hasten.parts.checkpoint.format import (
    DTYPES,
    NAMES,
    PASSING,
    TENSORS,
    DamagedCheckpointError,
    decode,
    part_name,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SMALL = 256  # bytes of a chunk that each rank writes which has it


@dataclass(frozen=True)
class ChunkPosition:
    """The position of a chunk in its tensor.

    Args:
        shape: of the full tensor.
        offset: of the chunk's first element, per dimension; one number for a flat chunk.
    """

    shape: Size
    offset: Size


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

    def __init__(self) -> None:
        self.exchanges = 0  # number of exchanges so far
        self._forms: list[Any] | None = None
        self._positions: dict[str, ChunkPosition] = {}

    def changed(self, tensors: Mapping[str, Tensor]) -> bool:
        """Returns True if this rank needs another exchange; then all ranks must run one."""
        return self._forms != _forms(tensors)

    def exchange(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes a new plan with all ranks of the default group.

        Raises:
            ValueError: on every rank: the ranks' chunks don't fit together.
        """
        positions = {name: position_of(tensor) for name, tensor in tensors.items()}
        local = {name: local_part(tensor) for name, tensor in tensors.items()}
        chunks = [
            (name, tensor.dtype, positions[name].shape, positions[name].offset, (*tensor.shape,))
            for name, tensor in local.items()
        ]
        rows: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(chunks, rows)
        received: list[Any] = [None]
        dist.scatter_object_list(received, None if rows is None else _dealt(rows))
        if isinstance(received[0], str):
            raise ValueError(received[0])
        small = [name for name, tensor in local.items() if tensor.nbytes <= SMALL]
        self._positions = {name: positions[name] for name in dict.fromkeys([*received[0], *small])}
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


# What files of another shape raise; what has verified is of another shape only if it was forged.
MALFORMED = (
    *(OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, AttributeError),
    SafetensorError,
)
NO_MEMORY = "allocate memory"  # in the words of torch, which raises RuntimeError for it


@contextmanager
def sound(path: Path) -> Iterator[None]:
    """Context in which files are read that verified: an error in it has a name.

    Raises:
        DamagedCheckpointError: a file has another form than its description.
        MemoryError, OSError: this process has no memory or file left for it; it may well be whole.
    """
    try:
        yield
    except DamagedCheckpointError:
        raise
    except MALFORMED as error:
        if getattr(error, "errno", None) in PASSING:
            raise
        if isinstance(error, RuntimeError) and NO_MEMORY in str(error):
            raise MemoryError(f"{path} doesn't fit in memory: {error}") from error
        raise DamagedCheckpointError(f"{path}: {error!r}") from error


@dataclass(frozen=True)
class Form:
    """Shape and format of a saved tensor."""

    shape: Size
    dtype: torch.dtype


@dataclass(frozen=True)
class SavedChunk:
    """A chunk on the disk: its file, position and size; packed if it was made smaller."""

    rank: int
    offset: Size
    shape: Size
    packed: bool


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each read when it is requested.

    Args:
        path: folder of a verified checkpoint.
        parts: the description of each rank's file.
        prefers: number of the file that is read if several hold a chunk.
        fetch: called with the name of a file before it is opened.

    Raises:
        ValueError, KeyError, TypeError: a description has another form.
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
        self._chunks: dict[str, dict[tuple[Size, Size], SavedChunk]] = {}  # by offset and shape
        self._open_files: dict[int, Any] = {}
        self._files = ExitStack()
        self._last: tuple[tuple[int, str], Tensor] | None = None  # last unpacked chunk
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
        form = self.forms.setdefault(name, Form(shape, NAMES[entry["dtype"]]))
        offset = _size(entry.get("offset", [0] * len(shape)))
        sizes = _size(entry.get("sizes", shape))
        chunks = self._chunks.setdefault(name, {})
        extent = shape if len(offset) == len(shape) else (math.prod(shape),)
        inside = all(o + s <= n for o, s, n in zip(offset, sizes, extent, strict=True))
        one_kind = all(len(other) == len(offset) for other, _ in chunks)
        if form != Form(shape, NAMES[entry["dtype"]]) or not inside or not one_kind:
            raise ValueError(f"the chunks of {name} don't fit together")
        if (offset, sizes) not in chunks or rank == self._prefers:
            chunks[offset, sizes] = SavedChunk(rank, offset, sizes, bool(entry.get("packed")))

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
        chunks, shape = self._chunks[name], self.forms[name].shape
        saved_dimensions = len(next(iter(chunks))[0])
        if len(offset) != saved_dimensions:
            read = functools.partial(self.part, name)
            if saved_dimensions == 1:
                return box_from_flat(read, shape, offset, sizes)
            return flat_from_boxes(read, shape, *offset, *sizes)
        if (offset, sizes) in chunks:
            with sound(self._path):
                return self._read(name, chunks[offset, sizes], None)
        target = torch.empty(sizes, dtype=self.forms[name].dtype)
        for chunk, source, target_window in overlaps([*chunks.values()], offset, sizes):
            with sound(self._path):
                target[target_window] = self._read(name, chunk, source)
        return target

    def _read(self, name: str, chunk: SavedChunk, window: tuple[slice, ...] | None) -> Tensor:
        file = self._file(chunk.rank)
        form = self.forms[name]
        if chunk.packed:
            if self._last is None or self._last[0] != (chunk.rank, name):
                wanted = {"dtype": DTYPES[form.dtype], "shape": chunk.shape}
                self._last = (chunk.rank, name), decode(file.get_tensor(name), wanted)
            values = self._last[1]
        elif window is not None:
            values = file.get_slice(name)[window] if window else file.get_tensor(name)
            expected = tuple(w.stop - w.start for w in window)
            return _of_form(values, name, Form(expected, form.dtype))
        else:
            values = file.get_tensor(name)
        values = _of_form(values, name, Form(chunk.shape, form.dtype))
        return values if window is None else values[window]

    def _file(self, rank: int) -> Any:
        if rank not in self._open_files:
            self._fetch(part_name(rank, TENSORS))
            opened = safe_open(self._path / part_name(rank, TENSORS), "pt")
            self._open_files[rank] = self._files.enter_context(opened)
        return self._open_files[rank]

    def close(self) -> None:
        """Closes the files; tensors that were read stay valid."""
        self._open_files.clear()
        self._files.close()


def overlaps(
    chunks: Sequence[SavedChunk], offset: Size, sizes: Size
) -> Iterator[tuple[SavedChunk, tuple[slice, ...], tuple[slice, ...]]]:
    """Yields each chunk that overlaps with a part, the overlap in the chunk, and in the part."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def described(offset: Size, sizes: Size) -> Any:
        return ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))

    filled = [chunk for chunk in chunks if math.prod(chunk.shape)]
    listed = [described(chunk.offset, chunk.shape) for chunk in filled]
    saved = TensorStorageMetadata(TensorProperties(), torch.Size(sizes), listed)
    for request in create_read_items_for_chunk_list("", saved, [described(offset, sizes)]):
        number = request.storage_index.index
        assert number is not None  # the chunk's number in the list, which the function sets
        yield (
            filled[number],
            _window(request.storage_offsets, request.lengths),
            _window(request.dest_offsets, request.lengths),
        )


def _window(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))


def _of_form(values: Tensor, name: str, form: Form) -> Tensor:
    if (tuple(values.shape), values.dtype) != (form.shape, form.dtype):
        raise DamagedCheckpointError(
            f"{name} has the shape {[*values.shape]} in {values.dtype}, and {[*form.shape]} in "
            f"{form.dtype} was expected"
        )
    return values


def _size(numbers: Any) -> Size:
    size = tuple(numbers)
    if any(type(n) is not int or n < 0 for n in size):
        raise ValueError(f"{numbers!r} is no size")
    return size


def read_part_like(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Returns the part of a saved tensor that ``like`` has on this rank, as a plain tensor.

    ``tensors`` may be a state in memory, as in one process.
    """
    if not is_part(like):
        return tensors[name]
    sizes, offset = tuple(local_part(like).shape), position_of(like).offset
    if isinstance(tensors, CheckpointTensors):
        return tensors.part(name, offset, sizes)
    own = local_part(tensors[name])
    return (own.flatten() if len(offset) != own.ndim else own)[_window(offset, sizes)]


def forms_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Form]:
    """Returns shape and format of each saved tensor, without reading it."""
    if isinstance(tensors, CheckpointTensors):
        return tensors.forms
    return {name: Form(tuple(t.shape), t.dtype) for name, t in tensors.items()}
