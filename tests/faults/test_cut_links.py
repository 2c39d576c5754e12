"""A supervised run whose ranks' link is cut: waited for, gone on with, or ended with a name.

A sample; ``python tests/faults/link_soak.py`` takes any length of cut.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.launch.supervisor import WORN_OUT
from labs import missing
from told import json_lines

# All three cases are run, on a busy machine.
pytestmark = [pytest.mark.waits, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("link_soak.py")
# Seconds of the cut, link_seconds, restarts. The first is shorter than ranks wait, the second isn't
CASES = {"waited": ("3", "30", "2"), "restarted": ("7", "4", "6"), "for good": ("inf", "4", "1")}

Case = tuple[dict[str, Any], Path, str]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """All at once: they wait more than they work."""
    if reason := missing():
        pytest.skip(reason)
    begun = {}
    for name, words in CASES.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun[name] = (process, folder)
    found = {}
    try:
        for name, (process, folder) in begun.items():
            out, err = process.communicate(timeout=600)
            assert process.returncode == 0, err
            found[name] = (json.loads(out), folder, err)
    finally:
        for process, _ in begun.values():
            process.kill()
    return found


def trained_as_without_a_cut(folder: Path) -> bool:
    return json_lines(folder / "metrics.jsonl") == json_lines(
        folder / "reference" / "metrics.jsonl"
    )


@pytest.mark.slow
def test_a_cut_of_some_seconds_is_waited_for(cases: dict[str, Case]) -> None:
    found, folder, _ = cases["waited"]
    assert found["code"] == 0
    assert found["seconds"] > 3
    assert json_lines(folder / "restarts.jsonl") == []
    assert trained_as_without_a_cut(folder)


@pytest.mark.slow
def test_a_cut_that_is_longer_than_ranks_wait_costs_restarts_and_no_step(
    cases: dict[str, Case],
) -> None:
    found, folder, _ = cases["restarted"]
    assert found["code"] == 0
    assert 1 <= len(json_lines(folder / "restarts.jsonl")) <= 6
    assert trained_as_without_a_cut(folder)


@pytest.mark.slow
def test_a_cut_for_good_ends_the_run_with_the_rank_named_in_bounded_time(
    cases: dict[str, Case],
) -> None:
    found, folder, err = cases["for good"]
    assert found["code"] == WORN_OUT
    assert found["seconds"] < 240, "not the ten minutes that ranks wait unless told otherwise"
    first, *others = json_lines(folder / "restarts.jsonl")
    assert "rank 0" in first["cause"] or "rank 1" in first["cause"]
    assert "link is cut" in first["cause"]
    assert len(others) == 1, "one restart, which can't meet"
    assert "didn't meet the others" in others[0]["cause"]
    assert "1 restart(s) are used up" in err
