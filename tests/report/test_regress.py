"""Bundles, read from strangers too, and the comparison of a switch's gain with what it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.measure.ablation import Design, Variant
from hasten.report import bundle as bundle_module
from hasten.report.bundle import (
    Bundle,
    bundle_of,
    changes,
    lost,
    measurements,
    read_bundle,
    stamp,
    write_bundle,
)
from hasten.techniques import CATALOGUE


def variants(
    gain: float = 1.5, seed: int = 0, rounds: int = 8, noise: float = 0.01
) -> list[Variant]:
    draw = np.random.default_rng(seed)
    weather = draw.lognormal(0, 0.05, rounds)
    base, other = (list(1000 * g * weather * draw.lognormal(0, noise, rounds)) for g in (1, gain))
    plan = Plan.from_list(["packed"], CATALOGUE)
    effective = [{"technique": "packed", "effective": True, "evidence": ""}]
    return [
        Variant("baseline", Plan(), rounds=base, kind="baseline"),
        Variant("all", plan, rounds=other, baseline_rounds=base, effective=effective, kind="all"),
    ]


def bundle(**changed: Any) -> Bundle:
    report = {"recipe": {"seed": 0}, "versions": {"torch": "2.13.0"}, "hardware": {"cpu": "x"}}
    return bundle_of(variants(), Design(), report, []).model_copy(update=changed)


def compared(now: list[Variant], margin: float = 0.02) -> Any:
    (found,) = changes(measurements(variants()), measurements(now), margin)
    return found


def test_a_folder_and_its_file_hold_the_same_bundle(tmp_path: Path) -> None:
    write_bundle(bundle(), tmp_path)
    assert read_bundle(tmp_path) == read_bundle(tmp_path / "bundle.json") == bundle()
    assert read_bundle(tmp_path).to_design() == Design()
    assert read_bundle(tmp_path).to_design(rounds=3) == Design(rounds=3)
    assert [p.name for p in tmp_path.iterdir()] == ["bundle.json"]


def test_an_unchanged_gain_is_not_lost_and_a_planted_loss_is() -> None:
    quiet = variants(1.5, seed=1, rounds=20)
    assert compared(quiet, margin=0.05).verdict == "same"
    worse = compared(variants(1.35, seed=1, rounds=20))
    assert worse.verdict == "lost"
    assert worse.ratio.estimate == pytest.approx(0.9, abs=0.02)
    assert worse.ratio.high < 0.98
    assert lost([worse]) == ["all"]
    assert compared(variants(1.7, seed=1)).verdict == "gained"


def test_the_interval_is_welch_s_on_logarithms() -> None:
    now = variants(1.45, seed=3, rounds=5, noise=0.03)
    logs = [
        np.log(np.array(m["all"].ratios)) for m in (measurements(variants()), measurements(now))
    ]
    theirs = stats.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval(0.95)
    found = compared(now).ratio
    assert found.low == pytest.approx(math.exp(theirs.low), rel=1e-6)
    assert found.high == pytest.approx(math.exp(theirs.high), rel=1e-6)


def test_a_slower_machine_alone_loses_nothing() -> None:
    now = variants(1.5, seed=1)
    for variant in now:
        variant.rounds = [value / 3 for value in variant.rounds]
    now[1].baseline_rounds = now[0].rounds
    assert compared(now, margin=0.05).verdict == "same"


def test_an_variant_that_fails_or_no_longer_acts_is_lost() -> None:
    broken = variants()
    broken[1].failed = "killed"
    assert compared(broken).verdict == "lost"
    assert "killed" in compared(broken).reason
    idle = variants(seed=1)
    idle[1].effective[0]["effective"] = False
    assert compared(idle).reason == "packed no longer acts"
    (found,) = changes(measurements(broken), measurements(variants()))
    assert found.verdict == "not measured"
    (found,) = changes(measurements(variants()), {})
    assert found.verdict == "lost"


def test_where_the_baseline_fails_it_is_named_and_no_gain_is_invented() -> None:
    now = variants(1.5, seed=1)
    now[0].failed = "no driver"
    now[1].baseline_rounds = []  # rounds in which nobody ran beside it
    found = compared(now)
    assert (found.verdict, found.ratio) == ("lost", None)
    assert found.reason == "the baseline failed: no driver"


def test_a_single_round_tells_nothing() -> None:
    assert compared(variants(0.5, rounds=1)).verdict == "undecided"


@pytest.mark.parametrize("margin", [-0.1, 1.0, float("nan")])
def test_a_margin_is_a_share(margin: float) -> None:
    with pytest.raises(InputError, match="--tolerance"):
        changes({}, {}, margin)


def spoilt(**changed: Any) -> str:
    return json.dumps({**bundle().model_dump(), **changed})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        spoilt(bundle=2),
        spoilt(recipe=[]),
        spoilt(plans={}),
        spoilt(plans={"a": 1}),
        spoilt(measured={}),
        spoilt(measured={"baseline": 1, "all": 2}),
        spoilt(
            measured={"baseline": {"rounds": [-1], "baseline_rounds": [], "idle": []}, "all": {}}
        ),
        spoilt(measured={"baseline": {"rounds": [1], "other": [1]}, "all": {"rounds": [1]}}),
        spoilt(data=[1]),
    ],
)
def test_a_damaged_bundle_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "bundle.json").write_text(text)
    with pytest.raises(InputError) as caught:
        read_bundle(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_design_of_another_version_is_refused() -> None:
    with pytest.raises(InputError, match="'magic'"):
        bundle(design={"magic": 1}).to_design()
    with pytest.raises(InputError):
        bundle(design={"rounds": "many"}).to_design()


def test_a_file_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "LARGEST", 10_000)
    (tmp_path / "bundle.json").write_text(" " * 20_000)
    with pytest.raises(InputError, match="larger than 10000 bytes"):
        read_bundle(tmp_path)


def test_a_bundle_that_can_t_be_written_or_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        write_bundle(bundle(), tmp_path / "file" / "x")
    with pytest.raises(InputError, match="hasten speedup --bundle"):
        read_bundle(tmp_path / "nothing")


def test_a_stamp_is_of_content_not_of_name_or_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text("{}\n")
    one, other = stamp(tmp_path / "a"), stamp(tmp_path / "b")
    assert one["sha256"] == other["sha256"]
    assert one["bytes"] == 3
    (tmp_path / "b" / "x.jsonl").write_text("{ }\n")
    assert stamp(tmp_path / "b")["sha256"] != one["sha256"]
    assert stamp(tmp_path / "none") == {
        "path": str(tmp_path / "none"),
        "bytes": None,
        "sha256": None,
    }
