"""From an order to its answer; an order that can't be obeyed is answered with the reason."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from hasten.core.health import NotFiniteError
from hasten.errors import InputError
from hasten.measure.quality.bench import CheckContext
from hasten.measure.quality.gradients import gradient, leak, reference, update
from hasten.measure.quality.job import losses, train

ALIKE = (InputError, NotFiniteError)  # all ranks meet with these, at the same place


def obey(bench: CheckContext, order: Mapping[str, Any], alone: bool = True) -> dict[str, Any]:
    """The answer to one order: ``refused`` with the reason where it can't be obeyed.

    ``failed`` instead, where other ranks may still wait in the midst of it: then this process and
    theirs are of no more use.
    """
    try:
        return _obeyed(bench, order)
    except Exception as error:  # one proof that fails doesn't keep the next from being made
        why = f"{type(error).__name__}: {error}".removeprefix("InputError: ")
        return {"refused" if alone or isinstance(error, ALIKE) else "failed": why}
    finally:
        gc.collect()  # a session's parts know each other; the next needs their memory


def _obeyed(bench: CheckContext, order: Mapping[str, Any]) -> dict[str, Any]:
    do, plan = order["do"], bench.read(list(order.get("plan", [])))
    if do == "reference":
        return reference(bench, plan)
    if do == "gradient":
        cut, padded = order.get("cut", "planned"), order.get("padded", False)
        return gradient(bench, plan, cut, padded, order.get("step", 1))
    if do == "leak":
        return leak(bench, plan)
    if do == "update":
        return update(bench, bench.read(list(order["without"])), plan)
    if do == "losses":
        return losses(bench, plan, order["steps"])
    if do == "train":
        return train(bench, plan, order["seed"], order["tokens"])
    raise ValueError(f"unknown order {do!r}")
