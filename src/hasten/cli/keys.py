"""``hasten keys``: recipe keys and techniques with type, default and meaning, from the schema."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import typer

from hasten.cli.arguments import AsJson
from hasten.cli.output import say
from hasten.errors import InputError
from hasten.formatting import did_you_mean

if TYPE_CHECKING:
    from hasten.core.technique import Technique

KEY_WIDTH, TYPE_WIDTH = 30, 34  # columns of the plain list


def keys(
    name: Annotated[
        str | None, typer.Argument(help="one recipe key or technique; default: all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List recipe keys and techniques with their meaning."""
    from hasten.recipe.schema import Recipe, foreign_words
    from hasten.techniques import CATALOGUE

    recipe_keys = {key: _key_row(key, field) for key, field in Recipe.model_fields.items()}
    techniques = {kind.name(): _technique_row(kind) for kind in CATALOGUE}
    if name is not None:
        rows = [table[name] for table in (recipe_keys, techniques) if name in table]
        if not rows:
            foreign = foreign_words(name)
            hint = f": {foreign}" if foreign else did_you_mean(name, [*recipe_keys, *techniques])
            raise InputError(f"NAME {name!r}: no recipe key or technique has this name{hint}")
        if as_json:
            say(json.dumps(rows, indent=1))
            return
        for row in rows:
            say("\n".join(_lines(row)))
        return
    if as_json:
        tables = {"keys": list(recipe_keys.values()), "techniques": list(techniques.values())}
        say(json.dumps(tables, indent=1))
        return
    say("recipe keys (key, type, default, meaning)")
    for row in recipe_keys.values():
        say(_setting_line(row))
    say("\ntechniques for `plan` (name, slot, fidelity, meaning); `hasten keys NAME` has settings")
    for row in techniques.values():
        say(f"  {row['name']:<{KEY_WIDTH}} {row['slot']:<14} {row['fidelity']:<9} {row['meaning']}")


def _lines(row: dict[str, Any]) -> list[str]:
    if row["kind"] == "key":
        values = ("type", "default", "meaning")
        return [f"{row['name']}: recipe key", *(f"  {key:<8} {row[key]}" for key in values)]
    head = f"{row['name']}: technique of slot {row['slot']}, fidelity {row['fidelity']}"
    body = [f"  {line}" for line in row["description"].splitlines()]
    settings = [_setting_line(setting) for setting in row["settings"]]
    if settings:
        settings = ["", "settings (name, type, default, meaning)", *settings]
    return [head, *body, *settings]


def _setting_line(row: dict[str, Any]) -> str:
    columns = f"  {row['name']:<{KEY_WIDTH}} {row['type']:<{TYPE_WIDTH}} {row['default']:<10}"
    return f"{columns} {row['meaning']}"


def _settings(model: Any) -> Any:
    """Returns the settings of a nested default that aren't their own defaults."""
    return model.model_dump(exclude_defaults=True)


def _key_row(name: str, field: Any) -> dict[str, Any]:
    default = field.get_default(call_default_factory=True)
    return {
        "kind": "key",
        "name": name,
        "type": type_text(field.annotation),
        "default": "required" if field.is_required() else json.dumps(default, default=_settings),
        "meaning": field.description,
    }


def _technique_row(kind: type[Technique]) -> dict[str, Any]:
    from hasten.core.technique import Fidelity

    description = inspect.getdoc(kind) or ""
    fidelity = kind.fidelity
    return {
        "kind": "technique",
        "name": kind.name(),
        "slot": kind.slot.name.lower(),
        # A property depends on the settings of an instance.
        "fidelity": fidelity.name.lower() if isinstance(fidelity, Fidelity) else "varies",
        "meaning": " ".join(description.partition("\n\n")[0].split()),
        "description": description,
        "settings": [_setting_row(field) for field in kind._fields()],
    }


def _setting_row(field: dataclasses.Field[Any]) -> dict[str, Any]:
    missing = dataclasses.MISSING
    default = field.default if field.default_factory is missing else field.default_factory()
    return {
        "name": field.name,
        "type": str(field.type),
        "default": "required" if default is missing else json.dumps(default, default=str),
        "meaning": field.metadata.get("doc", ""),
    }


def type_text(annotation: Any) -> str:
    """Returns a type as recipes write its values, such as ``auto | int`` or ``list of str``."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if annotation is Any:
        return "any"
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(one) for one in inner)
    if origin is list:
        return f"list of {type_text(inner[0])}"
    if origin is tuple:
        return f"[{', '.join(type_text(one) for one in inner)}]"
    if origin is dict:
        return f"{{{type_text(inner[0])}: {type_text(inner[1])}}}"
    if origin is Annotated:
        return type_text(inner[0])
    return str(getattr(annotation, "__name__", annotation))
