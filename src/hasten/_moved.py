"""Module paths of earlier versions, which are imported for one more release, with a warning.

``_moved.json`` says where each module is now, and which names are elsewhere or have another name.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = __name__.partition(".")[0]


@cache
def table() -> dict[str, dict[str, str]]:
    """Of modules and of names, from the old path to the new module, both without ``hasten.``."""
    found: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return found


class OldPaths(MetaPathFinder, Loader):
    """Finds the modules of the table; each shows what the new one has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, old = fullname.partition(".")
        if root != ROOT or old not in table()["modules"]:
            return None
        is_package = any(name.startswith(old + ".") for name in table()["modules"])
        return ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Old(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.partition(".")[2]
        new = f"{ROOT}.{table()['modules'][old]}"
        warnings.warn(
            f"{module.__name__} is {new} now; the old path ends with the next release",
            DeprecationWarning,
            stacklevel=2,  # frames of importlib aren't counted
        )
        module.__doc__ = importlib.import_module(new).__doc__


class _Old(ModuleType):
    """A module under its old path."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        old = self.__name__.partition(".")[2]
        home = table()["names"].get(f"{old}.{name}", table()["modules"][old])
        module, _, renamed = home.partition(":")
        return getattr(importlib.import_module(f"{ROOT}.{module}"), renamed or name)


def install() -> None:
    """Find old paths from now on; last, so that nothing that exists is looked up here."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(OldPaths())
