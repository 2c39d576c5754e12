"""The communication method benchmark's own arithmetic: how minutes are dealt over links, and what
a table says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranks import on_ranks

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_communication  # noqa: E402
from communication import links, rank  # noqa: E402


def sitting(link: str, seconds: float = 100.0, at: str = "", **found: Any) -> dict[str, Any]:
    return {"link": link, "seconds": seconds, "at": at, "found": found}


def row(*seconds: float) -> dict[str, Any]:
    return {
        "seconds": list(seconds),
        "bytes": [1e6 for _ in seconds],
        "waited": [0.1 for _ in seconds],
        "hidden": [0.2 for _ in seconds],
    }


def test_the_links_of_the_issue_are_there_and_share_all_the_time() -> None:
    assert {(link.rate, link.delay_ms) for link in links.LINKS.values()} == {
        ("100mbit", 0.0),
        ("1gbit", 0.0),
        (None, 0.0),
        ("10mbit", 20.0),
    }
    assert sum(link.share for link in links.LINKS.values()) == pytest.approx(1.0)
    for link in links.LINKS.values():
        assert link.methods[:2] == links.DENOMINATORS
        assert set(link.steps) <= set(link.methods)


@given(st.floats(1, 200))
def test_minutes_are_used_by_their_shares_and_no_more(minutes: float) -> None:
    done: list[dict[str, Any]] = []
    while (chosen := links.next_link(done, minutes)) is not None:
        name, seconds = chosen
        assert links.LEAST <= seconds <= links.SITTING
        done.append(sitting(name, seconds))
    assert {s["link"] for s in done} == set(links.LINKS)  # each one at least once
    whole = sum(s["seconds"] for s in done)
    assert whole <= max(60 * minutes, links.LEAST * len(links.LINKS)) + links.LEAST * 4


def test_a_table_that_was_cut_off_goes_on_where_most_is_missing() -> None:
    done = [sitting(name, 900.0) for name in links.LINKS if name != "1 Gbit/s"]
    assert links.next_link(done, 25) == ("1 Gbit/s", pytest.approx(375.0))


def test_sittings_are_put_together_by_method_in_their_order() -> None:
    done = [
        sitting("no limit", apart=row(1.0, 2.0), stream={**row(3.0, 4.0), "fragments": 2}),
        sitting("1 Gbit/s", apart=row(9.0)),
        sitting("no limit", apart=row(5.0), stream=row(6.0)),
    ]
    found = links.together(done, "no limit")
    assert found["apart"]["seconds"] == [1.0, 2.0, 5.0]
    assert found["stream"]["seconds"] == [3.0, 4.0, 6.0]
    text = "\n".join(links.rows(found))
    assert "| stream | 4.000 | 50 % (33-83) | - | - | 1.000 | 0.100 | 0.200 | 3 |" in text


def test_a_turn_of_local_steps_has_whole_rounds_between_exchanges() -> None:
    def method(kind: str, every: int) -> Any:
        return SimpleNamespace(kind=kind, part=SimpleNamespace(every=every))

    assert rank.whole_rounds(method("diloco", 50), 20) == 50
    assert rank.whole_rounds(method("diloco", 20), 20) == 20
    assert rank.whole_rounds(method("local", 8), 20) == 24
    assert rank.whole_rounds(method("stream", 3), 20) == 20


def test_rounds_of_a_sitting_that_was_cut_off_count_once(tmp_path: Path) -> None:
    place, under_way = tmp_path / "table.json", tmp_path / "table.sitting"
    links.keep([sitting("no limit", at="1")], place)
    rank.written(under_way, rank.as_json, sitting("1 Gbit/s", at="2"))
    found = links.kept(place, under_way)
    assert [s["link"] for s in found] == ["no limit", "1 Gbit/s"]
    assert not under_way.exists()
    rank.written(under_way, rank.as_json, found[-1])  # ended between the two files
    assert links.kept(place, under_way) == found
    assert links.kept(place, under_way) == found
    assert sorted(p.name for p in tmp_path.iterdir()) == ["table.json"]


def test_what_the_claim_is_about_is_trained_first_and_seed_by_seed() -> None:
    runs = bench_communication.in_turn(["ddp", "int8", "again", "stream:4"], 2)
    assert [(r["method"], r["seed"]) for r in runs] == [
        *(("ddp", 0), ("again", 0), ("stream:4", 0)),
        *(("ddp", 1), ("again", 1), ("stream:4", 1)),
        *(("int8", 0), ("int8", 1)),
    ]
    names = bench_communication.LOSS.split(",")
    assert len(bench_communication.in_turn(names, 3)) == 3 * len(names)


@pytest.mark.slow
@pytest.mark.long
def test_a_training_that_paused_goes_on_to_the_loss_of_a_whole_one(tmp_path: Path) -> None:
    for found in on_ranks("tools.bench_communication_jobs:paused", tmp_path):
        for method, seen in found.items():
            assert "loss" not in seen["first"]
            assert seen["first"]["step"] == rank.LOOK
            assert seen["second"]["pauses"] == [rank.LOOK]
            assert seen["whole"]["pauses"] == []
            assert seen["second"]["same_on_all_ranks"]
            # Ranks that train apart meet once more; DDP with a codec begins in full again.
            close = 1e-5 if method == "ddp" else 2e-2
            assert seen["second"]["loss"] == pytest.approx(seen["whole"]["loss"], rel=close)
