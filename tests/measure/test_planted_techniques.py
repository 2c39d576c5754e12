"""The planted techniques do in earnest what they are named for."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.errors import InputError
from hasten.measure.quality.requirements import VerificationRow
from hasten.recipe.build import requested_plan
from hasten.recipe.schema import Recipe
from measure.planted_techniques import (
    PLANTED,
    ClaimsOnly,
    DoesNothing,
    Waits,
    small_proofs,
)
from tiny import language_job, run, session_of

Found = tuple[list[dict[str, Any]], dict[str, float]]


@pytest.fixture(scope="module")
def found() -> Found:
    return small_proofs()


def test_a_leak_and_a_wrong_scale_are_seen_and_nothing_is_not(found: Found) -> None:
    entries = {entry["technique"]: entry for entry in found[0]}
    assert entries["leaks_documents"]["verdict"] == "differs"
    assert entries["scales_loss"]["verdict"] == "differs"
    assert entries["scales_loss"]["measured"] == pytest.approx(
        3.0, rel=1e-3
    )  # four times, less one
    assert entries["does_nothing"]["verdict"] == "equal"


def test_the_entries_have_the_form_of_the_guards_own(found: Found) -> None:
    for entry in found[0]:
        assert VerificationRow(**entry).to_dict() == entry


def test_hardly_moving_weights_ruin_the_eval_loss(found: Found) -> None:
    assert found[1]["ruined"] > 1.01 * found[1]["baseline"]


def test_who_only_claims_says_that_it_did_not_act() -> None:
    session = session_of(language_job(steps=1), ClaimsOnly())
    run(session)
    assert not ClaimsOnly().check_effect(session).effective


def test_waiting_changes_no_number() -> None:
    losses = [
        [m.loss for m in run(session_of(language_job(steps=2), *plan))]
        for plan in ((), (Waits(0.1),))
    ]
    assert losses[0] == losses[1]


def test_every_planted_technique_trains() -> None:
    for kind in PLANTED:
        session = session_of(language_job(steps=1), kind())
        assert len(run(session)) == 1
        assert kind().check_effect(session).evidence


def test_an_entry_of_ones_own_may_bring_techniques_beside_the_catalogues() -> None:
    recipe = Recipe(model="m", dataset="d", max_steps=1, plan=["packed", "does_nothing"])
    assert DoesNothing() in requested_plan(recipe, PLANTED).techniques
    with pytest.raises(InputError, match="no technique is called 'does_nothing'"):
        requested_plan(recipe)
