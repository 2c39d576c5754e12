"""Plans: a set of techniques, at most one per slot. The same file is the same experiment.

``variants`` and ``cumulative`` name the plans an experiment compares; ``key`` names the plan itself
in caches, checkpoints and reports.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.formatting import did_you_mean

if TYPE_CHECKING:
    from hasten.core.context import JobContext


@dataclasses.dataclass(frozen=True)
class Plan:
    """Techniques in the order of their slots.

    Raises:
        InputError: two techniques take the same slot.
    """

    techniques: tuple[Technique, ...] = ()

    def __init__(self, techniques: Iterable[Technique] = ()) -> None:
        ordered = tuple(sorted(techniques, key=lambda t: t.slot.position))
        for one, two in itertools.pairwise(ordered):
            if one.slot is two.slot:
                raise InputError(
                    f"plan: {one} and {two} both decide {one.slot.value} "
                    f"(slot {one.slot.name}); keep one of them"
                )
        object.__setattr__(self, "techniques", ordered)

    def __iter__(self) -> Iterator[Technique]:
        return iter(self.techniques)

    def __len__(self) -> int:
        return len(self.techniques)

    def __contains__(self, slot: object) -> bool:
        return any(t.slot is slot for t in self.techniques)

    def __str__(self) -> str:
        return " + ".join(str(t) for t in self) or "baseline"

    def with_(self, *techniques: Technique) -> Plan:
        """Returns this plan with more techniques."""
        return Plan((*self.techniques, *techniques))

    def without(self, technique: Technique) -> Plan:
        """Returns this plan without one technique."""
        return Plan(t for t in self if t != technique)

    def environment(self, context: JobContext) -> dict[str, str]:
        """Returns the environment variables that the techniques require at the process start."""
        return {k: v for t in self for k, v in t.environment(context).items()}

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that identify this plan; equal settings have equal keys."""
        text = json.dumps(self.to_list(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def variants(self) -> dict[str, Plan]:
        """Returns the plans of an ablation by name: none, each alone, each left out, all."""
        plans = {"baseline": Plan()}
        if len(self) > 1:
            plans |= {f"only {t.name()}": Plan([t]) for t in self}
        if len(self) > 2:
            plans |= {f"without {t.name()}": self.without(t) for t in self}
        if self:
            plans["all"] = self
        return plans

    def cumulative(self) -> dict[str, Plan]:
        """Returns plans that grow by one technique at a time, in the order of the slots."""
        rungs = {"baseline": Plan()}
        for count, technique in enumerate(self.techniques, start=1):
            rungs[f"+ {technique.name()}"] = Plan(self.techniques[:count])
        return rungs

    def to_list(self) -> list[dict[str, Any]]:
        """Returns one dictionary per technique, ready for JSON and YAML."""
        return [t.to_dict() for t in self]

    @classmethod
    def from_list(cls, entries: Iterable[Any], catalogue: Iterable[type[Technique]]) -> Plan:
        """Reads a plan; an entry is a name, ``{name: settings}`` or the stored form.

        Raises:
            InputError: an unknown technique or setting, with the nearest known one.
        """
        kinds = {kind.name(): kind for kind in catalogue}
        return cls(read_technique(entry, kinds) for entry in entries)


def read_technique(entry: Any, kinds: Mapping[str, type[Technique]]) -> Technique:
    """Reads a technique: a name, ``{name: {setting: value}}`` or ``{"technique": name, ...}``."""
    name, settings = name_and_settings(entry)
    kind = _find_kind(name, kinds)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in settings:
        if key not in fields:
            raise InputError(
                f"plan: {kind.name()} has no setting {key!r}{did_you_mean(key, fields)}; "
                f"it has {', '.join(fields) or 'none'}"
            )
    values = {key: _read_value(value, kinds) for key, value in settings.items()}
    for key, value in values.items():
        _check_type(f"{kind.name()}: {key}", value, fields[key].default)
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise InputError(f"plan: {kind.name()}: {error}") from error


def name_and_settings(entry: Any) -> tuple[str, dict[str, Any]]:
    """Returns a technique's name, as it is written, and its settings.

    Raises:
        InputError: the entry has none of the forms.
    """
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping) and isinstance(entry.get("technique"), str):
        return entry["technique"], {k: v for k, v in entry.items() if k != "technique"}
    if isinstance(entry, Mapping) and len(entry) == 1:
        name, settings = next(iter(entry.items()))
        if isinstance(name, str) and (settings is None or isinstance(settings, Mapping)):
            return name, dict(settings or {})
    raise InputError(
        f"plan: can't read {entry!r}; write a technique's name, or `name: {{setting: value}}`"
    )


def _find_kind(name: str, kinds: Mapping[str, type[Technique]]) -> type[Technique]:
    loose = {key.replace("_", ""): kind for key, kind in kinds.items()}
    technique_class = loose.get(name.replace("_", "").replace("-", "").lower())
    if technique_class is None:
        raise InputError(
            f"plan: no technique is called {name!r}{did_you_mean(name, kinds)}; "
            "`hasten keys` lists them all"
        )
    return technique_class


def _read_value(value: Any, kinds: Mapping[str, type[Technique]]) -> Any:
    if isinstance(value, Mapping) and "technique" in value:
        return read_technique(value, kinds)
    if isinstance(value, list):
        return tuple(_read_value(item, kinds) for item in value)
    return value


def _check_type(setting: str, value: Any, default: Any) -> None:
    """Checks that a setting has its default's type; whole numbers are floats, and fit ``auto``."""
    if default is None or isinstance(value, Technique):
        return
    wanted = (int, float) if isinstance(default, float) else type(default)
    is_bool = isinstance(value, bool)
    if default in ("auto", "dynamic") and isinstance(value, int) and not is_bool:
        return
    if not isinstance(value, wanted) or is_bool != isinstance(default, bool):
        raise InputError(
            f"plan: {setting} is {value!r}; it must be a {type(default).__name__}, like {default!r}"
        )


def entry_of(technique: Technique) -> Any:
    """Returns a technique as users write it: its name and the settings that aren't default."""
    fields = dataclasses.fields(technique)  # type: ignore[arg-type]  # every technique is one
    plain = technique.settings()
    changed = {f.name: plain[f.name] for f in fields if getattr(technique, f.name) != f.default}
    return {technique.name(): changed} if changed else technique.name()


def name_of(entry: Any) -> str:
    """Returns the technique's name of a plan's entry in any form."""
    if isinstance(entry, Mapping):
        entry = entry.get("technique") or next(iter(entry), "")
    return str(entry).lower().replace("-", "_")
