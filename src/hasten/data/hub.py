"""Data sets of the `datasets` library: names on the hub, and folders that `save_to_disk` wrote.

    owner/name                  the split train of its only configuration
    owner/name:split            another split
    owner/name:config:split     one of several configurations

A name becomes the Arrow files that the library keeps of it in its cache; a saved folder's files are
those that its state.json lists. Both are read like any other table. Scripts are never run: the
library refuses them from version 4 on, and an older one isn't used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hasten.errors import InputError

STATE = "state.json"
SPLITS = "dataset_dict.json"
_NAME = re.compile(r"(?P<set>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<config>[\w.+-]+))?(:(?P<split>\w+))?")
_LARGEST = 1 << 24  # bytes of a listing
_OLDEST = 4  # the first version that runs no scripts
Load = Callable[..., Any]  # as datasets.load_dataset


class HubName(NamedTuple):
    """What a name on the hub asks for."""

    dataset: str  # owner/name
    config: str | None
    split: str


def hub_name(name: str) -> HubName | None:
    """The hub name that `name` can be; None for anything that looks like a path.

    What lies in an existing folder or ends in letters, as `.txt`, is a path with a mistake in it.
    """
    found = _NAME.fullmatch(name)
    if found is None or Path(found["set"]).parent.exists():
        return None
    if Path(found["set"]).suffix[1:].isalpha():
        return None
    first, second = found["config"], found["split"]
    if second is None:
        return HubName(found["set"], None, first or "train")
    return HubName(found["set"], first, second)


def hub_files(name: HubName, load: Load | None = None) -> list[Path]:
    """The Arrow files of a data set on the hub, fetched into the library's cache if need be.

    Raises InputError where the library is missing, or the set can't be had or is a script.
    """
    load = load or _library(name.dataset)
    try:
        found = load(name.dataset, name.config, split=name.split)
        files = [Path(file["filename"]) for file in found.cache_files]
    except Exception as error:  # the library and those below it raise of every kind
        raise InputError(_said(name, error)) from error
    if not files or not len(found):
        raise InputError(f"dataset {name.dataset}: its split {name.split} has no records")
    return files


def saved_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder that `save_to_disk` wrote, in order; None for another folder.

    Raises InputError where its lists are damaged, or name files outside it or none of its own.
    """
    if (folder / STATE).is_file():
        return _listed(folder)
    if not (folder / SPLITS).is_file():
        return None
    splits = _object(folder / SPLITS).get("splits")
    names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
    if len(names) == 1:
        return _listed(_inside(folder, names[0]))
    told = ", ".join(str(folder / name) for name in names) or "none"
    raise InputError(f"{folder} has several splits, name one of them: {told}")


def _listed(folder: Path) -> list[Path]:
    listed = _object(folder / STATE).get("_data_files")
    rows = listed if isinstance(listed, list) else []
    names = [row.get("filename") if isinstance(row, dict) else None for row in rows]
    if not names:
        raise InputError(f"{folder / STATE} lists no data files: save the data set anew")
    return [_inside(folder, name) for name in names]


def _library(dataset: str) -> Load:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"dataset {dataset} is no file here; as a name on the hub it needs the library "
            "datasets: pip install 'hasten[hub]', or give a file or folder"
        ) from error
    version = str(datasets.__version__)
    if int(version.partition(".")[0]) < _OLDEST:
        raise InputError(
            f"dataset {dataset}: datasets {version} may run scripts: pip install 'hasten[hub]'"
        )
    load: Load = datasets.load_dataset
    return load


def _said(name: HubName, error: Exception) -> str:
    """The library's reason in one sentence, with the way out."""
    what = (str(error).splitlines() or [""])[0].strip()[:300] or type(error).__name__
    if "script" in what.lower():
        return (
            f"dataset {name.dataset} is a script, which is never run: give the files that it makes"
        )
    if isinstance(error, ConnectionError | TimeoutError):
        return (
            f"dataset {name.dataset} is no file here, and the hub can't be reached ({what}): check "
            "the name and the network, or give a file or folder"
        )
    if "Config name is missing" in what:
        what += f" {' '.join(str(error).split())[len(what) :][:200]}"
    return (
        f"dataset {name.dataset} can't be had from the hub ({what}): give "
        "owner/name, owner/name:split or owner/name:config:split"
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        found = json.loads(data) if len(data) <= _LARGEST else None
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: save the data set anew") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no list of a data set's files: save the data set anew")
    return found


def _inside(folder: Path, name: Any) -> Path:
    whole = folder.resolve()
    if not isinstance(name, str) or not (whole / name).resolve().is_relative_to(whole):
        raise InputError(f"{folder} lists {name!r}, which isn't in it: save the data set anew")
    if not (folder / name).exists():
        raise InputError(f"{folder} lacks {name}, which it lists: copy or save it whole")
    return folder / name
