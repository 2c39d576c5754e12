"""A source of records as a recipe writes it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DataSource(BaseModel):
    """A source of records with more to say than where it lies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1, description="a file, a folder, or dataset_info.json:NAME")
    weight: float = Field(
        1.0, gt=0, le=1000, description="how many times one epoch sees each of its records"
    )
    columns: dict[str, str] | None = Field(
        None, description="as the recipe's columns, for this source alone"
    )
