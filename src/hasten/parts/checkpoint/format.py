"""A checkpoint's format on disk: file-system calls, manifest, tensor file, state, compression."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from hasten.foreign_files import open_regular
from hasten.formatting import number_text
from hasten.machine.files import sync


class Disk:
    """The file-system calls of a commit: a test can cut the power between two of them.

    Nothing is durable before ``sync`` of the file and of the folder it is in.
    """

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def open_new(self, path: Path) -> int:
        """The descriptor of a file that wasn't there; owner and group may read it."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)

    def write(self, descriptor: int, block: memoryview) -> None:
        """All of the block: the system may take it in pieces."""
        while block:
            block = block[os.write(descriptor, block) :]

    def sync(self, path: Path) -> None:
        """Makes a file's bytes, or a folder's names, survive a loss of power."""
        sync(path)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """A folder and all in it; what can't be removed stays without a word."""
        shutil.rmtree(path, ignore_errors=True)


# The manifest of a checkpoint: what it consists of, sealed by a hash of its own text.
#
#     {"format": 3, "step": 120, "ranks": 2, "packed": false,
#      "files": {NAME: {"bytes", "xxh3_128", "sha256"}},
#      "meta": the caller's JSON, "seal": hash of all the above}
#
# Each rank has two of the files: the chunks that it wrote, and their description.
#
#     {"tensors": {NAME: {"dtype", "shape", and of a chunk "offset", "sizes"; "packed": true}},
#      "meta": the rank's JSON, "file": {"bytes", "xxh3_128", "sha256"}}
#
# The seal finds accidents, not forgers: whoever can write the folder can seal anew. So a manifest
# is read as a stranger's: its size has a limit, and the names in it can't leave the folder.

STATE, MANIFEST = "rank-00000.safetensors", "manifest.json"  # STATE: all that one process writes
TENSORS, DESCRIPTION = "safetensors", "json"  # the two files of a rank
FORMAT = 3
LARGEST_MANIFEST = 1 << 26
STEP = re.compile(r"step-[0-9]{8,12}")
REASON = "why-damaged.txt"  # in a damaged checkpoint that was set aside
# Names that only a save of ours gives to what isn't done; 1: of the checkpoint, 2: of the run.
UNDONE = re.compile(r"\.(?:writing|deleting)-(step-\d{8,12})-(\d+)(?:-\d+)?")
LAST_STEP = 10**12 - 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def name_of(step: int) -> str:
    """Returns the name of a step's checkpoint; ValueError if the number is out of range."""
    if not 0 <= step <= LAST_STEP:
        raise ValueError(f"step is {step}; it must lie between 0 and {LAST_STEP}")
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Returns the step of a checkpoint's name."""
    return int(name.removeprefix("step-"))


def part_name(rank: int, kind: str) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}.{kind}"


def undone(folder: str, run: str = "") -> str:
    """Returns the checkpoint of which a folder is a half done save of ``run``, or of any run."""
    match = UNDONE.fullmatch(folder)
    return match[1] if match and run in ("", match[2]) else ""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; anything with another name is not one."""
    if not folder.is_dir():
        return []
    paths = (path for path in folder.iterdir() if STEP.fullmatch(path.name))
    return sorted(paths, key=lambda path: step_of(path.name))


class DamagedCheckpointError(ValueError):
    """The checkpoint doesn't match its manifest."""


class NewerFormatError(ValueError):
    """A later version of this program wrote the checkpoint; it may well be whole."""


# What files of another form raise; NO_MEMORY: in the words of torch, as a RuntimeError.
MALFORMED = (
    *(OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, AttributeError),
    SafetensorError,
)
NO_MEMORY = "allocate memory"
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of the process, and say nothing of a file


@contextlib.contextmanager
def sound(path: object) -> Iterator[None]:
    """Context in which the files of a checkpoint are read: an error in it has a name.

    Args:
        path: of the checkpoint, for messages.

    Raises:
        DamagedCheckpointError: a file is missing, or has another form or content than expected.
        NewerFormatError: a later version of this program wrote it.
        MemoryError, OSError: this process has no memory or file left for it; it may well be whole.
    """
    try:
        yield
    except (DamagedCheckpointError, NewerFormatError):
        raise
    except MALFORMED as error:
        if getattr(error, "errno", None) in PASSING:
            raise
        if isinstance(error, RuntimeError) and NO_MEMORY in str(error):
            raise MemoryError(f"{path} doesn't fit in memory: {error}") from error
        reason = repr(error) if isinstance(error, KeyError) else str(error) or repr(error)
        if isinstance(error, FileNotFoundError) and error.filename:
            reason = f"{Path(error.filename).name.removesuffix('.new')} is missing"
        elif isinstance(error, OSError):
            reason = f"it can't be read: {error}"
        raise DamagedCheckpointError(f"{path}: {reason}") from error


def manifest_text(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as on disk: its JSON with the hash of that JSON as the last key."""
    text = json.dumps(manifest, indent=1)
    seal = xxhash.xxh3_128_hexdigest(text.encode())
    return f'{text.removesuffix("}").rstrip()},\n "seal": "{seal}"\n}}'.encode()


def read_manifest(path: Path, text: bytes | None = None) -> dict[str, Any]:
    """The manifest of the checkpoint in ``path``, every byte of it as it was written.

    ``text``: the file's contents, if they were read already. Raises as ``sound``.
    """
    with sound(path):
        text = read_text(path / MANIFEST) if text is None else text
        manifest: dict[str, Any] = json.loads(text)
        del manifest["seal"]
        if manifest_text(manifest) != text:
            raise ValueError(f"{MANIFEST} is not as it was written")
        if manifest["format"] != FORMAT:
            raise NewerFormatError(
                f"{path} has format {manifest['format']} and this version reads {FORMAT}; "
                "read it with the version that wrote it"
            )
        _check(manifest)
    return manifest


def read_text(path: Path) -> bytes:
    """Returns the bytes of a small file of a checkpoint; OSError or ValueError otherwise."""
    if path.parent.is_symlink():
        raise OSError("it is a link")
    with open_regular(path, follow_links=False) as file:
        text = file.read(LARGEST_MANIFEST + 1)
    if len(text) > LARGEST_MANIFEST:
        raise ValueError(f"{path.name} is larger than {LARGEST_MANIFEST} bytes")
    return text


def _check(manifest: Mapping[str, Any]) -> None:
    """The shape of a manifest; ValueError, KeyError or TypeError where it is another."""
    files, ranks, step = manifest["files"], manifest["ranks"], manifest["step"]
    if not isinstance(files, dict) or not isinstance(manifest["meta"], dict) or not files:
        raise ValueError(f"{MANIFEST} lists no files or holds no meta")
    for name, entry in files.items():
        if not _NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"{name[:120]!r} can't be the name of a checkpoint's file")
        if type(entry["bytes"]) is not int:
            raise ValueError(f"{name} has no size")
    if type(step) is not int or not 0 <= step <= LAST_STEP:
        raise ValueError(f"{step!r} is no step")
    if type(ranks) is not int or not 0 < ranks <= len(files):
        raise ValueError(f"{ranks!r} is no number of ranks")
    needed = {part_name(rank, kind) for rank in range(ranks) for kind in (TENSORS, DESCRIPTION)}
    if needed - files.keys():
        raise ValueError(f"{MANIFEST} doesn't list {min(needed - files.keys())}")


def compare(file: Path, expected: Mapping[str, Any], thorough: bool = False) -> None:
    """Compares a file with its size and hashes; OSError or ValueError if it differs.

    Args:
        thorough: compare sha256 as well, three to ten times slower.
    """
    name = file.name.removesuffix(".new")
    digests = {"xxh3_128": xxhash.xxh3_128(), **({"sha256": hashlib.sha256()} if thorough else {})}
    with open_regular(file, follow_links=False) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size != expected["bytes"]:
            raise ValueError(f"{name} has {size} bytes instead of {expected['bytes']}")
        block = bytearray(min(BLOCK, size) or 1)
        while count := opened.readinto(block):
            for digest in digests.values():
                digest.update(memoryview(block)[:count])
    for key, digest in digests.items():
        if digest.hexdigest() != expected[key]:
            raise ValueError(f"{name} is not as it was written ({key} differs)")


# Writes a safetensors file in one pass over its bytes: to the disk and through two hashes.
#
#     8 bytes: length of the header | header: JSON of name -> dtype, shape, place | the bytes
#
# The safetensors library copies every tensor into a Python object before it writes; here blocks of
# the tensors' own memory are written, which takes no memory and lets other threads run meanwhile.
# Files are read with the library. The format: https://github.com/huggingface/safetensors.

BLOCK = 1 << 23
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMES = {name: dtype for dtype, name in DTYPES.items()}


def write_blocks(path: Path, blocks: Iterable[memoryview], disk: Disk) -> dict[str, Any]:
    """A new file out of blocks, durable when this returns; its size and two hashes."""
    size, fast, slow = 0, xxhash.xxh3_128(), hashlib.sha256()
    descriptor = disk.open_new(path)
    try:
        for block in blocks:
            size += len(block)
            fast.update(block)
            slow.update(block)
            disk.write(descriptor, block)
    finally:
        os.close(descriptor)
    disk.sync(path)
    return {"bytes": size, "xxh3_128": fast.hexdigest(), "sha256": slow.hexdigest()}


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's memory."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in one piece of host memory each; those that are that already aren't copied.

    Raises:
        ValueError: a dtype has no name in safetensors, or a tensor is sparse.
    """
    host = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors can't "
                "hold; convert it before it is saved"
            )
        host[name] = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return host


def blocks_of(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yields the contents of a file of tensors; raises as ``on_host``."""
    # Wide ones first, so that every tensor lies at a multiple of its own width.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    host = on_host({name: tensors[name] for name in order})
    header: dict[str, Any] = {}
    begin = 0
    for name, tensor in host.items():
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in host.values():
        buffer = bytes_of(tensor)
        for start in range(0, len(buffer), BLOCK):
            yield buffer[start : start + BLOCK]


# A nested state as named tensors and JSON, and back: dicts, lists, tuples, tensors, numbers, text.
#
# What JSON can't say stands under a key that begins with ``$``.

TENSOR, ITEMS, TUPLE = "$tensor", "$items", "$tuple"
_PLAIN = (str, bool, int, float)


def json_without_tensors(value: Any, key_path: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON, each of its tensors put into ``tensors`` under the name of its place.

    Raises:
        TypeError: something in it is of another kind; the message names its place.
    """
    if isinstance(value, Tensor):
        name = key_path
        while name in tensors:  # keys may have a slash of their own
            name += "'"
        tensors[name] = value.detach()
        return {TENSOR: name}
    if isinstance(value, dict):
        for key in value:
            if key is not None and type(key) not in _PLAIN:
                raise TypeError(
                    f"the state at {key_path} has the key {str(key)[:60]!r} of type "
                    f"{type(key).__name__}; the keys that a checkpoint holds are text and numbers"
                )
        items = {
            key: json_without_tensors(item, f"{key_path}/{key}", tensors)
            for key, item in value.items()
        }
        if all(isinstance(key, str) and not key.startswith("$") for key in items):
            return items
        return {ITEMS: [[key, item] for key, item in items.items()]}
    if isinstance(value, list | tuple):
        inner = [
            json_without_tensors(item, f"{key_path}/{i}", tensors) for i, item in enumerate(value)
        ]
        return {TUPLE: inner} if isinstance(value, tuple) else inner
    if value is None or type(value) in _PLAIN:
        return value
    raise TypeError(
        f"the state at {key_path} is a {type(value).__name__}; a checkpoint holds dicts, lists, "
        "tensors, numbers and text"
    )


def tensors_from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Reverses ``json_without_tensors``.

    Raises:
        KeyError, TypeError, ValueError: the JSON isn't of that kind.
    """
    if isinstance(value, list):
        return [tensors_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]].clone()
    if TUPLE in value:
        return tuple(tensors_from_json(item, tensors) for item in value[TUPLE])
    pairs = value[ITEMS] if ITEMS in value else value.items()
    return {key: tensors_from_json(item, tensors) for key, item in pairs}


# Compression: byte shuffle and zstd.
#
#     all first bytes of a tensor's numbers, then all second bytes -> zstd, level 1
#
# Signs and exponents of trained weights repeat and their mantissas don't. So sorting
# bytes by their position makes them compressible for zstd (Alted, "Why modern CPUs are
# starving", 2010; blosc). It is useful if the disk or the network is slow.

SHUFFLE = "shuffle"
SMALLEST = 1 << 12  # bytes of a tensor below which nothing is gained
SAMPLE = 1 << 22  # bytes that a measurement packs


def encode(tensors: Mapping[str, Tensor], in_place: bool = False) -> dict[str, Tensor]:
    """Returns the packed bytes of the tensors that get smaller.

    Args:
        in_place: put packed bytes into a tensor's own memory, which then has no other use.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.nbytes < SMALLEST or tensor.dtype not in DTYPES:
            continue
        flat = np.frombuffer(bytes_of(tensor.detach().contiguous()), np.uint8)
        planes = np.ascontiguousarray(flat.reshape(-1, tensor.element_size()).T)
        code = pa.Codec("zstd", 1).compress(planes.reshape(-1))
        if len(code) < len(flat):
            own = tensor.detach().reshape(-1).view(torch.uint8)[: len(code)]
            packed[name] = own if in_place else torch.empty_like(own)
            packed[name].numpy()[:] = np.frombuffer(code, np.uint8)
    return packed


def decode(packed: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Returns the tensor that ``encode`` packed.

    Raises:
        ValueError, OSError: the bytes don't match dtype and shape.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = pa.Codec("zstd").decompress(memoryview(bytes_of(packed)), size)
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    return torch.from_numpy(np.ascontiguousarray(planes.T).reshape(-1)).view(dtype).reshape(shape)


class Packing:
    """Decides if tensors are packed; ``reason``: why, with the figures.

    Args:
        compression: True measures if it is faster, False never packs, ``shuffle`` always.
    """

    def __init__(self, compression: bool | str) -> None:
        if compression not in (True, False, SHUFFLE):
            raise ValueError(f"compression is {compression!r}; give True or False")
        self.packs = None if compression is True else bool(compression)  # None: not measured yet
        self.reason = f"compression {compression or 'off'}: set by the user"
        if compression is True:
            self.reason = "compression: not yet measured"
        self.speed = 0.0  # bytes per second of plain bytes; 0: not known yet

    def encode(self, tensors: Mapping[str, Tensor], in_place: bool) -> dict[str, Tensor]:
        """Returns what is packed of a state; see ``encode``."""
        if self.packs is None and self.speed:
            self.measure(tensors)
        return encode(tensors, in_place) if self.packs else {}

    def measure(self, tensors: Mapping[str, Tensor]) -> None:
        """Measures on a sample if packing makes a checkpoint reach its target earlier."""
        # The beginnings of the largest tensors, a megabyte or two in all.
        large = [tensor for tensor in tensors.values() if tensor.nbytes >= SMALLEST]
        large = sorted(large, key=torch.numel, reverse=True)[:16]
        share = SAMPLE // max(len(large), 1)
        sample = {str(n): t.reshape(-1)[: share // t.itemsize] for n, t in enumerate(large)}
        total_bytes = sum(t.nbytes for t in sample.values())
        began = time.perf_counter()
        size = sum(t.nbytes for t in {**sample, **encode(sample)}.values())
        packed_seconds = time.perf_counter() - began + size / self.speed
        plain_seconds = total_bytes / self.speed
        self.packs = packed_seconds < plain_seconds
        smaller = f"{number_text(total_bytes / max(size, 1), 'amount')} times smaller"
        target = f"to a place that takes {self.speed / 1e9:.2f} GB/s"
        if not total_bytes:
            self.reason = "compression off: there is nothing large enough to pack"
        elif self.packs:
            faster = f"{plain_seconds / packed_seconds:.2f} times faster"
            self.reason = f"compression shuffle: {smaller}, {faster} {target}"
        else:
            slower = f"{packed_seconds / plain_seconds:.2f} times as long {target}"
            self.reason = f"compression off: shuffle is {smaller} but takes {slower}"
