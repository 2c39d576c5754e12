"""From an order to its answer; an order that can't be obeyed is answered with the reason."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from hasten.guarding.gradients import gradient, reference
from hasten.guarding.leaks import leak
from hasten.guarding.material import Bench
from hasten.guarding.runs import losses, train
from hasten.guarding.updates import update


def obey(bench: Bench, order: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one order."""
    try:
        return _obeyed(bench, order)
    except Exception as error:  # one proof that fails doesn't keep the next from being made
        return {"failed": f"{type(error).__name__}: {error}".removeprefix("InputError: ")}
    finally:
        gc.collect()  # a session's parts know each other; the next needs their memory


def _obeyed(bench: Bench, order: Mapping[str, Any]) -> dict[str, Any]:
    do, plan = order["do"], bench.read(list(order.get("plan", [])))
    if do == "reference":
        return reference(bench, plan)
    if do == "gradient":
        return gradient(bench, plan, order.get("cut", "planned"), order.get("padded", False))
    if do == "leak":
        return leak(bench, plan)
    if do == "update":
        return update(bench, bench.read(list(order["without"])), plan)
    if do == "losses":
        return losses(bench, plan, order["steps"])
    if do == "train":
        return train(bench, plan, order["seed"], order["tokens"])
    raise ValueError(f"unknown order {do!r}")
