"""``checkpoint_every`` and ``checkpoint_dir``: settings of the technique ``checkpoints``, as keys.

They are folded into the plan when a recipe is read, so that the resolved recipe, a plan's hash and
an experiment know of one place only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "checkpoints"


def with_checkpoint_keys(values: Mapping[str, Any], plan: list[Any]) -> dict[str, Any]:
    """The recipe's values with the two keys moved into ``plan``.

    Raises:
        ValueError: a key's value isn't one, or it has nothing to act on.
    """
    every, folder = values.get("checkpoint_every"), values.get("checkpoint_dir")
    if every is not None and every != "dynamic" and not (type(every) is int and every >= 1):
        raise ValueError(f"checkpoint_every is {every!r}; give dynamic, or a number of steps")
    if folder is not None and not (isinstance(folder, str) and folder):
        raise ValueError(f"checkpoint_dir is {folder!r}; give a folder or an address")
    place = next((i for i, entry in enumerate(plan) if is_checkpoints(entry)), None)
    if every is not None:
        if place is not None:
            raise ValueError(
                "checkpoint_every and checkpoints in the plan both say when to save; keep one"
            )
        plan, place = [*plan, {NAME: {"interval": every}}], len(plan)
    if folder is not None:
        if place is None:
            raise ValueError(
                "checkpoint_dir has no effect: say checkpoint_every, or put checkpoints into plan"
            )
        plan = [
            *plan[:place],
            {NAME: {**_settings(plan[place]), "folder": folder}},
            *plan[place + 1 :],
        ]
    return {**values, "plan": plan, "checkpoint_every": None, "checkpoint_dir": None}


def read_resume(value: Any) -> Any:
    """``auto``, ``never``, or a path: a word alone is rather a slip."""
    if value in ("auto", "never") or (isinstance(value, str) and "/" in value):
        return value
    raise ValueError("give auto, never, or the path of a checkpoint, such as ./step-00000100")


def is_checkpoints(entry: Any) -> bool:
    """Whether an entry of a plan, in any of its forms, is this technique."""
    if isinstance(entry, Mapping):
        entry = entry.get("technique") or next(iter(entry), None)
    return isinstance(entry, str) and entry.lower().replace("-", "_") == NAME


def _settings(entry: Any) -> dict[str, Any]:
    if isinstance(entry, str):
        return {}
    if "technique" in entry:
        return {key: value for key, value in entry.items() if key != "technique"}
    settings = entry[next(iter(entry))] or {}
    if not isinstance(settings, Mapping):
        raise ValueError(f"plan: {NAME} is {settings!r}; write its settings as {{name: value}}")
    return dict(settings)
