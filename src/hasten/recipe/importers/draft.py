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
    folder: Path = Path()  # the file's folder, for paths in the file
    values: dict[str, Any] = field(default_factory=dict)
    plan: list[Any] = field(default_factory=list)
    rows: list[ImportedKey] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)  # recipe key -> source key, for comments
    plan_why: list[str] = field(default_factory=list)  # techniques that are defaults of the tool
    row_tokens: int | None = None  # tokens of a packed row, if the batch counts rows
    at_default: bool = False  # the key that is handled is missing in the file

    def note(self, key: str, fate: Fate, explanation: str) -> None:
        self.row(key, self.source.get(key), fate, explanation)

    def row(self, key: str, setting: Any, fate: Fate, explanation: str) -> None:
        """Adds a row for a key, or for a part of its value."""
        text = " ".join(repr(setting).split())
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        if self.at_default:
            if fate == "needless":
                return
            shown, explanation = LEFT_OUT, f"{explanation} ({self.tool}'s default)"
        self.rows.append(ImportedKey(key, shown, fate, explanation))

    def say(self, key: str, name: str, setting: Any) -> None:
        """Sets the recipe's key ``name``, derived from the source's ``key``."""
        if self.at_default:
            if name in self.values or setting == default_of(name):
                return
            self.why[name] = f"{key}: {self.tool}'s default"
        elif name in self.values and self.values[name] != setting:
            first = self.why[name]
            explanation = f"{first} has already made {name} {self.values[name]!r}, which is kept"
            self.note(key, "contradicts", explanation)
            return
        self.values[name], self.why[name] = setting, self.why.get(name, key)
        self.row(key, self.source.get(key, setting), "mapped", f"{name}: {setting}")

    def use(self, key: str, technique: str, settings: Mapping[str, Any] | None = None) -> None:
        """Adds a technique to the plan, derived from the source's ``key``."""
        self.add(technique, settings)
        if self.at_default:
            self.plan_why.append(f"{technique} is {self.tool}'s default ({key})")
        self.note(key, "mapped", f"plan: {technique}")

    def add(self, technique: str, settings: Mapping[str, Any] | None = None) -> None:
        """Adds a technique to the plan, once."""
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
        """Returns the source's value, or the default if the key is missing."""
        setting = self.source.get(key)
        return default if setting is None else setting

    @property
    def techniques(self) -> set[str]:
        return {next(iter(e)) if isinstance(e, dict) else e for e in self.plan}


def default_of(name: str) -> Any:
    """Returns the default of a recipe's key."""
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
        for key, setting in source.items():
            if key in handlers:
                before = len(draft.rows)
                handlers[key](draft, key, setting)
                if len(draft.rows) == before and handlers[key] is not later:
                    draft.note(key, "needless", "it is off")
            elif setting is not None and all(
                setting is not word and setting != word for word in quiet
            ):
                draft.note(key, "unmapped", "hasten doesn't know this key")
        draft.at_default = True
        for names, setting in (defaults or {}).items():
            keys = names.split("|")
            key = keys[0]
            if all(source.get(name) is None for name in keys):
                handlers[key](draft, key, setting)
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


def later(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Does nothing: ``finish`` reads this key together with others."""


def named(name: str, kind: Callable[[Any], Any] | None = None) -> Handler:
    """Returns the handler of a key that the recipe has under ``name``."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        if setting is not None:
            draft.say(key, name, kind(setting) if kind else setting)

    return handle


def positive(name: str) -> Handler:
    """Returns the handler of a whole number that the recipe has under ``name``; 0 is off."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        if setting:
            draft.say(key, name, whole_number(setting))

    return handle


def needless(explanation: str) -> Handler:
    """Returns the handler of a key without an effect in hasten."""
    return lambda draft, key, setting: draft.note(key, "needless", explanation)


OFF: tuple[Any, ...] = (None, False, 0, "", "none", "no", "None", "False", "false", [], {})


def is_off(setting: Any) -> bool:
    """Returns True for values that switch a key off."""
    return any(setting is word or setting == word for word in OFF)


def unmapped(explanation: str, off: tuple[Any, ...] = ()) -> Handler:
    """Returns the handler of an unsupported key; values that are off, or in ``off``, are fine."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        if not is_off(setting) and setting not in off:
            draft.note(key, "unmapped", explanation)  # else drafted() notes that it is off

    return handle


def always(explanation: str) -> Handler:
    """Returns the handler of a feature that hasten can't switch off."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        draft.note(key, "unmapped" if setting is False else "needless", explanation)

    return handle


def switch(technique: str, on: tuple[Any, ...] = (True, "auto", "true")) -> Handler:
    """Returns the handler of a key that switches a technique on."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        if setting in on:
            draft.use(key, technique)

    return handle


def implied(name: str, meant: Any) -> Handler:
    """Returns the handler that sets the recipe's ``name`` to ``meant`` if the key is on."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        if not is_off(setting):
            draft.say(key, name, meant)

    return handle


ROWS = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))


def names_of(setting: Any, separator: str | None = ",") -> list[str]:
    """Returns the names in a list, or in a text with separators; None: split at blanks."""
    parts = setting.split(separator) if isinstance(setting, str) else setting or ()
    return [name for part in parts if (name := str(part).strip())]


def whole_number(setting: Any) -> int:
    """Returns a whole number, which may be written as 8.0 or "8".

    Raises:
        ValueError: the setting isn't a whole number.
    """
    if isinstance(setting, bool) or float(setting) != int(float(setting)):
        raise ValueError("give a whole number")
    return int(float(setting))


KINDS: Mapping[str, Callable[[Any], Any]] = {"int": whole_number, "float": float, "bool": bool}


def table(name: str) -> dict[str, Handler]:
    """Returns handlers for the keys in the table ``name`` of ``keys.json``."""
    rows = ROWS[name]
    handlers: dict[str, Handler] = {}
    kinds: dict[str, Callable[[str], Handler]] = {
        "needless": needless,
        "always": always,
        "unmapped": unmapped,
        "sizes": lambda explanation: unmapped(explanation, off=(1,)),  # parallel sizes: 1 is off
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
