"""Price of an hour of the machine: a recipe's ``price``, inline or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hasten.errors import InputError
from hasten.formatting import did_you_mean
from hasten.recipe.yaml_reader import first_complaint, read_yaml_file


class Price(BaseModel):
    """The price of a device, in the user's currency."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    currency: str = Field(min_length=1, description="for example CNY, EUR, USD")
    per_device_hour: float = Field(ge=0, description="price of one device for one hour")
    devices: int | None = Field(
        None, ge=1, description="devices paid for; if left out, those that train"
    )
    spot_per_device_hour: float | None = Field(
        None, ge=0, description="price of such an hour on the spot market"
    )
    spot_share: float = Field(0.0, ge=0, le=1, description="share of the hours bought there")
    per_kwh: float | None = Field(
        None, ge=0, description="price of a kilowatt-hour, if energy is paid separately"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Price:
        if self.spot_share and self.spot_per_device_hour is None:
            raise ValueError("spot_share needs spot_per_device_hour, the price of those hours")
        if self.spot_per_device_hour is not None and not self.spot_share:
            raise ValueError("spot_per_device_hour has no effect without spot_share")
        return self

    @property
    def hour(self) -> float:
        """Mean price of one device for one hour, over spot and other hours."""
        spot = (self.spot_per_device_hour or 0.0) * self.spot_share
        return self.per_device_hour * (1 - self.spot_share) + spot

    def paid(self, training: int) -> int:
        """Returns the number of devices that cost money while ``training`` devices train."""
        return self.devices or training

    def money(self, seconds: float, devices: int, kwh: float | None = None) -> float:
        """Returns the price of a time on ``devices``, with the energy if it has a price."""
        energy = (self.per_kwh or 0.0) * (kwh or 0.0)
        return self.hour * devices * seconds / 3600 + energy


def price_of(setting: Any) -> Any:
    """Returns a recipe's ``price``; the name of a file is replaced by its contents.

    Raises:
        ValueError: no such file, not a price, or an unknown key.
    """
    if not isinstance(setting, str | dict):
        return setting
    if isinstance(setting, dict):
        return _checked_keys(setting, "")
    try:
        contents = read_yaml_file(Path(setting), "price file")
        if not isinstance(contents, dict):
            raise InputError(f"{setting} is not a price file: it must be lines of `key: value`")
        return Price(**_checked_keys(contents, f"{setting}: "))
    except ValidationError as error:
        raise ValueError(f"{setting}: {first_complaint(error)}") from error
    except InputError as error:
        raise ValueError(str(error)) from error


def _checked_keys(values: dict[Any, Any], prefix: str) -> dict[Any, Any]:
    for key in values:
        if key not in Price.model_fields:
            hint = did_you_mean(str(key), Price.model_fields)
            raise ValueError(f"{prefix}unknown key {key!r}{hint}")
    return values


def cost_of(
    price: Price | None, seconds: float, tokens: int, devices: int, kwh: float | None = None
) -> dict[str, Any] | None:
    """Returns a run's cost for its summary; None without a price."""
    if price is None:
        return None
    total = price.money(seconds, price.paid(devices), kwh)
    return {
        "currency": price.currency,
        "device_hours": price.paid(devices) * seconds / 3600,
        "total": total,
        "per_million_tokens": total / tokens * 1e6 if tokens else None,
    }
