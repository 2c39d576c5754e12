"""Planted techniques do what they are named for, and planted speeds get the right verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hasten.errors import InputError
from hasten.recipe.build import requested_plan
from hasten.recipe.schema import Recipe
from measure.planted import TRUTHS, counts, recorded, right
from measure.planted_techniques import (
    PLANTED,
    DoesNothing,
    small_proofs,
)

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


def test_hardly_moving_weights_ruin_the_eval_loss(found: Found) -> None:
    assert found[1]["ruined"] > 1.01 * found[1]["baseline"]


def test_an_entry_of_ones_own_may_bring_techniques_beside_the_catalogues() -> None:
    recipe = Recipe(model="m", dataset="d", max_steps=1, plan=["packed", "does_nothing"])
    assert DoesNothing() in requested_plan(recipe, PLANTED).techniques
    with pytest.raises(InputError, match="no technique is called 'does_nothing'"):
        requested_plan(recipe)


# What `small_proofs` finds (its own test trains the models); rounded.
PROOFS = (
    [
        {"technique": "leaks_documents", "verdict": "differs", "text": "leak off by 0.078"},
        {"technique": "scales_loss", "verdict": "differs", "text": "gradient off by 3"},
        {"technique": "does_nothing", "verdict": "equal", "text": "gradient off by 0"},
    ],
    {"baseline": 0.813, "ruined": 4.54},
)
ROUNDS = 2500  # so many short ones tell 5 % where bursts of others' work make rounds vary by 30 %
OF_SPEED = TRUTHS[:3]  # nothing, slower, faster; the words of the others don't rest on speed


@pytest.fixture(scope="module")
def speeds() -> Any:
    return recorded()


def test_the_machine_was_busy_and_its_copies_the_same_program(speeds: Any) -> None:
    turns = np.log(np.median(speeds, axis=2))
    assert (turns[:, 0] - turns[:, 1]).std() > 0.1
    assert np.abs(np.median(turns - turns[:, :1], axis=0)).max() < 0.05


@pytest.mark.parametrize("replays", [40, pytest.param(100, marks=pytest.mark.long)])
def test_planted_speeds_get_the_right_word_95_times_of_100(speeds: Any, replays: int) -> None:
    found = counts(speeds, ROUNDS, PROOFS, replays, OF_SPEED)
    assert all(count >= 0.95 * replays for count in right(found, OF_SPEED).values()), found
    assert found["nothing"]["helped"] == 0


@pytest.mark.parametrize("rounds", [5, 20])
def test_harm_and_idleness_are_seen_in_any_number_of_rounds(speeds: Any, rounds: int) -> None:
    found = counts(speeds, rounds, PROOFS, 60)
    good = right(found)
    assert all(good[truth.name] == 60 for truth in TRUTHS[3:]), found
    assert found["nothing"]["helped"] == 0
    assert found["5 % slower"]["helped"] == found["5 % faster"]["hurt"] == 0


@pytest.mark.parametrize(("sigma", "rounds"), [(0.01, 8), (0.02, 12), (0.03, 20)])
def test_on_a_calmer_machine_few_rounds_do(sigma: float, rounds: int) -> None:
    """`sigma` is how far a round's ratio strays, as on a machine with little else to do."""
    calm = np.random.default_rng(1).lognormal(0, sigma / 2**0.5, (2000, 4, 1))
    found = counts(calm, rounds, PROOFS, 100)
    assert all(count >= 95 for count in right(found).values()), found
    assert found["nothing"]["helped"] == 0
