"""A run's standing in words and lines of text: for the terminal, and for whoever reads along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hasten.monitor.standing import FINISHED, duration

BARS = "▁▂▃▄▅▆▇█"
UNKNOWN = "not known"
Standing = dict[str, Any]


def progress(s: Standing) -> str:
    """``step 40 of 160 (25 %)``."""
    if s["step"] is None:
        return "no step yet"
    text = f"step {s['step']:,.0f}"
    if s["total_steps"]:
        text += f" of {s['total_steps']:,.0f} ({s['step'] / s['total_steps']:.0%})"
    return text


def rows(s: Standing) -> list[tuple[str, str]]:
    """What is shown of a run, label and value, in the order of the page's tiles."""
    band = UNKNOWN
    if s["tokens_per_second_median"] is not None:
        band = (
            f"{s['tokens_per_second_median']:,.0f} ({s['tokens_per_second_low']:,.0f} to "
            f"{s['tokens_per_second_high']:,.0f})"
        )
    slow = UNKNOWN
    if s["slowest_rank_ratio"] is not None:
        slow = f"rank {s['slowest_rank']}, {s['slowest_rank_ratio']:.2f} times the others"
    return [
        ("loss", _number(s["loss"], ".4f")),
        ("held-out loss", _number(s["held_out_loss"], ".4f")),
        ("tokens/s", band),
        ("MFU", _number(s["mfu"], ".1%")),
        ("peak memory", _bytes(s["peak_memory_bytes"])),
        ("device", device(s)),
        ("data stall", _number(s["data_stall_share"], ".1%")),
        ("exposed communication", _number(s["exposed_communication_share"], ".1%")),
        ("expert load", _number(s["expert_load_ratio"], ".2f")),
        ("slowest rank", slow),
        ("skipped steps", str(s["skipped_steps"])),
        ("cost so far", UNKNOWN if s["cost"] is None else f"{s['cost']:.4f} {s['currency']}"),
        ("ETA", eta(s)),
    ]


def eta(s: Standing) -> str:
    """What is left, or why that isn't said."""
    if s["status"] in FINISHED:
        return f"finished in {duration(s['seconds'])} of steps"
    return UNKNOWN if s["eta_seconds"] is None else duration(s["eta_seconds"])


def device(s: Standing) -> str:
    """``87 %, 61 °C, 312 W``, as far as it is known."""
    words = []
    if s["device_utilisation"] is not None:
        words.append(f"{s['device_utilisation']:.0%}")
    if s["device_temperature"] is not None:
        words.append(f"{s['device_temperature']:.0f} °C")
    if s["device_power_watts"] is not None:
        words.append(f"{s['device_power_watts']:.0f} W")
    return ", ".join(words) or UNKNOWN


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Values as a row of bars; where there are more than fit, each bar is a mean."""
    known = [v for v in values if v is not None]
    if not known or width < 1:
        return ""
    low, high = min(known), max(known)
    share = max(len(values) / width, 1.0)
    found = []
    for index in range(min(width, len(values))):
        piece = values[int(index * share) : max(int((index + 1) * share), int(index * share) + 1)]
        there = [v for v in piece if v is not None]
        if not there:
            found.append(" ")
            continue
        height = (sum(there) / len(there) - low) / (high - low) if high > low else 0.5
        found.append(BARS[min(int(height * len(BARS)), len(BARS) - 1)])
    return "".join(found)


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _bytes(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
