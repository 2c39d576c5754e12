"""Settings that may change while a run goes on, between two steps, and who changes them.

What is offered has to be safe: the same mathematics with every value (other rounding at most), and
no value that could end the run. Whoever offers a switch answers for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def at_once() -> int:
    """The default delay: the next step has the new value."""
    return 0


@dataclass(frozen=True)
class Switch:
    """One setting of a running session.

    Args:
        name: ``technique.setting``, as a recipe has it.
        values: what it may be, in an order in which neighbours are alike.
        now: the value that it has.
        set: gives it another one of the values; called between two steps.
        delay: steps that are under way with the old value when a new one is set.
    """

    name: str
    values: tuple[Any, ...]
    now: Callable[[], Any]
    set: Callable[[Any], None]
    delay: Callable[[], int] = at_once
