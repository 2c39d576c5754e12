"""Records of other trainings: preferences, rewards, prompts alone, media. They are refused by name.

A column that means something and isn't used would vanish without a word: rejected answers would be
trained, or the picture that a question is about would be missing. So the whole file is refused,
whatever ``max_rejected`` allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hasten.errors import InputError

MEDIA = ("image", "images", "audio", "audios", "video", "videos")
PAIR = ("chosen", "rejected")
LABELS = ("label", "kto_tag")  # of KTO, where they hold truth values
TRUTHS = (True, False, "true", "false", "True", "False")
ANSWERS = ("completion", "output", "answer", "response", "messages", "conversations")
OURS = "hasten trains on answers alone"


def refuse_other_stage(record: Any, named: Iterable[str] = ()) -> None:
    """Refuse a record whose columns are those of another training.

    Args:
        record: as it was read.
        named: columns that the user has named as a shape's, which are read and not dropped.

    Raises:
        InputError: it is one, with what it is.
    """
    if not isinstance(record, Mapping):
        return
    filled = {key for key, value in record.items() if not _is_empty(value)} - {*named}
    found = _stage(record, filled)
    if found is not None:
        raise InputError(found)


def _stage(record: Mapping[str, Any], filled: set[str]) -> str | None:
    if filled >= {*PAIR}:
        return (
            "these are preference pairs (chosen, rejected), material of DPO or of a reward model; "
            f"{OURS}"
        )
    if "completions" in filled and "labels" in filled:
        return (
            "these are rated steps (completions, labels), material of a process reward model; "
            f"{OURS}"
        )
    label = next((key for key in LABELS if key in filled and _is_truth(record[key])), None)
    if label and filled & {*ANSWERS}:
        return (
            f"{label!r} says whether an answer is good, which is material of KTO: a false one is "
            f"to be avoided; {OURS}, so leave the false ones and the column out"
        )
    media = next((key for key in MEDIA if key in filled), None)
    if media:
        return (
            f"the column {media!r} holds what a text model can't read; hasten trains text alone, "
            "so take other records, or leave the column out if the text stands by itself"
        )
    if "prompt" in filled and not filled & {*ANSWERS, "text", "instruction", *PAIR}:
        return f"prompts without answers are material of reinforcement learning; {OURS}"
    return None


def _is_truth(value: Any) -> bool:
    return isinstance(value, (bool, str)) and value in TRUTHS


def _is_empty(value: Any) -> bool:
    """A table fills in columns that only some records have."""
    return value is None or (isinstance(value, (str, list, tuple, dict)) and not value)
