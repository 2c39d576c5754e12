"""Builds a recipe from another tool's settings, with a fate for every key and default.

The **fate** of a key is one of:

- ``mapped``: The recipe has it.
- ``needless``: The result is the same without it, or it has no meaning in hasten.
- ``unmapped``: The source requests it, and the recipe differs from the source.
- ``contradicts``: Two keys of the source exclude each other.

A key that the file leaves out has the tool's own default. If that makes another
training than hasten's default, the recipe contains it. A recipe therefore requires no
knowledge of its source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hasten.errors import InputError
from hasten.recipe.schema import Recipe

Fate = Literal["mapped", "needless", "unmapped", "contradicts"]
SHOWN = 60  # characters of a value
LEFT_OUT = "left out"


@dataclass(frozen=True)
class ImportedKey:
    """One key of the source."""

    key: str
    value: str
    fate: Fate
    explanation: str


@dataclass
class RecipeDraft:
    """Values and plan of the recipe so far; ``source`` is the mapping of its file."""

    source: Mapping[str, Any]
    tool: str = ""
    folder: Path = Path()  # of the file, for the paths that it names
    values: dict[str, Any] = field(default_factory=dict)
    plan: list[Any] = field(default_factory=list)
    rows: list[ImportedKey] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)  # recipe key -> source key, for comments
    plan_why: list[str] = field(default_factory=list)  # techniques that are defaults of the tool
    row_tokens: int | None = None  # of packed rows, which the source's batch counts
    at_default: bool = False  # the key at hand is left out in the file

    def note(self, key: str, fate: Fate, explanation: str) -> None:
        self.row(key, self.source.get(key), fate, explanation)

    def row(self, key: str, value: Any, fate: Fate, explanation: str) -> None:
        """A row for a part of a key's value."""
        text = " ".join(repr(value).split())
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        if self.at_default:
            if fate == "needless":
                return
            shown, explanation = LEFT_OUT, f"{explanation} ({self.tool}'s default)"
        self.rows.append(ImportedKey(key, shown, fate, explanation))

    def say(self, key: str, name: str, value: Any) -> None:
        """Sets the recipe's key ``name`` to ``value``, derived from the source's ``key``."""
        if self.at_default:
            if name in self.values or value == default_of(name):
                return
            self.why[name] = f"{key}: {self.tool}'s default"
        elif name in self.values and self.values[name] != value:
            first = self.why[name]
            explanation = f"{first} has already made {name} {self.values[name]!r}, which is kept"
            self.note(key, "contradicts", explanation)
            return
        self.values[name], self.why[name] = value, self.why.get(name, key)
        self.row(key, self.source.get(key, value), "mapped", f"{name}: {value}")

    def use(self, key: str, technique: str, settings: Mapping[str, Any] | None = None) -> None:
        """Adds a technique to the plan, derived from the source's ``key``."""
        self.add(technique, settings)
        if self.at_default:
            self.plan_why.append(f"{technique} is {self.tool}'s default ({key})")
        self.note(key, "mapped", f"plan: {technique}")

    def add(self, technique: str, settings: Mapping[str, Any] | None = None) -> None:
        """Put a technique into the plan, once."""
        if technique not in self.techniques:
            self.plan.append({technique: dict(settings)} if settings else technique)

    def withdraw(self, name: str, explanation: str, fate: Fate = "needless") -> None:
        """Removes a key of the recipe, and adds the reason to the row of the source's key."""
        if name not in self.values:
            return
        del self.values[name]
        key, _, default = self.why.pop(name).partition(": ")
        changed = [
            replace(r, fate=fate, explanation=explanation) if r.key == key else r for r in self.rows
        ]
        self.rows = [r for r in self.rows if r.key != key] if default else changed

    def setting(self, key: str, default: Any) -> Any:
        """The source's value, or the tool's default where it is left out."""
        value = self.source.get(key)
        return default if value is None else value

    @property
    def techniques(self) -> set[str]:
        return {next(iter(e)) if isinstance(e, dict) else e for e in self.plan}


def default_of(name: str) -> Any:
    """The value of a recipe's key that is left out."""
    return Recipe.model_fields[name].default


Handler = Callable[[RecipeDraft, str, Any], None]


def drafted(
    draft: RecipeDraft,
    handlers: Mapping[str, Handler],
    finish: Callable[[RecipeDraft], None] = lambda draft: None,
    quiet: tuple[Any, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> RecipeDraft:
    """Passes every key of the source to its handler.

    An unknown key without a value, or with one in ``quiet``, is ignored.

    Args:
        defaults: the tool's values of missing keys. The value of ``a|b`` is used if neither
            is present, and goes to the handler of ``a``.

    Raises:
        InputError: a value of a wrong type for its key.
    """
    source, key = draft.source, ""
    try:
        for key, value in source.items():
            if key in handlers:
                before = len(draft.rows)
                handlers[key](draft, key, value)
                if len(draft.rows) == before and handlers[key] is not later:
                    draft.note(key, "needless", "it is off")
            elif value is not None and all(value is not word and value != word for word in quiet):
                draft.note(key, "unmapped", "hasten doesn't know this key")
        draft.at_default = True
        for names, value in (defaults or {}).items():
            keys = names.split("|")
            key = keys[0]
            if all(source.get(name) is None for name in keys):
                handlers[key](draft, key, value)
        draft.at_default = False
        key = "its batch"
        finish(draft)
    except (TypeError, ValueError, AttributeError, OverflowError, KeyError) as error:
        raise InputError(
            f"{key} is {str(source.get(key, 'of another kind'))[:SHOWN]!r}, which it can't be: "
            f"{str(error).splitlines()[0][:SHOWN] if str(error) else type(error).__name__}"
        ) from error
    listed = {row.key.partition(".")[0] for row in draft.rows}
    for name in [name for name in source if name not in listed and name in handlers]:
        draft.note(name, "needless", "it is off")
    return draft


def later(draft: RecipeDraft, key: str, value: Any) -> None:
    """A key that ``finish`` reads, together with others."""


def named(name: str, kind: Callable[[Any], Any] | None = None) -> Handler:
    """A key that the recipe has too, under ``name``."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        if value is not None:
            draft.say(key, name, kind(value) if kind else value)

    return handle


def positive(name: str) -> Handler:
    """A whole number that the recipe has too; 0 is off."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        if value:
            draft.say(key, name, whole_number(value))

    return handle


def needless(explanation: str) -> Handler:
    """A key that changes nothing here, and why."""
    return lambda draft, key, value: draft.note(key, "needless", explanation)


OFF: tuple[Any, ...] = (None, False, 0, "", "none", "no", "None", "False", "false", [], {})


def is_off(value: Any) -> bool:
    """Values that ask for nothing, whatever their key."""
    return any(value is word or value == word for word in OFF)


def unmapped(explanation: str, off: tuple[Any, ...] = ()) -> Handler:
    """A handler for an unsupported key; values that are off, or in ``off``, need nothing."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        if not is_off(value) and value not in off:
            draft.note(key, "unmapped", explanation)  # else drafted() notes that it is off

    return handle


def always(explanation: str) -> Handler:
    """A key for what hasten does in any case; a file that switches it off differs."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        draft.note(key, "unmapped" if setting is False else "needless", explanation)

    return handle


def switch(technique: str, on: tuple[Any, ...] = (True, "auto", "true")) -> Handler:
    """A key that switches a technique on."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        if value in on:
            draft.use(key, technique)

    return handle


def implied(name: str, meant: Any) -> Handler:
    """A handler that sets the recipe's ``name`` to ``meant`` if the key is on."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        if not is_off(value):
            draft.say(key, name, meant)

    return handle


ROWS = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))


def names_of(value: Any, separator: str | None = ",") -> list[str]:
    """Names in a list, or in one text between separators; None: blanks."""
    parts = value.split(separator) if isinstance(value, str) else value or ()
    return [name for part in parts if (name := str(part).strip())]


def whole_number(value: Any) -> int:
    """A whole number, also one that is written as 8.0 or "8".

    Raises:
        ValueError: it has a fraction, or is no number.
    """
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError("give a whole number")
    return int(float(value))


KINDS: Mapping[str, Callable[[Any], Any]] = {"int": whole_number, "float": float, "bool": bool}


def table(name: str) -> dict[str, Handler]:
    """Handlers of the keys that ``keys.json`` speaks of under ``name``."""
    rows = ROWS[name]
    handlers: dict[str, Handler] = {}
    kinds: dict[str, Callable[[str], Handler]] = {
        "needless": needless,
        "always": always,
        "unmapped": unmapped,
        "sizes": lambda explanation: unmapped(explanation, off=(1,)),  # of groups of ranks
    }
    for kind, handler in kinds.items():
        for explanation, keys in rows.get(kind, {}).items():
            handlers |= {key: handler(explanation) for key in keys}
    handlers |= dict.fromkeys(rows.get("later", ()), later)
    handlers |= {key: switch(technique) for key, technique in rows.get("switch", {}).items()}
    handlers |= {key: implied(*meant) for key, meant in rows.get("implied", {}).items()}
    for key, (meant, *types) in rows.get("named", {}).items():
        handlers[key] = named(meant, *(KINDS[kind] for kind in types))
    return handlers
