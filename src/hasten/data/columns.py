"""Columns: a user's names for the columns of a known shape, and for what is inside its turns.

`question: prompt_text` reads the column `question` of a shape from the user's `prompt_text`. Seven
tags, named as in LLaMA-Factory's dataset_info.json, say the same of turns: `role_tag` and
`content_tag` are the keys of a turn, `user_tag`, `assistant_tag`, `system_tag`, `function_tag` (a
turn whose content is JSON of calls) and `observation_tag` (their results) its roles.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.data.messages import CALLS, FLAGS, THOUGHTS
from hasten.data.shapes import SHAPES
from hasten.errors import InputError

_ROLE_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "function_tag": CALLS,
    "observation_tag": "observation",
}
TAGS = ("role_tag", "content_tag", *_ROLE_TAGS)
# Stay in a turn as they are.
_KEPT = ("tool_calls", "function_call", "tool_call_id", "name", *FLAGS, *THOUGHTS, "train_detail")
_NAMES = list(dict.fromkeys(n for shape in SHAPES.values() for n in (*shape.needs, *shape.takes)))


@dataclass(frozen=True)
class Columns:
    """What the user calls a shape's columns and tags; without `shape` it is found out."""

    names: Mapping[str, str] = field(default_factory=dict)  # a shape's column <- the user's
    tags: Mapping[str, str] = field(default_factory=dict)
    shape: str | None = None  # known beforehand: columns that `names` lacks are then not read

    def shapes(self) -> tuple[str, ...]:
        """The shapes that these names can belong to, in the order of the table."""
        if self.shape:
            return (self.shape,)
        fit = (n for n, s in SHAPES.items() if {*s.needs, *s.takes} >= self.names.keys())
        return tuple(name for name in fit if SHAPES[name].turn or not self.tags)

    def renamed(self, record: Any, shape: str | None = None) -> Any:
        """The record with the shape's names in place of the user's; anything else as it is."""
        if not isinstance(record, dict):
            return record
        taken = {*self.names.values()} - self.names.keys()
        kept = {} if self.shape else {k: v for k, v in record.items() if k not in self.names}
        named = {known: record[own] for known, own in self.names.items() if own in record}
        found = {k: v for k, v in kept.items() if k not in taken} | named
        known_shape = SHAPES.get(shape or "")
        if self.tags and known_shape and (keys := known_shape.turn):
            turns = found.get(known_shape.needs[0])
            if isinstance(turns, list):
                found[known_shape.needs[0]] = [self._turn(turn, *keys) for turn in turns]
        return found

    def _turn(self, turn: Any, who: str, what: str) -> Any:
        if not isinstance(turn, dict):
            return turn
        role, content = self.tags.get("role_tag", who), self.tags.get("content_tag", what)
        found = {known: turn[own] for known, own in ((who, role), (what, content)) if own in turn}
        found |= {key: turn[key] for key in _KEPT if key in turn}
        roles = {own: _ROLE_TAGS[tag] for tag, own in self.tags.items() if tag in _ROLE_TAGS}
        if isinstance(name := found.get(who), str):
            found[who] = roles.get(name, name)
        return found


def columns_of(given: Mapping[str, str]) -> Columns:
    """Columns as a recipe writes them; raises InputError for a name that no shape has."""
    for key, own in given.items():
        if key not in (*_NAMES, *TAGS):
            close = difflib.get_close_matches(key, (*_NAMES, *TAGS), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_NAMES)}"
            raise InputError(f"columns: no shape has a column {key!r}: {hint}")
        if not own:
            raise InputError(f"columns: {key} has no name: write {key}: and your column's name")
    names = {key: own for key, own in given.items() if key not in TAGS}
    found = Columns(names, {key: own for key, own in given.items() if key in TAGS})
    if not found.shapes():
        raise InputError(
            f"columns: {', '.join(given)} don't belong to one shape; see the shapes in the "
            "quick start"
        )
    return found
