"""Cost of training, cost of an experiment, and the time until the experiment pays off.

Two figures are easily confused, so each has its own function here. The **ratio** of two
rates is the factor of work done in an hour, for example 1.5. The **time saved** is the
share by which the same work takes less time: 1 - 1/1.5 = 33 %. Half as much time is
twice the rate; no amount of speed saves 100 %.

Money is device hours times the price of one. Kilowatt-hours are from a counter
(`hasten.measure.energy`), never an estimate from a datasheet. Without a counter they're
null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hasten.errors import InputError
from hasten.measure.energy import JOULES_PER_KWH
from hasten.recipe.price import Price
from hasten.report.conclusions import on_the_whole
from hasten.report.judgement import verdict_word


def time_saved(ratio: float) -> float:
    """Returns the share of time saved for the same work at `ratio` times the rate (1.5: 0.333)."""
    if not (math.isfinite(ratio) and ratio > 0):
        raise InputError(f"a ratio of rates is positive and finite, not {ratio}")
    return 1 - 1 / ratio


def speed_words(ratio: float) -> str:
    """Returns a ratio of rates and the saved time: ``1.50× the speed, 33 % less time``."""
    saved = round(100 * time_saved(ratio))
    change = f"{saved} % less time" if saved > 0 else f"{-saved} % more time"
    return f"{ratio:.2f}× the speed, {change if saved else 'the same time'}"


def payback(ratio: Mapping[str, float | None], seconds: float, good: bool = True) -> dict[str, Any]:
    """Returns hours of training with the winner until an experiment of `seconds` has paid off.

    An hour with a plan of ratio r does the work of r baseline hours. It therefore saves r -
    1 hours of the same machine. The experiment has cost seconds / 3600. The argument
    `ratio` is a span (median, low, high). The argument `good` is false if the plan has no
    result, had no effect, or its model is worse.

    Returns:
        ``hours`` (None: never, or unknown) and ``text``.
    """
    middle, low = ratio.get("median"), ratio.get("low")
    if middle is None:
        return {"hours": None, "text": "not measured"}
    if not good or middle <= 1:
        return {"hours": None, "text": "never: nothing was saved"}
    hours = seconds / 3600 / (middle - 1)
    text = f"after {_hours(hours)} of training with it: {speed_words(middle)}"
    if low is None or low <= 1:
        return {"hours": hours, "text": f"{text}; the interval allows that it never does"}
    if low < middle:
        text += f"; after {_hours(seconds / 3600 / (low - 1))} at the interval's lower end"
    return {"hours": hours, "text": text}


def cost_of_experiment(
    report: Mapping[str, Any],
    price: Price | None,
    devices: int = 1,
    joules_per_token: Mapping[str, float | None] | None = None,
    source: str = "not measured",
    earlier_seconds: float = 0.0,
) -> dict[str, Any] | None:
    """Returns a report's ``cost``, as in docs/reference/metrics.md; None without a price.

    Args:
        report: with ``variants``, and as far as they're known ``design.seconds`` and ``quality``.
        price: of an hour, in the user's currency.
        devices: that trained.
        joules_per_token: of each variant, as far as they were counted.
        source: which counter gave them, or why there is none.
        earlier_seconds: of the experiments that led to this one, which are a part of its cost.
    """
    if price is None:
        return None
    variants: Sequence[Mapping[str, Any]] = report["variants"]
    seconds = (report.get("design") or {}).get("seconds")
    quality = (report.get("quality") or {}).get("verdict")
    used = joules_per_token or {}
    paid = price.paid(devices)
    energy = {name: each * 1e6 / JOULES_PER_KWH for name, each in used.items() if each}
    per_million = {
        variant["name"]: price.money(1e6 / rate, paid, energy.get(variant["name"]))
        for variant in variants
        if (rate := variant["tokens_per_second"]["median"])
        and verdict_word(variant["verdict"]) != "failed"
    }
    cost: dict[str, Any] = {
        "currency": price.currency,
        "per_device_hour": price.hour,
        "per_million_tokens": per_million,
        "energy": {"kwh_per_million_tokens": energy, "source": source},
    }
    if seconds is None:
        return cost
    seconds += earlier_seconds
    final = variants[-1]
    good = on_the_whole(final, report) not in ("failed", "no effect") and quality != "worse"
    spent = price.money(seconds, paid)
    cost["experiment"] = {"seconds": seconds, "money": spent}
    cost["payback"] = payback(final["ratio"], seconds, good)
    return cost


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{3600 * hours:.0f} s"
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"
