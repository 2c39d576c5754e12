"""Variants that take turns, and only pretend to train; those that may fail are processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hasten.machine.processes import LoadMeter
from hasten.measure import schedule
from hasten.measure.ablation import Design, with_second_baseline
from hasten.measure.record import VERSION, ExperimentRecord, seconds_of
from hasten.measure.schedule import OutOfTimeError
from hasten.measure.workers import WorkerError
from hasten.report.build import report_of
from hasten.report.schema import read_report
from simulation import KINDS, NAMES, PLANS, log, pretend

HEAD: dict[str, Any] = {"title": "t", "command": "c", "hardware": {}, "versions": {}}
HEAD |= {"recipe": {"seed": 0}}
TWO = {name: PLANS[name] for name in ("baseline", "all")}


def turns(folder: Path, warmup: int) -> list[str]:
    """Who had a turn, in order."""
    steps = [line.split() for line in log(folder) if line.startswith("steps")]
    return [name for _, name, step in steps if int(step) > warmup]


def test_every_variant_has_every_round_in_an_order_drawn_anew(tmp_path: Path) -> None:
    variants = pretend(tmp_path, Design(rounds=12, steps=2, warmup=2)).variants
    order = turns(tmp_path, 2)
    rounds = [tuple(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert all(set(names) == set(NAMES.values()) for names in rounds)
    assert len(rounds) == 12
    assert len(set(rounds)) > 3
    assert max(Counter(names[0] for names in rounds).values()) < 12  # no variant always goes first
    assert all(len(variant.rounds) == 12 and len(variant.steps) == 24 for variant in variants)
    assert [variant.name for variant in variants] == list(PLANS)
    assert [variant.kind for variant in variants] == list(KINDS.values())


def test_the_order_of_turns_belongs_to_the_seed(tmp_path: Path) -> None:
    orders = []
    for number, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        pretend(folder, Design(rounds=8, steps=1, warmup=1, seed=seed), plans=TWO)
        orders.append(turns(folder, 1))
    assert orders[0] == orders[1] != orders[2]


def test_all_variants_warm_up_as_long_as_the_slowest_to_settle(tmp_path: Path) -> None:
    design = Design(rounds=2, steps=1, warmup=2, longest_warmup=8)
    found = pretend(tmp_path, design, {"all": {"compiles_until": 5}}, plans=TWO)
    base, last = found.variants
    assert base.warmup["steps"] == last.warmup["steps"] == 6  # the sixth compiled nothing more
    assert base.losses[-1][0] == last.losses[-1][0] == 80
    assert last.warmup["compile_seconds"] == pytest.approx(2.5)
    assert last.warmup["seconds"] is not None


def test_a_warm_up_ends_at_its_bound(tmp_path: Path) -> None:
    design = Design(rounds=2, steps=1, warmup=1, longest_warmup=4)
    found = pretend(tmp_path, design, {"baseline": {"compiles_until": 99}}, plans=TWO)
    assert [variant.warmup["steps"] for variant in found.variants] == [4, 4]
    assert design.steps_in_all == 6


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("diverge", "NotFiniteError: the gradients were not finite"),
        ("killed", "code -9: killed, most likely for want of memory"),
        ("hang", "no answer within 1 s: it hangs"),
        ("end", "the process ended with code 7: an error of its own"),
    ],
)
def test_an_variant_that_fails_in_a_round_is_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    def tell(text: str, share: float) -> None:
        hangs = how == "hang" and text == "round 2/4: packed"  # others are given their time
        monkeypatch.setattr(schedule, "LEAST_TIMEOUT", 1.0 if hangs else 60.0)

    told = {"packed": {"rate": 1e6, "fails": {"steps": how}, "after": 2}}  # in its second round
    found = pretend(tmp_path, Design(rounds=4, steps=1, warmup=1), told, tell=tell).variants
    base, packed, other, last = found
    assert packed.failed is not None
    assert words in packed.failed
    assert len(packed.rounds) == 1
    assert [len(variant.rounds) for variant in (base, other, last)] == [4, 4, 4]
    report = report_of(found, title="", command="", hardware={}, versions={}, recipe={"seed": 0})
    verdicts = [variant["verdict"] for variant in read_report(report)["variants"]]
    assert verdicts[1].startswith("failed: ")
    assert not any(verdict.startswith("failed") for verdict in (verdicts[0], *verdicts[2:]))


@pytest.mark.parametrize("what", ["start", "evaluate", "steps"])
def test_an_variant_that_fails_before_the_first_round_costs_the_others_nothing(
    tmp_path: Path, what: str
) -> None:
    found = pretend(
        tmp_path, Design(rounds=3, steps=1), {"packed": {"fails": {what: "end"}}}
    ).variants
    assert found[1].failed == "the process ended with code 7: an error of its own"
    assert not found[1].rounds
    assert [len(variant.rounds) for variant in found] == [3, 0, 3, 3]


def test_an_variant_that_fails_at_the_end_keeps_what_was_measured(tmp_path: Path) -> None:
    told = {"all": {"fails": {"finish": "diverge"}}}
    last = pretend(tmp_path, Design(rounds=3, steps=1), told).variants[-1]
    assert last.failed is None
    assert last.unfinished == "NotFiniteError: the gradients were not finite"
    assert len(last.rounds) == 3
    assert last.eval_data[-1][1] == 2.0


def test_without_a_baseline_the_others_are_measured_all_the_same(tmp_path: Path) -> None:
    told = {"baseline": {"fails": {"steps": "end"}, "after": 2}}
    base, *others = pretend(tmp_path, Design(rounds=3, steps=1, warmup=1), told).variants
    assert base.failed
    assert [len(variant.rounds) for variant in others] == [3, 3, 3]
    assert all(variant.baseline_rounds == [] for variant in others)


def test_a_second_baseline_takes_turns_like_any_variant(tmp_path: Path) -> None:
    plans, kinds = with_second_baseline(TWO, KINDS)
    found = pretend(tmp_path, Design(rounds=3, steps=1), plans=plans, kinds=kinds).variants
    assert [(variant.name, variant.kind) for variant in found] == [
        *(("baseline", "baseline"), ("baseline again", "again"), ("all", "all"))
    ]
    assert len(found[1].rounds) == 3
    assert log(tmp_path).count("start baseline") == 2


def test_each_build_has_its_share_of_the_rounds(tmp_path: Path) -> None:
    found = pretend(tmp_path, Design(rounds=5, steps=1, builds=2), plans=TWO)
    for variant in found.variants:
        assert variant.builds == [0, 0, 0, 1, 1]
        assert len(variant.rounds) == 5
    assert log(tmp_path).count("start baseline") == 2
    assert found.design["builds"] == 2


def test_every_second_cohort_starts_from_the_other_end(tmp_path: Path) -> None:
    """Whoever starts first may be slower for as long as it lives."""
    record = ExperimentRecord()
    pretend(tmp_path, Design(rounds=6, steps=1, builds=3), record=record)
    started = [e["variant"] for e in record.events if e["event"] == "start"]
    first, second, third = (started[i : i + 4] for i in (0, 4, 8))
    assert second == first[::-1]
    assert third == first
    members = [e["members"] for e in record.events if e["event"] == "cohort"]
    assert members == [first] * 3  # the same group, whoever started first


def test_variants_that_fit_are_alive_together(tmp_path: Path) -> None:
    found = pretend(tmp_path, Design(rounds=2, steps=1), memory=440)  # four of 100, and some room
    assert found.design["grouping"] == "all 4 variants alive together"
    assert len([line for line in log(tmp_path) if line.startswith("start")]) == 4


def test_variants_that_do_not_fit_sit_in_groups_that_share_the_baseline(tmp_path: Path) -> None:
    rates = {"baseline": {"rate": 50.0}, "attention": {"rate": 75.0}}
    found = pretend(tmp_path, Design(rounds=3, steps=1), rates, memory=340)
    assert found.design["grouping"] == (
        "groups that share the baseline: baseline, all, packed; baseline, attention"
    )
    assert log(tmp_path).count("start baseline") == 2
    assert [len(variant.rounds) for variant in found.variants] == [3, 3, 3, 3]
    assert all(len(variant.baseline_rounds) == 3 for variant in found.variants)
    assert found.variants[2].rounds == pytest.approx([75.0] * 3)
    assert found.variants[2].eval_data[-1][0] == found.variants[0].eval_data[-1][0]


def test_where_no_two_variants_fit_every_turn_has_a_process_of_its_own(tmp_path: Path) -> None:
    found = pretend(tmp_path, Design(rounds=2, steps=1), memory=150, plans=TWO)
    assert found.design["grouping"].startswith("a fresh process for every turn")
    assert [len(variant.rounds) for variant in found.variants] == [2, 2]
    assert log(tmp_path).count("start baseline") == 3  # once to see that two are too many
    assert [variant.eval_data[-1][0] for variant in found.variants] == [30, 30]


@pytest.mark.parametrize(("grouping", "starts"), [("together", 4), ("groups", 4), ("fresh", 8)])
def test_a_grouping_can_be_asked_for(tmp_path: Path, grouping: str, starts: int) -> None:
    design = Design(rounds=2, steps=1, grouping=grouping)  # type: ignore[arg-type]
    found = pretend(tmp_path, design, memory=50 if grouping == "together" else 10_000)
    assert [len(variant.rounds) for variant in found.variants] == [2, 2, 2, 2]
    assert len([line for line in log(tmp_path) if line.startswith("start")]) == starts


def test_a_disturbed_round_is_done_again_and_both_stay_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([0.0, 0.9, *[0.0] * 99])  # the second turn of the first round
    monkeypatch.setattr(LoadMeter, "share", lambda *seen: next(loads))
    found = pretend(tmp_path, Design(rounds=3, steps=1, foreign_load=0.5), plans=TWO)
    assert found.design["redone_rounds"] == 1
    assert [len(variant.rounds) for variant in found.variants] == [3, 3]
    assert [variant.foreign_load for variant in found.variants] == [[0.0] * 3] * 2
    assert len(turns(tmp_path, 2)) == 8


def test_on_a_busy_machine_the_rounds_are_doubled_and_the_least_disturbed_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([share / 100 for share in range(99, 0, -1)])
    monkeypatch.setattr(LoadMeter, "share", lambda *seen: next(loads))
    found = pretend(tmp_path, Design(rounds=3, steps=1, foreign_load=0.01), plans=TWO)
    assert found.design["redone_rounds"] == 3
    assert len(turns(tmp_path, 2)) == 12
    loads_of = [variant.foreign_load for variant in found.variants]
    assert max(max(shares) for shares in loads_of) <= 0.93  # the last three of six rounds


def test_rounds_that_are_done_again_leave_the_second_build_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadMeter, "share", lambda *seen: 0.9)
    design = Design(rounds=4, steps=1, builds=2, foreign_load=0.5)
    found = pretend(tmp_path, design, plans=TWO)
    assert log(tmp_path).count("start baseline") == 2
    assert found.design["redone_rounds"] == 4
    assert [len(variant.rounds) for variant in found.variants] == [4, 4]


def test_a_budget_decides_over_rounds_and_variants_and_says_what_it_dropped(tmp_path: Path) -> None:
    told = {name: {"rate": 0.1} for name in PLANS}  # 100 s a step, as they say: starts are nothing
    found = pretend(tmp_path, Design(rounds=30, steps=1, budget_seconds=1600), told)
    assert found.design["dropped"] == ["attention: no time for it"]
    assert [variant.name for variant in found.variants] == ["baseline", "packed", "all"]
    assert 2 <= found.design["rounds"] < 30
    assert all(len(variant.rounds) == found.design["rounds"] for variant in found.variants)
    assert all(variant.eval_data[-1][0] == variant.losses[-1][0] for variant in found.variants)


def late(
    record: ExperimentRecord, at: str, seconds: float, time: int = 1
) -> Callable[[str, float], None]:
    """The clock leaps by so many seconds when something is told for the so manieth time."""
    told: list[str] = []

    def tell(text: str, share: float) -> None:
        told.append(text)
        if text == at and told.count(at) == time:
            record._began -= seconds

    return tell


def test_a_budget_that_ends_before_the_second_build_keeps_the_first(tmp_path: Path) -> None:
    record = ExperimentRecord()
    design = Design(rounds=8, steps=1, builds=2, budget_seconds=1000)
    tell = late(record, "starting baseline", 2000.0, time=2)
    found = pretend(tmp_path, design, plans=TWO, record=record, tell=tell)
    assert [len(variant.rounds) for variant in found.variants] == [4, 4]
    assert (found.design["rounds"], found.design["builds"]) == (4, 1)  # as there are
    assert found.design["dropped"] == ["further builds: no time for them"]
    assert any(event["event"] == "finish" for event in record.events)


def test_nobody_waits_longer_than_the_budget_and_a_round_for_an_variant_that_hangs(
    tmp_path: Path,
) -> None:
    record = ExperimentRecord()
    design = Design(rounds=8, steps=1, warmup=1, budget_seconds=200)
    told = {"all": {"rate": 1e6, "fails": {"steps": "hang"}, "after": 4}}

    def tell(text: str, share: float) -> None:
        if text == "round 4/8: all":
            record._began -= 198.0

    found = pretend(tmp_path, design, told, plans=TWO, record=record, tell=tell)
    assert [len(variant.rounds) for variant in found.variants] == [3, 3]
    assert record.elapsed < 240  # and not the minute that a turn may take


def test_a_budget_that_ends_before_the_second_group_keeps_the_first(tmp_path: Path) -> None:
    record = ExperimentRecord()
    tell = late(record, "starting baseline", 2000.0, time=2)
    design = Design(rounds=3, steps=1, budget_seconds=1000)
    found = pretend(tmp_path, design, memory=340, record=record, tell=tell)
    assert found.design["dropped"] == ["attention: no time for it"]
    assert {variant.name: len(variant.rounds) for variant in found.variants} == dict.fromkeys(
        ("baseline", "packed", "all"), 3
    )


IN_TIME = Design(rounds=6, steps=1, evaluations=2, budget_seconds=240)
SLOW = {name: {"rate": 5.0} for name in PLANS}  # 2 s a step, as they say: starts are nothing


@pytest.mark.parametrize("at", ["starting baseline", "starting all", "starting packed"])
def test_a_deadline_that_passes_while_variants_start_ends_the_experiment_there(
    tmp_path: Path, at: str
) -> None:
    record = ExperimentRecord()
    found = pretend(tmp_path, IN_TIME, SLOW, record=record, tell=late(record, at, 300.0))
    assert [(variant.name, variant.rounds) for variant in found.variants] == [("baseline", [])]
    dropped = [f"{name}: no time for it" for name in ("all", "packed", "attention")]
    assert found.design["dropped"] == dropped
    assert record.elapsed < 300 + 30  # nobody was waited for
    read_report(report_of(found.variants, **HEAD))


@pytest.mark.parametrize("place", [0, 3])
def test_a_deadline_that_passes_in_a_round_leaves_the_rounds_before_it(
    tmp_path: Path, place: int
) -> None:
    """Whoever's turn it is then."""
    record = ExperimentRecord()
    started: list[str] = []

    def tell(text: str, share: float) -> None:
        assert 0 <= share <= 1
        if text.startswith("round 3/"):
            started.append(text)
            if len(started) == place + 1:
                record._began -= 300.0

    found = pretend(tmp_path, IN_TIME, SLOW, record=record, tell=tell)
    assert len(started) == place + 1
    assert {variant.name: len(variant.rounds) for variant in found.variants} == dict.fromkeys(
        PLANS, 2
    )
    assert all(variant.failed is None for variant in found.variants)
    assert found.design["rounds"] == 2
    report = read_report(report_of(found.variants, **HEAD))
    assert all(variant["ratio"]["median"] for variant in report["variants"])


def test_a_deadline_that_passes_in_the_first_round_keeps_the_variants_that_had_their_turn(
    tmp_path: Path,
) -> None:
    record = ExperimentRecord()
    found = pretend(tmp_path, IN_TIME, SLOW, record=record, tell=late_in_round_1(record))
    turned = {e["variant"] for e in record.events if e["event"] == "turn"}
    assert len(turned) == 3
    assert {variant.name: len(variant.rounds) for variant in found.variants} == dict.fromkeys(
        turned, 1
    )


def late_in_round_1(record: ExperimentRecord) -> Callable[[str, float], None]:
    """The deadline passes before the last variant's turn, which isn't the baseline's."""
    told: list[str] = []

    def tell(text: str, share: float) -> None:
        if text.startswith("round 1/"):
            told.append(text)
            if len(told) == 4:
                assert not text.endswith("baseline")
                record._began -= 300.0

    return tell


def test_before_a_deadline_a_slow_start_leaves_rows_out_and_says_so(tmp_path: Path) -> None:
    record = ExperimentRecord()
    tell = late(record, "starting packed", 210.0)  # 30 s are left, and a round takes 2 s a variant
    found = pretend(tmp_path, IN_TIME, SLOW, record=record, tell=tell)
    assert found.design["dropped"] == ["attention: no time for it"]
    assert [variant.name for variant in found.variants] == ["baseline", "packed", "all"]
    assert all(len(variant.rounds) >= 2 for variant in found.variants)
    assert all(variant.eval_data[-1][0] for variant in found.variants)  # their quality is known


def test_a_budget_that_is_too_short_keeps_a_round_of_two(tmp_path: Path) -> None:
    crawling = {name: {"rate": 0.1} for name in PLANS}  # 100 s a step, as they say
    found = pretend(tmp_path, IN_TIME, crawling)
    assert [variant.name for variant in found.variants] == ["baseline", "all"]
    assert [len(variant.rounds) for variant in found.variants] == [1, 1]
    assert found.design["dropped"] == ["packed: no time for it", "attention: no time for it"]


def test_an_variant_that_hangs_is_waited_for_until_the_deadline_alone(tmp_path: Path) -> None:
    record = ExperimentRecord()
    hangs = {"all": {"fails": {"steps": "hang"}, "after": 2}}  # in the first round
    tell = late(record, "round 1/6: all", 299.9)
    found = pretend(tmp_path, replace(IN_TIME, warmup=2), hangs, record=record, tell=tell)
    assert all(variant.failed is None for variant in found.variants)
    assert record.elapsed < 330


@pytest.mark.parametrize(("left", "error"), [(5.0, WorkerError), (0.0, OutOfTimeError)])
def test_a_wait_that_the_deadline_ends_is_no_failure_of_the_worker(
    left: float, error: type[Exception]
) -> None:
    seconds_left = iter([60.0, left])  # when the wait begins and when it ends

    class Waited:
        def request(self, op: str, seconds: float, **more: Any) -> None:
            raise WorkerError(f"no answer within {seconds} s")

    process = schedule.VariantProcess(cast(Any, Waited()), lambda: next(seconds_left))
    with pytest.raises(WorkerError) as raised:
        process.ask("steps", 100.0)
    assert type(raised.value) is error


def test_an_variant_that_has_rounds_is_not_dropped_when_it_sits_down_again(tmp_path: Path) -> None:
    told = {name: {"rate": 0.1} for name in PLANS}  # 100 s a step, as they say: starts are nothing
    design = Design(rounds=6, steps=1, budget_seconds=6000)

    def killed(text: str, share: float) -> None:
        if text.startswith("round 4/"):
            raise KeyboardInterrupt

    path = tmp_path / "record.jsonl"
    with ExperimentRecord(path) as record, pytest.raises(KeyboardInterrupt):
        pretend(tmp_path, design, told, record=record, tell=killed)
    with ExperimentRecord(path) as record:
        tell = late(record, "starting baseline", 4000.0)  # five rounds of four wouldn't fit now
        found = pretend(tmp_path, design, told, record=record, tell=tell)
    assert found.design["dropped"] == []
    assert [len(variant.rounds) for variant in found.variants] == [6, 6, 6, 6]


def test_time_before_a_kill_counts_if_turns_of_it_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    lines = [
        *({"event": "run", "at": 0.0}, {"event": "start", "variant": "baseline", "at": 40.0}),
        *({"event": "run", "at": 0.0}, {"event": "turn", "variant": "baseline", "at": 90.0}),
        {"event": "evaluate", "variant": "baseline", "at": 95.0},
    ]
    path.write_text("".join(json.dumps(x) + "\n" for x in ({"record": VERSION, "key": ""}, *lines)))
    with ExperimentRecord(path) as record:
        assert 95.0 <= record.spent < 135.0  # the start without a turn left nothing
        assert record.elapsed < 40.0
        assert seconds_of(record.events) == 135.0


def test_a_start_after_a_kill_does_not_begin_the_budget_anew(tmp_path: Path) -> None:
    told = {name: {"rate": 10.0} for name in TWO}
    design = Design(rounds=30, steps=1, budget_seconds=60)
    path = tmp_path / "record.jsonl"

    def killed(text: str, share: float) -> None:
        if text.startswith("round 4/"):
            record._began -= 60.0
            record.append("evaluate", variant="all", cohort=1, tokens=0, eval_loss=None)
            raise KeyboardInterrupt

    with ExperimentRecord(path) as record, pytest.raises(KeyboardInterrupt):
        pretend(tmp_path, design, told, plans=TWO, record=record, tell=killed)
    with ExperimentRecord(path) as record:
        found = pretend(tmp_path, design, told, plans=TWO, record=record)
    assert [len(variant.rounds) for variant in found.variants] == [3, 3]
    assert found.design["rounds"] == 3
    assert [variant.failed for variant in found.variants] == [None, None]


def test_an_variant_that_cannot_start_again_for_its_proof_keeps_its_rounds(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"

    def killed(text: str, share: float) -> None:
        if text == "finishing all":
            raise KeyboardInterrupt

    with ExperimentRecord(path) as record, pytest.raises(KeyboardInterrupt):
        pretend(tmp_path, Design(rounds=3, steps=1), plans=TWO, record=record, tell=killed)
    with ExperimentRecord(path) as record:
        told = {"all": {"fails": {"start": "end"}}}
        found = pretend(tmp_path, Design(rounds=3, steps=1), told, plans=TWO, record=record)
    last = found.variants[-1]
    assert (last.failed, len(last.rounds)) == (None, 3)
    assert last.unfinished == "the process ended with code 7: an error of its own"


def test_the_energy_of_an_variant_is_what_the_counter_showed_during_its_own_turns(
    tmp_path: Path,
) -> None:
    readings = iter(range(0, 10_000, 5))  # joules go on between turns too
    found = pretend(tmp_path, Design(rounds=2, steps=3), joules=lambda: float(next(readings)))
    for variant in found.variants:
        tokens = sum(step["tokens"] for step in variant.steps)
        assert variant.joules_per_token == pytest.approx(2 * 5.0 / tokens)


def test_a_counter_that_fails_once_leaves_the_energy_unknown(tmp_path: Path) -> None:
    readings = iter([0.0, 5.0, 10.0, None])
    found = pretend(tmp_path, Design(rounds=2, steps=3), joules=lambda: next(readings, None))
    assert {variant.joules_per_token for variant in found.variants} == {None}


def test_rounds_in_slices_count_like_whole_turns(tmp_path: Path) -> None:
    """Every variant does all its steps of each round; one that fails doesn't hold up the others."""
    told = {"packed": {"fails": {"steps": "diverge"}, "after": 3}, "all": {"sleep": 0.1}}
    design = Design(rounds=4, steps=2, warmup=1)
    found = {
        variant.name: variant for variant in pretend(tmp_path, design, told, slices=True).variants
    }
    assert found["packed"].failed == "NotFiniteError: the gradients were not finite"
    for name in ("baseline", "attention", "all"):
        assert found[name].failed is None
        assert len(found[name].rounds) == 4
        assert [step["step"] for step in found[name].steps] == list(range(2, 10))
    drawn = [line for line in log(tmp_path) if line.startswith(("steps baseline", "steps doc"))]
    assert len({tuple(line.split()[1] for line in drawn[i : i + 2]) for i in range(2, 10, 2)}) > 1


def test_where_energy_is_counted_turns_are_whole(tmp_path: Path) -> None:
    said: list[str] = []
    design = Design(rounds=2, steps=1, warmup=1)

    def tell(text: str, share: float) -> None:
        said.append(text)

    pretend(tmp_path, design, plans=TWO, joules=lambda: 1.0, slices=True, tell=tell)
    assert "round 2/2: all" in said
