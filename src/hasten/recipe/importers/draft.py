"""A recipe that grows out of another tool's settings, and what became of every key on the way.

A **fate** is one of: ``mapped`` (the recipe says it), ``needless`` (hasten does it anyway, or it
has no meaning here), ``unmapped`` (asked for and not to be had: the recipe differs from the
source), ``contradicts`` (two keys of the source can't both be meant).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hasten.errors import InputError

Fate = Literal["mapped", "needless", "unmapped", "contradicts"]
SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class Row:
    """One key of the source."""

    key: str
    value: str
    fate: Fate
    words: str


@dataclass
class Draft:
    """Values and plan of the recipe so far; ``given`` is the source's mapping."""

    given: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    plan: list[Any] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)  # recipe key -> source key, for comments

    def note(self, key: str, fate: Fate, words: str) -> None:
        text = " ".join(repr(self.given.get(key)).split())
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        self.rows.append(Row(key, shown, fate, words))

    def say(self, key: str, name: str, value: Any) -> None:
        """The recipe's key ``name`` is ``value``, because the source's ``key`` says so."""
        if name in self.values and self.values[name] != value:
            first = self.why[name]
            words = f"{first} has already made {name} {self.values[name]!r}, which is kept"
            self.note(key, "contradicts", words)
            return
        self.values[name], self.why[name] = value, self.why.get(name, key)
        self.note(key, "mapped", f"{name}: {value}")

    def use(self, key: str, technique: str, settings: Mapping[str, Any] | None = None) -> None:
        """The plan has a technique, because the source's ``key`` says so."""
        entry: Any = {technique: dict(settings)} if settings else technique
        if entry not in self.plan:
            self.plan.append(entry)
        self.note(key, "mapped", f"plan: {technique}")

    @property
    def techniques(self) -> set[str]:
        return {next(iter(e)) if isinstance(e, dict) else e for e in self.plan}


Handler = Callable[[Draft, str, Any], None]


def drafted(
    given: Mapping[str, Any],
    handlers: Mapping[str, Handler],
    finish: Callable[[Draft], None] = lambda draft: None,
    quiet: tuple[Any, ...] = (),
) -> Draft:
    """Every key of the source through its handler; an unknown one that is ``quiet`` asks nothing.

    Raises:
        InputError: a value of a kind that its key can't have.
    """
    draft, key = Draft(given), ""
    try:
        for key, value in given.items():
            if key in handlers:
                handlers[key](draft, key, value)
            elif all(value is not word and value != word for word in quiet):
                draft.note(key, "unmapped", "hasten doesn't know this key")
        key = "its batch"
        finish(draft)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{key} is {str(given.get(key, 'of another kind'))[:SHOWN]!r}, which it can't be: "
            f"{str(error).splitlines()[0][:SHOWN] if str(error) else type(error).__name__}"
        ) from error
    told = {row.key for row in draft.rows}
    for name in [name for name in given if name not in told and name in handlers]:
        draft.note(name, "needless", "it is off")
    return draft


def named(name: str, kind: Callable[[Any], Any] | None = None) -> Handler:
    """A key that the recipe has too, under ``name``."""

    def handle(draft: Draft, key: str, value: Any) -> None:
        if value is not None:
            draft.say(key, name, kind(value) if kind else value)

    return handle


def needless(words: str) -> Handler:
    """A key that changes nothing here, and why."""
    return lambda draft, key, value: draft.note(key, "needless", words)


def unmapped(words: str, off: tuple[Any, ...] = (None, False, 0, "", "none", "no")) -> Handler:
    """A key that hasten can't follow; one that is off asks for nothing."""

    def handle(draft: Draft, key: str, value: Any) -> None:
        asked = all(value is not word and value != word for word in off)
        draft.note(key, "unmapped" if asked else "needless", words if asked else "it is off")

    return handle


def switch(technique: str, settings: Mapping[str, Any] | None = None) -> Handler:
    """A key that switches a technique on."""

    def handle(draft: Draft, key: str, value: Any) -> None:
        if value in (True, "auto", "true"):
            draft.use(key, technique, settings)
        else:
            draft.note(key, "needless", "it is off")

    return handle
