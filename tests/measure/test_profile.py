"""A profile: families add up, efficiency is arithmetic, files are whole, ranks agree."""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.job import Stop
from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.step import assemble, training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine import files
from hasten.machine.environment import World
from hasten.measure.profile import (
    OTHER,
    ProfiledOperator,
    efficiency,
    efficiency_once_more,
    family_of,
    keep_trace,
    longest,
    measure,
    steps_needed,
    table,
)
from hasten.report.profile_page import render_page, render_text, timeline, write_profile
from hasten.techniques.batch import AdaptiveBatch
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import TopK
from hasten.techniques.compile import Compiled
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.routing import BalancedRouting
from ranks import on_ranks
from tiny import job_context, language_job, session_of, tiny_model

NAMES = {
    "aten::mm": "products",
    "aten::addmm_": "products",
    "aten::bmm": "products",
    "aten::_grouped_mm": "products",
    "hasten::linear_backward": "products",
    "sm90_xmma_gemm_bf16bf16_bf16f32": "products",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_softmax": "attention",
    "aten::_log_softmax": "loss and head",
    "aten::nll_loss_forward": "loss and head",
    "_ChunkedCrossEntropy": "loss and head",
    "aten::_fused_adamw_": "optimizer",
    "Optimizer.step#AdamW.step": "optimizer",
    "aten::_foreach_mul_": "optimizer",
    "aten::copy_": "copies",
    "aten::embedding": "copies",
    "Memcpy HtoD (Pageable -> Device)": "copies",
    "gloo:all_reduce": "communication",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
    "aten::mul": "norm and elementwise",
    "aten::mul_": "norm and elementwise",
    "hasten::rms_norm": "norm and elementwise",
    "hasten::swiglu_backward": "norm and elementwise",
    "aten::detach": OTHER,
    "aten::transpose": OTHER,
    "command": OTHER,
}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("profile")
    found = measure(session_of(language_job(steps=30), Packed()), 2, 4, folder)
    return {**found, "folder": str(folder)}


@pytest.mark.parametrize(("name", "family"), NAMES.items())
def test_an_operator_belongs_to_the_family_that_a_person_would_say(name: str, family: str) -> None:
    assert family_of(name) == family


@given(st.lists(st.tuples(st.sampled_from(list(NAMES)), st.floats(1e-6, 9.0)), min_size=1))
def test_families_share_all_of_the_time(spent: list[tuple[str, float]]) -> None:
    found = table([ProfiledOperator(name, seconds, 1) for name, seconds in spent], 1.0)
    assert sum(row["share"] for row in found["families"]) == pytest.approx(1)
    assert sum(row["seconds"] for row in found["families"]) == pytest.approx(found["seconds"])
    assert sum(row["calls"] for row in found["families"]) == len(spent)
    assert (found["outside_seconds"] is None) == (found["seconds"] > 1.0)


def test_a_profile_has_its_step_its_memory_and_its_operators(profile: dict[str, Any]) -> None:
    assert profile["measured_steps"] == 4
    parts = [s for part, s in profile["ledger"]["step"].items() if s and part != "checkpoint"]
    slowest = profile["ledger"]["stability"]["p99"] * (1 + 1e-9)
    assert 0 < sum(parts) <= slowest
    assert profile["ledger"]["memory"]["activations"] > 0
    families = {row["family"] for row in profile["operators"]["families"]}
    assert {"products", "attention", "optimizer", "copies"} <= families
    assert profile["parallel"] is None
    assert [rank["rank"] for rank in profile["ranks"]] == [0]
    assert 0 < sum(seconds for _, seconds in profile["laps"]) <= slowest


def test_the_trace_is_one_a_viewer_reads_and_nothing_else_is_left(profile: dict[str, Any]) -> None:
    folder = Path(profile["folder"])
    assert [path.name for path in folder.iterdir()] == ["trace.json.gz"]
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        trace = json.load(file)
    assert len(trace["traceEvents"]) == profile["operators"]["trace"]["events"]
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


events = st.lists(
    st.one_of(
        st.builds(lambda d: {"ph": "X", "dur": d}, st.integers(0, 9)),
        st.just({"ph": "M", "name": "thread_name"}),
        st.just({"ph": "f", "id": 1}),
    ),
    max_size=60,
)


@given(events, st.integers(1, 30))
def test_a_trace_cut_to_size_keeps_the_longest_events_in_order(
    given_events: list[dict[str, Any]], most: int
) -> None:
    kept = longest(given_events, most)
    timed = [e["dur"] for e in given_events if e["ph"] == "X"]
    left = [e["dur"] for e in kept if e["ph"] == "X"]
    assert sorted(left) == sorted(timed)[-most:]
    names = [e for e in given_events if e["ph"] == "M"]
    assert [e for e in kept if e["ph"] == "M"] == names
    assert len(kept) <= most + len(names)
    if len(given_events) <= most:
        assert kept == given_events


def test_a_trace_that_cannot_be_read_leaves_the_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "trace.json.gz").write_bytes(b"earlier")
    with pytest.raises(ValueError, match="Expecting"):
        keep_trace(lambda path: Path(path).write_text("{"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json.gz"]
    assert (tmp_path / "trace.json.gz").read_bytes() == b"earlier"


def test_efficiency_is_measured_against_both_denominators() -> None:
    # Two ranks do 1000 tokens in 10 s, in 8 s without talking, and one alone does 500 in 5 s.
    found = efficiency(1000, 10.0, [(500, 8.0), (500, 6.0)], (500, 5.0), steps=4)
    assert found["efficiency_against_one_rank"] == pytest.approx(100 / (2 * 100))
    assert found["efficiency_against_no_communication"] == pytest.approx(0.8)
    assert found["communication_seconds"] == pytest.approx(0.5)


def test_a_job_that_ends_too_early_is_refused_with_advice(tmp_path: Path) -> None:
    session = session_of(language_job(stop=Stop(steps=3)))
    with pytest.raises(InputError, match="ends 1 steps too early"):
        measure(session, 1, 3, tmp_path)
    assert steps_needed(1, 3) == 5


def test_compiled_code_is_not_watched_by_a_mode_that_would_change_it(tmp_path: Path) -> None:
    session = session_of(language_job(steps=9))
    session.setup.compile = Compiled  # type: ignore[assignment]  # anything but the default
    found = measure(session, 1, 1, tmp_path)["ledger"]["memory"]
    assert found["logits"] is None
    assert found["activations"] > 0


def test_the_page_says_what_was_not_measured_and_loads_nothing(profile: dict[str, Any]) -> None:
    page = render_page({**profile, "title": "<script>", "command": "a & b", "created": "now"})
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "://" not in page
    assert "not measured" in page
    assert page.count("<rect") == len(profile["laps"])
    assert timeline([]) == "<p>not measured</p>"


def test_text_and_page_show_the_same_tables(profile: dict[str, Any]) -> None:
    text, page = render_text(profile), render_page(profile)
    for row in profile["operators"]["families"]:
        assert row["family"] in text
        assert row["family"] in page
    assert "between steps" not in text  # no checkpoint was written, and none is shown as zero


def test_a_file_that_cannot_be_finished_leaves_the_earlier_one(
    profile: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(profile, tmp_path)
    before = (tmp_path / "profile.html").read_text()

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_atomic", full)
    with pytest.raises(InputError, match="No space"):
        write_profile({**profile, "step_seconds": 1.0}, tmp_path)
    assert (tmp_path / "profile.html").read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["profile.html", "profile.json"]


def test_a_number_that_is_not_finite_is_refused_before_anything_is_written(
    profile: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_profile({**profile, "mfu": float("nan")}, tmp_path)
    assert list(tmp_path.iterdir()) == []


PLANS: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "the articles'": (TopK(dense_share=0.0), AdaptiveBatch(initial_size=2)),
    "routed": (BalancedRouting(speed=0.1),),
}


def profiled(world: World) -> dict[str, Any]:
    """The profile of a replicated toy job, and what each rank wrote."""
    job = language_job(steps=50)
    session = assemble(prepare(job, Plan((DDP(),)), job_context(job, world=world)))
    with tempfile.TemporaryDirectory() as place:
        found = measure(session, 1, 3, Path(place))
        found["written"] = sorted(path.name for path in Path(place).iterdir())
    return found


def efficiencies(world: World) -> dict[str, Any]:
    """Of each plan: its efficiency, and whether weights and biases are afterwards as before."""
    found: dict[str, Any] = {}
    for name, plan in PLANS.items():
        architecture = "deepseek_v3" if name == "routed" else "llama"
        job = language_job(partial(tiny_model, architecture), steps=6)
        context = job_context(job, architecture, world=world)
        session = assemble(prepare(job, Plan((*plan, DDP())), context))
        run: Any = training(session)
        next(run)
        before = replace(session.progress)
        turn = [next(run), next(run)]
        run.close()
        kept = {key: t.clone() for key, t in session.loss_module.state_dict().items()}
        value = efficiency_once_more(session, before, turn)
        after = session.loss_module.state_dict()
        same = all(torch.equal(kept[key], after[key]) for key in kept)
        found[name] = {"value": value, "same": same, "steps": session.progress.step}
    return found


def test_two_ranks_are_profiled_together_and_the_first_writes(tmp_path: Path) -> None:
    first, second = on_ranks(profiled, tmp_path)
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
    first, second = on_ranks(efficiencies, tmp_path)
    assert first == second
    for name, found in first.items():
        assert 0 < found["value"] < 10, name
        assert found["same"], name
        assert found["steps"] == 3
