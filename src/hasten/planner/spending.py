"""What a plan spends: days, device hours, money where the user gave a price, energy as a bound.

Device hours are always told, since they hold whatever an hour costs. Prices come from the user
alone; the package has none. Energy is a bound: every device at its power limit all the time, hosts,
switches and cooling not counted, and only for devices whose limit is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hasten.planner.candidate import Candidate, Span
from hasten.planner.layout import Job
from hasten.report.cost import money

PER_BILLION = 1e9  # tokens that figures are for where a job doesn't say how many
# Power limits in watts, from the makers' datasheets, recalled; the module's own, without its host.
_WATTS = {
    400: ("a100-40gb", "a100-80gb", "a800"),
    300: ("a100-pcie", "a6000", "a40", "v100-16gb", "v100-32gb"),
    350: ("l40s", "rtx3090", "h100-pcie"),
    700: ("h100-80gb", "h200", "h800"),
    500: ("h100-96gb-hbm2e-500w",),
    1000: ("b200",),
    750: ("mi300x",),
    450: ("rtx4090",),
    150: ("a10",),
    72: ("l4",),
    70: ("t4",),
}
WATTS: Mapping[str, int] = {name: watts for watts, names in _WATTS.items() for name in names}


class PerHour(Protocol):
    """A price: ``hasten.recipe.price.Price``, or anything that says as much."""

    @property
    def currency(self) -> str: ...

    @property
    def hour(self) -> float: ...


@dataclass(frozen=True)
class Spending:
    """Of a whole job, or of a billion tokens where the job doesn't say how many."""

    tokens: float
    seconds: Span
    device_hours: Span
    money: Span | None
    currency: str
    kwh_at_most: float | None

    @property
    def days(self) -> Span:
        return self.seconds.times(1 / 86_400)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "tokens": self.tokens,
            "days": vars(self.days),
            "device_hours": vars(self.device_hours),
            "money": vars(self.money) if self.money else None,
            "currency": self.currency or None,
            "kwh_at_most": self.kwh_at_most,
        }


def spending(found: Candidate, job: Job, price: PerHour | None = None) -> Spending:
    """What the job takes in that layout; neither failures nor evaluations are in it."""
    tokens = job.tokens or PER_BILLION
    rate = found.tokens_per_second_per_device
    seconds = Span(*(tokens / (v * found.devices) for v in (rate.middle, rate.high, rate.low)))
    hours = seconds.times(found.devices / 3600)
    paid = None
    if price is not None:
        each = (seconds.middle, seconds.low, seconds.high)
        paid = Span(*(money(price.hour, found.devices, s) for s in each))
    watts = WATTS.get(found.cluster.device.name)
    energy = hours.high * watts / 1000 if watts else None
    return Spending(tokens, seconds, hours, paid, price.currency if price else "", energy)
