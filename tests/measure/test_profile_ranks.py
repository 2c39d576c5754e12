"""A profile on two ranks: both agree on it, and only the first writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.report.profile_page import render_text
from ranks import on_ranks


def test_two_ranks_are_profiled_together_and_the_first_writes(tmp_path: Path) -> None:
    first, second = on_ranks("measure.profile_rank_jobs:profiled", tmp_path)
    assert first["parallel"] == second["parallel"]
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1]
    assert first["parallel"]["ranks"] == 2
    assert first["parallel"]["efficiency_against_no_communication"] > 0
    assert first["ledger"]["step"]["communication"] > 0
    for rank in first["ranks"]:
        communication = rank["communication"]
        seconds = (
            communication["exposed_comm_seconds"] + communication["hidden_communication_seconds"]
        )
        assert communication["comm_seconds"] == pytest.approx(seconds)
        assert communication["comm_bytes"] > 0
    assert (first["written"], second["written"]) == (["trace.json.gz"], [])
    text = render_text(first)
    assert "one rank alone x 2" in text
    assert "What travels in a step" in text


@pytest.mark.slow
def test_the_efficiency_of_a_turn_is_measured_and_moves_nothing(tmp_path: Path) -> None:
    first, second = on_ranks("measure.profile_rank_jobs:efficiencies", tmp_path)
    assert first == second
    for name, found in first.items():
        assert 0 < found["value"] < 10, name
        assert found["same"], name
        assert found["steps"] == 3
