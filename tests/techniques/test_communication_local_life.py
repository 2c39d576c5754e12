"""Sessions whose ranks train apart: a bad step, a stop, a checkpoint."""

from __future__ import annotations

from pathlib import Path

from ranks import on_ranks


def test_a_rank_whose_gradient_is_no_number_gives_its_step_up_alone(tmp_path: Path) -> None:
    one, other = on_ranks("techniques.apart_rank_jobs:one_bad_step", tmp_path)
    for communication in ("stream", "local_steps"):
        assert not any(one[communication]["skipped"])
        assert [i for i, s in enumerate(other[communication]["skipped"]) if s] == [1]
        assert one[communication]["weights"] == other[communication]["weights"]


def test_a_stop_that_one_rank_asks_for_comes_after_the_same_step_on_all(tmp_path: Path) -> None:
    found = on_ranks("techniques.apart_rank_jobs:stopped_by_one", tmp_path)
    assert found == [{"stream": 4, "local_steps": 4}] * 2


def test_a_resumed_run_has_the_bits_of_the_whole_one_on_every_rank(tmp_path: Path) -> None:
    for rank in on_ranks("techniques.apart_rank_jobs:resumed", tmp_path):
        for name, found in rank.items():
            assert found["losses"][0] == found["losses"][1]
            assert found["weights"][0] == found["weights"][1]
            assert found["ranks"] == ["1"]
            assert f"plan: {name} was on" in found["other"]
