"""In other trainers the proof on the first step runs, as it does for users."""

from __future__ import annotations

import pytest

from hasten.measure import choice


@pytest.fixture(autouse=True)
def with_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_PROOF", "on")


@pytest.fixture(autouse=True)
def no_choices(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No race that this user keeps decides."""
    monkeypatch.setattr(choice, "FOLDER", tmp_path_factory.mktemp("choices"))
