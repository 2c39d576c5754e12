"""Time is made up here, and so is what others take of the machine: nothing."""

from __future__ import annotations

import pytest

from hasten.tune import bench


@pytest.fixture(autouse=True)
def _a_calm_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "foreign_share", lambda before, after, cores: 0.0)
