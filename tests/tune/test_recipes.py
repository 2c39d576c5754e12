"""A recipe as a subject: its space, its winners as recipes, the proof that a lossy winner owes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.machine.processes import LoadMeter
from hasten.measure.ablation import Variant
from hasten.measure.choice import Choice
from hasten.measure.recipe_experiment import ExperimentSubject, prepared
from hasten.measure.search import Proposal
from hasten.progress import SilentProgress
from hasten.recipe.build import requested_plan
from hasten.recipe.schema import load_recipe, recipe_from
from hasten.tune import api
from hasten.tune.api import StudyResult, TuneOptions, Tuning
from hasten.tune.space import Point
from sample_data import small
from tiny import able
from tune.simulated import Machine

RECIPE = {
    "max_steps": 10,
    "global_batch_size": 8,
    "plan": ["fused_adamw"],
    "on_obstacle": "skip",
}


@pytest.fixture(autouse=True)
def _a_calm_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of these trials are made up; so is what others take of the machine meanwhile."""
    monkeypatch.setattr(LoadMeter, "share", lambda meter, name: 0.0)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> ExperimentSubject:
    values = small(tmp_path_factory.mktemp("tuned"), **RECIPE)
    found = prepared(recipe_from(values, "test"), SilentProgress())
    return dataclasses.replace(found, context=able(found.context))


def subject(given: ExperimentSubject, **options: Any) -> Tuning:
    return Tuning(given, TuneOptions(**options), SilentProgress())


def test_the_winner_is_a_recipe_with_its_gain_at_the_head(
    given: ExperimentSubject, tmp_path: Path
) -> None:
    found = subject(given)
    point = found.space.point(
        {
            "PRECISION": "autocast",
            "BATCH": "gradient_accumulation",
            "gradient_accumulation.micro_batch_size": 2,
        }
    )
    text = found.text(point, "1.300× [1.2, 1.4] of the speed " * 5)
    assert text.startswith("# 1.300×")
    (tmp_path / "tuned.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "tuned.yaml")
    same = recipe.model_copy(update={"plan": given.recipe.plan})
    assert same.model_dump() == given.recipe.model_dump()
    plan = requested_plan(recipe)
    assert {t.name() for t in plan} == {"fused_adamw", "autocast", "gradient_accumulation"}
    assert next(t for t in plan if t.slot is Slot.BATCH).settings()["micro_batch_size"] == 2


def test_a_micro_batch_is_never_larger_than_half_a_step(given: ExperimentSubject) -> None:
    (sizes,) = [d for d in subject(given).space.dimensions if d.name.endswith("batch_size")]
    assert max(v for v in sizes.values if v != 8) <= 4


def test_only_narrows_and_the_rest_stays_as_it_is(given: ExperimentSubject) -> None:
    found = subject(given, only=("precision",))
    assert {d.name for d in found.space.dimensions} == {"PRECISION"}
    for point in found.space.points():
        text = found.text(point, "x")
        assert "fused_adamw" in text


def test_a_lossy_winner_is_taken_only_with_proof(given: ExperimentSubject) -> None:
    options = TuneOptions(lossy=True)
    said: list[Sequence[str]] = [["muon: worse by 3 %"], []]
    proven = Tuning(given, options, SilentProgress(), prove=lambda s, plan: said.pop(0))
    point = next(
        p
        for p in proven.space.neighbours(proven.space.start)
        if any(t.fidelity is Fidelity.LOSSY for t in proven._plans.plan(p))
    )
    assert proven.refusal(point) == "muon: worse by 3 %"
    assert proven.refusal(point) is None
    assert "its quality wasn't verified" in str(
        Tuning(given, options, SilentProgress()).refusal(point)
    )
    assert proven.refusal(proven.space.start) is None


def test_the_key_changes_with_what_decides_the_numbers(given: ExperimentSubject) -> None:
    folder = subject(given).folder
    assert folder == subject(given).folder
    assert folder != subject(given, only=("precision",)).folder


def tuned(
    given: ExperimentSubject, machine: Machine, options: TuneOptions, patch: pytest.MonkeyPatch
) -> StudyResult:
    """A tuning whose comparisons a made-up machine measures."""
    patch.setattr(api, "prepared", lambda recipe, audience, ranks: given)
    patch.setattr(Tuning, "compare", lambda self, proposal, pool: machine.compare(proposal))
    return api.tune(given.recipe, 600, options)


@pytest.mark.parametrize(("faster", "better"), [(1.5, True), (1.0, False)])
def test_a_recipe_is_tuned_from_trials_to_its_winner(
    given: ExperimentSubject, faster: float, better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(
        subject(given, only=("precision",)).space,
        lambda s: 0.012 if s["PRECISION"] == "none" else 0.012 / faster,
        start=0.0,
    )
    options = TuneOptions(only=("precision",), fresh=True)
    found = tuned(given, machine, options, monkeypatch)
    assert found.better is better
    assert ("autocast" in found.text) is (better and "autocast" in str(found.settings))
    assert (found.folder / "best.yaml").read_text() == found.text
    if not better:
        assert "keep the settings" in str(found)
        assert found.settings == {"PRECISION": "none"}


def test_plan_auto_starts_from_what_was_chosen_before(
    given: ExperimentSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Choice(["autocast", "fused_adamw"], "remembered", "the fastest of 9 plans")
    auto = recipe_from({**given.recipe.model_dump(), "plan": "auto"}, "test")
    for found, plan in ((kept, kept.entries), (None, [])):
        monkeypatch.setattr(api, "kept_choice", lambda recipe, audience, found=found: found)
        recipe = api._as_chosen(auto, SilentProgress())
        assert recipe.plan == plan
        assert (recipe.auto_plan is None) == (found is not None)  # else the first plan is taken
    assert api._as_chosen(given.recipe, SilentProgress()) is given.recipe


def test_a_final_comparison_without_time_proves_nothing_and_loses_nothing(
    given: ExperimentSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Machine):
        def compare(self, proposal: Proposal[Point]) -> list[Variant]:
            if proposal.design.evaluations:
                return [Variant(name, Plan()) for name in proposal.variants]
            return super().compare(proposal)

    space = subject(given, only=("precision",)).space
    machine = Late(space, lambda s: 0.02 if s["PRECISION"] == "none" else 0.01, start=0.0)
    options = TuneOptions(only=("precision",), fresh=True, seed=5)
    found = tuned(given, machine, options, monkeypatch)
    assert not found.better
    assert found.settings == {"PRECISION": "none"}
    assert "Not proven (no time for two rounds)" in str(found)
    best = (found.folder / "best.yaml").read_text()
    assert "not proven by a final comparison" in best
    assert "plan:" in best
    assert best != found.text
    assert '"done"' not in (found.folder / "record.jsonl").read_text()


def test_what_did_not_act_is_left_out_of_the_winner_and_said(
    given: ExperimentSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TuneOptions(only=("autocast", "activation_checkpointing"), fresh=True, trials=3)
    space = subject(given, only=options.only).space
    idle = "activation_checkpointing"

    def seconds(s: dict[str, Any]) -> float:
        fast = 0.01 if s["PRECISION"] == "autocast" else 0.02
        return fast * (0.9 if s["ACTIVATION_CHECKPOINTING"] == idle else 1.0)

    def effects(s: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"technique": idle, "effective": False, "evidence": ""}] * (idle in s.values())

    machine = Machine(space, seconds, start=0.0, effects=effects)
    found = tuned(given, machine, options, monkeypatch)
    winner = found.report["winner"]
    assert winner["idle"] == ["activation_checkpointing"]
    assert winner["measured"]["ACTIVATION_CHECKPOINTING"] == "activation_checkpointing"
    assert winner["changes"] == {"PRECISION": "autocast"}
    assert "activation_checkpointing did not act in the measured plan and is left out" in " ".join(
        found.text.replace("# ", "").split()
    )
    plan = found.text.partition("plan:")[2]
    assert "autocast" in plan
    assert "activation_checkpointing" not in plan


def test_a_proof_that_can_not_be_made_refuses_the_winner_and_loses_no_study(
    given: ExperimentSubject,
) -> None:
    def can_not(shown: ExperimentSubject, plan: Plan) -> Sequence[str]:
        raise InputError("eval_data: the verification needs eval records")

    found = Tuning(given, TuneOptions(lossy=True), SilentProgress(), prove=can_not)
    point = next(
        p
        for p in found.space.neighbours(found.space.start)
        if any(t.fidelity is Fidelity.LOSSY for t in found._plans.plan(p))
    )
    assert "can't be verified here: eval_data" in str(found.refusal(point))


def test_on_ranks_turns_too_short_for_an_exchange_are_refused(given: ExperimentSubject) -> None:
    ranks = dataclasses.replace(
        given,
        recipe=given.recipe.model_copy(update={"nproc": 2}),
        context=dataclasses.replace(given.context, world=World(size=2)),
    )
    found = Tuning(ranks, TuneOptions(lossy=True, only=("communication",)), SilentProgress())
    assert found.together == 4 > subject(given).together  # no turn is cut within a round
    names = {d.name for d in found.space.dimensions}
    assert "local_steps.every" in names
    for point in found.space.points():
        settings = found.space.settings(point)
        assert 4 % settings.get("local_steps.every", 1) == 0
