"""Techniques of the slot LAYOUT: which rank holds which part."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_HOME = f"{__name__}.ddp"  # where what was a module of this name went to


def __getattr__(name: str) -> Any:
    """A class that this path had as a module; it is found here for one more release."""
    found = None if name.startswith("_") else getattr(importlib.import_module(_HOME), name, None)
    if not isinstance(found, type):  # submodules are found by the import that asks
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    said = f"{__name__}.{name} is in {_HOME} now; the old path ends with the next release"
    warnings.warn(said, DeprecationWarning, stacklevel=2)
    return found
