"""The catalogue of techniques, for those that name none."""

from __future__ import annotations

from hasten.core.technique import Technique
from hasten.techniques import CATALOGUE


def catalogue() -> tuple[type[Technique], ...]:
    """Every technique there is, for those above this room that name none."""
    return CATALOGUE
