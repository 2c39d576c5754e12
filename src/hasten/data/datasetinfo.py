"""Data sets as LLaMA-Factory's dataset_info.json lists them: `folder/dataset_info.json:NAME`.

Read is what an entry says of local files: `file_name`, `formatting` (alpaca, sharegpt), `columns`
and `tags`, with that file's own defaults. A name on a hub is refused and a script is never run.
An alpaca entry whose columns have a prompt and no response is plain text, as for pre-training.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from hasten.data.columns import TAGS, Columns
from hasten.errors import InputError

FILE = "dataset_info.json"
_LARGEST = 1 << 24  # bytes
_READ = ("file_name", "formatting", "columns", "tags")
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name", "load_from")
# The data set's column -> the shape's, per formatting.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
_COLUMNS = {"alpaca": _ALPACA | {"system": "system"}}
_COLUMNS["sharegpt"] = {"messages": "conversations", "system": "system", "tools": "tools"}
_UNMAPPED = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
}


def entry_of(name: str) -> tuple[Path, Columns] | None:
    """The file and columns that `FOLDER[/dataset_info.json]:NAME` stands for; None for a path.

    Raises InputError where the list or the entry can't be used.
    """
    place, colon, wanted = name.rpartition(":")
    if not colon or Path(name).exists():
        return None
    listing = Path(place) / FILE if Path(place).is_dir() else Path(place)
    if listing.name != FILE:
        return None
    entries = _entries(listing)
    if wanted not in entries:
        close = difflib.get_close_matches(wanted, entries, n=1) or list(entries)[:5]
        raise InputError(f"{listing} has no entry {wanted!r}: it has {', '.join(close) or 'none'}")
    return _read(listing, wanted, entries[wanted])


def _entries(listing: Path) -> dict[str, Any]:
    try:
        with listing.open("rb") as file:
            data = file.read(_LARGEST + 1)
        found = json.loads(data.decode("utf-8-sig")) if len(data) <= _LARGEST else None
    except OSError as error:
        raise InputError(f"{listing} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{listing} is not JSON: {error}; correct it") from error
    if not isinstance(found, dict):
        raise InputError(f"{listing} must be an object of data sets by their names")
    return found


def _read(listing: Path, name: str, entry: Any) -> tuple[Path, Columns]:
    place = f"{listing}: {name}"
    if not isinstance(entry, dict):
        raise InputError(f"{place} must be an object with a file_name")
    if entry.get("script_url"):
        raise InputError(f"{place} is a script, which is never run: give the files that it makes")
    if elsewhere := [key for key in _ELSEWHERE if entry.get(key)]:
        raise InputError(
            f"{place} lies elsewhere ({elsewhere[0]}): fetch it and give its file or folder"
        )
    if unread := [key for key, value in entry.items() if key not in _READ and value]:
        raise InputError(f"{place} has {unread[0]!r}, which is not read here: use an entry without")
    return _file(listing, place, entry.get("file_name")), _columns(place, entry)


def _file(listing: Path, place: str, name: Any) -> Path:
    if not isinstance(name, str) or not name:
        raise InputError(f"{place} has no file_name: only local files are read")
    folder = listing.parent.resolve()
    if not (folder / name).resolve().is_relative_to(folder):
        raise InputError(f"{place}: file_name {name!r} leads out of {folder}: name a file in it")
    return listing.parent / name


def _columns(place: str, entry: dict[str, Any]) -> Columns:
    formatting = entry.get("formatting", "alpaca")
    if not isinstance(formatting, str) or formatting not in _COLUMNS:
        raise InputError(f"{place}: formatting {formatting!r} is none of {', '.join(_COLUMNS)}")
    known = _COLUMNS[formatting]
    given = _texts(place, "columns", entry) or _UNMAPPED[formatting]
    if unread := [key for key in given if key not in known]:
        raise InputError(f"{place}: the column {unread[0]!r} is not read here: leave it out")
    tags = _texts(place, "tags", entry)
    if unread := [key for key in tags if key not in TAGS]:
        raise InputError(f"{place}: the tag {unread[0]!r} is none of {', '.join(TAGS)}")
    if formatting == "alpaca" and {*given} == {"prompt"}:
        return Columns({"text": given["prompt"]}, shape="text")
    names = {known[key]: own for key, own in given.items()}
    return Columns(names, tags, formatting)


def _texts(place: str, key: str, entry: dict[str, Any]) -> dict[str, str]:
    found = entry.get(key) or {}
    if not isinstance(found, dict):
        raise InputError(f"{place}: {key} must be an object of texts")
    kept = {name: own for name, own in found.items() if own is not None}
    if wrong := [name for name, own in kept.items() if not isinstance(own, str) or not own]:
        raise InputError(f"{place}: {key}: {wrong[0]} must be a text")
    return kept
