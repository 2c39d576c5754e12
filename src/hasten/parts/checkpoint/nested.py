"""A nested state as named tensors and JSON, and back: dicts, lists, tuples, tensors, numbers, text.

What JSON can't say stands under a key that begins with ``$``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

TENSOR, ITEMS, TUPLE = "$tensor", "$items", "$tuple"


def taken(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON, each of its tensors put into ``tensors`` under the name of its place.

    Raises:
        TypeError: something in it is of another kind; the message names its place.
    """
    if isinstance(value, Tensor):
        name = place
        while name in tensors:  # keys may have a slash of their own
            name += "'"
        tensors[name] = value.detach()
        return {TENSOR: name}
    if isinstance(value, dict):
        items = {key: taken(item, f"{place}/{key}", tensors) for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in items):
            return items
        return {ITEMS: [[key, item] for key, item in items.items()]}
    if isinstance(value, list | tuple):
        inner = [taken(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
        return {TUPLE: inner} if isinstance(value, tuple) else inner
    if value is None or type(value) in (str, bool, int, float):
        return value
    raise TypeError(
        f"the state at {place} is a {type(value).__name__}; a checkpoint holds dicts, lists, "
        "tensors, numbers and text"
    )


def given(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What ``taken`` made JSON of.

    Raises:
        KeyError, TypeError, ValueError: the JSON isn't of that kind.
    """
    if isinstance(value, list):
        return [given(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]].clone()
    if TUPLE in value:
        return tuple(given(item, tensors) for item in value[TUPLE])
    pairs = value[ITEMS] if ITEMS in value else value.items()
    return {key: given(item, tensors) for key, item in pairs}
