"""In other trainers the proof on the first step runs, as it does for users."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def with_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_PROOF", "on")
