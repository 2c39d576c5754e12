"""``layout``: which rank holds which part, as a key of a recipe beside the plan.

    layout: fsdp2                        a technique by its name
    layout: {fsdp2: {reshard: false}}    the same with settings
    layout: {dp: 2, tp: 2}               sizes of a mesh: the technique hybrid

It is folded into the plan when a recipe is read, so that the resolved recipe, a plan's hash and an
experiment know of one place only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hasten.core.plan import did_you_mean
from hasten.core.slot import Slot
from hasten.recipe.checkpoint_keys import with_checkpoint_keys

AXES = ("dp", "shard", "tp", "pp", "ep")


def with_layout_key(values: Mapping[str, Any], plan: list[Any]) -> dict[str, Any]:
    """The recipe's values with ``layout``, and the keys of checkpoints, moved into ``plan``.

    Raises:
        ValueError: no layout has that name, or no axis; or as ``with_checkpoint_keys`` says.
    """
    asked = values.get("layout")
    folded = with_checkpoint_keys(values, plan if asked is None else [*plan, _entry(asked)])
    return {**folded, "layout": None}


def _entry(asked: Any) -> Any:
    """A line of the plan."""
    from hasten.recipe.catalogue import catalogue  # torch, which reading a recipe can do without
    from hasten.techniques.layout.hybrid import Hybrid

    layouts = tuple(kind.name() for kind in catalogue() if kind.slot is Slot.LAYOUT)
    settings = tuple(field.name for field in dataclasses.fields(Hybrid))
    if isinstance(asked, str):
        _check(asked.lower().replace("-", "_"), layouts, "layout", "layouts")
        return asked
    if not isinstance(asked, Mapping) or not asked:
        raise ValueError(
            f"layout is {asked!r}; give a name ({', '.join(layouts)}) or sizes: {{dp: 2, tp: 2}}"
        )
    names = [str(key) for key in asked]
    if len(names) == 1 and names[0].lower().replace("-", "_") in layouts:
        return dict(asked)
    for name in names:
        _check(name, settings, "layout's", "sizes", shown=AXES)
    for name in AXES:
        size = asked.get(name, 1)
        if type(size) is not int or size < 1:
            raise ValueError(f"layout's {name} is {size!r}; it is a number of ranks, at least 1")
    return {Hybrid.name(): dict(asked)}


def _check(
    name: str, known: tuple[str, ...], whose: str, what: str, shown: tuple[str, ...] = ()
) -> None:
    if name not in known:
        hint = did_you_mean(name, known) or f" ({what}: {', '.join(shown or known)})"
        raise ValueError(f"{whose} {name!r} isn't known{hint}")
