"""Sources: the files or data sets of a recipe, and how often each example is trained.

A weight is how many times one epoch trains each example of a source. With 2 every
example is trained twice. With 0.25 a quarter of the examples is trained. With 1.5 every
example is trained, and half of them once more. The
seed decides which examples, once for the run. The trainer decides the order of the
epoch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hasten.data.conversation import TAGS, ColumnNames
from hasten.data.spool import IndexedConversations, Selection
from hasten.data.stages import missing_answers, refuse_other_stage
from hasten.errors import InputError, pip_install
from hasten.foreign_files import path_inside, read_json_object

# Data sets in LLaMA-Factory's dataset_info.json: `folder/dataset_info.json:NAME`.
#
# These keys of an entry are read: `file_name`, `formatting` (alpaca, sharegpt, openai), `columns`,
# `tags` and `ranking`, with LLaMA-Factory's defaults. Names on a hub are refused, and scripts are
# never run.
# An alpaca entry with a prompt column and no response is plain text for pre-training. LLaMA-Factory
# adds a system text of one model family to openai entries ("detailed thinking off",
# data/converter.py); hasten doesn't.

FILE = "dataset_info.json"
_LARGEST = 1 << 24  # bytes
_READ = ("file_name", "formatting", "columns", "tags", "ranking")
_SPLIT = "train"  # the only split of a file
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name", "load_from")
# The data set's column -> the shape's, per formatting.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
_MORE = {"system": "system", "tools": "tools"}
_COLUMNS = {
    "alpaca": _ALPACA | _MORE,
    "sharegpt": {"messages": "conversations", **_MORE},
    "openai": {"messages": "messages", **_MORE},
}
# Further columns of preferences. Of pairs and of rated answers: the shape per formatting.
_PAIRED = {"chosen": "chosen", "rejected": "rejected"}
_RATED = {"kto_tag": "label"}
_PAIR_SHAPES = {
    "alpaca": "instruction, chosen, rejected",
    "sharegpt": "conversations, chosen, rejected",
    "openai": "messages, chosen, rejected",
}
_RATED_SHAPES = {
    "alpaca": "instruction, output, label",
    "sharegpt": "conversations, label",
    "openai": "messages, label",
}
_SHAPES = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
_UNMAPPED = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "conversations"},
}


def entry_of(name: str, stage: str = "sft") -> tuple[Path, ColumnNames] | None:
    """Returns the file and columns of `FOLDER[/dataset_info.json]:NAME`; None for a path.

    Raises InputError if the list or the entry can't be used, or is for another stage.
    """
    location, colon, wanted = name.rpartition(":")
    if not colon or Path(name).exists():
        return None
    listing = Path(location) / FILE if Path(location).is_dir() else Path(location)
    if listing.name != FILE:
        return None
    entries = read_json_object(listing, "list of data sets by their names", _LARGEST)
    if wanted not in entries:
        close = difflib.get_close_matches(wanted, entries, n=1) or list(entries)[:5]
        raise InputError(f"{listing} has no entry {wanted!r}: it has {', '.join(close) or 'none'}")
    return _read(listing, wanted, entries[wanted], stage)


def _read(listing: Path, name: str, entry: Any, stage: str) -> tuple[Path, ColumnNames]:
    location = f"{listing}: {name}"
    if not isinstance(entry, dict):
        raise InputError(f"{location} must be an object with a file_name")
    if entry.get("script_url"):
        raise InputError(
            f"{location} is a script, which is never run: give the files that it makes"
        )
    if elsewhere := [key for key in _ELSEWHERE if entry.get(key)]:
        raise InputError(
            f"{location} isn't local ({elsewhere[0]}): fetch it and give its file or folder"
        )
    if entry.get("ranking") and stage == "sft":
        raise InputError(f"{location}: {_stage_of('chosen', 'rejected')}")
    unread = [key for key, setting in entry.items() if key not in _READ and setting]
    if unread and not (unread == ["split"] and entry["split"] == _SPLIT):
        raise InputError(
            f"{location} has {unread[0]!r}, which is not read here: use an entry without"
        )
    if not (file := entry.get("file_name")):
        raise InputError(f"{location} has no file_name: only local files are read")
    path = path_inside(listing.parent, file, f"{location}: file_name")
    return path, _columns(location, entry, stage)


def _columns(location: str, entry: dict[str, Any], stage: str) -> ColumnNames:
    formatting = entry.get("formatting", "alpaca")
    if not isinstance(formatting, str) or formatting not in _COLUMNS:
        raise InputError(f"{location}: formatting {formatting!r} is none of {', '.join(_COLUMNS)}")
    standard_names, shapes = _COLUMNS[formatting], _SHAPES
    if stage != "sft":
        is_pair = bool(entry.get("ranking"))
        if not is_pair and "kto_tag" not in (entry.get("columns") or {}):
            raise InputError(f"{location} has no ranking: {missing_answers({}, stage)}")
        if not is_pair and stage != "kto":
            raise InputError(f"{location} has a kto_tag, material of stage: kto, not {stage}")
        standard_names = standard_names | (_PAIRED if is_pair else _RATED)
        shapes = _PAIR_SHAPES if is_pair else _RATED_SHAPES
    columns = _texts(location, "columns", entry) or _UNMAPPED[formatting]
    if unread := [key for key in columns if key not in standard_names]:
        what = _stage_of(*unread) or f"the column {unread[0]!r} is not read here: leave it out"
        raise InputError(f"{location}: {what}")
    tags = _texts(location, "tags", entry)
    if unread := [key for key in tags if key not in TAGS]:
        raise InputError(f"{location}: the tag {unread[0]!r} is none of {', '.join(TAGS)}")
    if formatting == "alpaca" and {*columns} == {"prompt"}:
        return ColumnNames({"text": columns["prompt"]}, shape="text")
    names = {standard_names[key]: column for key, column in columns.items()}
    return ColumnNames(names, tags, shapes[formatting], stage)


def _stage_of(*columns: str) -> str:
    """Returns the refusal of these columns, if they belong to another kind of training."""
    try:
        refuse_other_stage({"messages": "a dialogue", **dict.fromkeys(columns, True)})
    except InputError as error:
        return str(error)
    return ""


def _texts(location: str, key: str, entry: dict[str, Any]) -> dict[str, str]:
    mapping = entry.get(key) or {}
    if not isinstance(mapping, dict):
        raise InputError(f"{location}: {key} must be an object of texts")
    texts = {name: text for name, text in mapping.items() if text is not None}
    if wrong := [name for name, text in texts.items() if not isinstance(text, str) or not text]:
        raise InputError(f"{location}: {key}: {wrong[0]} must be a text")
    return texts


PLAIN = ColumnNames()


@dataclass(frozen=True)
class Source:
    """One file or folder."""

    path: Path
    columns: ColumnNames = PLAIN


def source_of(name: str, columns: ColumnNames = PLAIN) -> Source:
    """Returns the source of a path or of `FOLDER[/dataset_info.json]:NAME`.

    Raises InputError for an entry that can't be used, or if columns are set twice.
    """
    entry = entry_of(name, columns.stage)
    if entry is None:
        return Source(Path(name), columns)
    if columns.names or columns.tags:
        raise InputError(f"columns: {name} brings its own columns; leave one of them out")
    return Source(*entry)


def weighted(
    groups: Sequence[IndexedConversations], weights: Sequence[float], seed: int
) -> Selection:
    """Returns the examples of an epoch, group after group, each as often as its weight.

    A fraction f of n examples is round(f * n) of them, without repetition and in their
    order.
    """
    selected: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    first = 0
    for number, (group, weight) in enumerate(zip(groups, weights, strict=True)):
        repeats, part = divmod(weight, 1)
        every = np.arange(first, first + len(group), dtype=np.int64)
        order = np.random.default_rng([seed, number]).permutation(len(group))
        selected += [*[every] * int(repeats), every[np.sort(order[: round(part * len(group))])]]
        first += len(group)
    return Selection(groups, np.concatenate(selected))


# Data sets of the `datasets` library: names on the hub, and folders that `save_to_disk` wrote.
#
#     owner/name                  the split train of its only configuration
#     owner/name:split            another split
#     owner/name:config:split     one of several configurations
#
# The Arrow files of a name are in the library's cache; those of a saved folder are listed in its
# state.json. Both are read like any other table. Scripts are never run: the library refuses them
# from version 4 on, and older versions aren't used.

STATE = "state.json"
SPLITS = "dataset_dict.json"
_SELECTIONS = ("_indices_files", "_indices_data_files")
_NAME = re.compile(r"(?P<set>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<config>[\w.+-]+))?(:(?P<split>\w+))?")
_OLDEST = 4  # the first version that runs no scripts
Load = Callable[..., Any]  # as datasets.load_dataset


class HubName(NamedTuple):
    """The parts of a name on the hub."""

    dataset: str  # owner/name
    config: str | None
    split: str


def hub_name(name: str) -> HubName | None:
    """Returns the hub name that `name` can be; None for anything that looks like a path.

    A name in an existing folder, or with an ending of letters such as `.txt`, is a mistyped
    path.
    """
    match = _NAME.fullmatch(name)
    if match is None or Path(match["set"]).parent.exists():
        return None
    if Path(match["set"]).suffix[1:].isalpha():
        return None
    first, second = match["config"], match["split"]
    if second is None:
        return HubName(match["set"], None, first or "train")
    return HubName(match["set"], first, second)


def hub_files(name: HubName, load: Load | None = None) -> list[Path]:
    """Returns the Arrow files of a data set on the hub, and fetches them if necessary.

    Raises InputError if the library is missing, or the data set can't be fetched or is a script.
    """
    load = load or _library(name.dataset)
    try:
        dataset = load(name.dataset, name.config, split=name.split)
        files = [Path(file["filename"]) for file in dataset.cache_files]
    except Exception as error:  # the library raises any kind of error
        raise InputError(_hub_error(name, error)) from error
    if not files or not len(dataset):
        raise InputError(f"dataset {name.dataset}: its split {name.split} has no examples")
    return files


def saved_files(folder: Path) -> list[Path] | None:
    """Returns the Arrow files of a folder from `save_to_disk`, in order; None for other folders.

    Raises InputError if the folder's lists are damaged, empty, or name files outside of it.
    """
    if (folder / STATE).is_file():
        return _listed(folder)
    if not (folder / SPLITS).is_file():
        return None
    splits = _saved(folder / SPLITS).get("splits")
    names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
    if len(names) == 1:
        return _listed(_inside(folder, names[0]))
    split_folders = ", ".join(str(folder / name) for name in names) or "none"
    raise InputError(f"{folder} has several splits, name one of them: {split_folders}")


def _listed(folder: Path) -> list[Path]:
    state = _saved(folder / STATE)
    if selection := [key for key in _SELECTIONS if state.get(key)]:
        raise InputError(
            f"{folder / STATE} selects rows of its files ({selection[0]}), as old releases of "
            "datasets do: load it with that release, call flatten_indices(), and save it again"
        )
    listed = state.get("_data_files")
    rows = listed if isinstance(listed, list) else []
    names = [row.get("filename") if isinstance(row, dict) else None for row in rows]
    if not names:
        raise InputError(f"{folder / STATE} lists no data files: save the data set again")
    return [_inside(folder, name) for name in names]


def _library(dataset: str) -> Load:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"dataset {dataset} is no file here; as a name on the hub it needs the library "
            f"datasets: {pip_install('hub')}, or give a file or folder"
        ) from error
    version = str(datasets.__version__)
    if int(version.partition(".")[0]) < _OLDEST:
        raise InputError(
            f"dataset {dataset}: datasets {version} may run scripts: {pip_install('hub')}"
        )
    load: Load = datasets.load_dataset
    return load


def _hub_error(name: HubName, error: Exception) -> str:
    """Returns the library's reason in one sentence, and what to do."""
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
        f"dataset {name.dataset} can't be fetched from the hub ({what}): give "
        "owner/name, owner/name:split or owner/name:config:split"
    )


def _inside(folder: Path, name: Any) -> Path:
    path = path_inside(folder, name, f"the list of files in {folder}")
    if not path.exists():
        raise InputError(f"{folder} lacks {name}, which it lists: copy or save it completely")
    return path


def _saved(path: Path) -> dict[str, Any]:
    return read_json_object(path, "list of a data set's files", _LARGEST)
