"""Foreign files and texts: opened as regular files, bounded, in their folder, and read strictly.

Every file that a user names or that another program wrote is opened here. Three rules hold:

  (1) only a regular file is opened: a named pipe without a writer would block for ever.
  (2) at most ``limit`` bytes are read, so that no file takes the machine's memory.
  (3) what JSON readers disagree about is an error: a key twice, integers beyond 64 bits, and
      values that are nested too deeply.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any

from hasten.errors import InputError

STOP_FILE = "stop"  # written into a run's folder by others: it saves and stops after its step
LARGEST_JSON = 64 << 20  # bytes; the index of a model with 100,000 tensors has 10 million
LARGEST_LOG = 1 << 30  # bytes; a line for each step of a run has about 500
LONGEST_LINE = 1 << 20  # bytes
# NUL ends a path in the kernel, and half a surrogate pair can't be written as UTF-8.
_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")


_POINTER = b"version https://git-lfs"


def first_bytes(path: Path) -> bytes:
    """The first bytes of a regular file; may raise OSError.

    Raises:
        InputError: Git LFS has left a pointer in place of the file's content.
    """
    with open_regular(path) as file:
        head = file.read(len(_POINTER))
    if head == _POINTER:
        raise InputError(
            f"{path} is a pointer of Git LFS, not its content: run `git lfs pull` in that clone"
        )
    return head


class DuplicateKeyError(ValueError):
    """A JSON object that has a key twice; readers disagree about which value counts."""


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Opens a regular file for reading bytes.

    Raises:
        OSError: the file is missing, a pipe, a device or a folder, or a link without
            ``follow_links``.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, limit: int, what: str) -> bytes:
    """The bytes of a file; ``what`` names in messages the kind of file that is expected.

    Raises:
        InputError: the file can't be read, isn't regular, or has more than ``limit`` bytes.
    """
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{path}: {reason}; give the path of a {what}") from error
    except ValueError as error:
        raise InputError(f"{str(path)!r} can't be a file's name; rename the {what}") from error
    if len(data) > limit:
        most = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
        raise InputError(f"{path} is larger than {most}; that is not a {what}")
    return data


def parse_json(data: bytes | str, origin: str) -> Any:
    """The value of a JSON text; ``origin`` names its origin in messages.

    Raises:
        InputError: the text isn't UTF-8 or JSON, has a key twice or an integer beyond 64 bits, or
            is nested too deeply.
    """
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        if is_too_deep(text):  # from Python 3.12 on the reader itself has no such limit
            raise RecursionError
        return json.loads(text, object_pairs_hook=unique_keys, parse_int=bounded_integer)
    except UnicodeDecodeError as error:
        raise InputError(f"{origin} is not UTF-8 text: {error.reason}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{origin}:{error.lineno} is not JSON: {error.msg}; correct it") from error
    except RecursionError as error:
        raise InputError(f"{origin} is not JSON that can be read: nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{origin} is ambiguous: {error}; correct it") from error


DEEPEST = 500  # levels of a JSON text


def is_too_deep(text: str) -> bool:
    """True if the objects and lists of a JSON text are nested in more than :data:`DEEPEST` levels.

    Code that goes through a value calls itself once a level, and Python bounds such calls.
    """
    if text.count("[") + text.count("{") <= DEEPEST:
        return False
    outside = text.replace("\\\\", "").replace('\\"', "").split('"')[::2]  # of strings
    brackets = re.sub(r"[^][]+", "", "".join(outside).replace("{", "[").replace("}", "]"))
    for _ in range(DEEPEST):  # the innermost level goes each time
        before, brackets = brackets, brackets.replace("[]", "")
        if brackets == before:
            return False
    return bool(brackets)


def read_json_object(path: Path, what: str, limit: int = LARGEST_JSON) -> dict[str, Any]:
    """The object in a JSON file; ``what`` names in messages the kind of file that is expected.

    Raises:
        InputError: the file can't be read, is too large, or holds something else.
    """
    content = parse_json(read_bounded(path, limit, what), str(path))
    if not isinstance(content, dict):
        raise InputError(
            f"{path} is not a {what}: it holds a {type(content).__name__}, expected an object"
        )
    return content


def json_lines(path: Path, what: str, largest: int = LARGEST_LOG) -> Iterator[dict[str, Any]]:
    """The objects of a file with one in each line; an unfinished last line is left out.

    Lines are read one by one: a million of them take no memory. ``what`` names in messages the
    kind of file that is expected.

    Raises:
        InputError: the file can't be read or is too large, or a line isn't an object.
    """
    count = 0
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > largest:
                raise InputError(f"{path} is larger than {largest} bytes; that is not a {what}")
            while line := file.readline(LONGEST_LINE + 1):
                count += 1
                if len(line) > LONGEST_LINE:
                    raise InputError(f"{path}:{count} is longer than {LONGEST_LINE} bytes")
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if not file.read(1):
                        break
                    why = str(error)[:80]
                    raise InputError(f"{path}:{count} is not JSON: {why}") from error
                if not isinstance(entry, dict):
                    raise InputError(f"{path}:{count} is not an object of JSON")
                yield entry
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{path}: {reason}; give the path of a {what}") from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs, for ``object_pairs_hook``.

    Raises:
        DuplicateKeyError: a key occurs twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        raise DuplicateKeyError(duplicate_reason(pairs))
    return values


def duplicate_reason(pairs: list[tuple[str, Any]]) -> str:
    """The first key of the pairs that occurs twice, as a sentence without its end."""
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            return f"the key {name[:60]!r} occurs twice in an object"
        names.add(name)
    raise ValueError("no key occurs twice")


def bounded_integer(digits: str) -> int:
    """An integer of at most 64 bits from its digits, for ``parse_int``.

    Raises:
        ValueError: the integer has more bits; Python itself refuses only 4,300 digits.
    """
    if len(digits) <= 20 and -(2**63) <= int(digits) < 2**64:
        return int(digits)
    raise ValueError(f"the integer {digits[:20]}... is beyond 64 bits")


def path_inside(folder: Path, name: object, origin: str, *, follow_links: bool = False) -> Path:
    """The path of a name that a foreign file gives for a file in ``folder``.

    With ``follow_links`` the file itself may be a link, as in the hub's cache. Its folder may not.
    The name may lead out in neither case.

    Raises:
        InputError: the name isn't a text or leads out of the folder.
    """
    if not isinstance(name, str) or not name or _UNWRITABLE.search(name):
        raise InputError(f"{origin}: {str(name)[:60]!r} is no file name; name a file in {folder}")
    parts = PurePath(name.replace("\\", "/"))
    leads_out = parts.is_absolute() or ".." in parts.parts
    if not leads_out:
        inner = (folder / name).parent if follow_links else folder / name
        leads_out = not inner.resolve().is_relative_to(folder.resolve())
    if leads_out:
        raise InputError(f"{origin}: {name!r} leads out of {folder}; name a file in it")
    return folder / name


def unwritable_character(text: str) -> str | None:
    """The name of a character that no path and no UTF-8 file can have; None without one."""
    match = _UNWRITABLE.search(text)
    if match is None:
        return None
    if match.group() == "\x00":
        return "a NUL character"
    if "\udc80" <= match.group() <= "\udcff":
        return f"the byte 0x{ord(match.group()) - 0xDC00:02x}, which is not UTF-8"
    return f"half a surrogate pair (\\u{ord(match.group()):04x})"
