"""What a user writes on a command line, read: a layout's words, counts like 15T, changes to try."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from hasten.errors import InputError
from hasten.machine.accelerators import device
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Layout

_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SHORT = {
    "micro": "micro_batch",
    "gradients": "compression",
    "vpp": "virtual",
    "mbs": "micro_batch",
}
CHANGES = ("gpu", "nodes", "gpus_per_node", "network", "link")


def count_of(text: str, what: str) -> float:
    """A number with k, M, B or T behind it.

    Raises:
        InputError: it is none, or not positive.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmbt]?)\s*", text.lower())
    value = float(found[1]) * _TIMES[found[2]] if found else 0.0
    if value <= 0 or value > 1e18:
        raise InputError(f"{what} is {text!r}; give a number such as 500M, 1B or 14.8T")
    return value


def layout_fields(words: Sequence[str]) -> dict[str, Any]:
    """``tp=8``, ``recompute=full`` ... as fields of a layout, also several in one word.

    Raises:
        InputError: a key that a layout doesn't have, or no number where one is needed.
    """
    kinds = {f.name: f.default for f in fields(Layout)}
    found: dict[str, Any] = {}
    for word in (w for text in words for w in re.split(r"[,\s]+", text) if w):
        key, equals, value = word.partition("=")
        name = _SHORT.get(key, key)
        if not equals or name not in kinds:
            raise InputError(
                f"a layout has no {word!r}{_near(key, kinds)}: write tp=8,recompute=full"
            )
        if isinstance(kinds[name], bool):
            found[name] = _switch(value, name)
        elif isinstance(kinds[name], int):
            found[name] = _whole(value, name)
        else:
            found[name] = value
    return found


def changed_cluster(cluster: Cluster, change: str) -> Cluster:
    """The cluster with ``gpu=a100``, ``nodes=8``, ``network=25`` or ``network=2x``.

    ``network`` is in Gbit/s of a device, ``link`` (within a node) in GB/s one way, or a factor.

    Raises:
        InputError: another key, or a value that can't be.
    """
    key, equals, value = change.partition("=")
    if not equals or key not in CHANGES:
        raise InputError(
            f"can't try {change!r}{_near(key, CHANGES)}: what may change is {', '.join(CHANGES)}, "
            "written gpu=a100, nodes=8, network=25 (Gbit/s a device), network=2x, link=100 (GB/s)"
        )
    if key == "gpu":
        chip = device(value)
        own = cluster.intra == cluster.device.link
        return replace(cluster, device=chip, intra=chip.link if own else cluster.intra)
    if key == "nodes":
        return replace(cluster, nodes=_whole(value, key))
    if key == "gpus_per_node":
        return replace(cluster, per_node=_whole(value, key))
    if key == "network":
        return replace(cluster, inter=_rate(value, cluster.inter, 1e9 / 8, key))
    return replace(cluster, intra=_rate(value, cluster.intra, 1e9, key))


def _rate(value: str, now: float, unit: float, key: str) -> float:
    times = value.endswith("x")
    try:
        number = float(value.removesuffix("x"))
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise InputError(f"{key} is {value!r}; give a rate above 0, or a factor such as 2x")
    return now * number if times else number * unit


def _whole(value: str, name: str) -> int:
    least = 0 if name == "zero" else 1
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < least:
        raise InputError(f"{name} is {value!r}; give a whole number, {least} at least")
    return int(value)


def _switch(value: str, name: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True}
    known |= {"0": False, "false": False, "no": False, "off": False}
    if value.lower() not in known:
        raise InputError(f"{name} is {value!r}; write yes or no")
    return known[value.lower()]


def _near(key: str, known: Any) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
