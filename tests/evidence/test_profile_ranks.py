"""A profile on two ranks: both agree on it, and only the first writes."""

from __future__ import annotations

from pathlib import Path

from hasten.evidence.profile_text import render_text
from ranks import on_ranks


def test_two_ranks_are_profiled_together_and_the_first_writes(tmp_path: Path) -> None:
    first, second = on_ranks("profile_rank_jobs:profiled", tmp_path)
    assert first["parallel"] == second["parallel"]
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1]
    assert first["parallel"]["ranks"] == 2
    assert first["parallel"]["efficiency_against_no_communication"] > 0
    assert first["ledger"]["step"]["communication"] is None
    assert (first["written"], second["written"]) == (["trace.json.gz"], [])
    assert "one rank alone x 2" in render_text(first)
