"""What would change the answer, what a user writes, and the plan against a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.machine.accelerators import DEVICES
from hasten.models.architecture import Architecture, Experts
from hasten.planner.advice import (
    _changed,
    changed_cluster,
    count_of,
    devices,
    layout_fields,
    neighbours,
    sensitivity,
    shape_advice,
    switches,
    what_if,
)
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Layouts
from hasten.planner.own_runs import table, terms_of_run
from hasten.planner.planning import ClusterPlan, plan
from hasten.planner.predict import predict
from planner.usual import JOB, MODEL, PLAIN


def planned(topology: str = "ethernet", nodes: int = 2, model: Architecture = MODEL) -> ClusterPlan:
    cluster = Cluster.preset(topology, nodes, 8, "h100")
    return plan(model, cluster, JOB, calibration=PLAIN, fewer_nodes=False)


def test_more_is_never_slower_and_less_never_faster() -> None:
    for change in sensitivity(planned()):
        if change.what.startswith("twice"):
            assert change.same_layout >= 1 - 1e-9
        else:
            assert change.same_layout <= 1 + 1e-9
        assert change.best_layout >= change.same_layout - 1e-9


def test_one_node_has_no_network_to_speak_of() -> None:
    alone = planned("single_node", 1)
    assert not any("network" in change.what for change in sensitivity(alone))


def test_a_change_is_what_planning_anew_would_find() -> None:
    found = planned()
    told = {c.what: c for c in sensitivity(found)}["twice the network"]
    anew = what_if(found, "network=2x")
    ratio = found.best[0].step_seconds.middle / anew.best[0].step_seconds.middle
    assert told.best_layout == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize("layers", [30, 61])
def test_a_change_of_nothing_changes_nothing(layers: int) -> None:
    """Stages that aren't even: closed forms order them otherwise than schedules played through."""
    found = planned("ethernet", 4, replace(MODEL, layers=layers, vocabulary=256_000))
    told = _changed(found, "nothing", found.cluster)
    assert (told.same_layout, told.best_layout, told.layout) == (1.0, 1.0, None)


def test_switches_of_other_mathematics_are_told_apart() -> None:
    changes = {c.what: c for c in switches(planned("dgx_h100", 2))}
    assert changes["fp8 products"].same_layout > 1
    assert all("other mathematics" in c.note for c in changes.values())
    assert "fp8 products" not in {c.what for c in switches(older())}


def older() -> ClusterPlan:
    cluster = Cluster.preset("dgx_a100", 1, 8)
    return plan(MODEL, cluster, JOB, calibration=PLAIN, fewer_nodes=False)


def test_each_known_device_is_tried_and_a_faster_one_is_worth_more() -> None:
    found = planned("single_node", 1)
    choices = {c.device: c for c in devices(found)}
    assert set(choices) == set(DEVICES)
    assert choices["h100-80gb"].price_ratio == 1.0
    assert choices["h200"].price_ratio > 1 > choices["a100-80gb"].price_ratio
    none = choices["t4"]
    assert none.best is None
    assert "doesn't fit" in none.reason


def test_neighbours_have_the_same_size_and_differ() -> None:
    sparse = replace(MODEL, moe=Experts(16, 2, 1024, dense_layers=1))
    for model in (MODEL, sparse):
        found = list(neighbours(model))
        assert {kind for kind, _, _ in found} >= {"depth", "heads"}
        for _, _, other in found:
            assert other != model
            assert abs(other.parameters() / model.parameters() - 1) <= 0.02


def test_advice_gains_what_predicting_the_neighbour_gains() -> None:
    found = planned("dgx_h100", 1)
    rows = Layouts.of([found.best[0].layout])
    base = predict(MODEL, found.cluster, JOB, rows, PLAIN).step_seconds[0]
    advised = shape_advice(found)
    assert advised
    for shape in advised:
        there = predict(shape.model, found.cluster, JOB, rows, PLAIN).step_seconds[0]
        size = shape.model.parameters() / MODEL.parameters()
        assert shape.gain == pytest.approx(base / there * size - 1)
        assert shape.gain >= 0.01
        assert abs(shape.parameters_ratio - 1) <= 0.02
        assert shape.reason


@given(st.floats(1e-3, 9e5), st.sampled_from("kmbtKMBT"))
def test_counts_are_read_as_people_write_them(value: float, letter: str) -> None:
    times = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[letter.lower()]
    assert count_of(f"{value:.6f}{letter}", "x") == pytest.approx(value * times, rel=1e-2)


@pytest.mark.parametrize("text", ["", "1 Q", "-3B", "B", "nan", "0", "1e400", "9" * 40])
def test_what_is_no_count_is_one_sentence(text: str) -> None:
    with pytest.raises(InputError, match="give a number such as"):
        count_of(text, "--tokens")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("gpu=b100", "no figures are known"),
        ("ndes=4", "did you mean 'nodes'"),
        ("network=fast", "give a rate"),
        ("network=-1", "give a rate"),
        ("nodes=0", "whole number"),
        ("nodes", "nodes=8"),
    ],
)
def test_a_change_that_cannot_be_is_one_sentence(change: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        changed_cluster(Cluster.preset("dgx_h100", 2), change)


def test_changes_are_what_they_say() -> None:
    here = Cluster.preset("dgx_h100", 2)
    assert changed_cluster(here, "network=25").inter == pytest.approx(25e9 / 8)
    assert changed_cluster(here, "network=0.5x").inter == here.inter / 2
    assert changed_cluster(here, "nodes=3").devices == 24
    assert changed_cluster(here, "gpu=h800").intra == DEVICES["h800"].link
    assert changed_cluster(here, "link=100").intra == 100e9


def test_words_of_a_layout_are_fields() -> None:
    found = layout_fields(["tp=8,pp=2", "micro=4 recompute=full", "zero=0", "flash=no"])
    assert found == {"tp": 8, "pp": 2, "micro_batch": 4, "recompute": "full", "zero": 0} | {
        "flash": False
    }
    for wrong in ("tq=8", "tp", "tp=0", "tp=x", "flash=maybe"):
        with pytest.raises(InputError):
            layout_fields([wrong])


def a_run(folder: Path, seconds: float, steps: int = 10) -> Path:
    row = {"positions": JOB.global_batch * JOB.sequence, "peak_memory_bytes": 5e10}
    row |= {"passes_seconds": 0.9 * seconds, "optimizer_seconds": 0.1 * seconds}
    slow = [{**row, "step_seconds": 9 * seconds, "data_seconds": 1.0}] * 3  # warming up
    rows = slow + [{**row, "step_seconds": seconds, "data_seconds": 0.0}] * steps
    rows.append({**row, "step_seconds": 1.0, "skipped": True})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def test_a_run_is_set_against_the_plan_term_by_term(tmp_path: Path) -> None:
    best = planned("dgx_h100").best[0]
    exact = best.step_seconds.middle
    terms = {t.name: t for t in terms_of_run(best, a_run(tmp_path / "run", exact))}
    assert terms["step"].measured == exact
    assert terms["step"].within
    assert terms["step"].ratio == pytest.approx(1)
    assert terms["rate of a device"].measured == pytest.approx(
        best.tokens_per_second_per_device.middle
    )
    parts = ("passes", "optimizer", "waiting for data")
    assert sum(terms[name].predicted for name in parts) == pytest.approx(exact)
    assert terms["waiting for data"].measured == 0.0
    late = {t.name: t for t in terms_of_run(best, a_run(tmp_path / "late", 3 * exact))}
    assert late["step"].within is False
    rows = table(list(late.values()))
    assert {len(row) for row in rows} == {5}
    assert rows[1][-1] == "no"


def test_a_folder_without_steps_is_one_sentence(tmp_path: Path) -> None:
    best = planned("dgx_h100").best[0]
    with pytest.raises(InputError, match="name the folder of a run"):
        terms_of_run(best, tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step_seconds": 1, "skipped": true}\n')
    with pytest.raises(InputError, match="no step that moved weights"):
        terms_of_run(best, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.raises(InputError, match="1 is not JSON"):
        terms_of_run(best, tmp_path)


def test_a_plan_keeps_its_layout_where_nothing_changes() -> None:
    found = planned("dgx_h100", 1)
    assert what_if(found, "network=1x").best[0].layout == found.best[0].layout
