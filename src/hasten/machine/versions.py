"""Releases of other packages that hasten was tested with; checks the installed ones.

``make test-versions`` writes ``tested_versions.json``. It runs the tests of models,
kernels and other trainers against the oldest and the newest releases that the pins
allow.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import sys
from collections.abc import Mapping
from importlib import resources
from typing import Any

# Packages that are always checked; other packages only if this process has imported them.
ALWAYS_CHECKED = ("torch", "transformers")


@functools.cache
def tested() -> Mapping[str, Any]:
    """Returns ``ranges``: (oldest, newest) by package; ``model_types``: first release."""
    text = resources.files("hasten.machine").joinpath("tested_versions.json").read_text()
    table: dict[str, Any] = json.loads(text)
    return table


def release(version: str) -> tuple[int, ...]:
    """Returns a version's numbers, without any suffix: 2.13.0+cpu is (2, 13, 0)."""
    plain = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in plain[0].split(".")) if plain else ()


def untested(installed: Mapping[str, str] | None = None) -> str | None:
    """Returns a sentence on packages outside the tested range; None: all are inside.

    A patch of the newest tested release (5.24.1 after 5.24.0) is inside.
    """
    packages = _in_use() if installed is None else installed
    outside = []
    for name, (oldest, newest) in tested()["ranges"].items():
        version = release(packages.get(name, ""))
        if version and not (release(oldest) <= version and version[:2] <= release(newest)[:2]):
            outside.append(f"{name} {packages[name]} (tested: {oldest} to {newest})")
    if not outside:
        return None
    return f"hasten wasn't tested with {', '.join(outside)}"


def knows_since(model_type: str) -> str | None:
    """Returns the first tested release of Transformers with a model type that the oldest lacks."""
    version: str | None = tested()["model_types"].get(model_type)
    return version


def _in_use() -> dict[str, str]:
    names = [name for name in tested()["ranges"] if name in ALWAYS_CHECKED or name in sys.modules]
    by_package = {}
    for name in names:
        try:
            by_package[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_package
