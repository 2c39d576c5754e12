"""``plan: auto`` of a whole run: chosen, kept in its folder, proven, gone on with, watched."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import hasten
from hasten.cli.main import app
from hasten.errors import InputError
from hasten.measure import choose as choosing
from hasten.measure.choice import Choice, ChoiceRow
from hasten.progress import SilentProgress
from hasten.recipe.schema import Recipe, load_recipe
from hasten.recipe.shorthands import catalogue
from hasten.training import chosen_plan
from hasten.training.chosen_plan import SpeedWatch, with_chosen_plan
from hasten.training.run import train
from measure.machines import Machine, MadeUpLoad
from sample_data import small


def test_a_run_has_the_chosen_plan_and_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = small(tmp_path, plan="auto", max_steps=2, checkpoint_every=2, lr_schedule="constant")
    path, told = tmp_path / "recipe.yaml", list[str]()
    path.write_text(Recipe(**values).to_yaml())
    summary = train(path, tell=told.append)
    output = Path(values["output"])
    names = [entry["technique"] for entry in summary["plan"]]
    assert {"labelled_token_loss", "checkpoints"} <= set(names)
    assert any(line.startswith("plan: auto chose ") and "forecast" in line for line in told)
    kept = load_recipe(output / "recipe.yaml")
    assert kept.auto_plan is None  # so that this recipe reproduces the run
    assert hasten.Plan.from_list(kept.plan, catalogue()).to_list() == summary["plan"]
    assert json.loads((output / "choice.json").read_text())["source"] == "forecast"

    def never(*args: Any, **more: Any) -> Choice:
        raise AssertionError("chosen again")

    monkeypatch.setattr(chosen_plan, "choose", never)
    more = Recipe(**{**values, "max_steps": 3, "resume": "auto"})
    told.clear()
    assert train(more, tell=told.append)["plan"] == summary["plan"]
    assert f"plan: auto: continuing with the plan of {output}" in told

    more = Recipe(**{**values, "max_steps": 4, "resume": "auto", "checkpoint_every": 3})
    recipe, _ = with_chosen_plan(more, SilentProgress())
    assert {"checkpoints": {"interval": 3}} in recipe.plan  # the recipe's own, as it is now
    assert {t.name() for t in hasten.Plan.from_list(recipe.plan, catalogue())} == set(names)


def test_a_technique_whose_proof_failed_is_left_out_now_and_of_the_stored_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = small(tmp_path, plan="auto", max_steps=2)
    raced = Choice(
        ["packed", "labelled_token_loss"],
        "measured",
        "the fastest",
        [ChoiceRow("without packed", "not taken", ""), ChoiceRow("fused_adamw", "not taken", "")],
        gain={"median": 2.0, "low": 1.9, "high": 2.1},
        tokens_per_second=1000.0,
    )
    rows = [
        {"technique": "packed", "verdict": "differs", "text": "gradient off by 0.3"},
        {"technique": "labelled_token_loss", "verdict": "equal", "text": ""},
    ]
    race = SimpleNamespace(run=lambda: raced)
    monkeypatch.setattr(choosing, "PlanComparison", lambda *args: race)
    choose = partial(choosing.choose, folder=tmp_path / "choices")
    monkeypatch.setattr(chosen_plan, "choose", choose)
    verification = lambda *args, **more: {"verification": rows, "invariance": []}  # noqa: E731
    monkeypatch.setattr(chosen_plan, "verified", verification)
    told: list[str] = []
    audience = SimpleNamespace(tell=told.append, begin=lambda: None, show=lambda text, share: None)
    recipe, choice = with_chosen_plan(Recipe(**values), audience)
    assert recipe.plan == ["labelled_token_loss"]
    assert choice is not None
    assert "a proof of equal quality failed" in choice.why
    assert any("without packed: its proof of equal quality failed" in line for line in told)
    assert (choice.gain, choice.tokens_per_second) == (None, None)  # those of another plan
    assert [(row.name, row.decision) for row in choice.rows] == [
        ("fused_adamw", "not taken"),
        ("packed", "left out"),
    ]
    recipe, again = with_chosen_plan(Recipe(**values), audience)
    assert again is not None
    assert (again.source, recipe.plan) == ("remembered", ["labelled_token_loss"])


def test_a_recipe_with_a_list_is_left_alone(tmp_path: Path) -> None:
    recipe = Recipe(**small(tmp_path, plan=["packed"]))
    assert with_chosen_plan(recipe, SilentProgress()) == (recipe, None)


def steps_at(rates: list[float]) -> list[Any]:
    return [SimpleNamespace(tokens=1000, step_seconds=1000 / rate) for rate in rates]


def meter(load: float) -> MadeUpLoad:
    return MadeUpLoad(Machine(lambda techniques: 1.0, load=load))


def spoken(rates: list[float], load: float) -> list[str]:
    """Sentences about a run whose plan was measured at 1,000 tokens/s."""
    told: list[str] = []
    raced = Choice(["packed"], "measured", "", tokens_per_second=1000.0, next_best=["prefetched"])
    watch = SpeedWatch(raced, told.append, meter(load))
    for metrics in steps_at(rates):
        watch.note(metrics)
    return told


@pytest.mark.parametrize(("speed", "lines"), [(1000.0, 0), (900.0, 0), (700.0, 1)])
def test_a_run_slower_than_its_plan_was_measured_is_told_of_once(speed: float, lines: int) -> None:
    told = spoken([speed] * 120, 0.4)
    assert len(told) == lines
    if told:
        assert "51 steps ran at 70% of the speed that was measured" in told[0]
        assert "(700 of 1,000 tokens/s)" in told[0]
        assert "other processes used 40% of the processor meanwhile" in told[0]
        assert "next best was prefetched" in told[0]


def test_some_steps_that_wait_long_are_seen_though_the_median_is_as_measured() -> None:
    [sentence] = spoken(([1000.0] * 3 + [150.0]) * 14, 0.63)
    assert "51 steps ran at 4" in sentence


def test_the_first_step_pays_for_memory_and_kernels_and_does_not_count() -> None:
    assert not spoken([10.0, *[1000.0] * 60], 0.0)


def test_a_slow_run_on_a_quiet_machine_has_another_cause() -> None:
    [sentence] = spoken([500.0] * 60, 0.02)
    assert "used 2% of the processor meanwhile, too little to explain it" in sentence


def test_options_of_a_choice_need_one(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(Recipe(**small(tmp_path, plan=["packed"])).to_yaml())
    found = CliRunner().invoke(app, ["train", str(path), "--choose-only"])
    assert isinstance(found.exception, InputError)
    assert "--choose-only: nothing is chosen" in str(found.exception)
