"""Rates as people write them: ``100mbit``, ``2.5gbit``, none for no limit; bits a second."""

from __future__ import annotations

import re

from hasten.errors import InputError

SEGMENT = 80 * 1024  # bytes that TCP hands down at once, with the headers of all their packets
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LOWEST, HIGHEST = 8e3, 400e9


def bits_per_second(rate: str | float | None) -> float:
    """A rate as a number of bits a second; 0 for no limit."""
    if rate is None or rate == "none":
        return 0.0
    if isinstance(rate, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)", rate.strip().lower())
        if found is None:
            raise InputError(f"{rate!r} is no rate: write 100mbit, 1gbit, 500kbit or none")
        rate = float(found[1]) * UNITS[found[2]]
    if not LOWEST <= rate <= HIGHEST:
        raise InputError(f"a link of {rate:g} bit/s can't be made: 8kbit to 400gbit can")
    return float(rate)


def burst_bytes(bits: float) -> int:
    """What may pass at once: 4 ms of the rate, and at least one segment as TCP hands it down.

    A bucket too small for that cuts each segment into packets on the sender's core, and the
    receiver is woken for every one of them, which network cards have spared hosts for long.
    """
    return max(SEGMENT, round(bits / 8 * 0.004))
