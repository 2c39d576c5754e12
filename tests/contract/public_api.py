"""What users type, import, read and store, as the code has it now; `test_public_api` compares it.

    python tests/contract/public_api.py    # writes public_api.json; look at its difference in git

A key that goes away or changes breaks somebody: the commit that changes the list says why.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

import hasten
from hasten import errors
from hasten.cli.main import app
from hasten.core.timing import StepMetrics
from hasten.errors import StoppedError
from hasten.monitor.server import HELP, PREFIX
from hasten.recipe.schema import Recipe
from hasten.report.schema import REPORT
from hasten.techniques import CATALOGUE

FILE = Path(__file__).with_name("public_api.json")
SOURCE = Path(hasten.__file__).parent


def surface() -> dict[str, Any]:
    """Every part of the public surface, as plain data."""
    return {
        "names": sorted(hasten.__all__),
        "commands": dict(_commands("hasten", typer.main.get_command(app))),
        "recipe": {
            name: [
                re.sub(r"\bhasten\.[\w.]+\.", "", str(field.annotation)),  # classes may move
                repr(field.get_default(call_default_factory=True)),
            ]
            for name, field in Recipe.model_fields.items()
        },
        "techniques": {
            kind.name(): {"slot": kind.slot.name, **_settings(kind)} for kind in CATALOGUE
        },
        "report": sorted(_keys(REPORT)),
        "metrics": [field.name for field in dataclasses.fields(StepMetrics)],
        "exit codes": {
            **{name: getattr(errors, name) for name in ("FAILED", "LEFT", "INTERRUPTED")},
            **{kind.__name__: kind.code for kind in _subclasses(StoppedError)},
        },
        "variables": sorted(set(re.findall(r"\bHASTEN_[A-Z_]+[A-Z]\b", _sources()))),
        "prometheus": sorted(PREFIX + name for name in HELP),
    }


def _commands(path: str, command: Any) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Each command's parameters: how they are written, their type and their default."""
    yield (
        path,
        {
            str(one.name): [
                sorted(name for name in (*one.opts, *one.secondary_opts) if name.startswith("-")),
                str(one.type_descriptor.annotation),
                None if callable(one.default) else repr(one.default),
            ]
            for one in command.params
        },
    )
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(f"{path} {name}", below)


def _settings(kind: type[Any]) -> dict[str, str]:
    return {
        field.name: "required" if field.default is dataclasses.MISSING else repr(field.default)
        for field in dataclasses.fields(kind)
    }


def _keys(shape: Any, above: str = "") -> Iterator[str]:
    """Of nested objects, with dots between."""
    if isinstance(shape, list):
        for inner in shape:
            yield from _keys(inner, above + "[]")
    elif isinstance(shape, Mapping):
        for key, inner in shape.items():
            yield f"{above}.{key}".lstrip(".")
            yield from _keys(inner, f"{above}.{key}".lstrip("."))


def _subclasses(kind: type[StoppedError]) -> Iterator[type[StoppedError]]:
    import hasten.core.health
    import hasten.launch.ranks
    import hasten.recipe.memory_check  # noqa: F401  # all three define some

    for below in sorted(kind.__subclasses__(), key=lambda found: found.__name__):
        yield below
        yield from _subclasses(below)


def _sources() -> str:
    return "\n".join(path.read_text() for path in sorted(SOURCE.rglob("*.py")))


def main() -> None:
    """Write what is there now."""
    FILE.write_text(json.dumps(surface(), indent=1) + "\n")


if __name__ == "__main__":
    main()
