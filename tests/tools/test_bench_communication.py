"""The arithmetic of the benchmarks of communication, layouts and tunings."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.plan import Plan
from hasten.core.step import training
from hasten.machine.environment import World
from hasten.measure.ablation import Variant
from hasten.measure.experiment import Measured
from hasten.measure.recipe_experiment import ExperimentSubject, prepared
from hasten.measure.workers import WorkerError, WorkerPool, WorkerSpec
from hasten.progress import SilentProgress
from hasten.recipe.schema import recipe_from
from hasten.recipe.shorthands import catalogue
from sample_data import small

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from communication import links, rank
from layouts import table, variants
from tuner import real
from tuner.problems import PROBLEMS, wide


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


def layouts_sitting(place: str, seconds: float = 100.0, **rates: list[float]) -> dict[str, Any]:
    rows = {n.replace("_", " "): {"rate": r, "bytes": [2e6] * len(r)} for n, r in rates.items()}
    models = {name: "llama" for name in rows if " " not in name}
    return {"place": place, "seconds": seconds, "found": {"variants": rows, "models": models}}


def test_a_layout_is_set_beside_one_process_and_beside_as_many_within_a_round() -> None:
    done = [
        layouts_sitting(
            "2", alone_llama=[100.0, 50.0], apart_llama=[160.0, 80.0], ddp=[120.0, 60.0]
        ),
        layouts_sitting("4", alone_llama=[1.0], apart_llama=[1.0], ddp=[1.0]),
    ]
    rounds, models = table.together(done, "2")
    text = "\n".join(table.rows(rounds, models, world=2))
    assert "| ddp | llama | 90 | 0.60 [0.60, 0.60] | 0.75 [0.75, 0.75] | 2.00 | 2 |" in text


def test_sittings_with_other_variants_are_not_mixed() -> None:
    done = [
        layouts_sitting("2", alone_llama=[1.0], apart_llama=[1.0], fsdp2=[9.0]),
        layouts_sitting("2", alone_llama=[1.0], apart_llama=[1.0], ddp=[2.0]),
        layouts_sitting("2", alone_llama=[1.0], apart_llama=[1.0], ddp=[4.0]),
    ]
    rounds, models = table.together(done, "2")
    assert models == {"ddp": "llama"}
    assert rounds["ddp"]["rate"] == [2.0, 4.0]
    assert len(rounds["alone llama"]["rate"]) == 2


@given(st.floats(0.1, 200), st.integers(1, 4))
def test_minutes_are_dealt_evenly_and_each_place_gets_a_sitting(minutes: float, count: int) -> None:
    places = list(table.PLACES)[:count]
    done: list[dict[str, Any]] = []
    for name, seconds in table.due(done, places, minutes).items():
        assert seconds == pytest.approx(max(table.LEAST, 60 * minutes / count))
        done.append({"place": name, "seconds": seconds})
    assert [s["place"] for s in done] == places
    assert table.due(done, places, minutes) == {}


@pytest.mark.parametrize("world", [2, 4])
def test_every_variant_is_one_that_its_ranks_allow(world: int) -> None:
    load = variants.Load("tiny", examples=2, tokens=16)
    for name, variant in variants.variants(world).items():
        assert variant.layout is not None
        known = variants._facts(variant, load, World(size=world), 8)
        assert variant.layout.unsupported_reasons(known) == (), name


@pytest.mark.parametrize("kind", [variants.DENSE, variants.EXPERTS])
def test_a_process_by_itself_has_the_load_that_was_asked_for(kind: str) -> None:
    run = training(variants.session(variants.Variant(kind), variants.Load("tiny", 2, 16), World()))
    assert [next(run).tokens for _ in range(2)] == [32, 32]


KINDS = {kind.name(): kind for kind in catalogue()}


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> ExperimentSubject:
    values = small(tmp_path_factory.mktemp("real"), max_steps=10)
    return prepared(recipe_from(values, "test"), SilentProgress())


def side_by_side(speeds: dict[str, float]) -> Any:
    def measured(
        subject: ExperimentSubject, plans: dict[str, Plan], kinds: Any, *_: Any
    ) -> Measured:
        variants = []
        for number, (name, plan) in enumerate(plans.items()):
            factor = 1.0
            for technique in plan:
                factor *= speeds[technique.name()]
            rounds = [100 * factor * (1 + 0.001 * ((i * (number + 1)) % 3)) for i in range(8)]
            variant = Variant(name, plan, rounds=rounds, kind=kinds[name])
            variant.effective = [
                {"technique": t.name(), "effective": True, "evidence": ""} for t in plan
            ]
            variants.append(variant)
        for variant in variants:
            variant.baseline_rounds = variants[0].rounds
        return Measured(variants, {"rounds": 8})

    return measured


@pytest.mark.long
def test_winners_are_paired_and_equal_plans_have_one_variant(
    subject: ExperimentSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    autocast, fused = Plan([KINDS["autocast"]()]), Plan([KINDS["fused_adamw"]()])
    monkeypatch.setattr(real, "measured", side_by_side({"autocast": 1.5, "fused_adamw": 1.47}))
    winners = {"winner 1": autocast, "winner 2": fused, "winner 3": autocast, "winner 4": Plan()}
    found = real._compared(subject, winners, 60.0, real.Told())
    assert found["variant_of"] == {
        "winner 1": "winner 1",
        "winner 2": "winner 2",
        "winner 3": "winner 1",
        "winner 4": "baseline",
    }
    found = real._apart(subject, winners, 60.0, real.Told())
    assert found["variant_of"]["winner 3"] == "winner 1"
    assert found["variant_of"]["winner 4"] == "winner 4"
    ratios = {tuple(r["variants"]): r["ratio"]["median"] for r in found["pairs"]}
    assert ratios[("winner 1", "winner 2")] == pytest.approx(1.5 / 1.47, rel=0.01)
    assert ratios[("winner 1", "winner 4")] == pytest.approx(1.5, rel=0.01)
    assert len(ratios) == 3
    (control,) = found["control"]
    assert control["variants"] == ["baseline again", "winner 1"]
    assert control["ratio"]["median"] == pytest.approx(1.0, abs=0.01)
    same = real._apart(subject, {"winner 1": fused, "winner 2": fused}, 60.0, real.Told())
    assert same["pairs"] == []
    assert "NOT within 3%" in real._verdict(found["pairs"], 3)
    assert "within 3%" in real._verdict(found["pairs"][:1], 2)
    assert "0 pairs of 2 winners" in real._verdict([], 2)
    assert "one and the same" in real._verdict([], 1)


class Speeds:
    """Workers with the speed of their micro-batch; 8 records fail."""

    def __init__(self, worker: WorkerSpec) -> None:
        own = [t["micro_batch_size"] for t in worker.arguments["plan"]]
        self.size = own[0] if own else 8

    def ready(self, timeout: float) -> None:
        if self.size == 8:
            raise WorkerError("out of memory")

    def request(self, op: str, timeout: float, count: int) -> dict[str, Any]:
        speeds = [1.0, 1.0, *[100.0 * {1: 1, 2: 3, 4: 2}[self.size]] * (count - 2)]
        return {"steps": [{"tokens": s, "step_seconds": 1.0} for s in speeds]}  # 3 to 5 count

    def close(self, kill: bool = False) -> None:
        pass


def test_micro_batches_are_doubled_until_one_fails_and_the_fastest_is_taken(
    subject: ExperimentSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerPool, "start", lambda pool, spec, name: Speeds(spec))
    found = real._doubled(subject, 60.0, real.Told())
    assert [r["micro_batch"] for r in found["trials"]] == [1, 2, 4, 8]
    assert [r["tokens_per_second"] for r in found["trials"]] == [100.0, 300.0, 200.0, None]
    assert found["micro_batch"] == 2
    plan = real._cut(subject, found["micro_batch"])
    assert plan.to_list() == [KINDS["gradient_accumulation"](micro_batch_size=2).to_dict()]


def test_the_wide_space_knows_its_best_point() -> None:
    assert set(PROBLEMS) >= {"grid", "synthetic", "wide"}
    problem = wide()
    assert problem.space.size > 20_000_000
    draw, states = random.Random(0), set()
    for point in problem.space.points()[:500]:
        tried = problem.trial(point, draw)
        states.add(tried.state)
        assert tried.state != "ok" or problem.truth(point) <= problem.best + 1e-9
    assert states == {"ok", "out of memory"}
